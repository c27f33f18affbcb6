"""What training keeps where it walks, and when backward walks back, whatever makes it."""

from dataclasses import replace

import pytest
import torch

from kda_ops import chunk, dispatch
from kda_ops.registrations import autograd, schemas
from kda_ops.stages import GRADIENTS, KEPT, Keeps
from tests.support.calls import overload, run
from tests.support.cases import Case
from tests.support.closeness import assert_all_identical
from tests.support.training_walk import training_walks

BACKEND = dispatch.backend(torch.device("cpu"))
CASE = Case(T=70, dtype=torch.float64, l2norm=True, beta="sigmoid", gate="bounded")
PACKED = replace(CASE, lengths=(0, 65, 1, 30), tail=5, transposed=True)
NAMES = dict(zip(KEPT, range(2, 99)))


@pytest.fixture
def walks():
    with training_walks(BACKEND) as keeps:
        yield keeps


def backward(case, forward, do=True, dfinal=True, need=GRADIENTS):
    """Run the backward pass on what a forward pass has returned."""
    args, given = tuple(case.inputs().values()), case.cotangents()
    o, _, *kept = forward
    both = [x if there else None for x, there in zip(given, (do, dfinal))]
    flags = case.flags() | {"need": schemas.mask_of(n in need for n in GRADIENTS)}
    found = chunk.Backward(1, (*both, *kept, *args, o), flags).run(BACKEND)
    return {n: x for n, x in zip(GRADIENTS, found) if x is not None}


def forward(case):
    return chunk.Forward(1, tuple(case.inputs().values()), case.flags()).run(BACKEND)


@pytest.mark.quick
@pytest.mark.bits
@pytest.mark.parametrize("keep", (False, True))
@pytest.mark.parametrize("case", (CASE, PACKED, replace(CASE, final=False, state=False)), ids=str)
def test_a_training_step_walks_there_and_back(case, keep):
    case = replace(case, disable_recompute=keep)
    want = run(case)
    with training_walks(BACKEND) as walks:
        got = run(case)
    assert (walks.trained, walks.walked) == (1, 1)
    assert_all_identical(got, want)


@pytest.mark.quick
def test_gdn_does_not_walk(walks):
    run(Case("gdn", T=70))
    assert (walks.trained, walks.walked) == (0, 0)


@pytest.mark.parametrize("keep", (False, True))
def test_forward_keeps_a_alone(walks, keep):
    case = replace(CASE, disable_recompute=keep)
    _, _, A, *others = forward(case)
    assert A.shape == (2, case.HV, 2, 32, 64) and all(x.shape == (0,) for x in others)
    fake = overload("kda", "chunk_fwd")(
        *(x if x is None else x.to("meta") for x in case.inputs().values()), **case.flags()
    )
    assert [x.shape for x in fake[2:]] == [x.shape for x in (A, *others)]


@pytest.mark.parametrize("keep", (False, True))
def test_backward_saves_o_only_with_kept_states(keep, monkeypatch):
    names = Keeps.names

    def with_o(self, rank, dtype, l2norm, disable_recompute):
        found = names(self, rank, dtype, l2norm, disable_recompute)
        return found | {"o"} if disable_recompute else found

    monkeypatch.setattr(Keeps, "names", with_o)
    autograd._reads_output.cache_clear()
    case = replace(CASE, disable_recompute=keep)

    def saved(heads):
        with training_walks(BACKEND, heads):
            x = case.inputs()
            x["v"].requires_grad_()
            o, _ = overload("kda", "chunk")(*x.values(), **case.flags())
            return any(x is not None and x.is_set_to(o) for x in o.grad_fn.saved_tensors)

    assert saved(heads=99) == keep and not saved(heads=1)
    autograd._reads_output.cache_clear()
