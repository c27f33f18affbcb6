"""How quick this machine is at this moment, for the tests that promise microseconds: a promise is
of the code, not of what else the machine does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 2.6e-3
"""What `interpreted` takes on the quiet machine, with Python 3.11, on which the limits were set."""


def interpreted() -> None:
    """A fixed piece of what imports and calls are made of: calls, short strings, and a
    dictionary.
    """
    lengths: dict[str, int] = {}
    for i in range(20_000):
        key = str(i % 977)
        lengths[key] = lengths.get(key, 0) + len(key)


def slower(
    work: Callable[[], None] = interpreted,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """How many times as long as its `seconds` the `work` takes here and now, in time of the process
    and at best; 1 on a machine that is quicker.
    """
    best = float("inf")
    for _ in range(10):
        start = clock()
        work()
        best = min(best, clock() - start)
    return max(1.0, best / seconds)
