"""Check the derivatives of gate, norm and sigmoid against autograd in float64, and their limits."""

import pytest
import torch
import torch.nn.functional as F

import kda_ops
from kda_ops.backends import activations, native
from kda_ops.backends.reference import Reference
from kda_ops.gates import gate_of
from kda_ops.problem import Problem
from tests.support.cases import Case, take
from tests.support.target import TARGET

GATES = [
    (bound, log, bias)
    for bound in (None, -5.0, -0.7)
    for log in (True, False)
    for bias in (True, False)
    if log or bound
]


def gate_inputs(rank, log, bias, dtype=torch.float64, scale=2.0):
    gen = torch.Generator().manual_seed(3)
    shape = (2, 5, 3, 4) if rank else (2, 5, 3)
    g = scale * torch.randn(shape, generator=gen, dtype=torch.float64)
    A_log = torch.randn(3, generator=gen, dtype=torch.float64) if log else None
    dt_bias = torch.randn(shape[2:], generator=gen, dtype=torch.float64) if bias else None
    return [None if x is None else x.to(dtype) for x in (g, A_log, dt_bias)]


def gate_by_hand(rank, g, A_log, dt_bias, bound):
    A = 1.0 if A_log is None else A_log.exp().reshape(-1, *[1] * rank)
    x = g if dt_bias is None else g + dt_bias
    return -A * F.softplus(x) if bound is None else bound * torch.sigmoid(A * x)


@pytest.mark.quick
@pytest.mark.skipif(torch.float64 not in TARGET.dtypes, reason="float64 is for CPUs")
@pytest.mark.parametrize("variant,rank", (("kda", 1), ("gdn", 0)))
@pytest.mark.parametrize("bound,log,bias", GATES)
def test_the_gate_operator_is_differentiable_in_float64(variant, rank, bound, log, bias):
    inputs = [None if x is None else x.requires_grad_() for x in gate_inputs(rank, log, bias)]
    op = getattr(kda_ops, f"{variant}_gate")
    torch.testing.assert_close(op(*inputs, lower_bound=bound), gate_by_hand(rank, *inputs, bound))
    given = [x for x in inputs if x is not None]

    def call(*xs):
        rest = iter(xs)
        return op(*(None if x is None else next(rest) for x in inputs), lower_bound=bound)

    assert torch.autograd.gradcheck(call, given)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("variant,rank", (("kda", 1), ("gdn", 0)))
def test_the_gate_is_float32_for_narrow_logits_and_its_gradients_are_rounded_once(
    variant, rank, dtype
):
    leaves = [x.to(TARGET.device).requires_grad_() for x in gate_inputs(rank, True, True, dtype)]
    y = getattr(kda_ops, f"{variant}_gate")(*leaves)
    assert y.dtype is torch.float32
    got = torch.autograd.grad(y, leaves, torch.ones_like(y))
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = gate_by_hand(rank, *wide, None)
    want = torch.autograd.grad(exact, wide, torch.ones_like(exact))
    for d, w, x in zip(got, want, leaves):
        assert d.dtype is x.dtype
        torch.testing.assert_close(d.double(), w, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("rank", (0, 1))
def test_a_bounded_gate_with_an_overflowing_slope_has_finite_gradients(rank):
    g, _, dt_bias = gate_inputs(rank, True, True, torch.float32, scale=5.0)
    A_log, which = torch.tensor([100.0, 5.0, -100.0]), gate_of(True, -5.0)
    y = activations.gate(g, A_log, dt_bias, which, rank)
    assert y.isfinite().all() and (y <= 0).all() and (y >= -5).all()
    for d in activations.gate_backward(torch.ones_like(y), g, A_log, dt_bias, which, rank):
        assert d.isfinite().all()


@pytest.mark.parametrize("rank", (0, 1))
def test_extreme_logits_give_the_limits_of_the_gate(rank):
    shape = (1, 2, 1, 1) if rank else (1, 2, 1)
    g = torch.tensor([-1e4, 1e4]).reshape(shape)
    y = activations.gate(g, torch.zeros(1), None, gate_of(True, None), rank).flatten()
    torch.testing.assert_close(y, torch.tensor([0.0, -1e4]))
    y = activations.gate(g, torch.zeros(1), None, gate_of(True, -5.0), rank).flatten()
    torch.testing.assert_close(y, torch.tensor([0.0, -5.0]))


def test_the_norm_of_zero_is_zero_and_has_a_gradient():
    zero = torch.zeros(1, 1, 1, 4)
    y, rstd = activations.l2norm(zero)
    assert not y.any()
    torch.testing.assert_close(
        activations.l2norm_backward(torch.ones_like(zero), y, rstd), torch.full_like(zero, 1e3)
    )


@pytest.mark.bits
def test_the_bits_of_a_token_do_not_depend_on_its_place():
    """Vectorised loops of torch may round strided elements or the last ones differently."""
    case = Case(T=129, H=1, HV=1, K=33, gate="softplus", beta="sigmoid", l2norm=True)
    whole = _activated(case, case.inputs())
    for b in (1, 37, 128):
        part = _activated(case, take(case.inputs(), 0, b))
        for name in ("q", "k", "g", "beta"):
            assert torch.equal(getattr(whole, name)[:, :b], getattr(part, name)), name


def _activated(case, inputs):
    return activations.Activated(
        Problem.parse(case.rank, *inputs.values(), **case.flags()), case.state_dtype
    )


def test_both_cpu_backends_share_the_gate():
    assert native.gate is activations.gate is Reference.gate
    assert native.gate_backward is activations.gate_backward


@pytest.mark.bits
@pytest.mark.parametrize("bound", (None, -5.0))
@pytest.mark.parametrize("rank", (0, 1))
def test_gradients_of_16_bit_gate_parameters_are_rounded_once(rank, bound):
    g, A_log, dt_bias = gate_inputs(rank, True, True, torch.float32)
    dy = torch.randn(g.shape, generator=torch.Generator().manual_seed(5))
    A_log, dt_bias = A_log.bfloat16(), dt_bias.bfloat16()
    which = gate_of(True, bound)
    narrow = activations.gate_backward(dy, g, A_log, dt_bias, which, rank)
    wide = activations.gate_backward(dy, g, A_log.float(), dt_bias.float(), which, rank)
    for a, b in zip(narrow[1:], wide[1:]):
        assert a.dtype is torch.bfloat16 and torch.equal(a, b.bfloat16())
