"""Check that tokens of no sequence, and logits that reset the state, reach no gradient."""

import pytest
import torch

import kda_ops
from tests.support.calls import overload
from tests.support.cases import Case
from tests.support.target import TARGET

FLOAT64 = pytest.mark.skipif(torch.float64 not in TARGET.dtypes, reason="float64 is for CPUs")
CHUNK_OPS = (kda_ops.chunk_kda, kda_ops.chunk_gdn, kda_ops.recurrent_kda, kda_ops.recurrent_gdn)
FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)


def inputs(op, T=70):
    gen = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, T, 2, 8, generator=gen) for _ in range(4))
    rank = 1 if "kda" in op.__name__ else 0
    x = [
        q,
        k,
        v,
        g if rank else g[..., 0].clone(),
        torch.randn(1, T, 2, generator=gen),
        torch.zeros(2),
        torch.zeros(2, 8) if rank else torch.zeros(2),
    ]
    return [t.to(TARGET.device) for t in x]


def gradients(op, x, gate_outside=False, **flags):
    x = [t.requires_grad_() for t in x]
    if gate_outside:
        gate = kda_ops.kda_gate if "kda" in op.__name__ else kda_ops.gdn_gate
        q, k, v, g, beta, A_log, dt_bias = x
        bound = flags.pop("lower_bound", None)
        g = gate(g, A_log, dt_bias, lower_bound=bound)
        o, _ = op(q, k, v, g, beta, **flags | {"use_gate_in_kernel": False})
    else:
        o, _ = op(*x, **flags)
    return o, torch.autograd.grad(o.square().sum(), x)


outside = pytest.mark.parametrize("gate_outside", (False, True))


@pytest.mark.bits
@pytest.mark.quick
@pytest.mark.parametrize("lower_bound", (None, -5.0))
@pytest.mark.parametrize("garbage", (float("nan"), float("inf"), -float("inf")))
@pytest.mark.parametrize("op", CHUNK_OPS)
@outside
def test_tokens_of_no_sequence_may_hold_anything(op, garbage, lower_bound, gate_outside):
    flags = FLAGS | dict(lower_bound=lower_bound, gate_outside=gate_outside)
    offsets = torch.tensor([0, 30, 60], device=TARGET.device)
    clean, dirty = inputs(op), inputs(op)
    for t in dirty[:5]:
        t[:, 60:] = garbage
    o, want = gradients(op, clean, cu_seqlens=offsets, **flags)
    p, got = gradients(op, dirty, cu_seqlens=offsets, **flags)
    assert torch.equal(o, p) and not p[:, 60:].any()
    assert not any(d[:, 60:].any() for d in got[:5])
    for a, b in zip(want, got):
        assert torch.equal(a, b)


@pytest.mark.quick
@pytest.mark.parametrize("op", CHUNK_OPS)
@outside
def test_a_logit_of_plus_infinity_forgets_and_has_finite_gradients(op, gate_outside):
    x = inputs(op)
    x[3][:, 5] = float("inf")
    o, grads = gradients(op, x, gate_outside, **FLAGS)
    assert o.isfinite().all() and all(d.isfinite().all() for d in grads)


@pytest.mark.bits
@FLOAT64
def test_float64_calls_compute_everything_in_float64():
    x = [t.double() for t in inputs(kda_ops.chunk_kda)]
    half = [t.float().double() if i == 3 else t for i, t in enumerate(x)]
    mixed = [t.float() if i == 3 else t for i, t in enumerate(half)]
    assert torch.equal(kda_ops.chunk_kda(*half, **FLAGS)[0], kda_ops.chunk_kda(*mixed, **FLAGS)[0])


@FLOAT64
def test_a_float64_state_outlives_decays_that_float32_cannot_hold():
    q, k, v = (torch.randn(1, 64, 1, 8, dtype=torch.float64) for _ in range(3))
    g = torch.full((1, 64, 1, 8), -2.0, dtype=torch.float64)
    state = torch.full((1, 1, 8, 8), 1e60, dtype=torch.float64)
    flags = dict(initial_state=state, use_qk_l2norm_in_kernel=True, output_final_state=True)
    torch.testing.assert_close(
        kda_ops.chunk_kda(q, k, v, g, None, **flags)[1],
        kda_ops.recurrent_kda(q, k, v, g, None, **flags)[1],
        rtol=1e-9,
        atol=0,
    )


def test_mapping_over_nothing_gives_nothing():
    q, k, v = (torch.randn(1, 70, 2, 8, device=TARGET.device) for _ in range(3))
    assert torch.vmap(lambda q: kda_ops.chunk_kda(q, k, v, None, None)[0])(
        torch.randn(0, 1, 70, 2, 8, device=TARGET.device)
    ).shape == (0, 1, 70, 2, 8)


def test_gradients_of_no_samples_have_the_shapes_of_samples(variant):
    case = Case(variant, T=5, HV=4, gate="softplus", beta="sigmoid")
    x = {n: t for n, t in case.inputs(TARGET.device).items() if t is not None}

    def loss(*args):
        o, final_state = overload(variant, "chunk")(**dict(zip(x, args)), **case.flags())
        return o.sum() + final_state.sum()

    grads = torch.func.vmap(torch.func.grad(loss, tuple(range(len(x)))))(
        *(t.new_empty((0, *t.shape)) for t in x.values())
    )
    assert [g.shape for g in grads] == [(0, *t.shape) for t in x.values()]
