"""tests/gpu/bits.py tells which bits two trees do not share."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEP = "kda_ops/backends/triton/step.py"
KERNELS = {"KDA_OPS_CPU": "triton", "TRITON_INTERPRET": "1"}
WITHOUT = ("KDA_OPS_CPU", "TRITON_INTERPRET", "PYTHONPATH")


def compare(folder, change, *words, **environment):
    """Return the script's lines and exit status for this tree and a changed copy of it."""
    for name in ("kda_ops", "registrations"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    file, old, new = change
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    here = {n: x for n, x in os.environ.items() if n not in WITHOUT} | environment
    if spec := importlib.util.find_spec("triton"):
        here["PYTHONPATH"] = str(Path(spec.origin).parents[1])
    script = str(ROOT / "tests" / "gpu" / "bits.py")
    command = [sys.executable, script, str(ROOT), str(folder), "--small", "--jobs", "1", *words]
    done = subprocess.run(command, env=here, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines, done.stderr[-2000:]
    found = {line[:44].rstrip(): line[45:] for line in lines[:-1]}
    return found, lines[-1], done.returncode


def test_trees_that_differ_in_words_have_the_same_bits(tmp_path):
    found, summary, status = compare(
        tmp_path, (STEP, "    b_S = b_R", "    # a comment\n    b_S = b_R")
    )
    assert set(found.values()) == {"same"} and len(found) > 30
    assert summary == f"cpu: 0 of {len(found)} cases differ" and status == 0


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_cases_of_a_changed_instruction_differ(tmp_path):
    norm = (STEP, "tl.rsqrt(b_qq + 1e-6)", "tl.rsqrt(b_qq + 1e-2)")
    found, summary, status = compare(tmp_path, norm, "--only", "kda", "recurrent_", **KERNELS)
    changed = {name: said for name, said in found.items() if said != "same"}
    assert set(changed) == {name for name in found if "given" not in name} != set(found)
    assert all(said.startswith("o ") and " of " in said for said in changed.values())
    assert summary == f"cpu: {len(changed)} of {len(found)} cases differ" and status == 1
