"""Which GPUs a process of pytest-xdist sees, in what order tests run, and what is said of those
that fail on a GPU.
"""

import pytest

LONG = (  # minutes of compiling on a GPU; minutes of interpreting and of compiling without one
    "tests/gpu/test_export.py",
    "tests/gpu/test_compiled.py",
    "tests/test_interpreter.py",
    "tests/test_offline_compile.py",
    "tests/test_examples.py",
)


class Reasons:
    """A plugin of pytest: why a test failed, at once, in its last words. A run that is cut comes to
    no summary.
    """

    def __init__(self, config: pytest.Config):
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for each phase of each test; with several processes, in the one that gathers what
        the others say, too, and only that has a terminal.
        """
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line("")
            for line in report.longreprtext.splitlines()[-20:]:
                terminal.write_line("| " + line[:300])


def rotated(process: str, count: int, visible: str | None = None) -> str:
    """The GPUs for CUDA_VISIBLE_DEVICES such that "cuda" is another one in each process: "gw5" of 4
    begins with the second.
    """
    ids = visible.split(",") if visible else list(map(str, range(count)))
    first = int(process.removeprefix("gw")) % len(ids)
    return ",".join(ids[first:] + ids[:first])


def longest_first(items: list) -> None:
    """Sort collected tests so that none that takes minutes begins last, when there is nothing left
    to do beside it.
    """
    names = [
        next((i for i, name in enumerate(LONG) if item.nodeid.startswith(name)), len(LONG))
        for item in items
    ]
    items[:] = [item for _, item in sorted(zip(names, items), key=lambda pair: pair[0])]
