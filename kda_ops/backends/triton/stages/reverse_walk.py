"""Run GDN's reverse scan and gradient as one kernel, the walk over the chunks of each head.

Here are the condition under which it runs, its launch, and `finish_walk`, which makes dg and dbeta
of the sums that the walk leaves. The walk itself is `reverse_walk_gdn`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.activations import flags_of, gate_of, reciprocal
from kda_ops.backends.triton.device.gradient_chunk import locate, write_column, write_rows
from kda_ops.backends.triton.device.operands import (
    BETA,
    COUNT_GDN,
    SUM_DG,
    SUM_LATE,
    SUM_PART,
    SUM_STATE,
    SUM_STRENGTH,
    SUMS,
    Strided,
    strided,
)
from kda_ops.backends.triton.device.sequence import find_sequence
from kda_ops.backends.triton.device.tile import CHUNK, dense, fit, rows_at
from kda_ops.backends.triton.plans.descriptors import (
    LENGTH,
    WIDTH,
    copied,
    has_gluon,
    is_copied,
    is_near,
    tokens,
)
from kda_ops.backends.triton.plans.launch import as_kv, columns_of, launch, new, strides_of
from kda_ops.backends.triton.stages.gradient import (
    GATES,
    gather_gradient,
    gradient_like,
    gradients_of,
    parts_of,
    visited_chunks,
)
from kda_ops.backends.triton.stages.gradient_gdn import HeadGradients, clear_columns, write_logits
from kda_ops.backends.triton.stages.gradient_pairs import strength_gradient
from kda_ops.backends.triton.stages.gradient_small import SMALL
from kda_ops.backends.triton.stages.reverse_scan import enter_runs, reads_z
from kda_ops.backends.triton.stages.runs import Runs
from kda_ops.backends.triton.stages.scan import overlap_scans, scan
from kda_ops.problem import Problem
from kda_ops.sequences import count_chunks
from kda_ops.stages import Gradients, Tile, Trace

KERNEL = import_module("kda_ops.backends.triton.stages.reverse_walk_gdn") if has_gluon() else None
FACTORS = 7 * LENGTH  # numbers of a chunk's `factors` (`operands`)
MOST_GROUPED = 2  # value heads of a key head: more would take more memory than the other kernels
# The least number of programs (runs, or N, times HV) for which the walk is faster than the kernels
# that it replaces. A step takes 6.5 us, and few programs do not hide that
# (docs/kernels/journal/walk-of-gdn.md).
LEAST_PROGRAMS = 48


class Form(NamedTuple):
    """What the walk computes, as constants of a kernel; see `reverse_walk_gdn`."""

    TILED: Any
    GIVEN: Any
    GROUPED: Any
    L2NORM: Any
    RUN: Any  # chunks per run, 0 for whole sequences


def walks(p: Problem, do: Tensor | None, dfinal_state: Tensor | None, need: frozenset[str]) -> bool:
    """Return whether the walk serves a call. Nothing here depends on values."""
    if KERNEL is None or p.rank or tuning.FORCED.walk is False or do is None:
        return False
    given = p.beta is not None and not p.sigmoid_beta
    return bool(
        tuning.is_hopper(p.q.device)
        and p.q.dtype in (torch.bfloat16, torch.float16)
        # in fp16 beta z underflows where a given beta is small
        and not (given and p.q.dtype is torch.float16)
        and p.K == p.V == WIDTH
        and p.HV <= MOST_GROUPED * p.H
        and need >= {"q", "k", "v"}
        and all(is_copied(p, x) for x in (p.q, p.k, do))
        and (dfinal_state is None or dfinal_state.dim() == 1 or is_near(strides_of(dfinal_state)))
        and (
            tuning.FORCED.walk
            or p.invariant
            or p.N * p.HV >= LEAST_PROGRAMS
            or runs_of_walk(p) * p.HV >= LEAST_PROGRAMS
        )
        # a descriptor has at least one row, and coordinates have 32 bits
        and 0 < p.B * p.T < 2**30
        and count_chunks(p) * (p.HV * FACTORS) < 2**31
        and p.N * (p.HV * 3 * LENGTH) < 2**30
    )


def runs_of_walk(p: Problem) -> int:
    """Return how many runs the walk has at least, 0 if it has none."""
    length = tuning.walk_run_length(p)
    if not length:
        return 0
    runs = tuning.pieces(p, length)
    return runs if p.cu_seqlens is None else runs - p.N  # each sequence may leave one empty


def path(device: torch.device) -> str:
    """Describe which kernels make GDN's gradients on a device, and why."""
    if KERNEL is None:
        return f"reverse scan and gradient, because triton {triton.__version__} has no known Gluon"
    if not tuning.is_hopper(device):
        return "reverse scan and gradient, because the walk needs compute capability 9.0"
    return (
        f"one walk (Gluon) from {LEAST_PROGRAMS} sequences, or runs of long ones, times heads on, "
        "in 16 bits at width 128"
    )


@triton.jit
def copy_rows(x, row, stride, tail, n_rows, D: tl.constexpr):
    """Write n_rows of the tile `tail` [64, D], or zeros without it, to x [rows, D].

    They go to row `row` and every `stride`-th after it, 16 rows at a time. So the kernel takes few
    registers, and many programs run at once.
    """
    o_d = tl.arange(0, D)
    for i in range(0, n_rows, 16):
        o_r = i + tl.arange(0, 16)
        m_x = (o_r < n_rows)[:, None]
        b_x = tl.zeros((16, D), x.dtype.element_ty)
        if tail is not None:
            b_x = tl.load(tail + o_r[:, None] * D + o_d[None, :], mask=m_x)
        tl.store(x + (row + o_r * stride)[:, None] * D + o_d[None, :], b_x, mask=m_x)


@triton.jit
def finish_small(
    p_beta, p_more, p_z, z_s, v, dv, dbeta, at, i_h, HV, D: tl.constexpr, LEAST: tl.constexpr
):
    """Write dbeta of the rows with a given beta below SMALL, and dv of those below LEAST.

    The walk wrote max(beta, LEAST) z, to rows of stride z_s from p_z on. Where p_z is in `tails`,
    `copy_rows` has copied all rows to `dv`. Rows are loaded only where beta is small, 16 at a time
    as in `copy_rows`.
    """
    o_d = tl.arange(0, D)
    tl.debug_barrier()  # other threads have copied dv
    for i in tl.range(0, at.n_rows, 16, num_stages=1):
        o_r = i + tl.arange(0, 16)
        b_beta = tl.load(p_beta + o_r)
        size = tl.abs(b_beta)
        m_small = (o_r < at.n_rows) & (size < SMALL)
        m_x = m_small[:, None]
        b_z = tl.load(p_z + o_r[:, None] * z_s + o_d[None, :], mask=m_x, other=0.0)
        b_z = b_z.to(tl.float32)
        if dbeta is not None:
            p_v = rows_at(v.pointer, v.strides, at.i_b, i_h, at.first, o_r, o_d)
            b_v = tl.load(p_v, mask=m_x, other=0.0).to(tl.float32)
            b_dbeta = tl.sum(b_z * b_v, 1) + tl.load(p_more + o_r)
            b_dbeta /= tl.where(size < LEAST, LEAST, b_beta)
            p_dbeta = dbeta + (at.token + o_r) * HV + i_h
            tl.store(p_dbeta, b_dbeta.to(dbeta.dtype.element_ty), mask=m_small)
        p_dv = dv + (at.token * HV + i_h) * D + o_r[:, None] * (HV * D) + o_d[None, :]
        b_dv = b_z * (b_beta * (1.0 / LEAST))[:, None]
        tl.store(p_dv, b_dv.to(dv.dtype.element_ty), mask=m_x & (size < LEAST)[:, None])


@triton.jit(do_not_specialize=["N", "T", "HV", "g_b", "g_t", "g_h"])
def finish_walk(
    sums,
    tails,
    factors,
    gamma,
    v,
    g,
    g_b,
    g_t,
    g_h,
    gate,
    cu_seqlens,
    grads,
    dv,
    N,
    T,
    HV,
    flags,
    D: tl.constexpr,
    TILED: tl.constexpr,
    GIVEN: tl.constexpr,
    GROUPED: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Finish dg, dbeta and dv of one chunk and value head, from what `reverse_walk_gdn` left::

        dg    = sum of dG over a row and the rows after it, plus for the whole chunk
                sum k r_1 (v_new dS^T) + gamma sum S dS; then through the gate   [64]
        dbeta = (1 - beta) sum_v z v_new, for the logit of a sigmoid;
                sum_v z v_new / beta, if GIVEN and beta >= SMALL;
                sum_v z v + sum_k k part / beta, if GIVEN and beta < SMALL       [64]
        dv    = beta z, if TILED, or if GIVEN and beta < LEAST                   [64, V]

    Names are those of `reverse_walk_gdn`. With NEG_EIGVAL, 1 - beta / 2 replaces 1 - beta. If
    GIVEN, rows of dv and v are loaded only where beta < SMALL. A last chunk with fewer than 64
    tokens takes its dq, dk and dv from `tails`. Tokens of no sequence get zeros.
    """
    i_h, i_t, i_tile = tl.program_id(0) % HV, tl.program_id(0) // HV, tl.program_id(0).to(tl.int64)
    at = locate(cu_seqlens, i_t, N, T)
    n_rows, row = at.n_rows, at.token * HV + i_h
    o_r, o_d = tl.arange(0, CHUNK), tl.arange(0, D)
    if (n_rows <= 0) | (at.live == 0):
        copy_rows(grads.dq, row, HV, None, n_rows, D)
        copy_rows(grads.dk, row, HV, None, n_rows, D)
        copy_rows(dv, row, HV, None, n_rows, D)
        clear_columns(grads, at, i_h, HV, i_tile)
    else:
        p_sum = sums + i_tile * SUMS
        b_beta = tl.load(factors + (i_tile * COUNT_GDN + BETA) * CHUNK + o_r)
        p_z, z_s = dv + row * D, HV * D
        if n_rows < CHUNK:
            i_n = at.i_b
            if cu_seqlens is not None:
                i_n = find_sequence(cu_seqlens, i_t, N + 1).to(tl.int64)
            p_z, z_s = tails + (i_n * HV + i_h) * ((1 if GROUPED else 3) * CHUNK * D), D
            if not GROUPED:
                copy_rows(grads.dq, row, HV, p_z, n_rows, D)
                copy_rows(grads.dk, row, HV, p_z + CHUNK * D, n_rows, D)
                p_z += 2 * CHUNK * D
            if not TILED:
                copy_rows(dv, row, HV, p_z, n_rows, D)
        if TILED:
            m_z = (o_r < n_rows)[:, None]
            b_z = tl.load(p_z + o_r[:, None] * z_s + o_d[None, :], mask=m_z, other=0.0)
            write_rows(dv, at, i_h, HV, b_z.to(tl.float32) * b_beta[:, None], o_d, D)
        if GIVEN:
            p_beta, p_more = factors + (i_tile * COUNT_GDN + BETA) * CHUNK, p_sum + SUM_PART
            finish_small(p_beta, p_more, p_z, z_s, v, dv, grads.dbeta, at, i_h, HV, D, LEAST)
        if grads.dbeta is not None:
            b_sum = tl.load(p_sum + SUM_STRENGTH + o_r)
            if GIVEN:
                p_dbeta = grads.dbeta + (at.token + o_r) * HV + i_h
                m_r = (o_r < n_rows) & (tl.abs(b_beta) >= SMALL)
                b_dbeta = b_sum / (b_beta * b_beta)
                tl.store(p_dbeta, b_dbeta.to(grads.dbeta.dtype.element_ty), mask=m_r)
            else:
                if not TILED:
                    b_sum *= reciprocal(b_beta)
                b_dbeta = strength_gradient(b_sum, b_beta, flags.NEG_EIGVAL)
                write_column(grads.dbeta, at, i_h, HV, b_dbeta)
        if grads.dg is not None:
            o_s = tl.arange(0, 2 * CHUNK)
            # but the last token's, which is not in dG either
            m_s = o_s < 2 * (n_rows - 1)
            b_total = tl.sum(tl.load(p_sum + SUM_LATE + o_s, mask=m_s, other=0.0), 0)
            b_total += tl.load(gamma + i_tile) * tl.sum(tl.load(p_sum + SUM_STATE + o_s), 0)
            b_dg = tl.cumsum(tl.load(p_sum + SUM_DG + o_r), 0, reverse=True) + b_total
            logits = Strided(g, (g_b, g_t, g_h))
            write_logits(grads, logits, gate, at, i_h, HV, i_tile, b_dg)


def reverse_walk(
    p: Problem,
    tile: Tile,
    trace: Trace | None,
    do: Tensor,
    dfinal_state: Tensor | None,
    need: frozenset[str],
) -> Gradients:
    """Return the gradients; see `kda_ops.stages.Backend.reverse_walk`."""
    assert KERNEL is not None  # as `walks` has checked
    q, device, tiles = p.q, p.q.device, count_chunks(p) * p.HV
    given, grouped = p.beta is not None and not p.sigmoid_beta, p.HV > p.H
    tiled = reads_z(p) and not given  # given: `finish_small` serves a small beta
    run = tuning.walk_run_length(p)
    form = Form(*map(tl.constexpr, (tiled, given, grouped, p.l2norm, run)))
    dv = new(q, "dv", p.v.shape)
    if grouped:  # fp32, because value heads add up
        shape = (p.B, p.T, p.HV, p.K)
        dq, dk = (new(q, f"{name}_heads", shape, torch.float32) for name in ("dq", "dk"))
    else:
        dq, dk = (new(q, name, q.shape) for name in ("dq", "dk"))
    # `prepare` always makes them
    assert tile.A is not None and tile.P is not None and tile.factors is not None
    sums = tile.P.view(torch.float32)  # the walk has read the P of a chunk when it writes there

    # rows of dv alone if grouped, because dq and dk are sums then; else of dq, dk and dv
    ends = (p.N * p.HV * (1 if grouped else 3) * LENGTH, p.V)
    tails = new(q, "tails", ends)
    dinitial = None
    if "initial_state" in need:
        wide = (p.V, p.K) if p.transposed else (p.K, p.V)
        dinitial = as_kv(p, new(q, "dinitial_state", (p.N, p.HV, *wide), torch.float32))
    dfinal = None if dfinal_state is None or dfinal_state.dim() == 1 else as_kv(p, dfinal_state)
    if run and trace is None:
        # both are independent, and with few heads the scan leaves room for the maps
        with overlap_scans(p) as on_side_stream:
            with on_side_stream:
                trace = scan(p, tile, None, None, keep=True)
            dfinal = enter_runs(p, tile, Runs(p, run), do, dfinal)
    elif run:
        dfinal = enter_runs(p, tile, Runs(p, run), do, dfinal)
    elif trace is None:
        trace = scan(p, tile, None, None, keep=True)
    assert trace is not None  # keep=True returns one
    launch(
        KERNEL.reverse_walk_gdn,
        tuning.pieces(p, run) * p.HV,
        device,
        q_d=tokens(p, q),
        k_d=tokens(p, p.k),
        do_d=tokens(p, do),
        vn_d=copied(trace.v_new, (tiles * LENGTH, p.V), (p.V, 1), (LENGTH, p.V)),
        S_d=copied(trace.states, (tiles * p.K, p.V), (p.V, 1), (p.K, p.V)),
        A_d=copied(tile.A, (tiles * LENGTH, LENGTH), (LENGTH, 1), (LENGTH, LENGTH)),
        P_d=copied(tile.P, (tiles * LENGTH, LENGTH), (LENGTH, 1), (LENGTH, LENGTH)),
        r_d=copied(tile.factors, (tiles * FACTORS,), (1,), (LENGTH,)),
        gamma=tile.gamma,
        dfinal=strided(dfinal),
        cu_seqlens=dense(p.cu_seqlens),
        dq=dq if grouped else tokens(p, dq),
        dk=dk if grouped else tokens(p, dk),
        dv_d=tokens(p, dv),
        tails_d=copied(tails, ends, (p.V, 1), (LENGTH, p.V)),
        sums=sums,
        dinitial=strided(dinitial),
        sequences=p.N if run and p.cu_seqlens is not None else None,
        T=p.T,
        H=p.H,
        HV=p.HV,
        q_h=strides_of(q)[2],
        k_h=strides_of(p.k)[2],
        do_h=strides_of(do)[2],
        scale=p.scale,
        form=form,
        num_warps=8,
    )
    g, dbeta = fit(p.g), gradient_like(p, "beta", need)
    dg = gradient_like(p, "g", need | {"g"}) if need & GATES else None
    dA_log, ddt_bias = parts_of(p, "A_log", 1, need), parts_of(p, "dt_bias", 1, need)
    g_b, g_t, g_h = columns_of(g)
    launch(
        finish_walk,
        visited_chunks(p) * p.HV,
        device,
        sums=sums,
        tails=tails,
        factors=tile.factors,
        gamma=tile.gamma,
        v=strided(fit(p.v)),
        g=g,
        g_b=g_b,
        g_t=g_t,
        g_h=g_h,
        gate=gate_of(p),
        cu_seqlens=dense(p.cu_seqlens),
        grads=HeadGradients(dq, dk, None, None, dg, dbeta, dA_log, ddt_bias),
        dv=dv,
        N=p.N,
        T=p.T,
        HV=p.HV,
        flags=flags_of(p),
        D=p.V,
        TILED=tiled,
        GIVEN=given,
        GROUPED=grouped,
        LEAST=KERNEL.LEAST.value,
        num_warps=4,
    )
    if grouped:
        dq, dk = gather_gradient(p, "q", q, dq), gather_gradient(p, "k", p.k, dk)
    grads = gradients_of(p, need, dq, dk, dg, dbeta, dA_log, ddt_bias)
    grads.v, grads.initial_state = dv, None if dinitial is None else as_kv(p, dinitial)
    return grads
