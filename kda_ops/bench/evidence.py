"""``python -m kda_ops evidence``: run the GPU suite and the benchmark, and write what they found.

benchmarks/results/evidence.json names of every row the card, the versions and the `digests` of its
kernels, and of the suite the source it ran on. Only what is missing or stale is measured: of the
cases of the file, or of those that the options name. The file is written after the suite and after
every row, so a run that was cut goes on where it is started again. `missing` says, case by case,
why a side has no row.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

from kda_ops.bench import compare, digests
from kda_ops.bench.cases import Case
from kda_ops.bench.machine import Help, checkout, write_json
from kda_ops.bench.rows import KEY, case_of, name_of

_WORD = "PASSED|FAILED|SKIPPED|ERROR"
# A line of pytest in several processes, and in one.
RESULTS = [
    rf"\[gw\d+\] \[ *\d+%\] (?P<word>{_WORD}) (?P<name>tests/.*?)\s*$",
    rf"(?P<name>tests/\S.*?) (?P<word>{_WORD})\b",
]
EMPTY: dict = {
    "code": {"rows": {}},
    "suite": {"source": None, "cut": None},
    "rows": [],
    "missing": {},
}


def count_tests(summary: str) -> dict[str, int]:
    """Passed, failed and skipped from the last line of pytest; errors count as failed."""
    found = {
        word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", summary)
    }
    return {
        "passed": found.get("passed", 0),
        "failed": found.get("failed", 0) + found.get("error", 0) + found.get("errors", 0),
        "skipped": found.get("skipped", 0),
    }


def _ungrouped(name: str) -> str:
    """A test's name without the group of processes that pytest-xdist writes after it."""
    return re.sub(r"@\w+$", "", name)


def parse_result(line: str) -> tuple[str, str] | None:
    """What a line of ``pytest -v`` says of a test: the count it belongs to, and its name."""
    found = next(filter(None, (re.match(p, line) for p in RESULTS)), None)
    if found is None:
        return None
    return "failed" if found["word"] == "ERROR" else found["word"].lower(), _ungrouped(
        found["name"]
    )


def run_suite(
    root: Path, limit: float = float("inf")
) -> tuple[dict[str, int], list[str], str | None]:
    """Run tests/gpu, on several cores and all GPUs where pytest-xdist is installed.

    Returns the counts, the names of what failed, and, where the run was cut after `limit` seconds
    or died, how many tests it had not reached.
    """
    import torch

    last, said, broken, there, spread, environment, begin = (
        "",
        dict[str, str](),
        list[str](),
        0,
        [],
        dict(os.environ),
        time.time(),
    )
    if importlib.util.find_spec("xdist"):
        spread = [
            "-n",
            str(max(1, min(14 * max(1, torch.cuda.device_count()), (os.cpu_count() or 1) - 2))),
            "--dist",
            "loadgroup",
        ]
        # The processes of the suite fill the cores already; with one thread they would compile in
        # themselves, which those of users do not.
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "tests/gpu", "-v", "-rfE", *spread]
    with subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        timer = threading.Timer(min(limit, threading.TIMEOUT_MAX), compare.end_group, [process])
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout is not None  # it is a pipe
            for line in process.stdout:
                print(line, end="", flush=True)
                if result := parse_result(line):
                    said[result[1]] = "failed" if said.get(result[1]) == "failed" else result[0]
                # of the summary: a module that could not be collected
                elif found := re.match(r"ERROR ([^\s:]+\.py)(?: - |$)", line.strip()):
                    broken.append(found[1])
                elif found := re.search(r"(?:collected |\[)(\d+) items?\b", line):
                    there = int(found[1])
                elif re.search(r"\d+ (passed|failed|skipped|error).* in [\d.:]+", line):
                    last = line
        except BaseException:
            compare.end_group(process)
            raise
        finally:
            timer.cancel()
    failures = [name for name, word in said.items() if word == "failed"] + broken
    if last:
        return count_tests(last), failures, None
    counts, took = (
        {word: list(said.values()).count(word) for word in ("passed", "failed", "skipped")},
        time.time() - begin,
    )
    why = (
        f"cut after {limit:g} s"
        if took >= limit
        else f"ended with {process.returncode} after {took:.0f} s"
    )
    return counts, failures, f"{why}: {there - len(said)} of {there} tests were not reached"


def read(path: Path) -> dict:
    """An evidence file, or one without anything."""
    return json.loads(path.read_text()) if path.exists() else EMPTY


def unfinished(missing: dict[str, str]) -> list[str]:
    """The names of rows that another run may have."""
    return [name for name, why in missing.items() if why.startswith(compare.UNFINISHED)]


def wanted(args: argparse.Namespace, parser: argparse.ArgumentParser, found: dict) -> list[Case]:
    """List the cases that the options name; without these, those of the file, with what it
    lacks.
    """
    import torch

    chosen = any(
        getattr(args, n) != parser.get_default(n) for n in ("ops", "passes", "gates", "settings")
    )
    if chosen or not found["rows"]:
        return compare.list_cases(
            "cuda", args.ops, args.passes, args.gates, args.settings, torch.bfloat16, None
        )
    names = [case_of(r) for r in found["rows"]] + [
        n.rsplit(" ", 1)[0] for n in unfinished(found["missing"])
    ]
    return [digests.case_named(name, "cuda") for name in dict.fromkeys(names)]


def main(argv: list[str]) -> int:
    """Run the command line; non-zero if a test failed, our side was wrong, or time ran out."""
    import torch

    begin = time.time()
    parser = argparse.ArgumentParser(
        prog="python -m kda_ops evidence", description=__doc__, formatter_class=Help
    )
    compare.add_arguments(parser, device="cuda")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="evidence.json of benchmarks/results by default; a run goes on from it",
    )
    parser.add_argument("--again", action="store_true", help="measure what is valid too")
    parser.add_argument(
        "--no-suite", action="store_true", help="leave the tests as the file has them"
    )
    parser.add_argument(
        "--suite-limit",
        type=float,
        default=float("inf"),
        metavar="S",
        help="cut the tests after S seconds",
    )
    args = parser.parse_args(argv)
    if args.dtype not in (None, "bfloat16"):
        parser.error("--dtype: evidence is of bfloat16.")
    root = checkout()
    if not torch.cuda.is_available():
        raise SystemExit("evidence needs a CUDA device.")
    here = root / "benchmarks" / "results" / "evidence.json"
    path = Path(args.output or here)
    found, source = read(path if path.exists() else here), digests.source_hash(root)
    about = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
    }
    cases = wanted(args, parser, found)
    names = [" ".join(c.key().values()) for c in cases]
    kernels = digests.kernels_of_all({*names, *map(case_of, found["rows"])}, os.cpu_count() or 1)
    rows, missing, suite = (
        {tuple(r[n] for n in KEY): r for r in found["rows"]},
        dict(found["missing"]),
        found["suite"],
    )

    def valid() -> list[dict]:
        return [r for r in rows.values() if digests.is_valid(r, kernels)]

    def write() -> None:
        if digests.source_hash(root) != source:
            raise SystemExit("the source changed while the evidence was taken: take it again.")
        beside = {case_of(r) for r in valid() if r["peer"]}
        kept = [r for r in rows.values() if r["peer"] or case_of(r) not in beside]
        code = {
            "triton": about["triton"],
            "rows": {n: kernels[n] for n in dict.fromkeys(map(case_of, kept))},
        }
        write_json(path, {"code": code, "suite": suite, "rows": kept, "missing": missing})

    def keep(x: dict | str) -> None:
        if isinstance(x, dict):
            key = tuple(x[n] for n in KEY)
            rows[key] = x | {"code": digests.code_of(kernels[case_of(x)])} | about
            missing.pop(name_of(key), None)
        else:
            name, why = x.split(": ", 1)
            missing[name] = why
        write()

    if not args.no_suite and (args.again or suite["source"] != source or suite["cut"]):
        counts, failures, cut = run_suite(root, args.suite_limit)
        suite = {"source": source, **about, **counts, "failures": failures, "cut": cut}
    write()
    have, until = (
        [r for r in valid() if not args.again or case_of(r) not in names],
        begin + args.time_limit,
    )
    if args.peers is None:  # else a case that has a row beside one peer may want another
        done = {case_of(r) for r in have} - {name.rsplit(" ", 1)[0] for name in unfinished(missing)}
        cases = [c for c, name in zip(cases, names) if name not in done]
    compare.measure_arguments(
        args,
        "cuda",
        lambda line: print(line, flush=True),
        until=until,
        have=have,
        keep=keep,
        only=cases,
    )
    for line in digests.report(
        {"code": {"rows": kernels}, "suite": suite, "rows": list(rows.values())}, kernels, root
    ):
        print(line)
    broken = any(r["ours_ms"] is None for r in valid()) or bool(compare.died(missing))
    return (
        1
        if broken
        or time.time() >= until
        or suite["cut"]
        or suite.get("failed")
        or not suite.get("passed")
        else 0
    )
