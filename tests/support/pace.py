"""Measure how fast this machine runs at the moment, to scale the limit of a timing test.

So a test judges the code, not the load of the machine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch

SECONDS = 1.0e-3
"""What `registering` takes on the quiet machine, with Python 3.11, on which the limit was set."""

_numbers = itertools.count()
_kept: list[torch.library.Library] = []


def registering() -> None:
    """Define and register ten operators: the work that an import of this package does."""
    namespace = f"kda_ops_pace_{next(_numbers)}"
    library = torch.library.Library(namespace, "FRAGMENT")  # noqa: TOR901  (held below)
    _kept.append(library)
    for i in range(10):
        library.define(f"f{i}(Tensor x, Tensor? y=None, *, float? z=None) -> (Tensor, Tensor)")
        for key in ("CPU", "CUDA", "AutogradCPU", "SparseCPU"):
            library.impl(f"f{i}", lambda *args: args, key)
        assert getattr(getattr(torch.ops, namespace), f"f{i}").default


def slower(
    work: Callable[[], None] = registering,
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
