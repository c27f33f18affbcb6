"""Compare two trees, for a change that should change nothing: ``compare BASE_TREE TREE``.

Each tree compiles the calls of its table (`benchmarks.budgets`) with the installed Triton and no
GPU. A line per call says whether its machine code is the same, or what each kernel takes before and
after. Comments, names and moved files change no machine code. ``--bits`` compares what public calls
return too: outputs, states and gradients, on the GPU if there is one. On a CPU the native backend
runs; with ``KDA_OPS_CPU=triton TRITON_INTERPRET=1`` the kernels do, and ``--small`` makes that
short. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

from benchmarks import bits
from kda_ops.tools.machine import Help

# The first makes Triton interpret. Where Inductor has set the second, kernels get torch's ptxas.
_NOT_OFFLINE = ("TRITON_INTERPRET", "TRITON_PTXAS_PATH")


def compiled(tree: Path, words: list[str]) -> dict[str, list[dict]]:
    """Compile the calls of a tree in a process of its own; return the kernels of each call."""
    if not (tree / "benchmarks" / "compile.py").exists():
        raise SystemExit(
            f"{tree} has no benchmarks/compile.py, which compiles the calls of a tree."
        )
    environment = {n: x for n, x in os.environ.items() if n not in _NOT_OFFLINE}
    path = [str(tree), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.json"
        command = [sys.executable, "-m", "benchmarks", "compile", *words, "--json", str(file)]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if not file.exists():
            raise SystemExit(f"{tree} does not compile:\n{done.stderr[-2000:]}")
        rows = json.loads(file.read_text())["rows"]
    found: dict[str, list[dict]] = {}
    for row in rows:
        found.setdefault(f"{row['label']} sm_{row['arch']}", []).append(row)
    return found


def differ(old: list[dict], new: list[dict]) -> str:
    """Say how the kernels of a call differ; nothing if their machine code is the same."""
    if [r["code"] for r in old] == [r["code"] for r in new] and not any(r["error"] for r in new):
        return ""
    pairs = [(a, b) for a, b in zip_longest(old, new) if not (a and b and a["code"] == b["code"])]
    return "; ".join(f"{_numbers(a)} -> {_numbers(b)}" for a, b in pairs)


def _numbers(row: dict | None) -> str:
    if row is None or row["error"]:
        return "nothing" if row is None else row["error"].splitlines()[-1]
    numbers = f"{row['registers']} registers, {row['stack']} B stack, {row['instructions']}"
    return f"{row['kernel']}: {numbers} instructions"


def main(argv: list[str]) -> int:
    """Compare the trees and print a line per call."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare", description=__doc__, formatter_class=Help
    )
    add = parser.add_argument
    add("trees", nargs=2, type=Path, metavar="TREE", help="the base and the tree to compare")
    add("--only", nargs="+", default=[], metavar="WORD", help="calls whose names have these words")
    add("--arch", default="90", help="the compute capability to compile for, times ten")
    add("--all", action="store_true", help="compile every dtype, width, gate and mode")
    add("--no-code", action="store_true", help="leave the machine code out")
    add("--bits", action="store_true", help="compare the bits too")
    add("--small", action="store_true", help="bits of few tokens, with fp16 for bf16")
    add("--jobs", type=int, default=1, help="processes of each tree")
    args = parser.parse_args(argv)
    trees, said = [tree.resolve() for tree in args.trees], dict[str, str]()
    if not args.no_code:
        words = ["--arch", args.arch, "--jobs", str(args.jobs), *["--all"] * args.all]
        old, new = (compiled(t, [*words, *(f"--only={w}" for w in args.only)]) for t in trees)
        said |= {call: differ(old.get(call, []), new.get(call, [])) for call in {**old, **new}}
    if args.bits:
        found = bits.differences(trees, args.small, args.only, args.jobs)
        said |= {f"bits: {call}": difference for call, difference in found.items()}
    for call, difference in said.items():
        print(f"{call:48} {difference or 'same'}")
    if not said:
        parser.error(f"no call has these words: {' '.join(args.only)}")
    changed = sum(map(bool, said.values()))
    print(f"{changed} of {len(said)} calls differ")
    return int(changed > 0)
