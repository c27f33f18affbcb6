"""Form the gradients of GDN: one chunk and all value heads of a key head per program.

E_ij is the decay from row j to row i, and o multiplies entry by entry. The inverse norms of q and k
are n_q and n_k. The factors of GDN are r_0 to r_6 (`operands`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kda_ops.backends.triton.device.activations import reciprocal
from kda_ops.backends.triton.device.gate import GIVEN, load_bias, load_rate, through_gate
from kda_ops.backends.triton.device.gradient_chunk import (
    locate,
    read_back,
    read_rows,
    write_column,
    write_rows,
)
from kda_ops.backends.triton.device.gradient_products import (
    FULL,
    Head,
    QueryKey,
    SumsOverK,
    key_gradient,
    load_row_decays,
    load_row_factors,
    pair_sums,
    query_gradient,
    read_value_rows,
    score_gradients,
)
from kda_ops.backends.triton.device.operands import COUNT_GDN, NORM_K, NORM_Q, Strided
from kda_ops.backends.triton.device.tile import CHUNK, add_two, load_column, prefetch_tile
from kda_ops.backends.triton.stages.gradient_pairs import strength_gradient


class HeadGradients(NamedTuple):
    """Where gradients go; each may be absent."""

    dq: Any  # [B T, H, K]
    dk: Any  # [B T, H, K]
    # the same in fp32, where slices of K or value heads add up
    dq_sum: Any
    dk_sum: Any
    dg: Any  # [B T, HV]
    dbeta: Any  # [B T, HV]
    # [NT, HV] fp32, the shares of a chunk
    dA_log: Any
    ddt_bias: Any


@triton.jit
def without_radial(b_dy, b_x, b_r, b_along, K: tl.constexpr, L2NORM: tl.constexpr):
    """Return dx = dy - r^2 x (x . dy) [64, width], from r = 1 / |x| and x . dy, [64] each.

    That is the gradient of x through the norm y = r x, where dy already has the factor r. With one
    channel dx = dy (1 - y^2). There 1e-6 r^2 replaces 1 - y^2, which rounding would lose.
    """
    if L2NORM and K == 1:
        b_dy *= (1e-6 * b_r * b_r)[:, None]
    elif L2NORM:
        b_dy -= b_x * (b_r * b_r * b_along)[:, None]
    return b_dy


@triton.jit
def write_strength(
    dbeta, head, scores, factors, sums, TILED: tl.constexpr, SUMS: tl.constexpr, flags
):
    """Write dbeta [64]: the gradient of a given beta if SUMS, else of the logit of a sigmoid."""
    if SUMS:
        b_dbeta = scores.zv + sums.k_part / factors.digits
    else:
        b_zvn = scores.zv_new
        if not TILED:
            b_zvn *= reciprocal(factors.strength)
        b_dbeta = strength_gradient(b_zvn, factors.strength, flags.NEG_EIGVAL)
    write_column(dbeta, head.at, head.i_h, head.HV, b_dbeta)


@triton.jit
def write_decay(grads, g, gate, gamma, head, sums, b_power):
    """Write dg [64]: the sum of dG from a row on, plus what all rows share, through the gate.

    All rows share the sum over rows of k . r_1 (v_new dS^T), and gamma times the sum of S dS. The
    last token of a chunk decays before no other of its tokens, so its k . rest counts for no row.
    """
    at, i_h, HV = head.at, head.i_h, head.HV
    b_gamma = tl.load(gamma + head.i_tile)
    m_r = tl.arange(0, CHUNK) < at.n_rows - 1
    b_dG = sums.q_dq + sums.k_part * b_power - tl.where(m_r, sums.k_rest, 0.0)
    b_late = tl.sum(tl.where(m_r, sums.k_late, 0.0), 0)
    b_dg = tl.cumsum(b_dG, 0, reverse=True) + (b_late + b_gamma * sums.S_dS)
    write_logits(grads, g, gate, at, i_h, HV, head.i_tile, b_dg)


@triton.jit
def write_logits(grads, g, gate, at, i_h, HV, i_tile, b_dg):
    """Write dg [64], through the gate if g are logits, and shares of dA_log and ddt_bias."""
    o_r = tl.arange(0, CHUNK)
    if gate.kind != GIVEN:
        b_x = load_column(g.pointer, g.strides, at.i_b, i_h, at.first, at.n_rows, o_r)
        bias, rate = load_bias(gate, i_h), load_rate(gate, i_h)
        b_dg, b_log = through_gate(b_dg, b_x + bias, rate, gate)
        m_r = o_r < at.n_rows
        b_log, b_bias = tl.reduce((tl.where(m_r, b_log, 0.0), tl.where(m_r, b_dg, 0.0)), 0, add_two)
        if grads.dA_log is not None:
            tl.store(grads.dA_log + i_tile, b_log)
        if grads.ddt_bias is not None:
            tl.store(grads.ddt_bias + i_tile, b_bias)
    write_column(grads.dg, at, i_h, HV, b_dg)


@triton.jit
def clear_heads(grads, at, i_t, i_g, H, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Write zeros to the gradients of a chunk that is no part of a sequence."""
    if grads.dq is not None:
        for i in range((K + BK - 1) // BK):
            o_k = i * BK + tl.arange(0, BK)
            write_rows(grads.dq, at, i_g, H, tl.zeros((CHUNK, BK), tl.float32), o_k, K)
            write_rows(grads.dk, at, i_g, H, tl.zeros((CHUNK, BK), tl.float32), o_k, K)
    for i in range(GROUP):
        i_h, HV = i_g * GROUP + i, H * GROUP
        clear_columns(grads, at, i_h, HV, i_t.to(tl.int64) * HV + i_h)


@triton.jit
def clear_columns(grads, at, i_h, HV, i_tile):
    """Write zeros to the gradients of g, beta and the gate's weights of such a chunk, one head."""
    b_zero = tl.zeros((CHUNK,), tl.float32)
    if grads.dg is not None:
        write_column(grads.dg, at, i_h, HV, b_zero)
    if grads.dbeta is not None:
        write_column(grads.dbeta, at, i_h, HV, b_zero)
    if grads.dA_log is not None:
        tl.store(grads.dA_log + i_tile, 0.0)
    if grads.ddt_bias is not None:
        tl.store(grads.ddt_bias + i_tile, 0.0)


@triton.jit
def add_up(x_sum, at, i_g, H, i_head, b_dx, o_k, K: tl.constexpr):
    """Return b_dx plus the sum over earlier value heads; store it. Without x_sum, return b_dx."""
    if x_sum is not None:
        if i_head > 0:
            b_dx += read_back(x_sum, at, i_g, H, o_k, K)
        write_rows(x_sum, at, i_g, H, b_dx, o_k, K)
    return b_dx


@triton.jit
def write_sums(
    grads,
    q,
    k,
    at,
    i_g,
    H,
    p_row,
    b_along_q,
    b_along_k,
    K: tl.constexpr,
    BK: tl.constexpr,
    L2NORM: tl.constexpr,
):
    """Write dq and dk [64, K] from their sums over value heads, through the norm."""
    for i in tl.range((K + BK - 1) // BK, num_stages=1):
        o_k = i * BK + tl.arange(0, BK)
        b_q, b_k = read_rows(q, at, i_g, o_k, K), read_rows(k, at, i_g, o_k, K)
        b_dq = read_back(grads.dq_sum, at, i_g, H, o_k, K)
        b_dk = read_back(grads.dk_sum, at, i_g, H, o_k, K)
        b_r = tl.load(p_row + NORM_Q * CHUNK)
        b_dq = without_radial(b_dq, b_q.to(tl.float32), b_r, b_along_q, K, L2NORM)
        write_rows(grads.dq, at, i_g, H, b_dq, o_k, K)
        b_r = tl.load(p_row + NORM_K * CHUNK)
        b_dk = without_radial(b_dk, b_k.to(tl.float32), b_r, b_along_k, K, L2NORM)
        write_rows(grads.dk, at, i_g, H, b_dk, o_k, K)


@triton.jit(do_not_specialize=["N", "T", "scale", "g_b", "g_t", "g_h"])
def gradient_gdn(
    q,
    k,
    v,
    g,
    g_b,
    g_t,
    g_h,
    gate,
    factors,
    gamma,
    do,
    kept,
    cu_seqlens,
    grads,
    N,
    T,
    H,
    scale,
    flags,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    TILED: tl.constexpr,
    EXACT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Form dq, dk, dg and dbeta of one chunk and the GROUP value heads of one key head::

        d    = scale n_q n_k sum_v do v_new                                   [64]
        M    = scale strict_tril(n_q n_k do v_new^T o E)                      [64, 64]
        N    = -beta strict_tril(n_k n_k z v_new^T o E)                       [64, 64]
        into = r_3 (do S^T) + M k;           dq = into + d k                  [64, K]
        part = N k - r_0 beta (z S^T)                                         [64, K]
        rest = r_1 (v_new dS^T) + N^T k + M^T q                               [64, K]
        dk   = part + rest + d q
        dG   = q . into + k . part - k . rest                                 [64]
        dg   = sum of dG over a row and the rows after it, plus for the whole chunk
               sum k . r_1 (v_new dS^T) + gamma sum S dS; then through the gate    [64]
        dbeta = sum_v z v_new / beta for a sigmoid, else sum_v z v + (k . part) / beta

    The module's docstring defines the letters; . is a sum over K. `kept.z` is z if TILED, else dv =
    beta z, and then beta is one except in dbeta. A given beta may be zero. So it is digits times a
    power of two: N and part take the digits, the sums over K the power.

    Norms, decays and beta are factors of rows and of the [64, 64] tiles. So q and k go from memory
    to the tensor cores as they are. With L2NORM, dq and dk are taken through the norm, which needs
    q . dq and k . dk anyway. In both, the part of d is q . d k.
    What pairs of rows add to dG cancels over a chunk: q . M k and k . M^T q use the same rounded M,
    and N likewise. In fp32, `pair_sums` takes these sums.

    Two terms do not decay: the pair of a row with itself, d, and r_1 (v_new dS^T) of the last
    token. In dG they would cancel, and their rounding may exceed all terms that decay. So dG has
    neither (`write_decay`).

    Four phases (M^T and N^T; M and N; dk; dq) keep few tiles in registers. Two programs of 4 warps
    share a multiprocessor. Its shared memory holds five tiles of rows and one state for each, so S
    is loaded twice. Slices of K and value heads add up in dq_sum and dk_sum.
    """
    i_g, i_t = tl.program_id(0) % H, tl.program_id(0) // H
    at = locate(cu_seqlens, i_t, N, T)
    slices: tl.constexpr = (K + BK - 1) // BK
    o_r, HV = tl.arange(0, CHUNK), H * GROUP
    if (at.n_rows <= 0) | (at.live == 0):
        clear_heads(grads, at, i_t, i_g, H, GROUP, K, BK)
        return
    SUMS: tl.constexpr = grads.dbeta is not None and not flags.SIGMOID
    b_zero = tl.zeros((CHUNK,), tl.float32)
    b_along_q, b_along_k = b_zero, b_zero  # q . dq and k . dk, over all value heads
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    x = QueryKey(read_rows(q, at, i_g, o_k, K), read_rows(k, at, i_g, o_k, K))
    for i_head in tl.range(GROUP, num_stages=1):
        i_h = i_g * GROUP + i_head
        i_tile = i_t.to(tl.int64) * HV + i_h
        head = Head(at, i_h, HV, i_tile, do, kept)
        p_row = factors + i_tile * (COUNT_GDN * CHUNK) + o_r
        sums = SumsOverK(b_zero, b_zero, b_zero, b_zero, b_zero, 0.0)
        prefetch_tile(kept.states, i_tile, K * V)
        prefetch_tile(kept.dstates, i_tile, K * V)
        sources = read_value_rows(head, o_v, V, TILED)
        by_row = load_row_factors(p_row, TILED)
        scores = score_gradients(v, sources, by_row, head, scale, V, BV, TILED, SUMS, EXACT, PREC)
        if PREC == FULL:
            sums = pair_sums(x, q, k, head, scores, by_row, i_g, K, BK, PREC)
        if T > 0:  # always true: its own basic block keeps loads from moving up
            decays = load_row_decays(p_row)
            for i in tl.range(slices, num_stages=1):
                if slices > 1:
                    o_k = i * BK + tl.arange(0, BK)
                    x = QueryKey(read_rows(q, at, i_g, o_k, K), read_rows(k, at, i_g, o_k, K))
                b_x, b_dk, b_part, b_S, sums = key_gradient(
                    x, head, sources, scores, sums, by_row, decays, o_k, K, V, BV, TILED, PREC
                )
                if grads.dq is not None:
                    b_dk += b_part * by_row.power[:, None]
                    b_along = sums.k_rest + sums.k_part * by_row.power + sums.own
                    b_dk = add_up(grads.dk_sum, at, i_g, H, i_head, b_dk, o_k, K)
                    if grads.dk_sum is None:
                        b_dk = without_radial(b_dk, b_x, by_row.k_norm, b_along, K, flags.L2NORM)
                        write_rows(grads.dk, at, i_g, H, b_dk, o_k, K)
                b_x, b_dq, sums = query_gradient(
                    x, b_S, head, sources, scores, sums, decays, o_k, K, V, BV, PREC
                )
                if grads.dq is not None:
                    b_dq = add_up(grads.dq_sum, at, i_g, H, i_head, b_dq, o_k, K)
                    if grads.dq_sum is None:
                        b_along = sums.q_dq + sums.own
                        b_dq = without_radial(b_dq, b_x, by_row.q_norm, b_along, K, flags.L2NORM)
                        write_rows(grads.dq, at, i_g, H, b_dq, o_k, K)
        if grads.dq_sum is not None:
            b_along_q += sums.q_dq + sums.own
            b_along_k += sums.k_rest + sums.k_part * by_row.power + sums.own
        if grads.dbeta is not None:
            write_strength(grads.dbeta, head, scores, by_row, sums, TILED, SUMS, flags)
        if grads.dg is not None:
            logits = Strided(g, (g_b, g_t, g_h))
            write_decay(grads, logits, gate, gamma, head, sums, by_row.power)
    if grads.dq_sum is not None:
        tl.debug_barrier()  # written by other threads
        p_row = factors + (i_t.to(tl.int64) * H + i_g) * (GROUP * COUNT_GDN * CHUNK) + o_r
        write_sums(grads, q, k, at, i_g, H, p_row, b_along_q, b_along_k, K, BK, flags.L2NORM)
