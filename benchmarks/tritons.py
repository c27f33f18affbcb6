"""Time the operators with several versions of Triton, and print the table that compares them.

``python -m benchmarks.tritons FOLDER... [--output FILE]``

Each folder holds another Triton, as ``pip install --no-deps --target FOLDER triton==3.9.0`` makes
it. The installed one runs first and last. Every run is ``python -m benchmarks`` without peers, in a
process of its own. A row without a time is left out, and the exit status says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import torch

from benchmarks import tables
from benchmarks.records import STAMP, checkout, need_writable, write_json
from kda_ops.tools.machine import Help, installed

COLUMNS = ("op", "gate", "setting", "pass")


def version_in(folder: Path) -> str:
    """Return the version of the one Triton that a folder holds."""
    found = [d.version for d in metadata.distributions(name="triton", path=[str(folder)])]
    if len(found) != 1 or not (folder / "triton" / "__init__.py").exists():
        raise ValueError(
            f"{folder} must hold one Triton: "
            f"rm -r {folder}; pip install --no-deps --target {folder} triton==VERSION"
        )
    return found[0]


def run(folder: Path | None, options: list[str]) -> tuple[dict, int]:
    """Run the benchmark with the Triton of a folder; return what it wrote and its exit status."""
    environment = dict(os.environ)
    if folder is not None:
        path = [str(folder.resolve()), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch) / "rows.json"
        command = [sys.executable, "-m", "benchmarks", *options, "--json", str(found)]
        status = subprocess.run(command, cwd=checkout(), env=environment).returncode
        return json.loads(found.read_text()) if found.exists() else {"rows": []}, status


def main(argv: list[str]) -> int:
    """Run the command line; non-zero if a run failed or has a row without a time."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tritons", description=__doc__, formatter_class=Help
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="another Triton")
    parser.add_argument("--ops", default="kda,gdn")
    parser.add_argument("--gates", default="bound,softplus")
    parser.add_argument("--settings", default="B8T4096H32,B1T8192H96,B1T65536H16")
    parser.add_argument("--output", metavar="FILE", help="write the rows, anew after every run")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or not installed("triton"):
        parser.error("it needs a CUDA device and an installed triton, which runs first and last.")
    need_writable(parser, args.output)
    try:
        versions = [installed("triton"), *map(version_in, args.folders)]
    except ValueError as error:
        parser.error(str(error))
    if len(set(versions)) < len(versions):
        parser.error(f"two of these Tritons have one version: {versions}")
    options = ["--peers", "none", "--passes", "fwd,fwdbwd", "--ops", args.ops]
    options += ["--gates", args.gates, "--settings", args.settings]
    rows, failed = list[dict](), False
    for folder, version in zip((None, *args.folders, None), (*versions, versions[0])):
        found, status = run(folder, options)
        failed |= status != 0
        for row in found["rows"]:
            if row["triton"] != version:
                raise SystemExit(f"{folder} ran Triton {row['triton']} in place of {version}.")
            if row["ours_ms"] is not None:
                rows.append({n: row[n] for n in (*COLUMNS, *STAMP)} | {"ms": row["ours_ms"]})
        if rows and args.output:
            write_json(args.output, {"rows": rows})
    if rows:
        print(tables.of_tritons({"rows": rows}, {}))
    return int(failed or not rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
