"""Measure how fast this machine runs at the moment, to scale the limits of timing tests.

So a test judges the code, not the load of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 2.6e-3
"""What `interpreted` takes on the quiet machine, with Python 3.11, on which the limits were set."""


def interpreted() -> None:
    """Run a fixed amount of Python work, like imports and calls: calls, strings, a dictionary."""
    lengths: dict[str, int] = {}
    for i in range(20_000):
        key = str(i % 977)
        lengths[key] = lengths.get(key, 0) + len(key)


def slower(
    work: Callable[[], None] = interpreted,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Return the best process time of `work` divided by its reference `seconds`, at least 1."""
    best = float("inf")
    for _ in range(10):
        start = clock()
        work()
        best = min(best, clock() - start)
    return max(1.0, best / seconds)
