"""Gradients of GDN: one chunk, and all value heads of a key head, per program.

E_ij is the decay from row j to row i, n_q and n_k are inverse norms of q and k, and r_0, r_1, r_3
are the rows FROM_START_K, TO_END_K and FROM_START_Q of `prepare_gdn` (`operands`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kda_ops.backends.triton.decay import pair_decay, pair_decay_transposed
from kda_ops.backends.triton.gate import load_rate, reciprocal
from kda_ops.backends.triton.gradient_chunk import (
    load_state,
    locate,
    read_back,
    read_rows,
    read_values,
    through_gate,
    write_column,
    write_rows,
)
from kda_ops.backends.triton.gradient_pairs import strength_gradient
from kda_ops.backends.triton.operands import (
    BETA,
    COUNT_GDN,
    FROM_START_K,
    FROM_START_Q,
    LOG_DECAY,
    NORM_K,
    NORM_Q,
    TO_END_K,
)
from kda_ops.backends.triton.tile import CHUNK, add_two, load_column, load_tile, prefetch_tile


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
def write_logits(grads, b_x, gate, lower_bound, at, i_h, HV, i_tile, b_dg, flags):
    """Write dg [64], through the gate if b_x are logits, and shares of dA_log and ddt_bias."""
    o_r = tl.arange(0, CHUNK)
    if flags.ACTIVATE:
        bias = 0.0
        if gate.dt_bias is not None:
            bias = tl.load(gate.dt_bias + i_h).to(tl.float32)
        rate, bound = load_rate(gate.A_log, i_h), tl.full((), lower_bound, tl.float32)
        b_dg, b_log = through_gate(b_dg, b_x + bias, rate, bound, flags.BOUNDED)
        m_r = o_r < at.n_rows
        b_log, b_bias = tl.reduce((tl.where(m_r, b_log, 0.0), tl.where(m_r, b_dg, 0.0)), 0, add_two)
        if grads.dA_log is not None:
            tl.store(grads.dA_log + i_tile, b_log)
        if grads.ddt_bias is not None:
            tl.store(grads.ddt_bias + i_tile, b_bias)
    write_column(grads.dg, at, i_h, HV, b_dg)


@triton.jit
def clear(grads, at, i_t, i_g, H, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
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
        b_q, b_r = b_q.to(tl.float32), tl.load(p_row + NORM_Q * CHUNK)
        b_dq = without_radial(b_dq, b_q, b_r, b_along_q, K, L2NORM)
        write_rows(grads.dq, at, i_g, H, b_dq, o_k, K)
        b_k, b_r = b_k.to(tl.float32), tl.load(p_row + NORM_K * CHUNK)
        b_dk = without_radial(b_dk, b_k, b_r, b_along_k, K, L2NORM)
        write_rows(grads.dk, at, i_g, H, b_dk, o_k, K)


@triton.jit(do_not_specialize=["N", "T", "scale", "lower_bound", "g_b", "g_t", "g_h"])
def gradient_gdn(
    q,
    k,
    v,
    g,
    g_b,
    g_t,
    g_h,
    gate,
    rows,
    gamma,
    do,
    kept,
    cu_seqlens,
    grads,
    N,
    T,
    H,
    scale,
    lower_bound,
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

        M  = scale tril(n_q n_k do v_new^T o E)                                  [64, 64]
        N  = -strict_tril(n_k n_k z v_new^T o E)                                 [64, 64]
        dq = r_3 (do S^T) + M k                                                  [64, K]
        dk = r_1 (v_new dS^T) - r_0 beta (z S^T) + (beta N + N^T beta) k + M^T q    [64, K]
        W  = strict_tril(M o q k^T + beta N o k k^T)                             [64, 64]
        dG = q . r_3 (do S^T) - k . (r_0 beta (z S^T) + r_1 (v_new dS^T))
             + rows of W - columns of W                                          [64]
        dg = sum of dG over a row and the rows after it, plus for the whole chunk
             sum k . r_1 (v_new dS^T) + gamma sum S dS; then through the gate    [64]
        dbeta = sum_v z v_new / beta for a sigmoid, else sum_v z v + k . dk's share of beta

    . is a sum over K. `kept.z` is z if TILED, else dv = beta z, and then beta is one except in
    dbeta.

    Norms, decays and beta are factors of rows and of the [64, 64] tiles. So q and k go from memory
    to the tensor cores as they are, and dq and dk leave through the norm. What pairs of rows add to
    dG cancels over a chunk, because rows and columns are sums of one fp32 matrix. The norm needs
    q . dq and k . dk, which are sums that dG has anyway, and the diagonal of W.

    The phases (what V alone makes, dk, dq) keep few tiles in registers. Two programs of four warps
    share a multiprocessor. Its shared memory holds five tiles of rows and one state for each, so S
    is loaded twice. Slices of K and value heads add up in dq_sum and dk_sum.
    """
    i_g, i_t = tl.program_id(0) % H, tl.program_id(0) // H
    at = locate(cu_seqlens, i_t, N, T)
    slices: tl.constexpr = (K + BK - 1) // BK
    o_r, HV = tl.arange(0, CHUNK), H * GROUP
    if (at.n_rows <= 0) | (at.live == 0):
        clear(grads, at, i_t, i_g, H, GROUP, K, BK)
        return
    TYPE: tl.constexpr = kept.states.dtype.element_ty
    SUMS: tl.constexpr = grads.dbeta is not None and not flags.SIGMOID
    HELD: tl.constexpr = grads.dq_sum is None
    values: tl.constexpr = (V + BV - 1) // BV
    lower, diagonal = o_r[:, None] > o_r[None, :], o_r[:, None] == o_r[None, :]
    b_zero = tl.zeros((CHUNK,), tl.float32)
    b_square, b_wide = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, BK), tl.float32)
    b_along_q, b_along_k = b_zero, b_zero
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_q, b_k = read_rows(q, at, i_g, o_k, K), read_rows(k, at, i_g, o_k, K)
    for i_head in tl.range(GROUP, num_stages=1):
        i_h = i_g * GROUP + i_head
        i_tile = i_t.to(tl.int64) * HV + i_h
        p_row = rows + i_tile * (COUNT_GDN * CHUNK) + o_r
        b_in_q, b_in_k, b_in_late, b_zv = b_zero, b_zero, b_zero, b_zero
        both = 0.0
        prefetch_tile(kept.states, i_tile, K * V)
        prefetch_tile(kept.dstates, i_tile, K * V)
        b_vn = load_tile(kept.v_new, i_tile, o_r, o_v, V)
        b_z = read_values(kept.z, at, i_tile, i_h, HV, o_v, V, TILED)
        b_do = None
        if do.pointer is not None:
            b_do = read_rows(do, at, i_h, o_v, V)
        b_strength = tl.load(p_row + BETA * CHUNK)
        b_k_norm, b_q_norm = tl.load(p_row + NORM_K * CHUNK), tl.load(p_row + NORM_Q * CHUNK)
        b_decay = tl.load(p_row + LOG_DECAY * CHUNK)
        b_start, b_end = tl.load(p_row + FROM_START_K * CHUNK), tl.load(p_row + TO_END_K * CHUNK)
        b_read, b_logit = tl.load(p_row + FROM_START_Q * CHUNK), b_zero
        gamma_here = tl.load(gamma + i_tile)
        b_beta = b_strength if TILED else tl.full((CHUNK,), 1.0, tl.float32)
        if flags.ACTIVATE:
            b_logit = load_column(g, (g_b, g_t, g_h), at.i_b, i_h, at.first, at.n_rows, o_r)
        b_P, b_PT, b_L, b_LT, b_qk, b_kk = (
            b_square,
            b_square,
            b_square,
            b_square,
            b_square,
            b_square,
        )
        for j in tl.range(values, num_stages=1):
            if values > 1:
                o_v = j * BV + tl.arange(0, BV)
                b_vn = load_tile(kept.v_new, i_tile, o_r, o_v, V)
                b_z = read_values(kept.z, at, i_tile, i_h, HV, o_v, V, TILED)
                if do.pointer is not None:
                    b_do = read_rows(do, at, i_h, o_v, V)
            if SUMS:
                b_v = read_rows(v, at, i_h, o_v, V).to(tl.float32)
                b_zv += tl.sum(b_v * b_z.to(tl.float32), 1)
            if do.pointer is not None:
                b_PT = tl.dot(b_vn, tl.trans(b_do), b_PT, input_precision=PREC)
                b_P = tl.dot(b_do, tl.trans(b_vn), b_P, input_precision=PREC)
            b_LT = tl.dot(b_vn, tl.trans(b_z), b_LT, input_precision=PREC)
            b_L = tl.dot(b_z, tl.trans(b_vn), b_L, input_precision=PREC)
        b_E = pair_decay_transposed(b_decay, EXACT) * b_k_norm[:, None]
        b_PT = (b_PT * b_E * (b_q_norm * scale)[None, :]).to(TYPE)
        b_LT = b_LT * b_E * (b_k_norm * b_beta)[None, :]
        b_E = pair_decay(b_decay, EXACT) * b_k_norm[None, :]
        for i in tl.range(slices, num_stages=1):
            if slices > 1:
                o_k = i * BK + tl.arange(0, BK)
                b_q, b_k = read_rows(q, at, i_g, o_k, K), read_rows(k, at, i_g, o_k, K)
            b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=PREC)
            b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision=PREC)
        b_P = b_P * b_E * (b_q_norm * scale)[:, None]
        b_W = b_qk * b_P
        b_own, b_zvn = tl.reduce(
            (tl.where(diagonal, b_W, 0.0), tl.where(diagonal, b_L, 0.0)), 1, add_two
        )
        b_W = tl.where(lower, b_W, 0.0)
        b_L = tl.where(lower, b_L * b_E * -b_k_norm[:, None], 0.0)
        b_WL = b_kk * b_L
        b_row_q, b_row_k = tl.reduce((b_W, b_WL), 1, add_two)
        b_column = tl.sum(b_W + b_WL * b_beta[:, None], 0)
        b_L = tl.where(lower, b_L * b_beta[:, None], tl.where(diagonal, 0.0, -b_LT)).to(TYPE)
        b_P = b_P.to(TYPE)
        # The identity depends on a product, so that the compiler keeps it in registers. Then
        # `eye @ k` brings k from shared memory into registers.
        b_eye = tl.where(diagonal | (b_kk < -float("inf")), 1.0, 0.0).to(TYPE)

        for i in tl.range(slices, num_stages=1):
            if slices > 1:
                o_k = i * BK + tl.arange(0, BK)
                b_q, b_k = read_rows(q, at, i_g, o_k, K), read_rows(k, at, i_g, o_k, K)
            b_late, b_early, b_dq = b_wide, b_wide, b_wide
            for j in tl.range(values, num_stages=1):
                if values > 1:
                    o_v = j * BV + tl.arange(0, BV)
                    b_vn = load_tile(kept.v_new, i_tile, o_r, o_v, V)
                b_S = load_state(kept.states, i_tile, o_k, o_v, K, V)
                b_dS = load_state(kept.dstates, i_tile, o_k, o_v, K, V)
                both += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32))
                b_late = tl.dot(b_vn, tl.trans(b_dS), b_late, input_precision=PREC)
            # S is loaded again: held, it would take registers while dS is used
            tl.debug_barrier()
            b_x = tl.dot(b_eye, b_k, input_precision=PREC)
            b_in_late += tl.sum(b_x * b_late, 1)
            b_dk = b_late * b_end[:, None]
            if grads.dq is not None:
                b_dk = tl.dot(b_L, b_k, b_dk, input_precision=PREC)
                b_dk = tl.dot(b_PT, b_q, b_dk, input_precision=PREC)
            b_S = load_state(kept.states, i_tile, o_k, o_v, K, V)
            for j in tl.range(values, num_stages=1):
                if values > 1:
                    o_v = j * BV + tl.arange(0, BV)
                    b_z = read_values(kept.z, at, i_tile, i_h, HV, o_v, V, TILED)
                    b_S = load_state(kept.states, i_tile, o_k, o_v, K, V)
                b_early = tl.dot(b_z, tl.trans(b_S), b_early, input_precision=PREC)
            b_in_k += tl.sum(b_x * b_early, 1)
            if grads.dq is not None:
                b_dk -= b_early * (b_start * b_beta)[:, None]
                if HELD:
                    b_along_k = (
                        b_in_late * b_end + (b_row_k - b_in_k * b_start) * b_beta + b_column + b_own
                    )
                    b_dk = without_radial(b_dk, b_x, b_k_norm, b_along_k, K, flags.L2NORM)
                    write_rows(grads.dk, at, i_g, H, b_dk, o_k, K)
                else:
                    if i_head > 0:
                        b_dk += read_back(grads.dk_sum, at, i_g, H, o_k, K)
                    write_rows(grads.dk_sum, at, i_g, H, b_dk, o_k, K)
            b_x = tl.dot(b_eye, b_q, input_precision=PREC)
            if do.pointer is not None:
                for j in tl.range(values, num_stages=1):
                    if values > 1:
                        o_v = j * BV + tl.arange(0, BV)
                        b_do = read_rows(do, at, i_h, o_v, V)
                        b_S = load_state(kept.states, i_tile, o_k, o_v, K, V)
                    b_dq = tl.dot(b_do, tl.trans(b_S), b_dq, input_precision=PREC)
                b_in_q += tl.sum(b_x * b_dq, 1)
            if grads.dq is not None:
                b_dq = tl.dot(b_P, b_k, b_dq * b_read[:, None], input_precision=PREC)
                if HELD:
                    b_along_q = b_in_q * b_read + b_row_q + b_own
                    b_dq = without_radial(b_dq, b_x, b_q_norm, b_along_q, K, flags.L2NORM)
                    write_rows(grads.dq, at, i_g, H, b_dq, o_k, K)
                else:
                    if i_head > 0:
                        b_dq += read_back(grads.dq_sum, at, i_g, H, o_k, K)
                    write_rows(grads.dq_sum, at, i_g, H, b_dq, o_k, K)
        b_in_q = b_in_q * b_read + b_row_q
        b_in_k, b_in_late = b_row_k - b_in_k * b_start, b_in_late * b_end
        if not HELD:
            b_along_q += b_in_q + b_own
            b_along_k += b_in_k * b_beta + b_in_late + b_column + b_own
        if grads.dbeta is not None:
            if not TILED:
                b_zvn *= reciprocal(b_strength)
            if SUMS:
                b_dbeta = b_zv + b_in_k
            else:
                b_dbeta = strength_gradient(b_zvn, b_strength, flags.NEG_EIGVAL)
            write_column(grads.dbeta, at, i_h, HV, b_dbeta)
        if grads.dg is not None:
            b_dG = b_in_q + b_in_k * b_beta - b_in_late - b_column
            b_dg = tl.cumsum(b_dG, 0, reverse=True) + (tl.sum(b_in_late, 0) + gamma_here * both)
            write_logits(grads, b_logit, gate, lower_bound, at, i_h, HV, i_tile, b_dg, flags)
    if not HELD:
        tl.debug_barrier()  # written by other threads
        p_row = rows + (i_t.to(tl.int64) * H + i_g) * (GROUP * COUNT_GDN * CHUNK) + o_r
        write_sums(grads, q, k, at, i_g, H, p_row, b_along_q, b_along_k, K, BK, flags.L2NORM)
