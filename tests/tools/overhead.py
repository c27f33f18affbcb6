"""What an eager call costs above its computation, in microseconds:
``python -m tests.tools.overhead [variant] [rounds]``.

Times a tiny ``recurrent_`` under inference_mode on one pinned core, and the same call with its
Problem already parsed, entered below the dispatcher; the difference is dispatch and validation.
Minimum over rounds, the two sides taking turns, in time of the process, which other processes do
not lengthen.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch

import kda_ops  # noqa: F401
from kda_ops import dispatch
from kda_ops.problem import Problem


def _best(call: Callable[[], object], best: float, count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        call()
    return min(best, (time.process_time() - start) / count)


def _compute(p: Problem) -> None:
    dispatch.backend(p.q.device).step(p, p.new_output(), p.state)


def _example(variant: str) -> tuple[Callable, Callable, Callable]:
    """Return a call of one token and one head, its computation alone, and its parsing alone."""
    op, rank = getattr(torch.ops, variant).recurrent_.default, 1 if variant == "kda" else 0
    q, k, v = (torch.randn(1, 1, 1, 8) for _ in range(3))
    g = -torch.rand((1, 1, 1, 8)[: 3 + rank])
    args = (q, k, v, g, torch.rand(1, 1, 1), torch.zeros(2, 1, 8, 8), torch.tensor([1]))
    p = Problem.parse_step(rank, *args)
    return lambda: op(*args), lambda: _compute(p), lambda: Problem.parse_step(rank, *args)


def count_calls(call: Callable[[], object]) -> int:
    """Return how many functions Python calls in `call`, its own and those of C."""
    calls = 0

    def see(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def count_operators(call: Callable[[], object]) -> int:
    """Return how many operators of torch run in `call`."""
    with torch.autograd.profiler.profile() as seen:
        call()
    return len(seen.function_events)


def above(variant: str, count: Callable[[Callable[[], object]], int]) -> int:
    """Return how much more `count` finds in a call of the operator than in its computation."""
    with torch.inference_mode():
        call, compute, _ = _example(variant)
        for _ in range(2):  # the first run imports
            whole, raw = count(call), count(compute)
    return whole - raw


def measure(variant: str = "gdn", rounds: int = 20, count: int = 200) -> tuple[float, float, float]:
    """Microseconds per call of the operator, of its computation alone, and of `Problem.parse_step`
    alone.
    """
    with torch.inference_mode():
        call, compute, parsing = _example(variant)
        whole = raw = parse = float("inf")
        for _ in range(rounds):
            whole = _best(call, whole, count)
            raw = _best(compute, raw, count)
            parse = _best(parsing, parse, count)
    return 1e6 * whole, 1e6 * raw, 1e6 * parse


def main() -> None:
    """Pin this process to one core and print the figures."""
    if hasattr(os, "sched_getaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    for variant in sys.argv[1:2] or ("gdn", "kda"):
        whole, raw, parse = measure(variant, *map(int, sys.argv[2:3]))
        print(
            f"{variant}::recurrent_  call {whole:6.1f} us  computation {raw:6.1f} us  above it "
            f"{whole - raw:5.1f} us  (of which parsing {parse:5.1f} us)"
        )


if __name__ == "__main__":
    main()
