"""A call by its plan gives bit for bit what the stages give, whatever lies in fresh memory."""

from contextlib import contextmanager
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_ops import checks, dispatch
from tests.support.calls import overload, run
from tests.support.cases import Case, replace
from tests.support.closeness import assert_all_identical
from tests.support.pools import OUTS, Pool, assert_out

TRITON = dispatch.load("triton")


@contextmanager
def nan_everywhere():
    """Within it, memory that nobody wrote holds NaN: a scratch block is all bits set."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def unplanned(call):
    """Return the results of a call without plans."""
    saved = TRITON.plans, TRITON.decodes
    TRITON.plans, TRITON.decodes = {}, {}
    try:
        return call()
    finally:
        TRITON.plans, TRITON.decodes = saved


def count():
    return sum(map(len, TRITON.plans.values()))


def assert_a_plan_changes_no_bit(call):
    """Assert that a call gives the same bits without a plan, while one is made, and by it."""
    want, made = unplanned(call), -1
    with nan_everywhere():
        while made != count():  # again by the plan, where this call has made it
            made = count()
            assert_all_identical(want, call())


SMALL = dict(H=1, HV=2, K=8, V=12, l2norm=True, beta="sigmoid")
TRAINED = st.builds(
    lambda T, packed, **words: Case(
        B=1 if packed else 2, T=T, lengths=(3, 0, T) if packed else None, **(SMALL | words)
    ),
    variant=st.sampled_from(("kda", "gdn")),
    T=st.sampled_from((1, 16, 17, 64, 66)),
    packed=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    gate=st.sampled_from(("softplus", "bounded", "weak", "none")),
    strides=st.sampled_from(("contiguous", "heads_first", "fused")),
    state=st.booleans(),
    transposed=st.booleans(),
    disable_recompute=st.booleans(),
)


@settings(max_examples=2)
@given(case=TRAINED, T=st.sampled_from((2, 16, 32, 65)))
@pytest.mark.parametrize("op", ("chunk", "recurrent"))
def test_training_by_a_plan(op, case, T):
    case = replace(case, disable_recompute=case.disable_recompute and op == "chunk")
    assert_a_plan_changes_no_bit(lambda: run(case, op))
    # the same model, other numbers: perhaps by the same plan
    other = replace(case, T=T) if case.lengths is None else replace(case, lengths=(T, 1))
    assert_a_plan_changes_no_bit(lambda: run(other, op))


POOLS = {
    "plain": Pool(Case(B=2, T=3, **SMALL), "", False),
    "one dead": Pool(Case(B=3, T=2, gate="softplus", **SMALL), "", True, (False, True)),
    "packed": Pool(Case(lengths=(2, 0, 3), **SMALL), "", True),
    "transposed": Pool(Case("gdn", B=2, T=3, transposed=True, **SMALL), "", True),
}


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("op", ("chunk_", "recurrent_"))
def test_a_pool_by_a_plan(op, pool):
    pool = replace(pool, op=op, case=replace(pool.case, state=False, final=False))

    assert_a_plan_changes_no_bit(lambda: dict(zip(("o", "state"), pool.run())))


@pytest.mark.parametrize("layout, name", list(zip(OUTS, cycle(POOLS))))
@pytest.mark.parametrize("op", ("chunk_", "recurrent_"))
def test_out_by_a_plan(op, name, layout):
    case = replace(POOLS[name].case, state=False, final=False)
    pool = replace(POOLS[name], op=op, case=case)
    for _ in range(2):  # the second call has a plan
        assert_out(pool, layout)


@pytest.mark.parametrize("op", ("chunk_", "recurrent_"))
def test_a_call_without_tokens_or_sequences_fills_out(op):
    """No plan serves it, and yet kernels may write zeros."""
    for lengths in ((), (0, 0)):
        pool = Pool(Case(lengths=lengths, tail=5, **SMALL), op)
        for layout in ("contiguous", "columns"):
            assert_out(pool, layout)


@pytest.mark.parametrize("strides", ("contiguous", "heads_first", "fused"))
@pytest.mark.parametrize("gate", ("softplus", "bounded"))
def test_a_gate_by_a_plan(variant, gate, strides):
    for T in (5, 16, 7):
        x = Case(variant, B=2, T=T, gate=gate, strides=strides, seed=1).inputs()
        words = {"lower_bound": -5.0} if gate == "bounded" else {}

        def call(x=x, words=words):
            leaves = [x[n].detach().requires_grad_() for n in ("g", "A_log", "dt_bias")]
            y = overload(variant, "gate")(*leaves, **words)
            return dict(zip("yabc", (y.detach(), *torch.autograd.grad(y.square().sum(), leaves))))

        assert_a_plan_changes_no_bit(call)


@pytest.mark.quick
@pytest.mark.parametrize("check", (False, True))
def test_values_on_a_cpu_are_checked_at_every_call(check, monkeypatch):
    monkeypatch.setattr(checks, "CHECK_VALUES", check)
    q, pool = torch.randn(1, 5, 2, 8), torch.zeros(3, 2, 8, 8)

    def call(slots, offsets=(0, 2, 5)):
        given = torch.tensor(slots), None, None, None, torch.tensor(offsets)
        return torch.ops.kda.recurrent_(q, q, q, None, None, pool, *given)

    call([0, 1])
    made = count()
    assert call([2, 1], (0, 4, 5)).shape == q.shape and count() == made
    for wrong, words in (
        (dict(slots=[1, 1]), "distinct slots"),
        (dict(slots=[0, 3]), "state_indices"),
        (dict(slots=[0, 1], offsets=(0, 9, 5)), "cu_seqlens"),
        (dict(slots=[0, 1], offsets=(1, 2, 5)), "cu_seqlens must start at 0"),
    ):
        with pytest.raises(ValueError, match=words):
            call(**wrong)
    assert count() == made


def chunk_bwd(do, dfinal_state, need=31):
    """Return the gradients of a small call, of the inputs whose bits `need` has."""
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 4, 1, 8) for _ in "qkvg")
    inputs = (q, k, v, -g.abs(), torch.rand(1, 4, 1))
    _, _, *kept = torch.ops.kda.chunk_fwd(*inputs, output_final_state=True)
    return torch.ops.kda.chunk_bwd(
        *(do, dfinal_state, *kept, *inputs), *(None,) * 5, need=need, output_final_state=True
    )


@pytest.mark.parametrize("order", ((0, 1), (1, 0)))
def test_an_empty_gradient_of_the_state_is_none(order):
    do, dstates = torch.zeros(1, 4, 1, 8), (torch.empty(0), torch.ones(1, 1, 8, 8))
    want = [unplanned(lambda d=d: chunk_bwd(do, d)) for d in dstates]
    for i in order * 2:
        for a, b in zip(chunk_bwd(do, dstates[i]), want[i]):
            assert torch.equal(a, b)


def test_gradients_of_a_wrong_shape_are_refused_whatever_was_planned():
    do, dstate = torch.ones(1, 4, 1, 8), torch.ones(1, 1, 8, 8)
    for _ in range(2):
        chunk_bwd(do, dstate)
        with pytest.raises(ValueError, match="do must have shape"):
            chunk_bwd(do[..., :4].contiguous(), dstate)
        with pytest.raises(ValueError, match="dfinal_state must have shape"):
            chunk_bwd(do, dstate[..., :4].contiguous())


def test_what_was_not_asked_for_is_empty_in_the_same_dtype():
    call = [torch.randn(1, 4, 1, 8, dtype=torch.bfloat16) for _ in "qkvg"]
    for _ in range(2):
        _, _, *kept = torch.ops.kda.chunk_fwd(*call, None)
        rest = (*call, *(None,) * 6)
        grads = torch.ops.kda.chunk_bwd(torch.ones_like(call[2]), None, *kept, *rest, need=4)
        assert {d.dtype for d in grads} == {torch.bfloat16}


def test_a_planned_output_is_contiguous_for_odd_strides_of_axes_of_length_one():
    x = torch.randn(100).as_strided((1, 2, 1, 16), (999, 16, 3, 1))
    g = torch.zeros(1, 2, 1, 16)
    for _ in range(2):
        o, _ = torch.ops.kda.chunk(x, x, x, g, None)
        assert o.stride() == (32, 16, 16, 1)


@pytest.mark.parametrize("operator", ("recurrent_", "chunk_"))
def test_a_pool_is_written_where_it_lies_however_far_its_heads_are_apart(operator):
    # uninitialised: only what is read and written takes memory
    pool = torch.empty(2, 532_700, 8, 8).transpose(0, 1)
    q, beta = torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2)
    for _ in range(2):
        pool[3] = 0
        getattr(torch.ops.kda, operator)(q, q, q, -q, beta, pool, torch.tensor([3]))
        assert pool[3].any()
