"""The witness tells a right backward from one that is off, and says by how much."""

from unittest import mock

import pytest
import torch

import kda_ops
from kda_ops import dispatch
from kda_ops.chunk import Backward
from kda_ops.stages import GRADIENTS
from tests.support.calls import run
from tests.support.cases import Case
from tests.support.target import TARGET
from tests.support.witness import backward_errors

CASES = (
    Case("kda", lengths=(3, 70), gate="softplus", beta="sigmoid", l2norm=True, transposed=True),
    Case("gdn", B=2, T=5, state=False, final=False),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.variant)
def test_each_backward_is_compared_with_float64(case):
    x = case.inputs(TARGET.device)
    with backward_errors() as errors:
        run(case)
        run(case, need=("q",))
    whole, part = errors
    assert set(whole) == {
        "d" + n for n, t in x.items() if t is not None and t.is_floating_point()
    } and set(part) == {"dq"}
    assert max(*whole.values(), *part.values()) < 1e-4


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.variant)
def test_an_entry_that_is_off_is_seen(case):
    backend = dispatch.backend(TARGET.device)
    right = backend.run

    def wrong(kind, *args):
        results = right(kind, *args)
        if kind is Backward:
            dk = results[GRADIENTS.index("k")]
            dk.view(-1)[7] += 0.01 * dk.abs().max()
        return results

    with backward_errors() as errors, mock.patch.object(backend, "run", wrong):
        run(case)
    (seen,) = errors
    assert 0.009 < seen.pop("dk") < 0.011 and max(seen.values()) < 1e-4


def test_what_a_program_does_afterwards_changes_nothing():
    q, k, v = (torch.randn(1, 5, 2, 8, device=TARGET.device, requires_grad=True) for _ in range(3))
    with backward_errors() as errors:
        o, _ = kda_ops.chunk_kda(q, k, v, None, None)
        o.sum().backward()
        for x in (q, k, v):
            x.grad.zero_()
            x.data.zero_()
    assert errors[0].keys() == {"dq", "dk", "dv"} and max(errors[0].values()) < 1e-4
