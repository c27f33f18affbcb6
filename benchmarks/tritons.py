"""Time the operators with several versions of Triton, and write tritons.json.

``python -m benchmarks.tritons FOLDER... [options of python -m benchmarks]``

Each folder holds another Triton, as ``pip install --no-deps --target FOLDER triton==3.9.0`` makes
it. The installed one runs first and last, so that the table shows how far one card drifts. Every
run is ``python -m benchmarks`` in a process of its own, without peers unless the options name some.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kda_ops.tools.machine import Help, checkout, need_writable, results, write_json

OPTIONS = ["--passes", "fwd,fwdbwd", "--gates", "bound,softplus", "--peers", "none"]
OPTIONS += ["--settings", "B8T4096H32,B1T8192H96,B1T65536H16"]
COLUMNS = ("op", "gate", "setting", "pass")


def run(folder: Path | None, options: list[str]) -> tuple[dict, int]:
    """Run the benchmark with the Triton of a folder; return what it wrote and its exit status."""
    environment = dict(os.environ)
    if folder is not None:
        path = [str(folder.resolve()), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch) / "rows.json"
        command = [sys.executable, "-m", "benchmarks", *OPTIONS, *options, "--json", str(found)]
        status = subprocess.run(command, cwd=checkout(), env=environment).returncode
        return json.loads(found.read_text()) if found.exists() else {"rows": []}, status


def main(argv: list[str]) -> int:
    """Run the command line; non-zero if a run failed or has a row without a time."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tritons", description=__doc__, formatter_class=Help
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="another Triton")
    parser.add_argument("--output", metavar="FILE", help="benchmarks/results/tritons.json")
    args, options = parser.parse_known_args(argv)
    for folder in args.folders:
        if not (folder / "triton").is_dir():
            parser.error(
                f"{folder} holds no Triton: pip install --no-deps --target {folder} triton"
            )
    need_writable(parser, args.output)
    about, rows, failed = dict[str, str](), list[dict](), False
    for folder in (None, *args.folders, None):
        found, status = run(folder, options)
        failed |= status != 0
        for row in found["rows"]:
            about = {"gpu": found["device"], "torch": found["torch"]}
            if row["ours_ms"] is not None:
                names = {n: row[n] for n in COLUMNS}
                rows.append({"triton": found["triton"], **names, "ms": row["ours_ms"]})
        if rows:
            write_json(args.output or results() / "tritons.json", about | {"rows": rows})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
