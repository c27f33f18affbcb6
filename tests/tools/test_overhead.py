"""An eager decode step calls few functions and operators besides its computation.

They are counted, not timed, so that the law holds at any load.
"""

import sys
from collections.abc import Callable

import pytest
import torch

from kda_ops import dispatch
from kda_ops.problem import Problem


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


@pytest.mark.quick
@pytest.mark.parametrize("count, most", ((count_calls, 70), (count_operators, 8)))
def test_dispatch_and_validation_of_a_decode_step_take_few_calls(variant, count, most):
    op, rank = getattr(torch.ops, variant).recurrent_.default, 1 if variant == "kda" else 0
    q, k, v = (torch.randn(1, 1, 1, 8) for _ in range(3))
    g = -torch.rand((1, 1, 1, 8)[: 3 + rank])
    args = (q, k, v, g, torch.rand(1, 1, 1), torch.zeros(2, 1, 8, 8), torch.tensor([1]))
    p = Problem.parse_step(rank, *args)

    def compute():
        dispatch.backend(q.device).step(p, p.new_output(), p.state)

    with torch.inference_mode():
        for _ in range(2):  # the first run imports
            whole, raw = count(lambda: op(*args)), count(compute)
    assert raw > 0 and whole - raw <= most
