"""``python -m kda_ops parallel``, on two processes of this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_parallel_leaves_the_file_of_the_gpus_alone_without_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file, small = (
        ROOT / "benchmarks" / "results" / "parallel.json",
        "--device cpu --length 64 --heads 1 --width 16 --time-limit 0".split(),
    )
    before = file.read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "kda_ops", "parallel", *small],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and '"fwd_ms"' in done.stdout and file.read_bytes() == before


def parallel(file, *more):
    command = [
        sys.executable,
        "-m",
        "kda_ops",
        "parallel",
        "--device",
        "cpu",
        "--length",
        "256",
        "--heads",
        "2",
        "--width",
        "16",
        "--output",
        str(file),
        *more,
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_parallel_writes_times_and_the_bytes_that_the_documentation_computes(tmp_path):
    file = tmp_path / "parallel.json"
    with parallel(file) as process:
        # a row stands in the file before the next one is printed
        assert process.stdout.readline() and process.stdout.readline()
        assert json.loads(file.read_text())["rows"] and process.wait(120) == 0
    assert json.loads(file.read_text())["missing"] == []
    for found in (
        json.loads(file.read_text()),
        json.loads((ROOT / "benchmarks" / "results" / "parallel.json").read_text()),
    ):
        measured = {(r["op"], r["gate"], r["gpus"]) for r in found["rows"]}
        assert measured >= {
            (op, gate, n) for op in ("kda", "gdn") for gate in ("strong", "weak") for n in (1, 2)
        }
        for row in found["rows"]:
            assert row["fwd_ms"] > 0 and row["fwdbwd_ms"] > 0
            assert row["gpus"] == 1 or row["sent_bytes"] == row["computed_bytes"] > 0


def test_parallel_out_of_time_has_what_it_reached_and_names_the_rest(tmp_path):
    file = tmp_path / "parallel.json"
    with parallel(file, "--time-limit", "0") as process:
        said = process.communicate(timeout=120)[0]
    found = json.loads(file.read_text())
    assert process.returncode == 0 and [(r["op"], r["gate"], r["gpus"]) for r in found["rows"]] == [
        ("kda", "strong", 1)
    ]
    assert (
        len(found["missing"]) == 7
        and found["missing"][0] == "kda strong on 2"
        and said.rstrip().endswith(", ".join(found["missing"]))
    )
