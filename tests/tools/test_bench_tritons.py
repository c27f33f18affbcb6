"""``python -m benchmarks.tritons``: each Triton runs in turn, the installed one first and last."""

import argparse
import json
import os
import subprocess

import pytest

from benchmarks import runner, tables, tritons
from tests.support.benchmark import row

BENCHMARK = """
import json, os, sys
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
    monkeypatch.setenv("PYTHONPATH", triton(tmp_path / "installed", "3.6"))
    monkeypatch.setenv("ROW", json.dumps(row()))
    return tmp_path


def test_the_installed_triton_runs_first_and_last(bench):
    folders = [triton(bench / f"new-{v}", v) for v in ("3.10", "3.8")]
    output = bench / "tritons.json"
    assert tritons.main([*folders, "--output", str(output), "--ops", "kda"]) == 0
    found = json.loads(output.read_text())
    assert [(r["triton"], r["ms"]) for r in found["rows"]] == [
        ("3.6", 36.0),
        ("3.10", 31.0),
        ("3.8", 38.0),
        ("3.6", 36.0),
    ]
    assert found["rows"][0].keys() == {"triton", *tritons.COLUMNS, "ms"}
    table = tables.of_tritons(found, {})
    assert "G, torch 1; ms." in table and " 36 | 38 (1.06) | 31 (0.86) |" in table
    assert os.environ["PYTHONPATH"] == str(bench / "installed")


def test_a_row_without_a_time_is_left_out_and_fails_the_command(bench):
    output = bench / "tritons.json"
    assert tritons.main([triton(bench / "new", "3.9"), "--output", str(output)]) == 1
    rows = json.loads(output.read_text())["rows"]
    assert [(r["triton"], r["pass"]) for r in rows] == [
        ("3.6", "fwd"),
        ("3.9", "fwd"),
        ("3.6", "fwd"),
    ]


def test_the_options_reach_the_benchmark(bench, monkeypatch):
    asked = []

    def run(command, **words):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(tritons.subprocess, "run", run)
    output = str(bench / "tritons.json")
    tritons.main([triton(bench / "new", "3.8"), "--output", output, "--settings", "B1T64H1"])
    parser = argparse.ArgumentParser()
    runner.add_arguments(parser)
    parser.add_argument("--json")
    for _, _, _, *options in asked:  # the benchmark takes them, the last of a name
        args = parser.parse_args(options)
        assert args.settings == ["B1T64H1"] and args.peers == [] and args.gates[0] == "bound"
    assert len(asked) == 3


def test_a_folder_without_a_triton_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        tritons.main([str(tmp_path)])
    assert "holds no Triton: pip install" in capsys.readouterr().err
