"""tests/gpu/evidence.json belongs to the kernels beside it, and the command that writes it counts
right.
"""

import hashlib
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from kda_ops.bench import evidence
from kda_ops.bench.cases import GATES, PASSES, parse_setting
from kda_ops.bench.rows import KEY, name_of
from kda_ops.bench.sides import PEERS
from kda_ops.registrations import schemas
from tests.support.suite import longest_first, rotated

FILE = Path(__file__).parent / "gpu" / "evidence.json"
# the GPU tests that failed in the run on file, and why it was kept nevertheless; empty after a
# clean one
KNOWN: dict[str, str] = {}
COLUMNS = {
    "op",
    "pass",
    "setting",
    "gate",
    "ours_ms",
    "state",
    "layout",
    "peer",
    "peer_ms",
    "ours_error",
    "peer_error",
    "also",
}


def test_evidence_is_of_these_kernels():
    if FILE.exists():  # there is none before the first run on a GPU
        found = json.loads(FILE.read_text())["kernels_sha256"]
        assert found == evidence.kernels_sha256(), (
            "the kernels changed since tests/gpu/evidence.json was written: run python -m kda_ops "
            "evidence on a GPU."
        )


def test_evidence_has_the_columns_it_promises():
    if FILE.exists():
        found = json.loads(FILE.read_text())
        assert set(found) == {
            "kernels_sha256",
            "gpu",
            "torch",
            "triton",
            "tests",
            "failures",
            "complete",
            "rows",
            "missing",
            "earlier",
        }
        assert set(found["tests"]) == {"passed", "failed", "skipped"} and found["tests"]["passed"]
        assert len(found["failures"]) == found["tests"]["failed"] and set(found["failures"]) == set(
            KNOWN
        ), found["failures"]
        assert evidence.without(found["earlier"], found["rows"]) == found["earlier"]
        assert all(
            row["also"]["kernels_sha256"] != found["kernels_sha256"] for row in found["earlier"]
        )
        for row in found["rows"] + found["earlier"]:
            assert set(row) == COLUMNS
            assert (
                row["op"] in schemas.VARIANTS
                and row["pass"] in PASSES
                and row["gate"] in GATES
                and parse_setting(row["setting"])
            )
            assert (row["state"], row["layout"]) in product(("fp32", "bf16"), ("kv", "vk")) and row[
                "peer"
            ] in (None, *(p.name for p in PEERS))
            assert row["ours_ms"] > 0 and all(
                x is None or x > 0 for x in (row["peer_ms"], row["ours_error"], row["peer_error"])
            )


def test_the_hash_is_of_contents_in_path_order(tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in (("c.py", "3"), ("a.py", "1"), ("b/x.py", "2"), ("notes.md", "no")):
        (tmp_path / name).write_text(text)
    assert evidence.kernels_sha256(tmp_path) == hashlib.sha256(b"123").hexdigest()
    (tmp_path / "a.py").write_text("0")
    assert evidence.kernels_sha256(tmp_path) == hashlib.sha256(b"023").hexdigest()


@pytest.mark.parametrize(
    "summary, want",
    [
        ("12 passed in 3.1s", (12, 0, 0)),
        ("1 failed, 2 passed, 3 skipped in 1s", (2, 1, 3)),
        ("2 passed, 1 error in 1s", (2, 1, 0)),
        ("3 skipped, 2 errors in 1s", (0, 2, 3)),
        ("no tests ran in 0.1s", (0, 0, 0)),
    ],
)
def test_a_summary_of_pytest_is_counted(summary, want):
    assert tuple(evidence.count_tests(summary).values()) == want


def test_the_suite_is_counted_whatever_the_project_adds_to_the_command(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-q"\n')
    (tmp_path / "tests" / "gpu" / "test_it.py").write_text(
        "import pytest\n\ndef test_a(): pass\n\ndef test_b(): assert False\n\ndef test_c(): "
        "pytest.skip('no')\n"
    )
    assert evidence.run_suite(tmp_path) == (
        {"passed": 1, "failed": 1, "skipped": 1},
        ["tests/gpu/test_it.py::test_b"],
        None,
    )


@pytest.mark.parametrize("spread", (True, False))
def test_a_suite_that_is_cut_keeps_what_it_said(spread, monkeypatch, tmp_path):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    if not spread:
        monkeypatch.setattr(evidence.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "test_z.py").write_text(
        "import time\n\ndef test_slow(): time.sleep(60)\n"
    )
    (tmp_path / "tests" / "gpu" / "test_export.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('x', ({'a b': 1},), ids=str)\ndef test_b(x): "
        "assert False\n\ndef test_c(): pass\n"
    )
    monkeypatch.setattr(evidence.os, "cpu_count", lambda: 3)  # one process
    counts, failures, cut = evidence.run_suite(tmp_path, 15)
    assert counts == {"passed": 1, "failed": 1, "skipped": 0} and failures == [
        "tests/gpu/test_export.py::test_b[{'a b': 1}]"
    ]
    assert cut == "cut after 15 s: 1 of 3 tests were not reached"


def test_a_suite_that_dies_says_how_and_counts_a_test_once(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(evidence.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "test_a.py").write_text(
        "import os, pytest\n\n@pytest.fixture\ndef torn():\n    yield\n    assert False\n\ndef "
        "test_b(torn): pass\n\ndef test_c(): os._exit(3)\n"
    )
    counts, failures, why = evidence.run_suite(tmp_path)
    assert counts == {"passed": 0, "failed": 1, "skipped": 0} and failures == [
        "tests/gpu/test_a.py::test_b"
    ]
    assert why.startswith("ended with 3 after ") and why.endswith(": 1 of 2 tests were not reached")


@pytest.mark.parametrize(
    "line, want",
    [
        (
            "[gw4] [ 27%] FAILED tests/gpu/test_a.py::test_b[{'B': 2}-kda]@ranks \n",
            ("failed", "tests/gpu/test_a.py::test_b[{'B': 2}-kda]"),
        ),
        (
            "tests/gpu/test_a.py::test_b[x y] SKIPPED (no) [ 3%]\n",
            ("skipped", "tests/gpu/test_a.py::test_b[x y]"),
        ),
        (
            "[gw0] [100%] ERROR tests/gpu/test_a.py::test_b\n",
            ("failed", "tests/gpu/test_a.py::test_b"),
        ),
        ("tests/gpu/test_a.py::test_b \n", None),
        ("FAILED tests/gpu/test_a.py::test_b - no\n", None),
    ],
)
def test_a_line_of_pytest_says_what_became_of_a_test(line, want):
    assert evidence.parse_result(line) == want


@pytest.mark.parametrize("spread", ([], ["-n", "2"]))
def test_why_a_test_failed_is_said_at_once(spread, tmp_path):
    if spread:
        pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(
        "from tests.support.suite import Reasons\n\ndef pytest_configure(config): "
        "config.pluginmanager.register(Reasons(config))\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import os\n\ndef test_a(): assert 1 + 1 == 3\n\ndef test_b(): pass\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "--no-summary",
        *spread,
        str(tmp_path),
    ]
    said = subprocess.run(
        command,
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(FILE.parents[2])),
        capture_output=True,
        text=True,
    ).stdout
    assert said.count("| E   assert (1 + 1) == 3") == 1 and "1 failed, 1 passed" in said, said


def test_what_takes_minutes_comes_first():
    names = [
        "tests/gpu/test_step.py::test_a",
        "tests/gpu/test_compiled.py::test_b",
        "tests/test_interpreter.py::test_c",
        "tests/test_compiled.py::test_d",
    ]
    items = [SimpleNamespace(nodeid=n) for n in names]
    longest_first(items)
    assert [names.index(i.nodeid) for i in items] == [1, 2, 0, 3]


def test_processes_of_the_suite_begin_with_different_gpus():
    assert [rotated(f"gw{i}", 4) for i in (0, 1, 6)] == ["0,1,2,3", "1,2,3,0", "2,3,0,1"]
    assert rotated("gw3", 2, "4,7") == "7,4"


def test_evidence_needs_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="CUDA"):
        evidence.main([])


ROW = dict.fromkeys(sorted(COLUMNS)) | {"ours_ms": 1.0, "also": {}}


def test_rows_of_earlier_kernels_stay_until_they_are_measured_again(device, monkeypatch, tmp_path):
    path, weak = tmp_path / "evidence.json", ROW | {"gate": "weak"}
    old = {
        "kernels_sha256": "old",
        "rows": [ROW, weak],
        "earlier": [
            weak | {"also": {"kernels_sha256": "older"}},
            ROW | {"gate": "strong", "also": {}},
        ],
    }
    path.write_text(json.dumps(old))
    monkeypatch.setattr(
        evidence.compare,
        "measure_arguments",
        lambda args, device, echo, *, keep, **words: keep(ROW),
    )
    assert evidence.main(["--output", str(path)]) == 0
    found, of_old = json.loads(path.read_text()), weak | {"also": {"kernels_sha256": "old"}}
    assert found["rows"] == [ROW] and found["earlier"] == [of_old, old["earlier"][1]]
    monkeypatch.setattr(
        evidence.compare,
        "measure_arguments",
        lambda args, device, echo, *, keep, **words: keep(weak),
    )
    assert evidence.main(["--output", str(path), "--resume", str(path)]) == 0
    assert json.loads(path.read_text())["earlier"] == [old["earlier"][1]]


def test_a_row_beside_a_peer_stands_for_that_of_our_side_alone(device, monkeypatch, tmp_path):
    path, beside = tmp_path / "evidence.json", ROW | {"peer": "fla"}
    path.write_text(json.dumps({"kernels_sha256": "old", "rows": [ROW, ROW | {"gate": "weak"}]}))
    monkeypatch.setattr(
        evidence.compare,
        "measure_arguments",
        lambda args, device, echo, *, keep, **words: (keep(ROW), keep(beside)),
    )
    assert evidence.main(["--output", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["rows"] == [beside] and [r["gate"] for r in found["earlier"]] == ["weak"]


@pytest.fixture
def device(monkeypatch):
    """A GPU, as far as the command can see, and a suite that passes."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
    monkeypatch.setattr(evidence.metadata, "version", lambda name: "1")
    monkeypatch.setattr(
        evidence, "run_suite", lambda *words: ({"passed": 1, "failed": 0, "skipped": 0}, [], None)
    )


def test_a_run_that_is_cut_keeps_what_it_had_and_is_resumed(device, monkeypatch, tmp_path):
    path = tmp_path / "evidence.json"

    def cut(args, device, echo, *, until, have, keep):
        keep(ROW)
        keep("kda decode fla: out of time")
        keep("gdn decode fla: it has none")
        keep(f"{name_of(tuple((ROW | {'gate': 'weak'})[n] for n in KEY))}: it broke")
        raise KeyboardInterrupt

    monkeypatch.setattr(evidence.compare, "measure_arguments", cut)
    with pytest.raises(KeyboardInterrupt):
        evidence.main(["--output", str(path)])
    found = json.loads(path.read_text())
    assert found["rows"] == [ROW] and not found["complete"] and found["tests"]["passed"] == 1
    assert list(found["missing"].values()) == ["out of time", "it has none", "it broke"]

    def rest(args, device, echo, *, until, have, keep):
        assert have == [ROW]
        keep(ROW | {"gate": "weak"})

    monkeypatch.setattr(evidence.compare, "measure_arguments", rest)
    monkeypatch.setattr(evidence, "run_suite", None)  # its result is at hand
    assert evidence.main(["--output", str(path), "--resume", str(path)]) == 0
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 2 and found["complete"]
    # nothing else can tell why there is no such row
    assert found["missing"] == {"gdn decode fla": "it has none"}


def test_files_that_went_on_from_one_are_joined_and_others_are_not(device, monkeypatch, tmp_path):
    monkeypatch.setattr(
        evidence.compare,
        "measure_arguments",
        lambda args, device, echo, *, have, keep, **words: keep(ROW | {"gate": f"{len(have)}"}),
    )
    base, one, two = (str(tmp_path / f"{n}.json") for n in ("base", "one", "two"))
    assert evidence.main(["--output", base]) == 0  # gate 0
    for path in (one, two):
        assert evidence.main(["--resume", base, "--output", path]) == 0  # gates 0 and 1
    found = json.loads(Path(one).read_text())
    # the first has a row after all
    found["missing"] = {
        name_of(tuple(found["rows"][0][n] for n in KEY)): "it broke",
        "gdn decode fla": "it has none",
    }
    Path(one).write_text(json.dumps(found))
    found = json.loads(Path(two).read_text())
    found["rows"][1]["setting"] = "another"
    Path(two).write_text(json.dumps(found))
    assert evidence.main(["--resume", one, two, "--output", one]) == 0
    assert [r["gate"] for r in json.loads(Path(one).read_text())["rows"]] == ["0", "1", "1", "3"]
    assert json.loads(Path(one).read_text())["missing"] == {"gdn decode fla": "it has none"}
    found["tests"]["passed"] = 2
    Path(two).write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="different runs"):
        evidence.main(["--resume", one, two, "--output", one])


def test_a_run_out_of_time_is_not_complete(device, monkeypatch, tmp_path):
    monkeypatch.setattr(
        evidence.compare, "measure_arguments", lambda *args, keep, **words: keep(ROW)
    )
    path = tmp_path / "evidence.json"
    assert evidence.main(["--output", str(path), "--time-limit", "0"]) == 1
    assert not json.loads(path.read_text())["complete"]


FAULTS = [
    ("a test failed", {"failed": 1}, None, ROW, None),
    ("no test passed", {"passed": 0}, None, ROW, None),
    ("our side has no time", {}, None, ROW | {"ours_ms": None}, None),
    ("our side died", {}, None, "kda fwd B1 weak fp32 kv alone: the process ended with -11", False),
    ("the suite was cut", {}, "cut after 1 s", ROW, False),
]


@pytest.mark.parametrize(
    "counts, cut, said, complete", [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_what_went_wrong_fails_the_command(
    device, monkeypatch, tmp_path, counts, cut, said, complete
):
    path = tmp_path / "evidence.json"
    monkeypatch.setattr(
        evidence,
        "run_suite",
        lambda *words: ({"passed": 1, "failed": 0, "skipped": 0} | counts, [], cut),
    )
    monkeypatch.setattr(
        evidence.compare, "measure_arguments", lambda *args, keep, **words: keep(said)
    )
    assert evidence.main(["--output", str(path)]) == 1
    assert json.loads(path.read_text())["complete"] is (complete is None)


def test_kernels_that_change_meanwhile_have_no_evidence(device, monkeypatch, tmp_path):
    hashes = iter("ab")
    monkeypatch.setattr(evidence, "kernels_sha256", lambda: next(hashes))
    monkeypatch.setattr(evidence.compare, "measure_arguments", lambda *args, **words: None)
    with pytest.raises(SystemExit, match="the kernels changed while the evidence was taken"):
        evidence.main(["--output", str(tmp_path / "evidence.json")])


def test_evidence_of_other_kernels_is_not_resumed(device, monkeypatch, tmp_path):
    path = tmp_path / "evidence.json"
    path.write_text(json.dumps({"kernels_sha256": "0"}))
    with pytest.raises(SystemExit, match="another kernels_sha256"):
        evidence.main(["--resume", str(path)])
