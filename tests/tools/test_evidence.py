"""The evidence on file says what it was measured with, and its command measures what is stale."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import evidence
from benchmarks.peers import PEERS
from kda_ops.registrations import schemas
from kda_ops.tools import digests
from kda_ops.tools.cases import GATES, KEY, PASSES, case_of, parse_setting
from tests.support import suite
from tests.support.suite import longest_first, rotated

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "results" / "evidence.json"
# The GPU tests that failed in the runs on file, by Triton, with the cause. This one draws calls at
# random; docs/performance.md, "Tritons compared", has its cause, which no Triton has alone.
SOFTPLUS = {
    "tests/gpu/test_serving.py::test_prefill_then_decode_is_one_prefill": "softplus in decode"
}
KNOWN: dict[str, dict[str, str]] = {"3.8.0": SOFTPLUS, "3.9.0": SOFTPLUS}
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


def test_evidence_has_the_columns_it_promises():
    if FILE.exists():  # absent before the first run on a GPU
        found = json.loads(FILE.read_text())
        assert set(found) == {"code", "suites", "rows", "missing"}
        assert set(found["code"]) == {"triton", "rows"}
        assert found["code"]["triton"] in found["suites"]
        for triton, ran in found["suites"].items():
            assert set(ran) == {"source", "gpu", "torch", *suite.WORDS, "failures", "cut"}
            assert ran["passed"] and len(ran["failures"]) == ran["failed"]
            assert set(ran["failures"]) == set(KNOWN.get(triton, ()))
        assert set(found["code"]["rows"]) == set(map(case_of, found["rows"]))
        for row in found["rows"]:
            assert set(row) == COLUMNS | {"code", *MACHINE}
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


def checkout_of(folder, **files):
    """Make a checkout whose GPU suite is these files."""
    (folder / "tests" / "gpu").mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-q"\n')
    for name, text in files.items():
        (folder / "tests" / "gpu" / f"{name}.py").write_text(text)
    return folder


MIXED = """
import pytest

def test_a(): pass

@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("x", ({"a b": 1},), ids=str)
def test_b(x): assert False

def test_c(): pytest.skip("no")

@pytest.fixture
def torn():
    yield
    assert False

def test_d(torn): pass
"""


@pytest.mark.parametrize("spread", (True, False))
def test_the_suite_is_counted_whatever_the_project_adds_to_the_command(
    spread, monkeypatch, tmp_path
):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(suite.os, "cpu_count", lambda: 3)  # one process
    if not spread:
        monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name: None)
    found = suite.run(checkout_of(tmp_path, test_it=MIXED, test_broken="import no_such_module"))
    assert {n: found[n] for n in (*suite.WORDS, "cut")} == {
        "passed": 1,
        "failed": 3,
        "skipped": 1,
        "cut": None,
    }
    name = "tests/gpu/test_it.py::"
    assert {f"{name}test_b[{{'a b': 1}}]", f"{name}test_d"} < set(found["failures"])


def test_a_suite_that_is_cut_keeps_what_it_said(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name: None)
    slow = "import time\n\ndef test_slow(): time.sleep(300)\n"
    found = suite.run(checkout_of(tmp_path, test_it=MIXED, test_z=slow), 25)
    assert found["cut"] == "cut after 25 s" and found["passed"] == 1 and found["failed"] == 2


def test_a_suite_that_dies_says_how(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name: None)
    found = suite.run(checkout_of(tmp_path, test_a="import os\n\ndef test_b(): os._exit(3)\n"))
    assert found["cut"] == "ended with 3" and found["passed"] == 0


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
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
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


@pytest.mark.parametrize("gpu, triton", ((False, "1"), (True, None)))
def test_evidence_needs_a_gpu_and_triton(gpu, triton, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(evidence, "installed", lambda name: triton)
    with pytest.raises(SystemExit, match="CUDA device and Triton"):
        evidence.main([])


KEYS = dict(zip(KEY, ("kda", "fwd", "B1T64H1", "bound", "fp32", "kv", None)))
ROW = dict.fromkeys(sorted(COLUMNS)) | KEYS | {"ours_ms": 1.0, "also": {}}
WEAK = ROW | {"gate": "weak"}
CARD = {"gpu": "GPU", "torch": "2"}
MACHINE = CARD | {"triton": "1"}


def made(row, kernels="scan:1"):
    """Build a row as the command writes it."""
    return row | {"code": digests.code_of(kernels)} | MACHINE


CLEAN = {"passed": 1, "failed": 0, "skipped": 0, "failures": [], "cut": None}


@pytest.fixture
def device(monkeypatch, tmp_path):
    """Pretend that there is a GPU, that the suite passes, and that each case has one kernel."""
    monkeypatch.setattr(evidence, "results", lambda: tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
    monkeypatch.setattr("torch.__version__", "2")
    monkeypatch.setattr(evidence, "installed", lambda name: "1")
    monkeypatch.setattr(suite, "run", lambda *words: dict(CLEAN))
    monkeypatch.setattr(
        digests, "kernels_of_all", lambda names, jobs: dict.fromkeys(names, "scan:1")
    )
    monkeypatch.setattr(digests, "source_hash", lambda root: "tree")


@pytest.fixture
def measures(monkeypatch):
    """Return a function that makes the benchmark report what it is given, and list what it asks."""

    def say(*said):
        asked = []

        def run(cases, peers, keep, until):
            asked.extend(c.name for c in cases)
            for x in said:
                keep(x)

        monkeypatch.setattr(evidence.runner, "run", run)
        return asked

    return say


def written(path, rows, source="tree", **missing):
    """Build a file that holds these rows."""
    suites = {"1": {"source": source, **CARD, **CLEAN}}
    found = {"code": {"triton": "1", "rows": {}}, "suites": suites}
    path.write_text(json.dumps(found | {"rows": rows, "missing": missing}))
    return str(path)


def test_only_what_is_stale_is_measured_again(device, measures, monkeypatch, tmp_path):
    path, strong = tmp_path / "evidence.json", ROW | {"gate": "strong"}
    written(
        path,
        [made(ROW), made(WEAK, "scan:0"), made(strong)],
        **{f"{case_of(strong)} fla": "out of time"},
    )
    monkeypatch.setattr(suite, "run", None)  # it ran on this source
    asked = measures(
        WEAK | {"ours_ms": 2.0}, {"name": f"{case_of(strong)} fla", "why": "it has none"}
    )
    assert evidence.main(["--output", str(path)]) == 0
    found = json.loads(path.read_text())
    assert asked == [case_of(WEAK), case_of(strong)]
    assert found["rows"] == [made(ROW), made(WEAK | {"ours_ms": 2.0}), made(strong)]
    assert found["missing"] == {f"{case_of(strong)} fla": "it has none"}
    assert found["code"] == {
        "triton": "1",
        "rows": dict.fromkeys(map(case_of, found["rows"]), "scan:1"),
    }


def test_what_is_asked_for_is_measured_where_it_is_missing(device, measures, tmp_path):
    path = written(tmp_path / "evidence.json", [made(ROW), made(WEAK)])
    asked = measures()
    assert evidence.main(["--output", path]) == 0 and asked == []
    words = "--ops kda --passes fwd --gates bound,strong --settings B1T64H1".split()
    assert evidence.main(["--output", path, *words]) == 0
    assert asked == [case_of(ROW | {"gate": "strong"})]


def test_a_peer_that_is_asked_for_has_rows_of_its_own(device, measures, monkeypatch, tmp_path):
    path = written(tmp_path / "evidence.json", [made(ROW), made(WEAK | {"peer": "fla"})])
    monkeypatch.setattr(evidence.runner, "peers_of", lambda device, chosen: [])
    asked = measures()
    assert evidence.main(["--output", path, "--peers", "fla"]) == 0 and asked == [case_of(ROW)]


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
    assert json.loads(Path(path).read_text())["suites"]["1"]["source"] == "older"
    monkeypatch.setattr(suite, "run", lambda *words: CLEAN | {"passed": 7})
    assert evidence.main(["--output", path]) == 0
    found = json.loads(Path(path).read_text())["suites"]
    assert found == {"1": {"source": "tree", **CARD, **CLEAN, "passed": 7}}


def test_the_tests_run_with_each_triton_and_leave_rows_and_other_runs(
    device, monkeypatch, tmp_path
):
    path = written(tmp_path / "evidence.json", [made(ROW), made(WEAK, "scan:0")])
    before = json.loads(Path(path).read_text())
    monkeypatch.setattr(evidence, "installed", lambda name: "2")
    monkeypatch.setattr(digests, "kernels_of_all", None)  # other kernels, which do not compare
    for counts, code in ((CLEAN | {"cut": "cut after 1 s"}, 1), (CLEAN | {"passed": 9}, 0)):
        monkeypatch.setattr(suite, "run", lambda *words, counts=counts: dict(counts))
        assert evidence.main(["--output", path, "--no-rows"]) == code
        suites = before["suites"] | {"2": {"source": "tree", **CARD, **counts}}
        assert json.loads(Path(path).read_text()) == before | {"suites": suites}
    monkeypatch.setattr(suite, "run", None)  # this Triton has a whole run of this source
    assert evidence.main(["--output", path, "--no-rows"]) == 0


def test_the_first_file_may_hold_the_tests_alone(device, measures, monkeypatch, tmp_path):
    assert evidence.main(["--no-rows"]) == 0
    found = json.loads((tmp_path / "evidence.json").read_text())
    suites = {"1": {"source": "tree", **CARD, **CLEAN}}
    assert found == {
        "suites": suites,
        "rows": [],
        "missing": {},
        "code": {"triton": "1", "rows": {}},
    }
    measures(ROW)
    monkeypatch.setattr(evidence, "installed", lambda name: "2")  # its first rows may be another's
    words = "--ops kda --passes fwd --gates bound --settings B1T64H1".split()
    assert evidence.main(words) == 0
    found = json.loads((tmp_path / "evidence.json").read_text())
    assert found["rows"] == [made(ROW) | {"triton": "2"}] and set(found["suites"]) == {"1", "2"}


def test_a_new_file_takes_over_a_run_of_the_tests_on_file(device, monkeypatch, tmp_path):
    written(tmp_path / "evidence.json", [made(ROW)])
    monkeypatch.setattr(suite, "run", None)  # it ran on this source
    new = tmp_path / "new.json"
    assert evidence.main(["--no-rows", "--output", str(new)]) == 0
    assert json.loads(new.read_text()) == json.loads((tmp_path / "evidence.json").read_text())


THEIRS = {"source": "tree"}


def test_another_triton_may_run_its_tests_meanwhile(device, monkeypatch, tmp_path):
    path = tmp_path / "evidence.json"
    written(path, [made(ROW, "scan:0"), made(WEAK, "scan:0")], source="older")

    def other_writes(**change):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    def run_suite(*words):
        other_writes(rows=[made(ROW), made(WEAK, "scan:0")], suites={"2": THEIRS})
        return dict(CLEAN)

    def run(cases, peers, keep, until):
        assert [c.name for c in cases] == [case_of(WEAK)]
        other_writes(suites={"2": THEIRS, "3": THEIRS})
        keep(WEAK)

    monkeypatch.setattr(suite, "run", run_suite)
    monkeypatch.setattr(evidence.runner, "run", run)
    assert evidence.main(["--no-rows"]) == 0
    ours = {"source": "tree", **CARD, **CLEAN}
    assert json.loads(path.read_text())["suites"] == {"2": THEIRS, "1": ours}
    assert evidence.main([]) == 0
    found = json.loads(path.read_text())
    assert found["rows"] == [made(ROW), made(WEAK)]
    assert found["suites"] == {"2": THEIRS, "3": THEIRS}


def test_rows_of_two_tritons_share_no_file(device, measures, monkeypatch, tmp_path):
    path = written(tmp_path / "evidence.json", [made(ROW), made(WEAK)])
    before = json.loads(Path(path).read_text())
    monkeypatch.setattr(evidence, "installed", lambda name: "2")
    asked = measures(ROW)
    with pytest.raises(SystemExit, match="rows of Triton 1, here is 2: --no-rows"):
        evidence.main([])
    assert json.loads(Path(path).read_text()) == before and asked == []
    words = "--ops kda --passes fwd --gates bound --settings B1T64H1".split()
    assert evidence.main(["--output", str(tmp_path / "new.json"), *words]) == 0
    found = json.loads((tmp_path / "new.json").read_text())
    assert found["rows"] == [made(ROW) | {"triton": "2"}] and found["code"]["triton"] == "2"
    assert set(found["suites"]) == {"2"} and json.loads(Path(path).read_text()) == before


def test_options_that_choose_rows_need_rows(device):
    for words in (["--no-suite"], ["--ops", "kda"], ["--peers", "fla"]):
        with pytest.raises(SystemExit):
            evidence.main(["--no-rows", *words])


def test_a_run_that_is_cut_goes_on_where_it_is_started_again(
    device, measures, monkeypatch, tmp_path
):
    path = tmp_path / "evidence.json"
    written(path, [made(ROW, "scan:0"), made(WEAK, "scan:0")], source="older")

    def cut(cases, peers, keep, until):
        keep(ROW)
        raise KeyboardInterrupt

    monkeypatch.setattr(evidence.runner, "run", cut)
    with pytest.raises(KeyboardInterrupt):
        evidence.main(["--output", str(path)])
    assert json.loads(path.read_text())["rows"] == [made(ROW), made(WEAK, "scan:0")]
    monkeypatch.setattr(suite, "run", None)  # its result is at hand
    asked = measures(WEAK)
    assert evidence.main(["--output", str(path)]) == 0 and asked == [case_of(WEAK)]
    assert json.loads(path.read_text())["rows"] == [made(ROW), made(WEAK)]


DIED = {"name": f"{case_of(ROW)} alone", "why": "the process ended with -11"}
FAULTS = {
    "a test failed": ({"failed": 1}, ROW, []),
    "no test passed": ({"passed": 0}, ROW, []),
    "our side has no time": ({}, ROW | {"ours_ms": None}, []),
    "our side died": ({}, DIED, []),
    "the suite was cut": ({"cut": "cut after 1 s"}, ROW, []),
    "time ran out": ({}, ROW, ["--time-limit", "0"]),
}


@pytest.mark.parametrize("counts, said, words", FAULTS.values(), ids=FAULTS)
def test_what_went_wrong_fails_the_command(
    device, measures, monkeypatch, tmp_path, counts, said, words
):
    path = written(tmp_path / "evidence.json", [made(ROW, "scan:0")], source="older")
    monkeypatch.setattr(suite, "run", lambda *words: CLEAN | counts)
    measures(said)
    assert evidence.main(["--output", path, *words]) == 1
    found = json.loads(Path(path).read_text())
    assert found["suites"]["1"].items() >= counts.items()
    assert said is DIED or made(said) in found["rows"]
    if "cut" in counts:  # then it runs again
        monkeypatch.setattr(suite, "run", lambda *words: CLEAN | {"passed": 9})
        assert evidence.main(["--output", path]) == 0


def test_source_that_changes_meanwhile_has_no_evidence(device, measures, monkeypatch, tmp_path):
    path = written(tmp_path / "evidence.json", [made(ROW, "scan:0")])
    hashes = iter(("tree", "tree", "other"))
    monkeypatch.setattr(digests, "source_hash", lambda root: next(hashes))
    measures(ROW)
    with pytest.raises(SystemExit, match="the source changed while the evidence was taken"):
        evidence.main(["--output", path])
    assert json.loads(Path(path).read_text())["rows"] == [made(ROW, "scan:0")]
