"""``python -m benchmarks.tritons``: each Triton runs in turn, the installed one first and last."""

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import runner, tritons
from tests.support.benchmark import row

BENCHMARK = """
import json, os, sys
assert os.environ["PYTHONPATH"].endswith("/installed")  # the caller's stays
from importlib import metadata
from pathlib import Path
version = metadata.version("triton")
rows = [json.loads(os.environ["ROW"]) | {"ours_ms": 10.0 * float(version)}]
found = {"device": "G", "torch": "1", "triton": version, "rows": rows, "options": sys.argv[1:]}
if version == "3.9":
    rows.append(rows[0] | {"ours_ms": None, "pass": "fwdbwd"})  # its error was too large
Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(found))
sys.exit(version == "3.9")
"""


def triton(folder, version):
    """Make a folder that holds a Triton, as pip would."""
    (folder / "triton").mkdir(parents=True)
    (folder / "triton" / "__init__.py").touch()
    about = folder / f"triton-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: triton\nVersion: {version}\n")
    return str(folder)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Make a checkout whose benchmark says which Triton it finds, with 3.6 installed."""
    package = tmp_path / "checkout" / "benchmarks"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(BENCHMARK)
    monkeypatch.setattr(tritons, "checkout", lambda: package.parent)
    monkeypatch.setattr(tritons, "installed", lambda name: "3.6")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("PYTHONPATH", triton(tmp_path / "installed", "3.6"))
    monkeypatch.setenv("ROW", json.dumps(row()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_installed_triton_runs_first_and_last(bench, capsys):
    triton(bench / "new-3.8", "3.8")
    output = bench / "tritons.json"
    words = [triton(bench / "new-3.10", "3.10"), "new-3.8", "--output", str(output)]
    assert tritons.main(words) == 0
    found = json.loads(output.read_text())
    assert [(r["triton"], r["ms"]) for r in found["rows"]] == [
        ("3.6", 36.0),
        ("3.10", 31.0),
        ("3.8", 38.0),
        ("3.6", 36.0),
    ]
    assert found["rows"][0].keys() == {"triton", *tritons.COLUMNS, "ms"}
    said = capsys.readouterr().out
    assert "G, torch 1; ms." in said and " 36 | 38 (1.06) | 31 (0.86) |" in said


def test_a_row_without_a_time_is_left_out_and_fails_the_command(bench):
    output = bench / "tritons.json"
    assert tritons.main([triton(bench / "new", "3.9"), "--output", str(output)]) == 1
    rows = json.loads(output.read_text())["rows"]
    assert [(r["triton"], r["pass"]) for r in rows] == [
        ("3.6", "fwd"),
        ("3.9", "fwd"),
        ("3.6", "fwd"),
    ]


def test_the_benchmark_takes_the_options(bench, monkeypatch):
    asked = []

    def run(command, **words):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(tritons.subprocess, "run", run)
    assert tritons.main([triton(bench / "new", "3.8"), "--settings", "B1T64H1"]) == 1  # no row
    assert tritons.main([str(bench / "new")]) == 1
    parser = argparse.ArgumentParser()
    runner.add_arguments(parser)
    parser.add_argument("--json")
    given, default = (parser.parse_args(asked[i][3:]) for i in (0, 3))
    assert given.settings == ["B1T64H1"] and len(default.settings) == 3 and len(asked) == 6
    for args in (given, default):
        assert args.peers == [] and args.passes == ["fwd", "fwdbwd"]
        assert args.ops == ["kda", "gdn"] and args.gates == ["bound", "softplus"]


def test_a_folder_must_hold_one_triton_of_its_own_version(bench, capsys):
    two, code_alone, about_alone = (bench / name for name in ("two", "code", "about"))
    triton(two, "3.8")
    (two / "triton-3.9.dist-info").mkdir()
    (two / "triton-3.9.dist-info" / "METADATA").write_text("Name: triton\nVersion: 3.9\n")
    (code_alone / "triton").mkdir(parents=True)
    (code_alone / "triton" / "__init__.py").touch()
    (Path(triton(about_alone, "3.8")) / "triton" / "__init__.py").unlink()
    for folder in (bench, two, code_alone, about_alone):
        with pytest.raises(SystemExit):
            tritons.main([str(folder)])
        assert "must hold one Triton: rm -r" in capsys.readouterr().err
    same = triton(bench / "same", "3.6")
    for folders in ([same], [triton(bench / "a", "3.8"), triton(bench / "b", "3.8")]):
        with pytest.raises(SystemExit):
            tritons.main(folders)
        assert "have one version" in capsys.readouterr().err


def test_a_run_with_another_triton_than_its_folder_says_is_refused(bench, monkeypatch):
    folder = triton(bench / "new", "3.8")
    monkeypatch.setattr(tritons, "version_in", lambda folder: "3.10")
    with pytest.raises(SystemExit, match="ran Triton 3.8 in place of 3.10"):
        tritons.main([folder])


def test_what_a_run_lacks_is_said_before_it_starts(bench, monkeypatch, capsys):
    monkeypatch.setattr(tritons, "run", None)
    folder = triton(bench / "new", "3.8")
    with pytest.raises(SystemExit):
        tritons.main([folder, "--output", str(bench / "none" / "tritons.json")])
    assert "cannot be written" in capsys.readouterr().err
    monkeypatch.setattr(tritons, "installed", lambda name: None)
    with pytest.raises(SystemExit):
        tritons.main([folder])
    assert "an installed triton" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        tritons.main([folder])
    assert "a CUDA device" in capsys.readouterr().err
