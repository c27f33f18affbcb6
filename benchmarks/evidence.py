"""Run the GPU tests and the benchmark, and write what they found.

evidence.json names of every row the card, the versions and the `digests` of its kernels. `suites`
has the last run of the tests with each Triton, and the source that it ran on. Only stale and
missing rows are measured, of the cases in the file or of the cases that the options name. The file
is written after the tests and after every row, so a run that was cut goes on where it is started
again. `missing` says why a row has no figures. All rows of a file are of one Triton.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

from benchmarks import runner
from kda_ops.tools import digests
from kda_ops.tools.cases import KEY, Case, case_of, name_of
from kda_ops.tools.machine import Help, checkout, installed, need_writable, results, write_json
from tests.support import suite


class Evidence:
    """The file, and what of it holds for this tree."""

    def __init__(self, path: Path, with_rows: bool):
        self.triton = installed("triton")
        start = path if path.exists() else results() / "evidence.json"
        empty: dict = {"suites": {}, "rows": [], "missing": {}}
        empty["code"] = {"triton": self.triton, "rows": {}}
        found = json.loads(start.read_text()) if start.exists() else empty
        if with_rows and found["rows"] and found["code"]["triton"] != self.triton:
            if start == path:
                raise SystemExit(
                    f"{path} has rows of Triton {found['code']['triton']}, here is {self.triton}: "
                    "--no-rows runs the tests alone, --output NEW_FILE measures all rows."
                )
            found = empty
        self.path = path
        self.take(found)
        self.source = digests.source_hash(checkout())
        self.about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        self.kernels: dict[str, str] = {}

    def take(self, found: dict) -> None:
        """Take over what a file holds."""
        self.found, self.missing = found, dict(found["missing"])
        self.rows = {tuple(r[n] for n in KEY): r for r in found["rows"]}
        late = (n for n, why in self.missing.items() if why.startswith(runner.UNFINISHED))
        self.late = {name.rsplit(" ", 1)[0] for name in late}

    def on_file(self) -> dict:
        """Return what the file holds at present, for another Triton may run its tests meanwhile."""
        return json.loads(self.path.read_text()) if self.path.exists() else self.found

    @property
    def suite(self) -> dict:
        """Return the last run of the tests with this Triton; of no source where there is none."""
        return self.found["suites"].get(self.triton, {"source": None, "cut": None})

    def valid(self) -> list[dict]:
        """Return the rows that were measured with the kernels of this tree."""
        return [r for r in self.rows.values() if digests.is_valid(r, self.kernels)]

    def stale(self, names: list[str], peers: list[str]) -> list[str]:
        """Return the cases without a valid row, or without one next to each of some peers."""
        have = {(case_of(r), r["peer"]) for r in self.valid()}
        done = {name for name, _ in have if all((name, p) in have for p in peers)} - self.late
        return [n for n in names if n not in done]

    def keep(self, found: dict) -> None:
        """Take a row, or the reason for its absence, and write the file."""
        if "why" in found:
            self.missing[found["name"]] = found["why"]
        else:
            code = digests.code_of(self.kernels[case_of(found)])
            about = self.about | {"triton": self.triton}
            self.rows[tuple(found[n] for n in KEY)] = found | {"code": code} | about
            self.missing.pop(name_of(found), None)
        self.write_rows()

    def run_suite(self, limit: float) -> None:
        """Run the tests, unless this Triton has a whole run of this source, and write the file."""
        if self.suite["source"] != self.source or self.suite["cut"]:
            ran = {"source": self.source, **self.about, **suite.run(checkout(), limit)}
            self.take(self.on_file())
            self.found["suites"] |= {self.triton: ran}
        self.write(self.found)

    def write_rows(self) -> None:
        """Write rows; one without a peer goes once its case has a valid one with a peer."""
        beaten = {case_of(r) for r in self.valid() if r["peer"]}
        rows = [r for r in self.rows.values() if r["peer"] or case_of(r) not in beaten]
        code = {n: self.kernels[n] for n in dict.fromkeys(map(case_of, rows))}
        found = {"code": {"triton": self.triton, "rows": code}, "suites": self.on_file()["suites"]}
        self.write(found | {"rows": rows, "missing": self.missing})

    def write(self, found: dict) -> None:
        """Write the file, unless the source has changed meanwhile."""
        if digests.source_hash(checkout()) != self.source:
            raise SystemExit("the source changed while the evidence was taken: take it again.")
        write_json(self.path, found)


def measure(found: Evidence, args: argparse.Namespace, chosen: bool, until: float) -> list[str]:
    """Measure the rows on file, or the rows that options chose; return what is still stale."""
    peers = runner.peers_of("cuda", args.peers)
    known = [*map(case_of, found.rows.values())]
    names = list(dict.fromkeys([*known, *found.late]))
    if not names or chosen:
        names = [c.name for c in runner.list_cases(args, "cuda", torch.bfloat16)]
    found.kernels = digests.kernels_of_all({*names, *known}, os.cpu_count() or 1)
    found.write_rows()
    cases = [Case.named(n, "cuda") for n in found.stale(names, args.peers or [])]
    runner.run(cases, peers, found.keep, until)
    code = {"triton": found.triton, "rows": found.kernels}
    state = {"code": code, "suites": found.on_file()["suites"], "rows": [*found.rows.values()]}
    return digests.report(state, found.kernels, checkout())


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
    found = Evidence(Path(args.output or results() / "evidence.json"), not args.no_rows)
    if not args.no_suite:
        found.run_suite(until - time.time())
    wrong = False
    if not args.no_rows:
        print(*measure(found, args, chosen, until), sep="\n")
        died = (n for n, why in found.missing.items() if why.startswith(runner.UNFINISHED))
        wrong = any(n.endswith(" alone") for n in died)
        wrong = wrong or any(r["ours_ms"] is None for r in found.valid())
    ran = found.suite
    passed = ran.get("passed") and not ran.get("failed") and not ran["cut"]
    return int(wrong or not passed or time.time() >= until)
