"""``python -m benchmarks compare`` finds the code and the bits that two trees do not share."""

import importlib.util
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.machine_code import code_digest

ROOT = Path(__file__).parents[2]
STEP = "kda_ops/backends/triton/stages/step.py"
KERNELS = {"KDA_OPS_CPU": "triton", "TRITON_INTERPRET": "1"}
WITHOUT = ("KDA_OPS_CPU", "TRITON_INTERPRET", "PYTHONPATH")
HAS_TRITON = importlib.util.find_spec("triton") is not None
WORDS = [
    (STEP, "recur(", "steps("),
    (STEP, "        recur,", "        steps,"),
    (STEP, "    b_S = b_R", "    # a comment,\n\n    # and lines that move\n    b_S = b_R"),
    (STEP, "b_u", "b_write"),
]


def compared(folder, changes, *words, **environment):
    """Return what is said of each call of this tree and a changed copy, and the exit status."""
    for name in ("kda_ops", "registrations", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for file, old, new in changes:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))
    here = {n: x for n, x in os.environ.items() if n not in WITHOUT} | environment
    if HAS_TRITON:
        here["PYTHONPATH"] = str(Path(importlib.util.find_spec("triton").origin).parents[1])
    command = [sys.executable, "-m", "benchmarks", "compare", str(ROOT), str(folder), *words]
    done = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True)
    *lines, summary = done.stdout.splitlines() or [done.stderr[-2000:]]
    found = {line[:48].rstrip(): line[49:] for line in lines}
    changed = sum(said != "same" for said in found.values())
    assert summary == f"{changed} of {len(found)} calls differ", summary
    return found, done.returncode


@pytest.mark.nightly
@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_only_an_instruction_changes_the_machine_code(tmp_path):
    only = "--only bound on float32".split()
    found, status = compared(tmp_path / "words", WORDS, *only)
    assert set(found.values()) == {"same"} and len(found) == 2 and status == 0
    sign = [(STEP, "b_u = b_v - b_u", "b_u = b_v + b_u")]
    found, status = compared(tmp_path / "sign", sign, *only, "kv")
    (said,) = found.values()
    assert said.startswith("recur: ") and " instructions -> recur: " in said and status == 1


def test_trees_that_differ_in_words_have_the_same_bits(tmp_path):
    found, status = compared(tmp_path, WORDS[1:2], *"--no-code --bits --small --only gdn".split())
    assert set(found.values()) == {"same"} and len(found) > 10 and status == 0


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_the_cases_of_a_changed_instruction_differ(tmp_path):
    norm = [(STEP, "tl.rsqrt(b_qq + 1e-6)", "tl.rsqrt(b_qq + 1e-2)")]
    words = "--no-code --bits --small --only kda recurrent_".split()
    found, status = compared(tmp_path, norm, *words, **KERNELS)
    changed = {name: said for name, said in found.items() if said != "same"}
    assert set(changed) == {name for name in found if "given" not in name} != set(found)
    assert all(said.startswith("o ") and " of " in said for said in changed.values())
    assert status == 1


@pytest.mark.quick
def test_kernels_are_compared_in_the_order_of_their_launches():
    def row(kernel, code, error=""):
        return dict(kernel=kernel, code=code, registers=9, stack=0, instructions=1, error=error)

    both = [row("a", 1), row("b", 2)]
    assert compare.differ(both, [row("c", 1), row("d", 2)]) == ""
    assert compare.differ(both, both[:1]).endswith("1 instructions -> nothing")
    assert compare.differ(both, both[::-1]).count(" -> ") == 2
    assert "no shared memory" in compare.differ(both, [row("a", "", "out:\nno shared memory")])


@pytest.mark.quick
def test_a_digest_is_of_what_reaches_the_device():
    def cubin(text=b"\1\2", name="scan", line=b"7", shared=64):
        """Make an ELF file with code, shared memory and line numbers."""
        sections = [("", 0, 0, b"", 0), (f".text.{name}", 1, 6, text, 0)]
        sections += [(f".nv.shared.{name}", 8, 3, b"", shared), (".debug_line", 1, 0, line, 0)]
        names = b"".join(s[0].encode() + b"\0" for s in sections) + b".shstrtab\0"
        body, headers, at = b"", b"", 0
        for label, kind, flags, data, size in (*sections, (".shstrtab", 3, 0, names, 0)):
            headers += struct.pack(
                "<2I4Q", at, kind, flags, 0, 64 + len(body), size or len(data)
            ).ljust(64, b"\0")
            body, at = body + data, at + len(label) + 1
        start = b"\x7fELF".ljust(40, b"\0") + struct.pack("<Q10x3H", 64 + len(body), 64, 5, 4)
        return start.ljust(64, b"\0") + body + headers

    digest = code_digest(cubin(), "scan", 255)
    assert digest == code_digest(cubin(name="pass_over", line=b"8888"), "pass_over", 255)
    others = {code_digest(c, "scan", 255) for c in (cubin(b"\1\3"), cubin(shared=65))}
    assert len(others | {digest, code_digest(cubin(), "scan", 254)}) == 4
