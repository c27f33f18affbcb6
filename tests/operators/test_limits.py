"""The corners of the definition: no decay, no writing, no tokens, no heads."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given

from kda_ops.backends.reference import Reference
from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS
from tests.support.calls import forward, run
from tests.support.cases import EMPTY, Case, cases, followed, replace
from tests.support.closeness import (
    assert_all_identical,
    assert_close,
    assert_identical,
    oracle,
    twin,
)
from tests.support.pools import Pool
from tests.support.target import TARGET

OPS = ("chunk", "recurrent")
ONE_STATE = dict(H=1, HV=1, state=True, final=True)


def delta_rule(case, inputs):
    """Run the delta rule without decay, in float64, one head and token at a time."""
    x = {n: None if t is None else t.cpu().double() for n, t in inputs.items()}
    group, scale = case.HV // case.H, case.K**-0.5 if case.scale is None else case.scale
    o = torch.zeros(case.B, case.T, case.HV, case.V, dtype=torch.float64)
    for b in range(case.B):
        for h in range(case.HV):
            S = torch.zeros(case.K, case.V, dtype=torch.float64)
            if x["initial_state"] is not None:
                S = x["initial_state"][b, h].mT if case.transposed else x["initial_state"][b, h]
            for t in range(case.T):
                k, beta = x["k"][b, t, h // group], 1.0 if x["beta"] is None else x["beta"][b, t, h]
                S = S + beta * torch.outer(k, x["v"][b, t, h] - S.mT @ k)
                o[b, t, h] = scale * S.mT @ x["q"][b, t, h // group]
    return o


@pytest.mark.parametrize("op", OPS)
@given(case=cases(T=65, B=2, lengths=None, gate="zero", beta="given", l2norm=False))
def test_without_decay_it_is_the_plain_delta_rule(op, case):
    inputs = case.inputs(TARGET.device)
    want, twin_o = delta_rule(case, inputs), twin(case, op)["o"]
    assert_close("o", forward(case, op, inputs)["o"], want, twin_o)
    assert_close("o", forward(case, op, inputs | {"g": None})["o"], want, twin_o)


@pytest.mark.bits
@pytest.mark.parametrize("op", OPS)
@given(case=cases(beta="given"))
def test_no_beta_is_a_beta_of_one(op, case):
    inputs = case.inputs(TARGET.device)
    need = tuple(n for n in GRADIENTS if n != "beta")
    ones = run(case, op, inputs | {"beta": torch.ones_like(inputs["beta"])}, need)
    assert_all_identical(run(case, op, inputs | {"beta": None}, need), ones)


@pytest.mark.parametrize("op", OPS)
@given(case=cases(B=2, lengths=None, beta="given", gate="weak", l2norm=False, **ONE_STATE))
def test_a_beta_of_zero_only_decays(op, case):
    inputs = case.inputs(TARGET.device)
    got = forward(case, op, inputs | {"beta": torch.zeros_like(inputs["beta"])})
    decay = inputs["g"].double().cumsum(1).exp()
    decay = decay if case.rank else decay[..., None].expand(*decay.shape, case.K)
    S = inputs["initial_state"].double()
    S = S.mT if case.transposed else S
    o = torch.einsum("bthk,bthk,bhkv->bthv", inputs["q"].double().expand(decay.shape), decay, S) * (
        case.K**-0.5 if case.scale is None else case.scale
    )
    eps = torch.finfo(case.dtype).eps
    torch.testing.assert_close(
        got["o"].double(), o, rtol=8 * eps, atol=8 * eps * o.abs().max().item()
    )
    last = (decay[:, -1, :, :, None] * S) if case.T else S
    eps = torch.finfo(case.state_dtype).eps
    torch.testing.assert_close(
        got["final_state"].double(),
        last.mT if case.transposed else last,
        rtol=64 * eps,
        atol=8 * eps,
    )


@pytest.mark.quick
def test_a_large_rate_amplifies_no_rounding_of_the_gate(variant):
    """Decays near one, from a tiny softplus times a large rate, on an fp32 state."""
    case = Case(variant, T=64, H=1, HV=1, gate="softplus", final=True)
    inputs = case.inputs(TARGET.device)
    inputs["g"] = inputs["g"] - 8.0
    inputs["A_log"] = torch.full_like(inputs["A_log"], 4.0)
    inputs["beta"] = torch.zeros_like(inputs["beta"])  # the state only decays
    A, bias = inputs["A_log"].double().exp(), inputs["dt_bias"].double()
    logits = inputs["g"].double() + bias.view(inputs["g"].shape[2:])
    left = (-A.item() * F.softplus(logits).sum(1)).exp().view(case.N, 1, -1, 1)
    got = forward(case, "recurrent", inputs)["final_state"].double()
    want = left * inputs["initial_state"].double()
    # 64 decays, each rounded to 2^-24 of itself; the sum over them is bounded by 64 * 2^-24
    torch.testing.assert_close(got, want, rtol=4e-6, atol=0.0)


@pytest.mark.quick
@pytest.mark.parametrize("op", OPS)
def test_forgetting_everything_starts_anew(variant, op):
    """g = -inf at a token makes what came before irrelevant, exactly."""
    case = Case(variant, T=129, final=True, dtype=TARGET.dtypes[0])
    inputs = case.inputs(TARGET.device)
    inputs["g"] = inputs["g"].clone()
    inputs["g"][:, 70] = -torch.inf
    other = replace(case, seed=9).inputs(TARGET.device)
    changed = followed(other, 70, inputs)
    changed |= {n: inputs[n] for n in ("g", "A_log", "dt_bias")}
    a, b = forward(case, op, inputs), forward(case, op, changed)
    torch.testing.assert_close(a["o"][:, 70:], b["o"][:, 70:])
    torch.testing.assert_close(a["final_state"], b["final_state"])
    do, dfinal_state = case.cotangents(TARGET.device)
    do[:, :70] = 0.0
    grads = run(case, op, inputs, cotangents=(do, dfinal_state))
    assert not grads["dinitial_state"].any()
    assert not grads["dv"][:, :70].any()
    assert not grads["dk"][:, :70].any()
    assert all(x.isfinite().all() for x in grads.values())


@pytest.mark.quick
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("sizes", (*EMPTY, dict(HV=0), dict(B=0, T=0)), ids=str)
def test_any_size_may_be_zero(variant, sizes, op):
    sizes = {"B": 2, "T": 9 if TARGET.slow else 65} | sizes
    for gate in ("weak", "softplus"):
        case = Case(variant, **sizes, gate=gate, final=True, dtype=TARGET.dtypes[0])
        got, inputs = run(case, op), case.inputs(TARGET.device)
        assert got["o"].shape == inputs["v"].shape and got["final_state"].shape == case.state_shape
        assert not got["o"].any()
        if not case.rows or not case.HV:
            assert_identical(
                got["final_state"],
                inputs["initial_state"],
                "an empty sequence passes its state through",
            )
            assert_identical(
                got["dinitial_state"], case.cotangents(TARGET.device)[1], "and its gradient"
            )
        for name in GRADIENTS:
            assert inputs[name] is None or got["d" + name].shape == inputs[name].shape
            assert name == "initial_state" or inputs[name] is None or not got["d" + name].any()


@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_any_size_of_a_call_on_a_pool_may_be_zero(variant, sizes, op):
    for indexed in (False, True):
        pool = Pool(
            Case(
                variant,
                **({"B": 2, "T": 5} | sizes),
                state=False,
                final=False,
                dtype=TARGET.dtypes[0],
            ),
            op,
            indexed,
        )
        o, state = pool.run()
        assert not o.any()
        assert_identical(state, pool.state(), "the pool")


@given(case=cases(beta="given", l2norm=False))
def test_the_chunk_formulas_of_the_oracle_agree_with_its_recurrence(case):
    """The reference, in float64, against itself: what a twin is made of is the definition."""
    case = replace(case, dtype=torch.float64)
    p = Problem.parse(case.rank, *case.inputs().values(), **case.flags())
    o, final_state = p.new_output(), p.new_final_state()
    Reference().scan(p, Reference().prepare(p), o, final_state, keep=False)
    ref = oracle(case)
    torch.testing.assert_close(o, ref["o"], rtol=1e-9, atol=1e-11)
