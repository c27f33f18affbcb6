"""Run KDA's backward as two walks: forward again for the states, then back for the gradients.

Here are the launch of the second, `reverse_walk_kda`, and `finish_back`, which makes dbeta of the
sums that the walk leaves, and brings the last rows of each sequence to their place. The first walk
is `walk.states`; it is left out if forward has kept the states.
"""

from __future__ import annotations

from importlib import import_module
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton.device.activations import flags_of, gate_of, strength_column
from kda_ops.backends.triton.device.gate import GIVEN, load_bias, load_rate, log_decay, through_gate
from kda_ops.backends.triton.device.gradient_chunk import locate, write_column
from kda_ops.backends.triton.device.operands import strided
from kda_ops.backends.triton.device.sequence import find_sequence
from kda_ops.backends.triton.device.tile import CHUNK, dense, inverse_norm, rows_at
from kda_ops.backends.triton.plans.descriptors import copied, has_gluon, tokens
from kda_ops.backends.triton.plans.launch import as_kv, columns_of, launch, new, strides_of
from kda_ops.backends.triton.stages.gradient import (
    gather_gradient,
    gradient_like,
    gradients_of,
    parts_of,
    visited_chunks,
)
from kda_ops.backends.triton.stages.gradient_pairs import strength_gradient
from kda_ops.backends.triton.stages.gradient_small import SMALL
from kda_ops.backends.triton.stages.reverse_walk import copy_rows
from kda_ops.backends.triton.stages.walk import HALF, factor_of_P, scores, states, tiles
from kda_ops.problem import Problem
from kda_ops.stages import Gradients, Walked

KERNEL = import_module("kda_ops.backends.triton.stages.reverse_walk_kda") if has_gluon() else None
BLOCK = tl.constexpr(HALF)
ROWS = tl.constexpr(32)  # of the gate that are finished at once
LEAST = tl.constexpr(2.0**-60)  # a sigmoid below has a gradient of zero


@triton.jit
def small_gradient(i, at, i_h, p_y, p_u, p_S, k, v, dv, g, gate, H, HV, flags, D: tl.constexpr):
    """Return dbeta of row i of a chunk, whose beta is small, from its block of 32 rows::

        z = y_i - sum_{j > i} (sum_k k_jk k_ik E_jik) dv_j
        x = v_i - sum_k k_ik exp(G_ik) S_k - sum_{j < i} (sum_k k_ik k_jk E_ijk) u_j
        dbeta_i = z . x

    u_i / beta would be x, and dv_i / beta would be z. S enters the block, and G starts there.
    """
    first = i // BLOCK * BLOCK
    i_r = i - first
    o_r, o_k = tl.arange(0, BLOCK), tl.arange(0, D)
    m_r = first + o_r < at.n_rows
    one = (o_r == i_r)[:, None]
    later = o_r > i_r
    p_g = rows_at(g.pointer, g.strides, at.i_b, i_h, at.first + first, o_r, o_k)
    b_g = tl.load(p_g, mask=m_r[:, None], other=0.0).to(tl.float32)
    bias = load_bias(gate, i_h, o_k, D)[None, :]
    rate = load_rate(gate, i_h)
    b_G = tl.cumsum(log_decay(b_g, bias, rate, gate, m_r[:, None]), 0)
    p_k = rows_at(k.pointer, k.strides, at.i_b, i_h // (HV // H), at.first + first, o_r, o_k)
    b_k = tl.load(p_k, mask=m_r[:, None], other=0.0).to(tl.float32)
    b_k *= inverse_norm(b_k, flags.L2NORM)[:, None]
    b_Gi, b_ki = tl.sum(tl.where(one, b_G, 0.0), 0), tl.sum(tl.where(one, b_k, 0.0), 0)
    b_E = b_G - b_Gi[None, :]
    b_E = tl.exp2(tl.where(later[:, None], b_E, -b_E))
    b_pairs = tl.sum(b_k * b_E * b_ki[None, :], 1)
    b_after, b_before = tl.where(later, b_pairs, 0.0), tl.where(o_r < i_r, b_pairs, 0.0)
    b_from = b_ki * tl.exp2(b_Gi)
    dbeta = tl.full((), 0.0, tl.float32)
    for i_v in tl.range(0, D, 32, num_stages=1):
        o_v = i_v + tl.arange(0, 32)
        p_dv = dv + ((at.token + first + o_r) * HV + i_h)[:, None] * D + o_v[None, :]
        b_dv = tl.load(p_dv, mask=(m_r & later)[:, None], other=0.0).to(tl.float32)
        b_z = tl.load(p_y + i_r * D + o_v).to(tl.float32) - tl.sum(b_dv * b_after[:, None], 0)
        p_v = v.pointer + at.i_b * v.strides[0] + (at.first + i) * v.strides[1]
        b_x = tl.load(p_v + i_h.to(tl.int64) * v.strides[2] + o_v * v.strides[3]).to(tl.float32)
        b_S = tl.load(p_S + o_v[:, None] * D + o_k[None, :]).to(tl.float32)
        b_x -= tl.sum(b_S * b_from[None, :], 1)
        b_u = tl.load(p_u + o_r[:, None] * D + o_v[None, :]).to(tl.float32)
        dbeta += tl.sum(b_z * (b_x - tl.sum(b_u * b_before[:, None], 0)), 0)
    return dbeta


@triton.jit
def finish_gate(dg, g, gate, at, i_h, HV, i_tile, dA_log, ddt_bias, D: tl.constexpr):
    """Turn dg of a chunk into the gradient of the logits g, in its place.

    Write the chunk's shares of dA_log [NT, HV] and ddt_bias [NT, HV, D].
    """
    o_k = tl.arange(0, D)
    b_bias = load_bias(gate, i_h, o_k, D)
    rate = load_rate(gate, i_h)
    b_A, b_b = tl.zeros((D,), tl.float32), tl.zeros((D,), tl.float32)
    for i in tl.static_range(0, CHUNK, ROWS):
        o_r = i + tl.arange(0, ROWS)
        m_x = (o_r < at.n_rows)[:, None]
        p_g = rows_at(g.pointer, g.strides, at.i_b, i_h, at.first, o_r, o_k)
        b_x = tl.load(p_g, mask=m_x, other=0.0).to(tl.float32) + b_bias[None, :]
        p_dg = dg + ((at.token + o_r) * HV + i_h)[:, None] * D + o_k[None, :]
        b_dg = tl.load(p_dg, mask=m_x, other=0.0).to(tl.float32)
        b_dx, b_share = through_gate(b_dg, b_x, rate, gate, True)
        tl.store(p_dg, b_dx.to(dg.dtype.element_ty), mask=m_x)
        b_A += tl.sum(b_share, 0)
        b_b += tl.sum(b_dx, 0)
    if dA_log is not None:
        tl.store(dA_log + i_tile, tl.sum(b_A, 0))
    if ddt_bias is not None:
        tl.store(ddt_bias + i_tile * D + o_k, b_b)


@triton.jit(do_not_specialize=["N", "T", "H", "HV"])
def finish_back(
    sums,
    tails,
    ends,
    y,
    u,
    S,
    k,
    v,
    g,
    beta,
    gate,
    cu_seqlens,
    dq,
    dk,
    dv,
    dg,
    dbeta,
    dA_log,
    ddt_bias,
    N,
    T,
    H,
    HV,
    flags,
    D: tl.constexpr,
):
    """Finish the gradients of one chunk and value head, from what `reverse_walk_kda` left::

        dbeta = sum_v dv u / beta^2,   through the sigmoid if there is one   [64]

    A given beta below SMALL takes the formula of `small_gradient`. Last rows come from `tails` and
    `ends`. Tokens of no sequence get zeros.
    """
    i_h, i_t, i_tile = tl.program_id(0) % HV, tl.program_id(0) // HV, tl.program_id(0).to(tl.int64)
    at = locate(cu_seqlens, i_t, N, T)
    n_rows, row = at.n_rows, at.token * HV + i_h
    if (n_rows <= 0) | (at.live == 0):
        if dA_log is not None:
            tl.store(dA_log + i_tile, 0.0)
        if ddt_bias is not None:
            tl.store(ddt_bias + i_tile * D + tl.arange(0, D), tl.zeros((D,), tl.float32))
    if n_rows > 0:
        o_r = tl.arange(0, CHUNK)
        if at.live:
            i_n, begin = at.i_b, at.i_b * 0
            blocks = i_n * tl.cdiv(T, BLOCK)
            if cu_seqlens is not None:
                i_n = find_sequence(cu_seqlens, i_t, N + 1).to(tl.int64)
                begin = tl.load(cu_seqlens + i_n).to(tl.int64)
                blocks = begin // BLOCK + i_n
            rest = n_rows % BLOCK
            if (rest > 0) & (n_rows < CHUNK):
                p_end = tails + (i_n * HV + i_h) * (3 * BLOCK * D)
                last = row + (n_rows - rest) * HV
                copy_rows(dq, last, HV, p_end, rest, D)
                copy_rows(dk, last, HV, p_end + BLOCK * D, rest, D)
                copy_rows(dv, last, HV, p_end + 2 * BLOCK * D, rest, D)
                copy_rows(dg, last, HV, ends + (i_n * HV + i_h) * (BLOCK * D), rest, D)
            if gate.kind != GIVEN:
                tl.debug_barrier()  # other threads have copied dg
                finish_gate(dg, g, gate, at, i_h, HV, i_tile, dA_log, ddt_bias, D)
            if dbeta is not None:
                b_beta = strength_column(beta, at.i_b, i_h, at.first, n_rows, flags)
                block = blocks + (at.first - begin + o_r) // BLOCK
                p_sum = sums + (block * HV + i_h) * BLOCK + o_r % BLOCK
                b_sum = tl.load(p_sum, mask=o_r < n_rows, other=0.0)
                if flags.SIGMOID:
                    b_dbeta = b_sum / tl.maximum(b_beta, LEAST)
                    b_dbeta = strength_gradient(b_dbeta, b_beta, flags.NEG_EIGVAL)
                    write_column(dbeta, at, i_h, HV, b_dbeta)
                else:
                    small = (tl.abs(b_beta) < SMALL) & (o_r < n_rows)
                    b_dbeta = b_sum / tl.where(small, 1.0, b_beta * b_beta)
                    if y is not None:
                        tl.debug_barrier()  # other threads have copied dv
                        b_left = tl.where(small, o_r, CHUNK)
                        i = tl.min(b_left, 0)
                        while i < CHUNK:
                            tile = (blocks + (at.first - begin + i) // BLOCK) * HV + i_h
                            d = small_gradient(
                                i,
                                at,
                                i_h,
                                y + tile * (BLOCK * D),
                                u + tile * (BLOCK * D),
                                S + tile * (D * D),
                                k,
                                v,
                                dv,
                                g,
                                gate,
                                H,
                                HV,
                                flags,
                                D,
                            )
                            b_dbeta = tl.where(o_r == i, d, b_dbeta)
                            b_left = tl.where(b_left > i, b_left, CHUNK)
                            i = tl.min(b_left, 0)
                    write_column(dbeta, at, i_h, HV, b_dbeta)
        else:
            copy_rows(dq, row, HV, None, n_rows, D)
            copy_rows(dk, row, HV, None, n_rows, D)
            copy_rows(dv, row, HV, None, n_rows, D)
            copy_rows(dg, row, HV, None, n_rows, D)
            if dbeta is not None:
                write_column(dbeta, at, i_h, HV, tl.zeros((CHUNK,), tl.float32))


def walk_back(
    p: Problem, kept: Walked, do: Tensor, dfinal_state: Tensor | None, need: frozenset[str]
) -> Gradients:
    """Return the gradients named in `need`, from what `walk.walk_training` kept."""
    assert KERNEL is not None and p.g is not None  # as `walk.trains` has checked
    q, g, grouped = p.q, p.g, p.HV > p.H
    AP, S, u = kept.A, kept.states, kept.v_new
    assert AP is not None  # as `Backend.walk_back` asks
    if S is None or u is None:
        S, u = states(p, AP)
    dv, dg = new(q, "dv", p.v.shape), new(q, "dg", g.shape, g.dtype)
    # Value heads of one key head are summed afterwards.
    heads, name = (p.B, p.T, p.HV, p.K), "_heads" if grouped else ""
    dq, dk = new(q, "dq" + name, heads), new(q, "dk" + name, heads)
    dbeta = gradient_like(p, "beta", need)
    sums = y = None
    if dbeta is not None:
        sums = new(q, "dbeta_sums", u.shape[:3], torch.float32)
        if not p.sigmoid_beta:
            y = new(q, "y", u.shape)
    tails = new(q, "tails", (p.N, p.HV, 3, HALF, p.K))
    ends = new(q, "ends", (p.N, p.HV, HALF, p.K), g.dtype)
    dA_log, ddt_bias = parts_of(p, "A_log", 1, need), parts_of(p, "dt_bias", p.K, need)
    dinitial = None
    if p.state is not None and "initial_state" in need:
        wide = (p.V, p.K) if p.transposed else (p.K, p.V)
        dinitial = as_kv(p, new(q, "dinitial_state", (p.N, p.HV, *wide), torch.float32))
    dfinal = None if dfinal_state is None or dfinal_state.dim() == 1 else as_kv(p, dfinal_state)
    beta_b, beta_t, beta_h = columns_of(p.beta)
    gate = gate_of(p)
    launch(
        KERNEL.reverse_walk_kda,
        p.N * p.HV,
        q.device,
        q_d=tokens(p, q, HALF),
        k_d=tokens(p, p.k, HALF),
        g_d=tokens(p, g, HALF),
        do_d=tokens(p, do, HALF, 64),
        u_d=tiles(u, HALF, p.V),
        S_d=tiles(S, p.V, p.K),
        AP_d=scores(p, AP, HALF),
        dq_d=tokens(p, dq, HALF),
        dk_d=tokens(p, dk, HALF),
        dg_d=tokens(p, dg, HALF),
        dv_d=tokens(p, dv, HALF, 64),
        tails_d=tiles(tails, HALF, p.K),
        v_tails_d=tiles(tails, HALF, 64),
        ends_d=tiles(ends, HALF, p.K),
        y=y,
        sums_d=None if sums is None else copied(sums, (prod(sums.shape),), (1,), (HALF,)),
        beta=p.beta,
        gate=gate,
        dfinal=strided(dfinal),
        dinitial=strided(dinitial),
        cu_seqlens=dense(p.cu_seqlens),
        beta_b=beta_b,
        beta_t=beta_t,
        beta_h=beta_h,
        q_h=strides_of(q)[2],
        k_h=strides_of(p.k)[2],
        g_h=strides_of(g)[2],
        do_h=strides_of(do)[2],
        N=p.N,
        T=p.T,
        H=p.H,
        HV=p.HV,
        scale=p.scale,
        factor=factor_of_P(p),
        flags=flags_of(p),
        REGISTERS=200,
        num_warps=4,
    )
    launch(
        finish_back,
        visited_chunks(p) * p.HV,
        q.device,
        sums=sums,
        tails=tails,
        ends=ends,
        y=y,
        u=u,
        S=S,
        k=strided(p.k),
        v=strided(p.v),
        g=strided(g),
        beta=strided(p.beta),
        gate=gate,
        cu_seqlens=dense(p.cu_seqlens),
        dq=dq,
        dk=dk,
        dv=dv,
        dg=dg,
        dbeta=dbeta,
        dA_log=dA_log,
        ddt_bias=ddt_bias,
        N=p.N,
        T=p.T,
        H=p.H,
        HV=p.HV,
        flags=flags_of(p),
        D=p.K,
        num_warps=4,
    )
    if grouped:
        dq = gather_gradient(p, "q", q, dq) if "q" in need else dq
        dk = gather_gradient(p, "k", p.k, dk) if "k" in need else dk
    grads = gradients_of(p, need, dq, dk, dg, dbeta, dA_log, ddt_bias)
    grads.v = dv if "v" in need else None
    grads.initial_state = None if dinitial is None else as_kv(p, dinitial)
    return grads
