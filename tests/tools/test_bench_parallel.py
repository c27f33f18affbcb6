"""``torchrun -m benchmarks.parallel``, on four local processes, and what GPUs recorded."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASES = [(op, gate, n) for op in ("kda", "gdn") for gate in ("strong", "weak") for n in (1, 2, 4)]


def cases(rows):
    assert all(row["fwd_ms"] > 0 and row["fwdbwd_ms"] > 0 for row in rows)
    return [(row["op"], row["gate"], row["gpus"]) for row in rows]


def test_one_sequence_is_timed_on_one_rank_on_two_and_on_all(tmp_path):
    file = tmp_path / "parallel.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += ["-m", "benchmarks.parallel", "--setting=B1T256H2D16", f"--output={file}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert cases(found["rows"]) == CASES and found["setting"] == "B1T256H2D16"
    assert [json.loads(x) for x in done.stdout.splitlines() if x[0] == "{"] == found["rows"]


def test_recorded_rows_have_all():
    found = json.loads((ROOT / "benchmarks" / "results" / "parallel.json").read_text())
    assert cases(found["rows"]) == CASES
