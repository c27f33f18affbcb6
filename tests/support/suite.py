"""Choose the GPUs of each pytest-xdist process, sort tests, and print failures at once."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import pytest

LONG = (  # compile or interpret for minutes
    "tests/gpu/test_export.py",
    "tests/gpu/test_compiled.py",
    "tests/kernels/test_interpreter.py",
    "tests/kernels/test_plans.py",
    "tests/kernels/test_offline_compile.py",
    "tests/kernels/test_walk_orders.py",
    "tests/tools/test_examples.py",
)


class Reasons:
    """A pytest plugin that prints each failure's reason at once, before an aborted run loses it."""

    def __init__(self, config: pytest.Config):
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a failed phase of a test, in the process that has the terminal."""
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line("")
            for line in report.longreprtext.splitlines()[-20:]:
                terminal.write_line("| " + line[:300])


def rotated(process: str, count: int, visible: str | None = None) -> str:
    """Return CUDA_VISIBLE_DEVICES for a process, so that each has another default GPU.

    With 4 GPUs "gw5" begins with the second.
    """
    ids = visible.split(",") if visible else list(map(str, range(count)))
    first = int(process.removeprefix("gw")) % len(ids)
    return ",".join(ids[first:] + ids[:first])


def longest_first(items: list) -> None:
    """Sort tests so that those of minutes start first, and other processes stay busy meanwhile."""
    names = [
        next((i for i, name in enumerate(LONG) if item.nodeid.startswith(name)), len(LONG))
        for item in items
    ]
    items[:] = [item for _, item in sorted(zip(names, items), key=lambda pair: pair[0])]


def beyond_pairs(items: list) -> list:
    """Return the tests without which every two values of parameters still meet in some case.

    Of a test marked `once` each value is in some case.
    """
    shown = {}
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        values = sorted((name, repr(value)) for name, value in given.items())
        of = shown.setdefault(item.nodeid.split("[")[0], {})
        size = 1 if item.get_closest_marker("once") else 2
        of[item] = set(combinations(values, size)) or {(*values,)}
    beyond = []
    for of in shown.values():
        left = set().union(*of.values())
        while left:
            best = max(of, key=lambda item: len(of[item] & left))
            left -= of.pop(best)
        beyond += of
    return beyond


WORDS = ("passed", "failed", "skipped")
GROUP = re.compile(r"@[^\]@]*$")  # pytest-xdist puts it behind a name, which may have an @ itself
# variables that name the files of the hooks below, which ``-p tests.support.suite`` loads
LOG, DONE = "KDA_OPS_SUITE_LOG", "KDA_OPS_SUITE_DONE"


def _note(name: str, word: str) -> None:
    # with several processes the one that gathers what the others say writes
    if LOG in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ[LOG], "a") as log:
            log.write(f"{word} {name}\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down what became of a test at once: a run that is cut comes to no summary."""
    if report.when == "call" or not report.passed:
        _note(GROUP.sub("", report.nodeid), report.outcome)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write down a module that cannot be collected."""
    if report.failed:
        _note(report.nodeid, "failed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests that an earlier run has done before it was cut."""
    if DONE in os.environ:
        done = {line.split(" ", 1)[1] for line in Path(os.environ[DONE]).read_text().splitlines()}
        items[:] = [i for i in items if GROUP.sub("", i.nodeid) not in done]


def processes_per_gpu() -> int:
    """Return how many processes may share a GPU; a test takes up to 7 GiB of its memory."""
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    return max(1, min(14, memory // (7 << 30)))


def run(root: Path, limit: float = math.inf, done: Sequence[str] = ()) -> dict:
    """Run tests/gpu, on several cores and all GPUs where pytest-xdist is installed.

    Return how many tests passed, failed and were skipped, the names of the failures, and under
    "cut" why the run did not end by itself, or None. A run that was cut also returns "done": pass
    it to the next run, which counts these tests and does not run them again. Failures run again.
    """
    import torch

    spread, cut = [], None
    if importlib.util.find_spec("xdist"):
        most = (os.cpu_count() or 1) - 2
        count = max(1, min(processes_per_gpu() * max(1, torch.cuda.device_count()), most))
        spread = ["-n", str(count), "--dist", "loadgroup"]
    with tempfile.TemporaryDirectory() as folder:
        path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        log, before = Path(folder) / "log", Path(folder) / "done"
        for file in (log, before):
            file.write_text("".join(f"{line}\n" for line in done))
        environment = {"PYTHONPATH": os.pathsep.join(path), LOG: str(log), DONE: str(before)}
        if spread:
            # the processes fill the cores; with one thread they would compile in themselves
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
        command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "tests.support.suite"]
        command += ["--continue-on-collection-errors", "-v", "-rfE", "tests/gpu", *spread]
        # a test of this function may itself run in a process of pytest-xdist
        around = {n: x for n, x in os.environ.items() if not n.startswith("PYTEST_XDIST")}
        words = dict(cwd=root, env=around | environment, start_new_session=True)
        with subprocess.Popen(command, **words) as process:
            try:
                process.wait(None if limit == math.inf else max(0.0, limit))
            except subprocess.TimeoutExpired:
                cut = f"cut after {limit:.0f} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        fine = (0, 1, 5) if done else (0, 1)  # all passed, some failed, none were left
        if cut is None and process.returncode not in fine:
            cut = f"ended with {process.returncode}"
        return count_tests(log.read_text(), cut)


def count_tests(log: str, cut: str | None) -> dict:
    """Count what the hooks wrote. A test that passed failed if its fixture then failed."""
    became: dict[str, str] = {}
    for word, name in (line.split(" ", 1) for line in log.splitlines()):
        became[name] = "failed" if became.get(name) == "failed" else word
    failures = [name for name, word in became.items() if word == "failed"]
    ends = list(became.values())
    counts = {word: ends.count(word) for word in WORDS}
    done = [f"{word} {name}" for name, word in became.items() if word != "failed"]
    return counts | {"failures": failures, "cut": cut} | ({"done": done} if cut else {})
