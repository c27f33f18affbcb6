"""``python -m kda_ops evidence``: run the GPU suite and the benchmark, and write down what they
found.

tests/gpu/evidence.json holds the hash of the kernels it belongs to, so a test that needs no GPU can
tell when it no longer does. The file is written after the suite and after every row: a run that
ends early leaves what it had, not `complete`, and ``--resume`` goes on from there, or from several
files that went on from one. `missing` says, case by case, why a side has no row; `earlier` keeps
the rows of the file before, of other kernels (whose hash is in `also`), until they are measured
again.
"""

from __future__ import annotations

import argparse
import hashlib
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

from kda_ops.bench import compare
from kda_ops.bench.machine import Help, write_json
from kda_ops.bench.rows import KEY, name_of

KERNELS = Path(__file__).resolve().parent.parent / "backends" / "triton"
_WORD = "PASSED|FAILED|SKIPPED|ERROR"
# in several processes, in one
RESULTS = [
    rf"\[gw\d+\] \[ *\d+%\] (?P<word>{_WORD}) (?P<name>tests/.*?)\s*$",
    rf"(?P<name>tests/\S.*?) (?P<word>{_WORD})\b",
]


def kernels_sha256(folder: Path = KERNELS) -> str:
    """The hash of the concatenated contents of ``**/*.py`` below a folder, in sorted path order."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def checkout() -> Path:
    """The root of the checkout that the package runs from."""
    root = KERNELS.parent.parent.parent
    if not (root / "tests").is_dir():
        raise SystemExit(
            "evidence belongs to a checkout: there is no folder tests beside the package."
        )
    return root


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
    """Run tests/gpu, its output passing through, on several cores and all GPUs where pytest-xdist
    is installed.

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


def _resumed(
    paths: list[str], about: dict
) -> tuple[tuple[dict[str, int], list[str], str | None], list[dict], dict[str, str]]:
    """The tests of some files, the rows of all, and what a side of theirs cannot do, if they are of
    this machine, these kernels and one run of the suite.
    """
    suites, rows, missing = [], dict[tuple, dict](), dict[str, str]()
    for path in paths:
        found = json.loads(Path(path).read_text())
        if wrong := [n for n in about if found.get(n) != about[n]]:
            raise SystemExit(
                f"{path} is of another {wrong[0]} ({found.get(wrong[0])}, here "
                f"{about[wrong[0]]}): take the evidence anew."
            )
        suites.append(
            (found["tests"], found["failures"], found.get("missing", {}).get("tests/gpu"))
        )
        rows |= {tuple(row[n] for n in KEY): row for row in found["rows"]}
        missing |= {
            n: why
            for n, why in found.get("missing", {}).items()
            if n != "tests/gpu" and not why.startswith(compare.UNFINISHED)
        }
    if any(suite != suites[0] for suite in suites):
        raise SystemExit(
            f"{' and '.join(paths)} are of different runs of the suite: take the evidence anew."
        )
    return (
        suites[0],
        list(rows.values()),
        {n: why for n, why in missing.items() if n not in map(name_of, rows)},
    )


def set_aside(path: Path, kernels: str) -> list[dict]:
    """The rows of a file, if there is one, that are of other kernels than these; each says of
    which.
    """
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    older, hash_ = found.get("earlier", []), found["kernels_sha256"]
    rows = (
        []
        if hash_ == kernels
        else [r | {"also": r["also"] | {"kernels_sha256": hash_}} for r in found["rows"]]
    )
    return rows + without(older, rows)


def without(rows: list[dict], others: list[dict]) -> list[dict]:
    """The rows of a case and peer that others have not; those without a time of a peer only of a
    case that others have not.
    """
    there = {tuple(r[n] for n in KEY) for r in others}
    cases = {key[:-1] for key in there}
    return [
        r
        for r in rows
        if tuple(r[n] for n in KEY) not in there
        and (r["peer_ms"] or tuple(r[n] for n in KEY[:-1]) not in cases)
    ]


def main(argv: list[str]) -> int:
    """Run the command line; non-zero if a test failed, our side broke or was wrong in a row, or
    time ran out.
    """
    import torch

    begin = time.time()
    parser = argparse.ArgumentParser(
        prog="python -m kda_ops evidence", description=__doc__, formatter_class=Help
    )
    compare.add_arguments(parser, device="cuda")
    parser.add_argument("--output", metavar="FILE", help="tests/gpu/evidence.json by default")
    parser.add_argument(
        "--resume",
        nargs="+",
        metavar="FILE",
        help="keep the tests, rows and reasons of these files and measure what they lack",
    )
    parser.add_argument(
        "--suite-limit",
        type=float,
        default=float("inf"),
        metavar="S",
        help="cut the tests after S seconds and keep what they said until then",
    )
    args = parser.parse_args(argv)
    root = checkout()
    if not torch.cuda.is_available():
        raise SystemExit("evidence needs a CUDA device.")
    path = Path(args.output or root / "tests" / "gpu" / "evidence.json")
    about = {
        "kernels_sha256": kernels_sha256(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
    }
    missing: dict[str, str]
    suite, rows, missing = _resumed(args.resume, about) if args.resume else (None, [], {})
    earlier = set_aside(path, about["kernels_sha256"])

    def write(complete: bool = False) -> None:
        assert suite is not None  # it was resumed, or has run, before anything is written
        tests, failures, cut = suite
        missing.update({"tests/gpu": cut} if cut else {})
        beside = [r for r in rows if r["peer"]]
        said = beside + without([r for r in rows if not r["peer"]], beside)
        found = {
            "tests": tests,
            "failures": failures,
            "complete": complete,
            "rows": said,
            "missing": missing,
            "earlier": without(earlier, rows),
        }
        write_json(path, about | found)

    def keep(x: dict | str) -> None:
        if isinstance(x, dict):
            rows.append(x)
            missing.pop(name_of(tuple(x[n] for n in KEY)), None)
        else:
            name, why = x.split(": ", 1)
            missing[name] = why
        write()

    if suite is None:
        suite = run_suite(root, args.suite_limit)
    write()
    until = begin + args.time_limit
    compare.measure_arguments(
        args, "cuda", lambda line: print(line, flush=True), until=until, have=rows, keep=keep
    )
    if kernels_sha256() != about["kernels_sha256"]:
        raise SystemExit("the kernels changed while the evidence was taken: take it again.")
    complete = time.time() < until and "tests/gpu" not in missing and not compare.died(missing)
    write(complete)
    return (
        1
        if suite[0]["failed"]
        or not suite[0]["passed"]
        or any(r["ours_ms"] is None for r in rows)
        or not complete
        else 0
    )
