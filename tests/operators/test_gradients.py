"""Gradients: against finite differences, for any subset of inputs, from any incoming gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kda_ops.backends.reference import Reference
from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS
from tests.support.calls import overload, run
from tests.support.cases import Case, cases, double, on
from tests.support.closeness import assert_all_identical, assert_identical
from tests.support.target import TARGET

OPS = ("chunk", "recurrent")
CHECKED = {
    "plain": {},
    "both layouts, packed": dict(lengths=(2, 0, 1), tail=1, transposed=True),
    "everything inside": dict(gate="softplus", beta="neg_eigval", l2norm=True, H=1, HV=2),
    "bounded gate": dict(gate="bounded", beta="sigmoid", l2norm=True, seed=1),
    "nothing optional": dict(gate="none", beta="none", state=False, final=False),
}


@pytest.mark.quick
@pytest.mark.skipif(torch.float64 not in TARGET.dtypes, reason="finite differences need float64")
@pytest.mark.parametrize("options", CHECKED.values(), ids=CHECKED)
@pytest.mark.parametrize(
    "variant,op,T",
    (
        ("kda", "chunk", 3),
        ("gdn", "chunk", 3),
        ("kda", "recurrent", 2),
        ("gdn", "recurrent", 2),
        ("gdn", "chunk", 65),
    ),
)
def test_gradients_are_finite_differences(variant, op, T, options):
    if T == 65 and options:
        pytest.skip("one call across a chunk boundary is enough")
    case = Case(
        variant,
        **({"B": 1, "T": T, "H": 1, "HV": 1, "K": 2, "V": 3, "dtype": torch.float64} | options),
    )
    inputs = case.inputs()
    leaves = {n: x.requires_grad_() for n, x in inputs.items() if x is not None and n in GRADIENTS}

    def call(*xs):
        outs = overload(variant, op)(*(inputs | dict(zip(leaves, xs))).values(), **case.flags(op))
        return outs if case.final else outs[0]

    few = dict(nondet_tol=0.0, fast_mode=T == 65)  # without it, one call per entry of each input
    assert torch.autograd.gradcheck(call, tuple(leaves.values()), **few)


@pytest.mark.bits
@pytest.mark.parametrize("op", OPS)
@given(case=cases(final=True), need=st.sets(st.sampled_from(GRADIENTS), min_size=1))
def test_asking_for_some_gradients_gives_the_same_bits_as_asking_for_all(op, case, need):
    given_inputs = {n for n, x in case.inputs().items() if x is not None}
    need = need & given_inputs or {"v"}
    everything = run(case, op)
    assert_all_identical(
        run(case, op, need=need),
        {n: x for n, x in everything.items() if n in ("o", "final_state") or n[1:] in need},
    )


@pytest.mark.bits
@pytest.mark.parametrize("op", OPS)
@given(case=cases(final=True))
def test_incoming_gradients_may_have_any_strides(op, case):
    do, dfinal_state = case.cotangents(TARGET.device)
    dense = run(
        case,
        op,
        cotangents=(
            do[..., :1].expand(do.shape).contiguous(),
            dfinal_state[..., :1].expand(dfinal_state.shape).contiguous(),
        ),
    )
    assert_all_identical(
        run(
            case,
            op,
            cotangents=(
                do[..., :1].expand(do.shape),
                dfinal_state[..., :1].expand(dfinal_state.shape),
            ),
        ),
        dense,
    )
    heads_first = tuple(d.transpose(1, 2).contiguous().transpose(1, 2) for d in (do, dfinal_state))
    assert_all_identical(run(case, op, cotangents=heads_first), run(case, op))


@pytest.mark.quick
@pytest.mark.parametrize("op", OPS)
def test_an_output_that_is_not_used_has_a_gradient_of_zero(variant, op):
    case = Case(variant, T=65, dtype=TARGET.dtypes[0])
    do, dfinal_state = case.cotangents(TARGET.device)
    for used in (0, 1):
        inputs = case.inputs(TARGET.device)
        leaves = {
            n: inputs[n].requires_grad_() for n in ("q", "k", "v", "g", "beta", "initial_state")
        }
        outs = overload(variant, op)(*inputs.values(), **case.flags(op))
        grads = torch.autograd.grad(
            outs[used], list(leaves.values()), (do, dfinal_state)[used], allow_unused=True
        )
        zeros = (
            (do, torch.zeros_like(dfinal_state))
            if used == 0
            else (torch.zeros_like(do), dfinal_state)
        )
        want = run(case, op, need=leaves, cotangents=zeros)
        for name, d in zip(leaves, grads):
            if d is None:
                assert not want["d" + name].any()
            else:
                torch.testing.assert_close(d, want["d" + name])


@pytest.mark.parametrize("transposed", (False, True))
def test_a_state_that_was_not_asked_for_is_empty_and_like_what_is_kept_has_no_gradient(
    variant, transposed
):
    case = Case(variant, final=False, transposed=transposed)
    inputs = case.inputs(TARGET.device)
    inputs["v"].requires_grad_()
    o, final_state = overload(variant, "chunk")(*inputs.values(), **case.flags())
    assert o.requires_grad and not final_state.requires_grad and final_state.shape == (0,)
    assert final_state.dtype is case.state_dtype
    for keep in (False, True):
        _, final_state, *kept = overload(variant, "chunk_fwd")(
            *inputs.values(), **(case.flags() | {"disable_recompute": keep})
        )
        assert not any(x.requires_grad for x in (final_state, *kept))


def test_without_gradients_nothing_is_kept(variant):
    inputs = Case(variant).inputs(TARGET.device)
    inputs["v"].requires_grad_()
    with torch.no_grad():
        o, _ = overload(variant, "chunk")(*inputs.values())
    assert o.grad_fn is None


@pytest.mark.bits
@pytest.mark.parametrize("op", OPS)
def test_backward_may_run_twice_on_a_retained_graph(variant, op):
    case = Case(variant, T=65)
    inputs = case.inputs(TARGET.device)
    v = inputs["v"].requires_grad_()
    o, _ = overload(variant, op)(*inputs.values(), **case.flags(op))
    first = torch.autograd.grad(o.sum(), v, retain_graph=True)[0]
    assert_identical(first, torch.autograd.grad(o.sum(), v)[0], "dv")


def test_changing_an_input_before_backward_is_noticed(variant):
    inputs = Case(variant).inputs(TARGET.device)
    inputs["q"].requires_grad_()
    o, _ = overload(variant, "chunk")(*inputs.values())
    inputs["v"].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("logit", (100.0, 1e4, 1e5))
def test_a_reset_adds_no_rounding_to_the_gradient_of_A_log(variant, logit):
    """Check a decay of exactly 0, where dg must be 0.

    dA_log sums g dg, and g may be arbitrarily large, so any rounding left in dg would show.
    """
    sizes = dict(T=128, K=32, V=32, H=2, HV=2, state=False, final=False)
    case = Case(variant, gate="softplus", l2norm=True, **sizes)
    x, (do, _) = case.inputs(), case.cotangents()
    x["g"][:, ::16] = logit
    x["A_log"].zero_()
    p = Problem.parse(case.rank, *double(x).values(), **case.flags())
    p.A_log.requires_grad_()
    o = p.new_output()
    Reference().step(p, o, p.new_final_state())
    (want,) = torch.autograd.grad(o, p.A_log, do.double())
    there = on(x, TARGET.device)
    got = (
        run(case, inputs=there, need=("A_log",), cotangents=(do.to(TARGET.device), None))["dA_log"]
        .cpu()
        .double()
    )
    # five times what rounding by 6e-8 leaves of a sum of 128 x 32 terms
    assert (got - want).norm() < 2e-5 * want.norm()


@pytest.mark.parametrize("op", OPS)
def test_gates_may_be_wider_than_q(variant, op):
    case = Case(variant, lengths=(5, 0, 2), gate="softplus", beta="sigmoid", l2norm=True)
    x = case.inputs(TARGET.device)
    wide = x | {n: x[n].double() for n in ("g", "beta", "A_log", "dt_bias")}
    got, want = run(case, op, wide), run(case, op)
    for name, t in want.items():
        assert got[name].dtype is (wide[name[1:]].dtype if name[1:] in wide else t.dtype), name
        torch.testing.assert_close(got[name].to(t.dtype), t, rtol=1e-4, atol=1e-5)
