"""Everything of the gradients for one decay per head: one chunk, and all value heads of a key head, per program."""

import triton
import triton.language as tl

from kda_ops.backends.triton.decay import pair_decay, pair_decay_transposed, row_decay
from kda_ops.backends.triton.gate import decay_column, load_rate, strength_column
from kda_ops.backends.triton.gradient_pairs import clear_values
from kda_ops.backends.triton.gradient_tile import (
    clear_keys,
    gate_gradient,
    load_state,
    locate_rows,
    on_diagonal,
    read_rows,
    write_column,
    write_rows,
)
from kda_ops.backends.triton.tile import inverse_norm, load_column, load_tile


@triton.jit
def norms(q, q_s, k, k_s, i_b, i_g, first, n_rows, K: tl.constexpr, BK: tl.constexpr):
    """(1 / |q|, 1 / |k|) of the rows of a chunk, [64] fp32."""
    b_qq = tl.zeros((64,), tl.float32)
    b_kk = b_qq
    for i in tl.range((K + BK - 1) // BK, num_stages=1):
        o_k = i * BK + tl.arange(0, BK)
        b_q = read_rows(q, q_s, i_b, i_g, first, n_rows, o_k, K).to(tl.float32)
        b_k = read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K).to(tl.float32)
        b_qq += tl.sum(b_q * b_q, 1)
        b_kk += tl.sum(b_k * b_k, 1)
    return tl.rsqrt(b_qq + 1e-6), tl.rsqrt(b_kk + 1e-6)


@triton.jit
def norm_gradient(b_dy, b_x, b_r, b_along):
    """The gradient of x from that of y = r x, r = 1 / |x|: r (dy - y (y . dy)), with y . dy [64] given."""
    return b_r[:, None] * (b_dy - b_x.to(tl.float32) * (b_r * b_along)[:, None])


@triton.jit
def products(b_do, b_vn, b_z, b_S, b_dS, n_rows, b_P, b_PT, b_L, b_LT, b_dq, b_early, b_late, PREC: tl.constexpr):
    """Add do v_new^T, v_new do^T, z v_new^T, v_new z^T [64, 64], do S^T, z S^T and v_new dS^T [64, width].

    A triangle of each square counts: a product is never transposed. The branch, always taken, keeps these products apart from those that read
    their results: one that feeds another is laid out as its operand, and half of the warps do what the other half does.
    """
    if n_rows > 0:
        if b_do is not None:
            b_P = tl.dot(b_do, tl.trans(b_vn), b_P, input_precision=PREC)
            b_PT = tl.dot(b_vn, tl.trans(b_do), b_PT, input_precision=PREC)
            b_dq = tl.dot(b_do, tl.trans(b_S), b_dq, input_precision=PREC)
        b_L = tl.dot(b_z, tl.trans(b_vn), b_L, input_precision=PREC)
        b_LT = tl.dot(b_vn, tl.trans(b_z), b_LT, input_precision=PREC)
        b_early = tl.dot(b_z, tl.trans(b_S), b_early, input_precision=PREC)
        b_late = tl.dot(b_vn, tl.trans(b_dS), b_late, input_precision=PREC)
    return b_P, b_PT, b_L, b_LT, b_dq, b_early, b_late


@triton.jit(do_not_specialize=["N", "T", "scale", "lower_bound", "g_b", "g_t", "g_h", "beta_b", "beta_t", "beta_h"])
def gradient_rows(
    q, q_s, k, k_s, v, v_s, g, g_b, g_t, g_h, beta, beta_b, beta_t, beta_h, A_log, dt_bias, do, do_s, states, v_new, dstates, z, cu_seqlens,
    dq, dk, dv, dg, dbeta, dA_log, ddt_bias, N, T, H, HV, writers, scale, lower_bound,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, L2NORM: tl.constexpr,
    ACTIVATE: tl.constexpr, BOUNDED: tl.constexpr, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr, EXACT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One chunk and GROUP value heads of one key head; E_ij is the decay from row j to row i, a_i = exp G_i, e_i = exp(G_64 - G_i), unit q and k::

        dP = tril(scale do v_new^T o E)      dL = -strict_tril(z v_new^T o E)                                   [64, 64]
        dq = scale a (do S^T) + dP k         dk = -beta a (z S^T) + e (v_new dS^T) + (beta dL + dL^T beta) k + dP^T q    [64, K]
        W  = strict_tril(dP o q k^T + beta dL o k k^T)
        dG = sum_k q scale a (do S^T) - k (beta a (z S^T) + e (v_new dS^T)) + rows of W - columns of W          [64]
        dv = beta z      dbeta = sum_v z v_new / beta for a sigmoid, else sum_v z v + sum_k k dk's share of beta

    What pairs of rows add to dG cancels in a sum over a chunk, and does so here too, for rows and columns are sums of one fp32 matrix. Norms
    and beta are factors of the [64, 64] tiles, so that q and k go from memory to the tensor cores as they are. All of K in one slice: the gradients of
    the heads of a group add up in registers, and pass through the norm here. In several slices GROUP is 1, dq and dk are those of unit q and k of
    a value head, and every slice makes the pairs anew.
    """
    i_w, i_t = tl.program_id(0) % writers, tl.program_id(0) // writers
    i_b, first, n_rows, live = locate_rows(cu_seqlens, i_t, N, T)
    token = i_b * T + first
    slices: tl.constexpr = (K + BK - 1) // BK
    o_r = tl.arange(0, 64)
    if (n_rows <= 0) | (live == 0):
        for i in range(slices):
            clear_keys(dq, dk, None, None, None, None, token, token, i_w, writers, n_rows, i * BK + tl.arange(0, BK), i, 1, K)
        for i in range(GROUP):
            i_h = i_w * GROUP + i
            clear_keys(None, None, dg, None, dA_log, ddt_bias, i_t.to(tl.int64) * HV + i_h, token, i_h, HV, n_rows, tl.arange(0, 1), 0, 1, 1)
            clear_values(dv, dbeta, token, i_h, HV, n_rows, V, BV)
        return
    TYPE: tl.constexpr = states.dtype.element_ty
    SUMS: tl.constexpr = dbeta is not None and not SIGMOID
    i_g = i_w * GROUP // (HV // H)
    bound = tl.full((), lower_bound, tl.float32)
    lower, diagonal = o_r[:, None] > o_r[None, :], o_r[:, None] == o_r[None, :]
    b_zero = tl.zeros((64,), tl.float32)
    b_q_norm = tl.full((64,), 1.0, tl.float32)
    b_k_norm = b_q_norm
    if L2NORM and slices > 1:
        b_q_norm, b_k_norm = norms(q, q_s, k, k_s, i_b, i_g, first, n_rows, K, BK)
    b_dq_sum = tl.zeros((64, BK), tl.float32)
    b_dk_sum, b_along_q, b_along_k = b_dq_sum, b_zero, b_zero
    for i_head in tl.range(GROUP, num_stages=1):
        i_h = i_w * GROUP + i_head
        i_tile = i_t.to(tl.int64) * HV + i_h
        b_in_q, b_in_k, b_in_late, b_row_q, b_row_k, b_self, b_column = b_zero, b_zero, b_zero, b_zero, b_zero, b_zero, b_zero
        b_zvn, b_zv, b_beta, b_x, b_start, b_end, b_gamma = b_zero, b_zero, b_zero, b_zero, b_zero, b_zero, 0.0
        b_both = tl.zeros((BK,), tl.float32)
        for i in tl.range(slices, num_stages=1):
            o_k = i * BK + tl.arange(0, BK)
            b_q, b_k = read_rows(q, q_s, i_b, i_g, first, n_rows, o_k, K), read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K)
            b_P = tl.zeros((64, 64), tl.float32)
            b_PT, b_L, b_LT, b_dq = b_P, b_P, b_P, tl.zeros((64, BK), tl.float32)
            b_early, b_late = b_dq, b_dq
            for j in tl.range((V + BV - 1) // BV, num_stages=1):
                o_v = j * BV + tl.arange(0, BV)
                b_vn, b_z, b_do = load_tile(v_new, i_tile, o_r, o_v, V), load_tile(z, i_tile, o_r, o_v, V), None
                if do is not None:
                    b_do = read_rows(do, do_s, i_b, i_h, first, n_rows, o_v, V)
                b_S, b_dS = load_state(states, i_tile, o_k, o_v, K, V), load_state(dstates, i_tile, o_k, o_v, K, V)
                # Not before the loops: all of these wait for memory together.
                b_beta = strength_column(beta, (beta_b, beta_t, beta_h), i_b, i_h, first, n_rows, SIGMOID, NEG_EIGVAL)
                b_x = decay_column(g, (g_b, g_t, g_h), A_log, dt_bias, bound, i_b, i_h, first, n_rows, ACTIVATE, BOUNDED)
                b_both += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 1)
                if i == 0:
                    if SUMS:
                        b_zv += tl.sum(read_rows(v, v_s, i_b, i_h, first, n_rows, o_v, V).to(tl.float32) * b_z.to(tl.float32), 1)
                    if dv is not None:
                        write_rows(dv, token, i_h, HV, n_rows, b_z.to(tl.float32) * b_beta[:, None], o_v, V)
                b_P, b_PT, b_L, b_LT, b_dq, b_early, b_late = products(
                    b_do, b_vn, b_z, b_S, b_dS, n_rows, b_P, b_PT, b_L, b_LT, b_dq, b_early, b_late, PREC
                )  # fmt: skip
            if slices == 1:
                b_q_norm, b_k_norm = inverse_norm(b_q, L2NORM), inverse_norm(b_k, L2NORM)
            b_start, b_end, b_gamma = row_decay(b_x, EXACT)
            b_k32 = b_k.to(tl.float32)
            b_in_q += tl.sum(b_q.to(tl.float32) * b_dq, 1)
            b_in_k += tl.sum(b_k32 * b_early, 1)
            b_in_late += tl.sum(b_k32 * b_late, 1)
            b_dq = b_dq * (b_start * scale)[:, None]
            b_dk = b_late * b_end[:, None] - b_early * (b_start * b_beta)[:, None]
            b_zvn = on_diagonal(b_L)
            b_E = pair_decay_transposed(b_x, EXACT)
            b_PT = (b_PT * b_E * (b_q_norm * -scale)[None, :]).to(TYPE)
            b_LT = tl.where(diagonal, 0.0, b_LT * b_E * -(b_k_norm * b_beta)[None, :])
            b_E = pair_decay(b_x, EXACT) * b_k_norm[None, :]
            b_P = b_P * b_E * scale
            b_W = tl.dot(b_q, tl.trans(b_k), input_precision=PREC) * b_P * b_q_norm[:, None]
            b_self += on_diagonal(b_W)
            b_W = tl.where(lower, b_W, 0.0)
            b_L = tl.where(lower, -b_L * b_E, 0.0)
            b_WL = tl.dot(b_k, tl.trans(b_k), input_precision=PREC) * b_L * b_k_norm[:, None]
            b_row_q += tl.sum(b_W, 1)
            b_row_k += tl.sum(b_WL, 1)
            b_column += tl.sum(b_W + b_WL * b_beta[:, None], 0)
            if dq is not None:
                b_L = tl.where(lower, b_L * b_beta[:, None], b_LT).to(TYPE)
                b_dq = tl.dot(b_P.to(TYPE), b_k, b_dq, input_precision=PREC)
                # The negative of a negative: a sum would become a chain of two products, and the first be laid out as the operand of the second.
                b_dk = tl.dot(b_L, b_k, b_dk, input_precision=PREC) - tl.dot(b_PT, b_q, input_precision=PREC)
                if slices == 1:
                    b_dq_sum += b_dq
                    b_dk_sum += b_dk
                else:
                    write_rows(dq, token, i_w, writers, n_rows, b_dq, o_k, K)
                    write_rows(dk, token, i_w, writers, n_rows, b_dk, o_k, K)
        b_in_q, b_in_k, b_in_late = b_in_q * b_start * b_q_norm * scale, b_in_k * -b_start * b_k_norm, b_in_late * b_end * b_k_norm
        b_along_q += b_in_q + b_row_q + b_self
        b_along_k += (b_in_k + b_row_k) * b_beta + b_in_late + b_column + b_self
        if dbeta is not None:
            b_dbeta = b_zvn * (1.0 - b_beta * (0.5 if NEG_EIGVAL else 1.0)) if SIGMOID else b_zv + b_in_k + b_row_k
            write_column(dbeta, token, i_h, HV, n_rows, b_dbeta)
        if dg is not None:
            b_dG = b_in_q + b_row_q + (b_in_k + b_row_k) * b_beta - b_in_late - b_column
            b_dg = tl.cumsum(b_dG, 0, reverse=True) + (tl.sum(b_in_late, 0) + b_gamma * tl.sum(b_both, 0))
            if ACTIVATE:
                bias = 0.0
                if dt_bias is not None:
                    bias = tl.load(dt_bias + i_h).to(tl.float32)
                b_logit = load_column(g, (g_b, g_t, g_h), i_b, i_h, first, n_rows, o_r)
                b_dg, b_log = gate_gradient(b_dg, b_logit, bias, load_rate(A_log, i_h), bound, BOUNDED)
                if dA_log is not None:
                    tl.store(dA_log + i_tile, tl.sum(tl.where(o_r < n_rows, b_log, 0.0), 0))
                if ddt_bias is not None:
                    tl.store(ddt_bias + i_tile, tl.sum(tl.where(o_r < n_rows, b_dg, 0.0), 0))
            write_column(dg, token, i_h, HV, n_rows, b_dg)
    if slices == 1 and dq is not None:
        o_k = tl.arange(0, BK)
        if L2NORM:
            b_dq_sum = norm_gradient(b_dq_sum, read_rows(q, q_s, i_b, i_g, first, n_rows, o_k, K), b_q_norm, b_along_q)
            b_dk_sum = norm_gradient(b_dk_sum, read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K), b_k_norm, b_along_k)
        write_rows(dq, token, i_w, writers, n_rows, b_dq_sum, o_k, K)
        write_rows(dk, token, i_w, writers, n_rows, b_dk_sum, o_k, K)
