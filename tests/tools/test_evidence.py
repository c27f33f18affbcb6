"""benchmarks/results/evidence.json says what it was measured with, and the command that writes it
measures what is stale.
"""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from kda_ops.bench import digests, evidence
from kda_ops.bench.cases import GATES, PASSES, parse_setting
from kda_ops.bench.rows import KEY, case_of
from kda_ops.bench.sides import PEERS
from kda_ops.registrations import schemas
from tests.support.suite import longest_first, rotated

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "evidence.json"
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


@pytest.mark.quick
def test_evidence_has_the_columns_it_promises():
    if FILE.exists():  # there is none before the first run on a GPU
        found = json.loads(FILE.read_text())
        suite, machine = found["suite"], {"gpu", "torch", "triton"}
        assert set(found) == {"code", "suite", "rows", "missing"} and set(found["code"]) == {
            "triton",
            "rows",
        }
        assert (
            set(suite) == {"source", *machine, "passed", "failed", "skipped", "failures", "cut"}
            and suite["passed"]
        )
        assert len(suite["failures"]) == suite["failed"] and set(suite["failures"]) == set(KNOWN), (
            suite["failures"]
        )
        assert set(found["code"]["rows"]) == set(map(case_of, found["rows"]))
        for row in found["rows"]:
            assert set(row) == COLUMNS | {"code", *machine}
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
        env=dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2])),
        capture_output=True,
        text=True,
    ).stdout
    assert said.count("| E   assert (1 + 1) == 3") == 1 and "1 failed, 1 passed" in said, said


def test_what_takes_minutes_comes_first():
    names = [
        "tests/gpu/test_step.py::test_a",
        "tests/gpu/test_compiled.py::test_b",
        "tests/kernels/test_interpreter.py::test_c",
        "tests/compile/test_compiled.py::test_d",
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


KEYS = dict(zip(KEY, ("kda", "fwd", "B1T64H1", "bound", "fp32", "kv", None)))
ROW = dict.fromkeys(sorted(COLUMNS)) | KEYS | {"ours_ms": 1.0, "also": {}}
WEAK = ROW | {"gate": "weak"}
MACHINE = {"gpu": "GPU", "torch": "2", "triton": "1"}


def made(row, kernels="scan:1"):
    """Make a row as the command writes it."""
    return row | {"code": digests.code_of(kernels)} | MACHINE


@pytest.fixture
def device(monkeypatch):
    """Fake a GPU, a suite that passes, and a tree whose cases all have one kernel."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
    monkeypatch.setattr("torch.__version__", "2")
    monkeypatch.setattr(evidence.metadata, "version", lambda name: "1")
    monkeypatch.setattr(
        evidence, "run_suite", lambda *words: ({"passed": 1, "failed": 0, "skipped": 0}, [], None)
    )
    monkeypatch.setattr(
        digests, "kernels_of_all", lambda names, jobs: dict.fromkeys(names, "scan:1")
    )
    monkeypatch.setattr(digests, "source_hash", lambda root: "tree")


@pytest.fixture
def measures(monkeypatch):
    """Return `say(*rows)`, which fakes the benchmark's rows and returns the cases asked for."""

    def say(*said):
        asked = []

        def measure(args, device, echo, *, until, have, keep, only):
            asked.extend(" ".join(c.key().values()) for c in only)
            for x in said:
                keep(x)

        monkeypatch.setattr(evidence.compare, "measure_arguments", measure)
        return asked

    return say


def written(path, rows, source="tree", **missing):
    """Write a file of these rows."""
    suite = {
        "source": source,
        **MACHINE,
        "passed": 1,
        "failed": 0,
        "skipped": 0,
        "failures": [],
        "cut": None,
    }
    path.write_text(
        json.dumps(
            {"code": {"triton": "1", "rows": {}}, "suite": suite, "rows": rows, "missing": missing}
        )
    )
    return str(path)


def test_only_what_is_stale_is_measured_again(device, measures, monkeypatch, tmp_path):
    path, strong = tmp_path / "evidence.json", ROW | {"gate": "strong"}
    written(
        path,
        [made(ROW), made(WEAK, "scan:0"), made(strong)],
        **{f"{case_of(strong)} fla": "out of time"},
    )
    monkeypatch.setattr(evidence, "run_suite", None)  # it ran on this source
    asked = measures(WEAK | {"ours_ms": 2.0}, f"{case_of(strong)} fla: it has none")
    assert evidence.main(["--output", str(path)]) == 0
    found = json.loads(path.read_text())
    assert asked == [case_of(WEAK), case_of(strong)]
    assert found["rows"] == [made(ROW), made(WEAK | {"ours_ms": 2.0}), made(strong)]
    assert found["missing"] == {f"{case_of(strong)} fla": "it has none"}
    assert found["code"] == {
        "triton": "1",
        "rows": dict.fromkeys(map(case_of, found["rows"]), "scan:1"),
    }


def test_all_that_is_asked_for_is_measured_again_on_demand(device, measures, tmp_path):
    path = written(tmp_path / "evidence.json", [made(ROW), made(WEAK)])
    asked = measures()
    assert evidence.main(["--output", path, "--again"]) == 0 and asked == [
        case_of(ROW),
        case_of(WEAK),
    ]
    asked = measures()
    assert evidence.main(["--output", path]) == 0 and asked == []
    asked = measures()
    words = "--ops kda --passes fwd --gates bound,strong --settings B1T64H1".split()
    assert evidence.main(["--output", path, *words]) == 0 and asked == [
        case_of(ROW | {"gate": "strong"})
    ]


def test_a_stale_row_stays_until_its_case_has_another(device, measures, tmp_path):
    path = written(tmp_path / "evidence.json", [made(ROW, "scan:0"), made(WEAK, "scan:0")])
    measures(ROW | {"peer": "fla"})
    evidence.main(["--output", path])
    assert json.loads(Path(path).read_text())["rows"] == [
        made(WEAK, "scan:0"),
        made(ROW | {"peer": "fla"}),
    ]


def test_the_suite_runs_again_where_the_source_is_another(device, measures, monkeypatch, tmp_path):
    path = written(tmp_path / "evidence.json", [made(ROW)], source="older")
    measures()
    assert evidence.main(["--output", path, "--no-suite"]) == 0
    assert json.loads(Path(path).read_text())["suite"]["source"] == "older"
    monkeypatch.setattr(
        evidence, "run_suite", lambda *words: ({"passed": 7, "failed": 0, "skipped": 0}, [], None)
    )
    assert evidence.main(["--output", path]) == 0
    found = json.loads(Path(path).read_text())["suite"]
    assert found["source"] == "tree" and found["passed"] == 7 and found.items() >= MACHINE.items()


def test_a_run_that_is_cut_goes_on_where_it_is_started_again(
    device, measures, monkeypatch, tmp_path
):
    path = tmp_path / "evidence.json"
    written(path, [made(ROW, "scan:0"), made(WEAK, "scan:0")], source="older")

    def cut(args, device, echo, *, keep, **words):
        keep(ROW)
        raise KeyboardInterrupt

    monkeypatch.setattr(evidence.compare, "measure_arguments", cut)
    with pytest.raises(KeyboardInterrupt):
        evidence.main(["--output", str(path)])
    assert json.loads(path.read_text())["rows"] == [made(ROW), made(WEAK, "scan:0")]
    monkeypatch.setattr(evidence, "run_suite", None)  # its result is at hand
    asked = measures(WEAK)
    assert evidence.main(["--output", str(path)]) == 0 and asked == [case_of(WEAK)]
    assert json.loads(path.read_text())["rows"] == [made(ROW), made(WEAK)]


FAULTS = [
    ("a test failed", {"failed": 1}, None, ROW, []),
    ("no test passed", {"passed": 0}, None, ROW, []),
    ("our side has no time", {}, None, ROW | {"ours_ms": None}, []),
    ("our side died", {}, None, f"{case_of(ROW)} alone: the process ended with -11", []),
    ("the suite was cut", {}, "cut after 1 s", ROW, []),
    ("time ran out", {}, None, ROW, ["--time-limit", "0"]),
]


@pytest.mark.quick
@pytest.mark.parametrize(
    "counts, cut, said, words", [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_what_went_wrong_fails_the_command(
    device, measures, monkeypatch, tmp_path, counts, cut, said, words
):
    path = written(tmp_path / "evidence.json", [made(ROW, "scan:0")], source="older")
    monkeypatch.setattr(
        evidence,
        "run_suite",
        lambda *words: ({"passed": 1, "failed": 0, "skipped": 0} | counts, [], cut),
    )
    measures(said)
    assert evidence.main(["--output", path, *words]) == 1
    found = json.loads(Path(path).read_text())
    assert found["suite"]["cut"] == cut and (isinstance(said, str) or made(said) in found["rows"])


def test_source_that_changes_meanwhile_has_no_evidence(device, measures, monkeypatch, tmp_path):
    path = written(tmp_path / "evidence.json", [made(ROW, "scan:0")])
    hashes = iter(("tree", "tree", "other"))
    monkeypatch.setattr(digests, "source_hash", lambda root: next(hashes))
    measures(ROW)
    with pytest.raises(SystemExit, match="the source changed while the evidence was taken"):
        evidence.main(["--output", path])
    assert json.loads(Path(path).read_text())["rows"] == [made(ROW, "scan:0")]
