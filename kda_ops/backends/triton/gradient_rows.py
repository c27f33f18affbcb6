"""Everything of the gradients for one decay per head: one chunk, and all value heads of a key head,
per program.
"""

import triton
import triton.language as tl

from kda_ops.backends.triton.decay import pair_decay, pair_decay_transposed
from kda_ops.backends.triton.gate import load_rate, reciprocal
from kda_ops.backends.triton.gradient_pairs import strength_gradient
from kda_ops.backends.triton.gradient_tile import (
    clear_keys,
    gate_gradient,
    load_state,
    locate_rows,
    read_rows,
    read_values,
    write_column,
    write_rows,
)
from kda_ops.backends.triton.tile import add_two, load_column, load_tile, prefetch_tile


@triton.jit
def along(b_dx, b_x, b_r, b_along, K: tl.constexpr, L2NORM: tl.constexpr):
    """Through y = r x, r = 1 / |x|: dx - r^2 x (x . dx), for a dx that has its factor r, and x . dx
    [64].
    """
    if L2NORM and K == 1:
        b_dx *= (1e-6 * b_r * b_r)[:, None]
    elif L2NORM:
        b_dx -= b_x * (b_r * b_r * b_along)[:, None]
    return b_dx


@triton.jit(do_not_specialize=["N", "T", "scale", "lower_bound", "g_b", "g_t", "g_h"])
def gradient_rows(
    q,
    q_s,
    k,
    k_s,
    v,
    v_s,
    g,
    g_b,
    g_t,
    g_h,
    A_log,
    dt_bias,
    rows,
    gamma,
    do,
    do_s,
    states,
    v_new,
    dstates,
    z,
    cu_seqlens,
    dq,
    dk,
    dq_sum,
    dk_sum,
    dg,
    dbeta,
    dA_log,
    ddt_bias,
    N,
    T,
    H,
    scale,
    lower_bound,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    TILED: tl.constexpr,
    L2NORM: tl.constexpr,
    ACTIVATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    EXACT: tl.constexpr,
    PREC: tl.constexpr,
):
    """One chunk and the GROUP value heads of one key head; E_ij is the decay from row j to row i,
    n_q and n_k the norms, r the rows of `prepare_gdn`::

        dP = scale tril(n_q n_k do v_new^T o E)  dL = -strict_tril(n_k n_k z v_new^T o E)   [64, 64]
        dq = r_3 (do S^T) + dP k
        dk = r_1 (v_new dS^T) - r_0 beta (z S^T) + (beta dL + dL^T beta) k + dP^T q    [64, K]
        W  = strict_tril(dP o q k^T + beta dL o k k^T)
        dG = sum_k q r_3 (do S^T) - k (r_0 beta (z S^T) + r_1 (v_new dS^T))
             + rows of W - columns of W    [64]
        dbeta = sum_v z v_new / beta for a sigmoid, else sum_v z v + sum_k k dk's share of beta

    `z` is z if TILED; else it is dv = beta z, and beta is one but in dbeta.

    Norms, decays and beta are factors of rows and of the [64, 64] tiles, so that q and k go from
    memory to the tensor cores as they are, and dq and dk leave through the norm. What pairs of rows
    add to dG cancels in a sum over a chunk, and does so here too, for rows and columns are sums of
    one fp32 matrix. The norm needs q . dq and k . dk, which are sums that dG has anyway, and the
    diagonal of W.

    In phases, so that few tiles are alive: what V alone makes, then dk, then dq. Two programs of
    four warps share a multiprocessor, whose shared memory holds five tiles of rows and one state
    each: S is read twice. Where K takes several slices or a key head has several value heads, dq
    and dk add up in dq_sum and dk_sum, fp32.
    """
    i_g, i_t = tl.program_id(0) % H, tl.program_id(0) // H
    i_b, first, n_rows, live = locate_rows(cu_seqlens, i_t, N, T)
    token = i_b * T + first
    slices: tl.constexpr = (K + BK - 1) // BK
    o_r = tl.arange(0, 64)
    if (n_rows <= 0) | (live == 0):
        for i in range(slices):
            clear_keys(
                dq,
                dk,
                None,
                None,
                None,
                None,
                token,
                token,
                i_g,
                H,
                n_rows,
                i * BK + tl.arange(0, BK),
                i,
                1,
                K,
            )
        for i in range(GROUP):
            i_h = i_g * GROUP + i
            clear_keys(
                None,
                None,
                dg,
                None,
                dA_log,
                ddt_bias,
                i_t.to(tl.int64) * (H * GROUP) + i_h,
                token,
                i_h,
                H * GROUP,
                n_rows,
                tl.arange(0, 1),
                0,
                1,
                1,
            )
            if dbeta is not None:
                write_column(dbeta, token, i_h, H * GROUP, n_rows, tl.zeros((64,), tl.float32))
        return
    TYPE: tl.constexpr = states.dtype.element_ty
    SUMS: tl.constexpr = dbeta is not None and not SIGMOID
    HELD: tl.constexpr = dq_sum is None
    values: tl.constexpr = (V + BV - 1) // BV
    lower, diagonal = o_r[:, None] > o_r[None, :], o_r[:, None] == o_r[None, :]
    b_zero, b_square, b_wide = (
        tl.zeros((64,), tl.float32),
        tl.zeros((64, 64), tl.float32),
        tl.zeros((64, BK), tl.float32),
    )
    b_along_q, b_along_k = b_zero, b_zero
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_q, b_k = (
        read_rows(q, q_s, i_b, i_g, first, n_rows, o_k, K),
        read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K),
    )
    for i_head in tl.range(GROUP, num_stages=1):
        i_h = i_g * GROUP + i_head
        i_tile = i_t.to(tl.int64) * (H * GROUP) + i_h
        p_row = rows + i_tile * 448 + o_r
        b_in_q, b_in_k, b_in_late, b_zv = b_zero, b_zero, b_zero, b_zero
        both = 0.0
        prefetch_tile(states, i_tile, K * V)
        prefetch_tile(dstates, i_tile, K * V)
        b_vn, b_z, b_do = (
            load_tile(v_new, i_tile, o_r, o_v, V),
            read_values(z, i_tile, token, i_h, H * GROUP, n_rows, o_v, V, TILED),
            None,
        )
        if do is not None:
            b_do = read_rows(do, do_s, i_b, i_h, first, n_rows, o_v, V)

        b_strength, b_k_norm, b_q_norm, b_decay = (
            tl.load(p_row + 128),
            tl.load(p_row + 256),
            tl.load(p_row + 320),
            tl.load(p_row + 384),
        )
        b_start, b_end, b_read, b_logit, gamma_here = (
            tl.load(p_row),
            tl.load(p_row + 64),
            tl.load(p_row + 192),
            b_zero,
            tl.load(gamma + i_tile),
        )
        b_beta = b_strength if TILED else tl.full((64,), 1.0, tl.float32)
        if ACTIVATE:
            b_logit = load_column(g, (g_b, g_t, g_h), i_b, i_h, first, n_rows, o_r)
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
                b_vn, b_z = (
                    load_tile(v_new, i_tile, o_r, o_v, V),
                    read_values(z, i_tile, token, i_h, H * GROUP, n_rows, o_v, V, TILED),
                )
                if do is not None:
                    b_do = read_rows(do, do_s, i_b, i_h, first, n_rows, o_v, V)
            if SUMS:
                b_zv += tl.sum(
                    read_rows(v, v_s, i_b, i_h, first, n_rows, o_v, V).to(tl.float32)
                    * b_z.to(tl.float32),
                    1,
                )
            if do is not None:
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
                b_q, b_k = (
                    read_rows(q, q_s, i_b, i_g, first, n_rows, o_k, K),
                    read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K),
                )
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
        # One, so that a product brings k and q from shared memory into the layout of a result; by
        # way of a product, or it would lie in shared memory too.
        b_eye = tl.where(diagonal | (b_kk < -float("inf")), 1.0, 0.0).to(TYPE)

        for i in tl.range(slices, num_stages=1):
            if slices > 1:
                o_k = i * BK + tl.arange(0, BK)
                b_q, b_k = (
                    read_rows(q, q_s, i_b, i_g, first, n_rows, o_k, K),
                    read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K),
                )
            b_late, b_early, b_dq = b_wide, b_wide, b_wide
            for j in tl.range(values, num_stages=1):
                if values > 1:
                    o_v = j * BV + tl.arange(0, BV)
                    b_vn = load_tile(v_new, i_tile, o_r, o_v, V)
                b_S, b_dS = (
                    load_state(states, i_tile, o_k, o_v, K, V),
                    load_state(dstates, i_tile, o_k, o_v, K, V),
                )
                both += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32))
                b_late = tl.dot(b_vn, tl.trans(b_dS), b_late, input_precision=PREC)
            tl.debug_barrier()  # S is read again: kept, it would take registers while dS is used
            b_x = tl.dot(b_eye, b_k, input_precision=PREC)
            b_in_late += tl.sum(b_x * b_late, 1)
            b_dk = b_late * b_end[:, None]
            if dq is not None:
                b_dk = tl.dot(b_L, b_k, b_dk, input_precision=PREC)
                b_dk = tl.dot(b_PT, b_q, b_dk, input_precision=PREC)
            b_S = load_state(states, i_tile, o_k, o_v, K, V)
            for j in tl.range(values, num_stages=1):
                if values > 1:
                    o_v = j * BV + tl.arange(0, BV)
                    b_z, b_S = (
                        read_values(z, i_tile, token, i_h, H * GROUP, n_rows, o_v, V, TILED),
                        load_state(states, i_tile, o_k, o_v, K, V),
                    )
                b_early = tl.dot(b_z, tl.trans(b_S), b_early, input_precision=PREC)
            b_in_k += tl.sum(b_x * b_early, 1)
            if dq is not None:
                b_dk -= b_early * (b_start * b_beta)[:, None]
                if HELD:
                    b_along_k = (
                        b_in_late * b_end + (b_row_k - b_in_k * b_start) * b_beta + b_column + b_own
                    )
                    write_rows(
                        dk,
                        token,
                        i_g,
                        H,
                        n_rows,
                        along(b_dk, b_x, b_k_norm, b_along_k, K, L2NORM),
                        o_k,
                        K,
                    )
                else:
                    if i_head > 0:
                        b_dk += read_rows(dk_sum, (0, H * K, K, 1), 0, i_g, token, n_rows, o_k, K)
                    write_rows(dk_sum, token, i_g, H, n_rows, b_dk, o_k, K)
            b_x = tl.dot(b_eye, b_q, input_precision=PREC)
            if do is not None:
                for j in tl.range(values, num_stages=1):
                    if values > 1:
                        o_v = j * BV + tl.arange(0, BV)
                        b_do, b_S = (
                            read_rows(do, do_s, i_b, i_h, first, n_rows, o_v, V),
                            load_state(states, i_tile, o_k, o_v, K, V),
                        )
                    b_dq = tl.dot(b_do, tl.trans(b_S), b_dq, input_precision=PREC)
                b_in_q += tl.sum(b_x * b_dq, 1)
            if dq is not None:
                b_dq = tl.dot(b_P, b_k, b_dq * b_read[:, None], input_precision=PREC)
                if HELD:
                    b_along_q = b_in_q * b_read + b_row_q + b_own
                    write_rows(
                        dq,
                        token,
                        i_g,
                        H,
                        n_rows,
                        along(b_dq, b_x, b_q_norm, b_along_q, K, L2NORM),
                        o_k,
                        K,
                    )
                else:
                    if i_head > 0:
                        b_dq += read_rows(dq_sum, (0, H * K, K, 1), 0, i_g, token, n_rows, o_k, K)
                    write_rows(dq_sum, token, i_g, H, n_rows, b_dq, o_k, K)
        b_in_q = b_in_q * b_read + b_row_q
        b_in_k, b_in_late = b_row_k - b_in_k * b_start, b_in_late * b_end
        if not HELD:
            b_along_q += b_in_q + b_own
            b_along_k += b_in_k * b_beta + b_in_late + b_column + b_own
        if dbeta is not None:
            if not TILED:
                b_zvn *= reciprocal(b_strength)
            b_dbeta = b_zv + b_in_k if SUMS else strength_gradient(b_zvn, b_strength, NEG_EIGVAL)
            write_column(dbeta, token, i_h, H * GROUP, n_rows, b_dbeta)
        if dg is not None:
            b_dG = b_in_q + b_in_k * b_beta - b_in_late - b_column
            b_dg = tl.cumsum(b_dG, 0, reverse=True) + (tl.sum(b_in_late, 0) + gamma_here * both)
            if ACTIVATE:
                bias = 0.0
                if dt_bias is not None:
                    bias = tl.load(dt_bias + i_h).to(tl.float32)
                b_dg, b_log = gate_gradient(
                    b_dg,
                    b_logit,
                    bias,
                    load_rate(A_log, i_h),
                    tl.full((), lower_bound, tl.float32),
                    BOUNDED,
                )
                b_log, b_bias = tl.reduce(
                    (tl.where(o_r < n_rows, b_log, 0.0), tl.where(o_r < n_rows, b_dg, 0.0)),
                    0,
                    add_two,
                )
                if dA_log is not None:
                    tl.store(dA_log + i_tile, b_log)
                if ddt_bias is not None:
                    tl.store(ddt_bias + i_tile, b_bias)
            write_column(dg, token, i_h, H * GROUP, n_rows, b_dg)
    if not HELD:
        tl.debug_barrier()  # written by other threads
        p_row = rows + (i_t.to(tl.int64) * H + i_g) * (GROUP * 448) + o_r
        for i in tl.range(slices, num_stages=1):
            o_k = i * BK + tl.arange(0, BK)
            b_q, b_k = (
                read_rows(q, q_s, i_b, i_g, first, n_rows, o_k, K),
                read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K),
            )
            b_dq = read_rows(dq_sum, (0, H * K, K, 1), 0, i_g, token, n_rows, o_k, K)
            b_dk = read_rows(dk_sum, (0, H * K, K, 1), 0, i_g, token, n_rows, o_k, K)
            write_rows(
                dq,
                token,
                i_g,
                H,
                n_rows,
                along(b_dq, b_q.to(tl.float32), tl.load(p_row + 320), b_along_q, K, L2NORM),
                o_k,
                K,
            )
            write_rows(
                dk,
                token,
                i_g,
                H,
                n_rows,
                along(b_dk, b_k.to(tl.float32), tl.load(p_row + 256), b_along_k, K, L2NORM),
                o_k,
                K,
            )
