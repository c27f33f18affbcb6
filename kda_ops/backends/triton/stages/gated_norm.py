"""Normalise, scale and gate the output of each head, forward and backward.

A program takes ROWS tokens of one head at a time. A row lies in one warp, whose threads read 16
bytes of it each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.activations import tokens_at
from kda_ops.backends.triton.device.gate import sigmoid
from kda_ops.backends.triton.device.operands import strided
from kda_ops.backends.triton.plans.launch import launch, new, total


@triton.jit
def load_tokens(x, i_h, o_r, T, n_tokens, V: tl.constexpr, BV: tl.constexpr):
    """Return rows o_r of all B * T tokens of one head, [ROWS, BV] fp32, zero past the end."""
    o_v = tl.arange(0, BV)
    m_x = (o_r < n_tokens)[:, None] & (o_v < V)[None, :]
    return tl.load(tokens_at(x, i_h, o_r, T, o_v), mask=m_x, other=0.0).to(tl.float32)


@triton.jit
def load_weight(weight, i_h, H, G, V: tl.constexpr, BV: tl.constexpr):
    """Return the row of weight [G, V] that serves head i_h, [1, BV] fp32."""
    o_v = tl.arange(0, BV)
    row = (i_h // (H // G)).to(tl.int64)
    p_w = weight.pointer + row * weight.strides[0] + o_v.to(tl.int64) * weight.strides[1]
    return tl.load(p_w, mask=o_v < V, other=0.0).to(tl.float32)[None, :]


@triton.jit
def store_tokens(y, i_h, o_r, b_y, n_tokens, H, V: tl.constexpr, BV: tl.constexpr):
    """Write rows o_r of one head of a contiguous [B T, H, V] tensor."""
    o_v = tl.arange(0, BV)
    m_y = (o_r < n_tokens)[:, None] & (o_v < V)[None, :]
    p_y = y + ((o_r * H + i_h) * V)[:, None] + o_v[None, :]
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_y)


@triton.jit
def inverse_rms(b_x, eps, V: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) of each row, [ROWS, 1]."""
    return tl.rsqrt(tl.sum(b_x * b_x, 1) / V + eps)[:, None]


@triton.jit(do_not_specialize=["T", "n_tokens", "eps"])
def normalise(
    x,
    weight,
    gate,
    y,
    T,
    n_tokens,
    eps,
    H,
    G,
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    SILU: tl.constexpr,
    FAST: tl.constexpr,
):
    """Write y [B T, H, V] of ROWS tokens of one head::

    y = x / sqrt(mean(x^2) + eps) weight a(gate);   a = silu or sigmoid, 1 without a gate
    """
    i_h = tl.program_id(0) % H
    o_r = (tl.program_id(0) // H).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b_x = load_tokens(x, i_h, o_r, T, n_tokens, V, BV)
    b_y = b_x * inverse_rms(b_x, eps, V) * load_weight(weight, i_h, H, G, V, BV)
    if gate.pointer is not None:
        b_g = load_tokens(gate, i_h, o_r, T, n_tokens, V, BV)
        b_s = sigmoid(b_g, FAST)
        b_y *= b_g * b_s if SILU else b_s
    store_tokens(y, i_h, o_r, b_y, n_tokens, H, V, BV)


@triton.jit(do_not_specialize=["T", "n_tokens", "eps"])
def normalise_gradient(
    dy,
    x,
    weight,
    gate,
    dx,
    dweight,
    dgate,
    T,
    n_tokens,
    eps,
    H,
    G,
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    SILU: tl.constexpr,
    FAST: tl.constexpr,
):
    """Write dx, dgate, and this program's share of dweight, with u = x / sqrt(mean(x^2) + eps)::

        du = dy weight a(gate);   dx = (du - u mean(u du)) / sqrt(mean(x^2) + eps)
        dgate = dy u weight a'(gate);   dweight = sum dy u a(gate)

    Shares are [programs H / G, G, V], fp32, and are added afterwards in a fixed order.
    """
    i_h, i_p = tl.program_id(0) % H, (tl.program_id(0) // H).to(tl.int64)
    o_v = tl.arange(0, BV)
    b_w = load_weight(weight, i_h, H, G, V, BV)
    b_sum = tl.zeros((BV,), tl.float32)
    for step in range(STEPS):
        o_r = (i_p * STEPS + step) * ROWS + tl.arange(0, ROWS)
        b_x = load_tokens(x, i_h, o_r, T, n_tokens, V, BV)
        b_dy = load_tokens(dy, i_h, o_r, T, n_tokens, V, BV)
        rstd = inverse_rms(b_x, eps, V)
        b_u = b_x * rstd
        if gate.pointer is not None:
            b_g = load_tokens(gate, i_h, o_r, T, n_tokens, V, BV)
            b_s = sigmoid(b_g, FAST)
            slope = b_s * (1.0 + b_g * (1.0 - b_s)) if SILU else b_s * (1.0 - b_s)
            store_tokens(dgate, i_h, o_r, b_dy * b_u * b_w * slope, n_tokens, H, V, BV)
            b_dy *= b_g * b_s if SILU else b_s
        b_sum += tl.sum(b_dy * b_u, 0)
        b_du = b_dy * b_w
        mean = (tl.sum(b_u * b_du, 1) / V)[:, None]
        store_tokens(dx, i_h, o_r, rstd * (b_du - b_u * mean), n_tokens, H, V, BV)
    each = H // G
    share = (i_p * each + i_h % each) * G + i_h // each
    tl.store(dweight + share * V + o_v, b_sum, mask=o_v < V)


def _options(kernel: str, x: Tensor, kind: type[tuning.Options]) -> tuning.Options:
    return tuning.choose(kernel, tuning.Widths(x.dtype, x.device, 1, x.shape[-1]), kind)


def _given(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, silu: bool, o: tuning.Entries
) -> dict:
    B, T, H, V = x.shape
    block = triton.next_power_of_2(max(V, 1))
    return dict(
        x=strided(x),
        weight=strided(weight),
        gate=strided(gate),
        T=T,
        n_tokens=B * T,
        eps=eps,
        H=H,
        G=weight.shape[0],
        V=V,
        BV=block,
        ROWS=max(1, o.entries // block),
        SILU=silu,
        FAST=x.element_size() == 2,
        **o.launch,
    )


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, silu: bool) -> Tensor:
    """Return y; see `kda_ops.stages.Backend.gated_norm`."""
    y = new(x, "y", x.shape)
    options = _options("normalise", x, tuning.Entries)
    given = _given(x, weight, gate, eps, silu, options)
    if given["n_tokens"] * given["H"] * given["V"]:
        programs = triton.cdiv(given["n_tokens"], given["ROWS"]) * given["H"]
        launch(normalise, programs, x.device, **given, y=y)
    return y


def gated_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, silu: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients; see `kda_ops.stages.Backend.gated_norm_backward`."""
    options = _options("normalise_gradient", x, tuning.Steps)
    given = _given(x, weight, gate, eps, silu, options)
    H, G, V = given["H"], given["G"], given["V"]
    dx, dgate = new(x, "dx", x.shape), None
    if gate is not None:
        dgate = new(gate, "dgate", gate.shape)
    programs = triton.cdiv(given["n_tokens"], given["ROWS"] * options.steps)
    parts = new(x, "dweight_parts", (programs * (H // max(G, 1)), G, V), torch.float32)
    if given["n_tokens"] * H * V:
        launch(
            normalise_gradient,
            programs * H,
            x.device,
            **given,
            dy=strided(dy),
            dx=dx,
            dweight=parts,
            dgate=dgate,
            STEPS=options.steps,
        )
    return dx, total(parts, weight), dgate
