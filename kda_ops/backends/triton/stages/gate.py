"""Compute gates as operators of their own (`kda::gate`, `gdn::gate`), forward and backward."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.activations import make_gate, tokens_at
from kda_ops.backends.triton.device.gate import load_bias, load_rate, log_decay, through_gate
from kda_ops.backends.triton.device.operands import Strided
from kda_ops.backends.triton.plans.launch import launch, new, strides_of, total
from kda_ops.gates import Gate


@triton.jit(do_not_specialize=["T", "n_tokens"])
def gate_forward(
    g, gate, y, T, HV, n_tokens, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr
):
    """Write the natural log decay y [B T, HV, K] fp32 of ROWS tokens of one head (`log_decay`).

    A program takes ROWS of the `n_tokens` = B T tokens.
    """
    i_h = tl.program_id(0) % HV
    o_r = (tl.program_id(0) // HV).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b_x, m_x = logits(g, gate, i_h, o_r, T, n_tokens, K, BK)
    rate = load_rate(gate, i_h)
    b_y = log_decay(b_x, 0.0, rate, gate, None, UNIT=1.0, EXACT=True)
    o_k = tl.arange(0, BK)
    tl.store(y + ((o_r * HV + i_h) * K)[:, None] + o_k[None, :], b_y, mask=m_x)


@triton.jit(do_not_specialize=["T", "n_tokens"])
def gate_gradient(
    dy,
    g,
    gate,
    dg,
    dA_log,
    ddt_bias,
    T,
    HV,
    n_tokens,
    K: tl.constexpr,
    BK: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Write dg in g's dtype, and this program's shares of dA_log and d dt_bias (`through_gate`).

    Shares are [programs, HV] and [programs, HV, K], fp32, and are added afterwards in a fixed
    order.
    """
    i_h, i_p = tl.program_id(0) % HV, (tl.program_id(0) // HV).to(tl.int64)
    o_k = tl.arange(0, BK)
    rate = load_rate(gate, i_h)
    b_rate, b_bias = tl.zeros((BK,), tl.float32), tl.zeros((BK,), tl.float32)
    for step in range(STEPS):
        o_r = (i_p * STEPS + step) * ROWS + tl.arange(0, ROWS)
        b_x, m_x = logits(g, gate, i_h, o_r, T, n_tokens, K, BK)
        p_dy = tokens_at(dy, i_h, o_r, T, o_k)
        b_dy = tl.load(p_dy, mask=m_x, other=0.0).to(tl.float32)
        b_dx, b_share = through_gate(b_dy, b_x, rate, gate, EXACT=True)
        b_rate += tl.sum(b_share, 0)
        b_bias += tl.sum(b_dx, 0)
        tl.store(
            dg + ((o_r * HV + i_h) * K)[:, None] + o_k[None, :],
            b_dx.to(dg.dtype.element_ty),
            mask=m_x,
        )
    if dA_log is not None:
        tl.store(dA_log + i_p * HV + i_h, tl.sum(b_rate, 0))
    if ddt_bias is not None:
        tl.store(ddt_bias + (i_p * HV + i_h) * K + o_k, b_bias, mask=o_k < K)


@triton.jit
def logits(g, gate, i_h, o_r, T, n_tokens, K: tl.constexpr, BK: tl.constexpr):
    """Return g + dt_bias of rows o_r of all B * T tokens of one head, [ROWS, BK] fp32, and which of
    them are entries.
    """
    o_k = tl.arange(0, BK)
    m_x = (o_r < n_tokens)[:, None] & (o_k < K)[None, :]
    p_x = tokens_at(g, i_h, o_r, T, o_k)
    b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    return b_x + load_bias(gate, i_h, o_k, K)[None, :], m_x


def _sizes(x: Tensor, rank: int) -> tuple[int, int, int, int]:
    """Return B, T, HV and K of logits; a scalar per head counts as one column."""
    B, T, HV, *width = x.shape
    return B, T, HV, width[0] if rank else 1


def _tile(K: int, entries: int) -> dict[str, Any]:
    """Return the columns and rows of a program's tile."""
    block = max(1, triton.next_power_of_2(K))
    return dict(BK=block, ROWS=max(1, entries // block))


def _strides(x: Tensor, rank: int) -> tuple[int, ...]:
    s = strides_of(x)
    return s if rank else (*s, 1)


def gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, which: Gate, rank: int) -> Tensor:
    """Return the log decay from raw logits, in float32; see `kda_ops.stages.Backend.gate`."""
    y = new(g, "y", g.shape, torch.float32)
    B, T, HV, K = _sizes(g, rank)
    widths = tuning.Widths(g.dtype, g.device, 1, K)
    options = tuning.choose("gate_forward", widths, tuning.Entries)
    tile = _tile(K, options.entries)
    if B * T * HV * K:
        launch(
            gate_forward,
            triton.cdiv(B * T, tile["ROWS"]) * HV,
            g.device,
            g=Strided(g, _strides(g, rank)),
            gate=make_gate(A_log, dt_bias, which),
            y=y,
            T=T,
            HV=HV,
            n_tokens=B * T,
            K=K,
            **tile,
            **options.launch,
        )
    return y


def gate_backward(
    dy: Tensor, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, which: Gate, rank: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of g, A_log, dt_bias; see `kda_ops.stages.Backend.gate_backward`."""
    dx = new(g, "dg", g.shape)
    B, T, HV, K = _sizes(g, rank)
    widths = tuning.Widths(g.dtype, g.device, 1, K)
    options = tuning.choose("gate_gradient", widths, tuning.Steps)
    tile = _tile(K, options.entries)
    shares = triton.cdiv(B * T, tile["ROWS"] * options.steps)
    dA_log = None if A_log is None else new(g, "dA_log_parts", (shares, HV), torch.float32)
    ddt_bias = None if dt_bias is None else new(g, "ddt_bias_parts", (shares, HV, K), torch.float32)
    if B * T * HV * K:
        launch(
            gate_gradient,
            shares * HV,
            g.device,
            dy=Strided(dy, _strides(dy, rank)),
            g=Strided(g, _strides(g, rank)),
            gate=make_gate(A_log, dt_bias, which),
            dg=dx,
            dA_log=dA_log,
            ddt_bias=ddt_bias,
            T=T,
            HV=HV,
            n_tokens=B * T,
            K=K,
            **tile,
            STEPS=options.steps,
            **options.launch,
        )
    return dx, total(dA_log, A_log), total(ddt_bias, dt_bias)
