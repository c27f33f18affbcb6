"""Run the GPU tests and the benchmark, and record both.

The rows that are measured are those on file, or those that the options choose. The worker checks a
side's error before it times that side. Each row takes the place of the row of the same name on
file, and the file is written after the tests and after every row. A run that was cut goes on where
it is started again, because rows and tests of this very commit are not run twice. `suites` has the
last run of the tests with each Triton. `missing` says why a row has no figures.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from benchmarks import runner
from benchmarks.cases import Case, case_of, name_of
from benchmarks.records import checkout, need_writable, results, stamp, write_json
from kda_ops.tools.machine import Help, installed
from tests.support import suite


def read(path: Path) -> dict:
    """Return what a file holds; another Triton may run its tests meanwhile and write it too."""
    return (
        json.loads(path.read_text()) if path.exists() else {"suites": {}, "rows": [], "missing": {}}
    )


def keep(path: Path, found: dict) -> None:
    """Put a row, or the reason for its absence, into a file.

    A row without a peer goes once its case has a row with one.
    """
    whole = read(path)
    if "why" in found:
        whole["missing"][found["name"]] = found["why"]
    else:
        name, rows = name_of(found), whole["rows"]
        at = next((i for i, r in enumerate(rows) if name_of(r) == name), len(rows))
        rows[at : at + 1] = [found]
        rows[:] = [
            r for r in rows if not (found["peer"] and name_of(r) == f"{case_of(found)} alone")
        ]
        whole["missing"].pop(name, None)
    write_json(path, whole)


def todo(whole: dict, names: list[str], peers: list[str], here: dict) -> list[str]:
    """Return the cases without a row of this commit and card, or without one next to some peers."""
    late = [n for n, why in whole["missing"].items() if why.startswith(runner.UNFINISHED)]
    unfinished = {name.rsplit(" ", 1)[0] for name in late}
    have = {(case_of(r), r["peer"]) for r in whole["rows"] if is_of(r, here)}
    done = {name for name, _ in have if all((name, p) in have for p in peers)} - unfinished
    return [n for n in names if n not in done]


def is_of(record: dict, here: dict) -> bool:
    """Whether a record is of this commit, card and torch; nothing is of a tree with changes."""
    same = all(record[n] == here[n] for n in ("card", "torch", "commit"))
    return same and not here["commit"].endswith("+")


def run_suite(path: Path, limit: float, here: dict) -> dict:
    """Run the tests that the file does not have of this commit, and write the file."""
    ran = read(path)["suites"].get(here["triton"])
    if ran and is_of(ran, here) and not ran["cut"]:
        return ran
    done = ran.get("done", ()) if ran and is_of(ran, here) else ()
    ran = {n: here[n] for n in ("card", "torch", "commit", "date")}
    ran |= suite.run(checkout(), limit, done)
    whole = read(path)
    whole["suites"][here["triton"]] = ran
    write_json(path, whole)
    return ran


def measure(path: Path, args: argparse.Namespace, chosen: bool, until: float, here: dict) -> bool:
    """Measure rows; return whether our side has a time in each."""
    whole, right = read(path), True
    names = list(dict.fromkeys(map(case_of, whole["rows"])))
    if chosen or not names:
        names = [c.name for c in runner.list_cases(args, "cuda", torch.bfloat16)]

    def take(found: dict) -> None:
        nonlocal right
        died = found.get("why", "").startswith(runner.UNFINISHED)
        right &= (
            not (died and found["name"].endswith(" alone")) and found.get("ours_ms", 0) is not None
        )
        keep(path, found)

    cases = [Case.named(n, "cuda") for n in todo(whole, names, args.peers or [], here)]
    runner.run(cases, runner.peers_of("cuda", args.peers), take, until)
    return right


def main(argv: list[str]) -> int:
    """Run the command line; non-zero if a test failed, our side was wrong, or time ran out."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks evidence", description=__doc__, formatter_class=Help
    )
    runner.add_arguments(parser)
    parser.add_argument("--output", metavar="FILE", help="benchmarks/results/evidence.json")
    less = parser.add_mutually_exclusive_group()
    less.add_argument("--no-suite", action="store_true", help="do not run the tests")
    less.add_argument("--no-rows", action="store_true", help="run the tests alone")
    args = parser.parse_args(argv)
    until = time.time() + args.time_limit
    options = ("ops", "passes", "gates", "settings")
    chosen = any(getattr(args, n) != parser.get_default(n) for n in options)
    if args.no_rows and (chosen or args.peers):
        parser.error("--no-rows measures no rows: leave out what chooses them.")
    if not torch.cuda.is_available() or not installed("triton"):
        raise SystemExit("evidence needs a CUDA device and Triton.")
    need_writable(parser, args.output)
    path, here, fine = Path(args.output or results() / "evidence.json"), stamp("cuda"), True
    if not args.no_suite:
        ran = run_suite(path, until - time.time(), here)
        fine = bool(ran["passed"]) and not ran["failed"] and not ran["cut"]
    if not args.no_rows:
        fine &= measure(path, args, chosen, until, here)
    return int(not fine or time.time() >= until)
