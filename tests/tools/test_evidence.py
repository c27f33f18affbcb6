"""Recorded results say what was measured, and ``evidence`` runs, checks errors and writes."""

import json
import re
import subprocess

import pytest

from benchmarks import evidence, records
from benchmarks.cases import KEY, case_of
from tests.support import suite
from tests.support.benchmark import row

RESULTS = records.results()


def stamped(record):
    return (
        all(isinstance(record[n], str) and record[n] for n in records.STAMP)
        and re.fullmatch(r"[0-9a-f]{10}\+?", record["commit"])
        and re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    )


@pytest.mark.quick
@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_every_row_names_card_versions_commit_and_date(file):
    found = json.loads(file.read_text())
    rows = found.get("rows") or [found]  # parity.json has curves
    assert all(map(stamped, rows))


def test_rows_on_file_are_named_once_and_have_times_and_errors():
    found = json.loads((RESULTS / "evidence.json").read_text())
    for triton, ran in found["suites"].items():
        assert stamped(ran | {"triton": triton})
        assert ran["passed"] and len(ran["failures"]) == ran["failed"]
    assert len({tuple(r[n] for n in KEY) for r in found["rows"]}) == len(found["rows"])
    for r in found["rows"]:
        numbers = (r["peer_ms"], r["ours_error"], r["peer_error"])
        assert r["ours_ms"] > 0 and all(x is None or x > 0 for x in numbers)


MIXED = """
import pytest

def test_a(): pass

@pytest.mark.parametrize("x", ({"a b@c": 1}, {"a b@d": 2}), ids=str)
def test_b(x): assert False

def test_c(): pytest.skip("no")

@pytest.fixture
def torn():
    yield
    assert False

def test_d(torn): pass
"""


def test_a_run_of_the_tests_is_counted_whole_or_cut(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name: None)  # one process
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-q"\n')
    (folder / "test_it.py").write_text(MIXED)
    (folder / "test_broken.py").write_text("import no_such_module")
    found = suite.run(tmp_path)
    names = found.pop("failures")
    assert found == {"passed": 1, "failed": 4, "skipped": 1, "cut": None}
    assert {f"tests/gpu/test_it.py::{n}" for n in ("test_b[{'a b@c': 1}]", "test_d")} < set(names)
    (folder / "test_z.py").write_text("import os\n\ndef test_dies(): os._exit(3)\n")
    cut = suite.run(tmp_path)
    assert cut["cut"] == "ended with 3" and cut["done"][0] == "passed tests/gpu/test_it.py::test_a"
    # a test that has passed does not run again, and still counts
    (folder / "test_z.py").unlink()
    (folder / "test_it.py").write_text(MIXED.replace("test_a(): pass", "test_a(): assert False"))
    assert suite.run(tmp_path, done=cut["done"])["passed"] == 1
    assert suite.run(tmp_path)["passed"] == 0
    (folder / "test_broken.py").unlink()
    (folder / "test_it.py").write_text("def test_a(): pass\n")
    assert suite.run(tmp_path, done=cut["done"][:1])["cut"] is None  # none were left


def git(folder, *words):
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(("git", *who, *words), cwd=folder, check=True, capture_output=True)


def test_a_commit_is_named_with_its_changes(monkeypatch, tmp_path):
    monkeypatch.delenv(records.COMMIT, raising=False)
    monkeypatch.setattr(records, "checkout", lambda: tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(SystemExit, match="is no git checkout: set KDA_OPS_COMMIT"):
        records.commit()
    for name in ("kda_ops/a.py", "registrations/b.py", "benchmarks/c.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "a")
    clean = records.commit()
    assert re.fullmatch(r"[0-9a-f]{10}", clean)
    (tmp_path / "benchmarks" / "c.json").write_text("2")  # results change while they are taken
    assert records.commit() == clean
    (tmp_path / "registrations" / "b.py").write_text("2")
    assert records.commit() == f"{clean}+"
    monkeypatch.setenv(records.COMMIT, "c0ffee")
    assert records.commit() == "c0ffee"


CLEAN = {"passed": 1, "failed": 0, "skipped": 0, "failures": [], "cut": None}
HERE = {n: row()[n] for n in records.STAMP}
OLD = HERE | {"commit": "fedcba9876", "date": "2026-10-01"}
ALONE = row(peer=None, peer_ms=None)
CHOSEN = "--ops kda --passes fwd --gates weak --settings B1T130H2HV4D16".split()


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Return a function that runs the command over a file, with what tests and benchmark find."""
    path = tmp_path / "evidence.json"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(evidence, "installed", lambda name: "2")
    monkeypatch.setattr(evidence, "stamp", lambda device: dict(HERE))
    monkeypatch.setattr(evidence.runner, "peers_of", lambda device, chosen: [])

    def run(*said, words=CHOSEN, ran=CLEAN, on_file=None):
        asked = []

        def measure(cases, peers, keep, until):
            asked.extend(c.name for c in cases)
            for found in said:
                keep(found)

        monkeypatch.setattr(evidence.runner, "run", measure)
        monkeypatch.setattr(suite, "run", ran and (lambda *words: dict(ran)))
        if on_file is not None:
            path.write_text(json.dumps({"suites": {}, "rows": on_file, "missing": {}}))
        status = evidence.main(["--output", str(path), *words])
        return status, asked, json.loads(path.read_text())

    return run


def test_a_row_replaces_the_one_of_its_name_and_no_other(command):
    old, other = row(**OLD), row(gate="strong", **OLD)
    status, asked, found = command(row(ours_ms=2.0), on_file=[old, other])
    assert status == 0 and asked == [case_of(old)]
    assert found["rows"] == [row(ours_ms=2.0), other]
    assert found["suites"] == {"2": {n: x for n, x in HERE.items() if n != "triton"} | CLEAN}
    # without options, what is on file; what is of this commit is not measured twice
    status, asked, found = command(words=[], ran=None)
    assert status == 0 and asked == [case_of(other)]


def test_a_cut_suite_goes_on_with_what_its_own_commit_has_done(monkeypatch, tmp_path):
    asked, cut = [], CLEAN | {"cut": "cut after 1 s", "done": ["passed a"]}
    monkeypatch.setattr(suite, "run", lambda root, limit, done: asked.append([*done]) or cut)
    for commit in (HERE["commit"], HERE["commit"], OLD["commit"], "fedcba9876+", "fedcba9876+"):
        evidence.run_suite(tmp_path / "evidence.json", 1.0, HERE | {"commit": commit})
    assert asked == [[], ["passed a"], [], [], []]


DIED = {"name": f"{case_of(ALONE)} alone", "why": "the process ended with -11"}
FAULTS = {
    "a test failed": ({"failed": 1}, row(), []),
    "no test passed": ({"passed": 0}, row(), []),
    "the suite was cut": ({"cut": "cut after 1 s"}, row(), []),
    "our side has no time": ({}, row(ours_ms=None), []),
    "our side died": ({}, DIED, []),
    "time ran out": ({}, row(), ["--time-limit", "0"]),
}


@pytest.mark.parametrize("counts, said, words", FAULTS.values(), ids=FAULTS)
def test_what_went_wrong_fails_the_command_and_is_on_file(command, counts, said, words):
    status, _, found = command(said, words=[*CHOSEN, *words], ran=CLEAN | counts)
    assert status == 1 and found["suites"]["2"].items() >= counts.items()
    assert said is DIED or found["rows"] == [said]
