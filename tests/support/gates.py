"""Laws of the gate that each of its kinds keeps: far and infinite logits, NaN, rows past the end.

`tests/kernels/interpreted/test_gates.py` runs them under the interpreter, and
`tests/gpu/test_gates.py` on a GPU.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kda_ops import dispatch
from kda_ops.gates import gate_of
from kda_ops.problem import Problem
from tests.support import calls
from tests.support.calls import Results, run_stages
from tests.support.cases import BOUND, INSIDE, Case, Tensors, on, replace
from tests.support.closeness import assert_all_close, definition, drawn

KINDS = {  # the log decay of rate = exp(A_log) and x = g + dt_bias
    "softplus": lambda rate, x: -rate * torch.nn.functional.softplus(x),
    "bounded": lambda rate, x: BOUND * (rate * x).sigmoid(),
}
FAR = (-1e4, -30.0, 0.0, 30.0, 1e4)
WILD = (math.nan, math.inf, -math.inf)
kinds = pytest.mark.parametrize("kind", KINDS)
ranks = pytest.mark.parametrize("rank", (1, 0))
ops = pytest.mark.parametrize("op", ("chunk", "recurrent"))
dtypes = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))


def gate_by_hand(rank: int, g: Tensor, A_log: Tensor, dt_bias: Tensor, kind: str) -> Tensor:
    """Return the log decay by its definition."""
    return KINDS[kind](A_log.exp().reshape(-1, *[1] * rank), g + dt_bias)


def clamped(A_log: float) -> float:
    """Return exp(A_log) within the limits of `device/gate.py`."""
    return min(max(math.exp(A_log), 2.0**-126), 2.0**100)


def gate_inputs(rank: int, logits: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return g, A_log, dt_bias and dy in fp32; every third logit is one of `logits`."""
    gen, shape = torch.Generator().manual_seed(rank), (2, 75, 3, *[20] * rank)
    g, dy = (torch.randn(shape, generator=gen) for _ in range(2))
    some = torch.tensor(logits)[torch.arange(g.numel()) % len(logits)].reshape(shape)
    g = torch.where((torch.arange(g.numel()) % 3 == 0).reshape(shape), some, g)
    return g, torch.randn(3, generator=gen), torch.randn(shape[2:], generator=gen), dy


def both(rank: int, kind: str, dy: Tensor, *inputs: Tensor) -> Results:
    """Return y and the gradients from the gate's own kernels."""
    dy, *inputs = (x.to(calls.TARGET.device) for x in (dy, *inputs))
    kernels, which = dispatch.load("triton"), gate_of(True, **INSIDE[kind])
    y = kernels.gate(*inputs, which, rank)
    found = kernels.gate_backward(dy, *inputs, which, rank)
    return {n: x.cpu() for n, x in zip(("y", "dg", "dA_log", "ddt_bias"), (y, *found))}


def by_autograd(rank: int, kind: str, dy: Tensor, *inputs: Tensor) -> Results:
    """Return y and the gradients of the definition in the dtype of the inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = gate_by_hand(rank, *leaves, kind)
    found = torch.autograd.grad(y, leaves, dy)
    return dict(zip(("y", "dg", "dA_log", "ddt_bias"), (y.detach(), *found)))


@kinds
@ranks
def test_far_logits_have_the_gradients_of_the_definition(rank, kind):
    *inputs, dy = gate_inputs(rank, FAR)

    def twin(draw: int) -> Results:
        """Perturb dy by up to half a unit in the last place."""
        noise = torch.rand(dy.shape, generator=torch.Generator().manual_seed(draw)).double() - 0.5
        near = dy * (1.0 + (draw > 0) * torch.finfo(dy.dtype).eps * noise)
        return by_autograd(rank, kind, near.float(), *inputs)

    want = by_autograd(rank, kind, dy.double(), *(x.double() for x in inputs))
    assert_all_close(both(rank, kind, dy, *inputs), want, twin)


@kinds
@ranks
@pytest.mark.parametrize("A_log", (-200.0, 0.0, 200.0))
def test_infinite_logits_have_the_limits_of_the_gate_and_no_gradient(rank, kind, A_log):
    g, log, bias, dy = gate_inputs(rank, (-math.inf, math.inf))
    g, log = g.abs().clamp(min=math.inf) * g.sign(), torch.full_like(log, A_log)
    got = both(rank, kind, dy, g, log, bias)
    want = KINDS[kind](clamped(A_log), g.double()).float()
    torch.testing.assert_close(got["y"], want, rtol=1e-6, atol=0.0)
    assert not any(got[n].any() for n in ("dg", "dA_log", "ddt_bias"))


@kinds
@ranks
def test_a_logit_that_is_nan_stays_in_its_row(rank, kind):
    *inputs, dy = gate_inputs(rank, FAR)
    want = both(rank, kind, dy, *inputs)
    inputs[0][1, 7, 2] = math.nan
    got = both(rank, kind, dy, *inputs)
    mine = torch.zeros(inputs[0].shape, dtype=torch.bool)
    mine[1, 7, 2] = True
    assert got["y"][mine].isnan().all()
    for name in ("y", "dg"):
        assert torch.equal(got[name][~mine], want[name][~mine])
    assert not any(got[n].isnan().any() for n in ("dg", "dA_log", "ddt_bias"))


@kinds
@ranks
def test_a_rate_that_is_nan_makes_its_head_nan(rank, kind):
    """The clamp of the rate must not replace it by a number."""
    *inputs, dy = gate_inputs(rank, FAR)
    want = both(rank, kind, dy, *inputs)["y"]
    inputs[1][1] = math.nan
    y = both(rank, kind, dy, *inputs)["y"]
    assert y[:, :, 1].isnan().all() and torch.equal(y[:, :, ::2], want[:, :, ::2])


@kinds
@ranks
def test_a_rate_that_overflows_leaves_a_logit_of_zero_finite(rank, kind):
    g, log, bias, dy = gate_inputs(rank, FAR)
    got = both(rank, kind, dy, 0.0 * g, torch.full_like(log, 200.0), 0.0 * bias)
    assert all(x.isfinite().all() for x in got.values())
    want = KINDS[kind](clamped(200.0), 0.0 * g.double()).float()
    torch.testing.assert_close(got["y"], want, rtol=1e-6, atol=0.0)


@kinds
@ranks
def test_rows_without_a_gradient_add_exactly_nothing(rank, kind):
    """Padding, where dy is 0, may hold anything."""
    g, *parameters, dy = gate_inputs(rank, FAR)
    g, dy = g[:1, :64].clone(), dy[:1, :64].clone()  # of one tile of the kernel
    want = both(rank, kind, dy[:, :33], g[:, :33], *parameters)
    dy[:, 33:] = 0.0
    g[:, 33:] = torch.tensor(WILD * 11)[:31].reshape(-1, 1, *[1] * rank)
    got = both(rank, kind, dy, g, *parameters)
    assert not got["dg"][:, 33:].any() and torch.equal(got["dg"][:, :33], want["dg"])
    assert all(torch.equal(got[n], want[n]) for n in ("dA_log", "ddt_bias"))


def gated(variant: str, kind: str, dtype: torch.dtype, **sizes: object) -> Case:
    """Return a case with a gate inside, which takes A_log."""
    words = dict(T=70, H=1, HV=2, beta="sigmoid", l2norm=True, seed=1) | sizes
    return Case(variant, gate=kind, dtype=dtype, **words)


def assert_defined(case: Case, inputs: Tensors, op: str = "chunk", got=None) -> None:
    """Hold results and gradients to the budget of a case with other inputs."""
    if got is None:
        got = calls.run(case, op, on(inputs, calls.TARGET.device))

    def twin(draw: int) -> Results:
        p = Problem.parse(case.rank, *inputs.values(), **case.flags())
        operand = case.dtype if case.dtype.itemsize < 4 else None
        found = run_stages(
            drawn(draw, torch.float32, operand), p, case.cotangents(), step=op != "chunk"
        )
        return {n: found[n] for n in got}

    want = definition(case, inputs, [n[1:] for n in got if n.startswith("d")])
    assert_all_close(got, {n: want[n] for n in got}, twin)


def far(case: Case, logits: tuple[float, ...]) -> Tensors:
    """Return inputs of which some tokens have these logits in half of the channels."""
    inputs = case.inputs()
    for i, x in enumerate(logits):
        inputs["g"][:, 3 + 5 * i :: 31, ..., ::2] = x
    return inputs


def hidden(case: Case) -> Tensors:
    """Return inputs whose decays are weak, and whose bias alone would make a strong one.

    So a row that is no token must not go through the gate as a logit of 0.
    """
    inputs = case.inputs()
    inputs["dt_bias"] = torch.full_like(inputs["dt_bias"], 8.0)
    inputs["g"] = inputs["g"] - 10.0
    if inputs["A_log"] is not None:
        inputs["A_log"] = inputs["A_log"].clamp(min=-0.5)
    return inputs


@kinds
@dtypes
@ops
def test_far_logits_meet_the_error_budget(op, variant, kind, dtype):
    case = gated(variant, kind, dtype, T=70 if op == "chunk" else 30)
    assert_defined(case, far(case, FAR), op)


@kinds
@dtypes
@pytest.mark.parametrize("T", (1, 33, 70))
def test_rows_past_the_end_do_not_decay(variant, kind, dtype, T):
    case = gated(variant, kind, dtype, T=T)
    assert_defined(case, hidden(case))


@kinds
@pytest.mark.parametrize("A_log", (-200.0, 0.0, 200.0))
@ops
def test_infinite_logits_give_finite_results(op, variant, kind, A_log):
    case = gated(variant, kind, torch.float32, T=40)
    inputs = far(case, (-math.inf, math.inf))
    inputs["A_log"] = torch.full_like(inputs["A_log"], A_log)
    there = on(inputs, calls.TARGET.device)
    got = calls.run(case, op, there)
    assert all(x.isfinite().all() for x in got.values())
    assert not got["dg"].cpu()[inputs["g"].isinf()].any()


@kinds
@ops
def test_rows_of_no_sequence_add_exactly_nothing(op, variant, kind):
    case = gated(variant, kind, torch.float32, lengths=(33,), tail=9)
    inputs = hidden(case)
    alone = {n: x[:, :33] if n in ("q", "k", "v", "g", "beta") else x for n, x in inputs.items()}
    inputs["g"][:, 33:] = torch.tensor(WILD * 3).reshape(-1, 1, *[1] * case.rank)
    do, dfinal_state = case.cotangents(calls.TARGET.device)
    got, want = (
        calls.run(case, op, on(x, calls.TARGET.device), cotangents=(d, dfinal_state))
        for x, d in ((inputs, do), (alone, do[:, :33]))
    )
    for n, x in got.items():
        if x.shape != want[n].shape:
            assert not x[:, 33:].any(), n
            x = x[:, :33]
        assert torch.equal(x, want[n]), n


@kinds
@ops
def test_nan_stays_in_its_sequence_and_its_head(op, variant, kind):
    case = gated(variant, kind, torch.float32, lengths=(20, 3, 9), HV=1)
    inputs = case.inputs(calls.TARGET.device)
    want = calls.run(case, op, inputs)
    inputs["g"][:, 21] = math.nan
    got = calls.run(case, op, inputs)
    for n in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(got[n][:, :20], want[n][:, :20])
        assert torch.equal(got[n][:, 23:], want[n][:, 23:])
    case = replace(case, lengths=None, T=9, H=2, HV=2)
    inputs = case.inputs(calls.TARGET.device)
    want = calls.run(case, op, inputs)
    inputs["A_log"][0] = math.nan
    got = calls.run(case, op, inputs)
    assert got["o"][:, :, 0].isnan().all()
    for n in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(got[n][:, :, 1], want[n][:, :, 1])
