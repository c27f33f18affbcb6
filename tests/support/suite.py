"""Choose the GPUs of each pytest-xdist process, sort tests, and print failures at once."""

import pytest

LONG = (  # compile or interpret for minutes
    "tests/gpu/test_export.py",
    "tests/gpu/test_compiled.py",
    "tests/kernels/test_interpreter.py",
    "tests/kernels/test_offline_compile.py",
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
