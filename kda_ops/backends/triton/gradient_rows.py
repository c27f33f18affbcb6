"""Gradients of q, k and g for one decay per head: all of K of one chunk and value head per program."""

import triton
import triton.language as tl

from kda_ops.backends.triton.decay import row_decay
from kda_ops.backends.triton.gate import decay_column, load_rate, strength_column
from kda_ops.backends.triton.gradient_tile import (
    clear_keys,
    gate_gradient,
    key_gradients,
    load_norm,
    locate_rows,
    query_gradient,
    read_rows,
    write_column,
    write_rows,
)
from kda_ops.backends.triton.tile import load_column, load_tile


@triton.jit(do_not_specialize=["N", "T", "scale", "lower_bound"])
def gradient_rows(
    q, q_s, k, k_s, g, g_s, beta, beta_s, A_log, dt_bias, do, do_s, states, v_new, dstates, z, dP, dL, q_norm, k_norm, cu_seqlens,
    dq, dk, dg, dbeta, dA_log, ddt_bias, N, T, H, HV, scale, lower_bound,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ACTIVATE: tl.constexpr, BOUNDED: tl.constexpr, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr, EXACT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The same for one decay per head: dP and dL hold it already, and dG is a sum over K too, so one program sees all slices::

        dq = scale exp G (do S^T) + tril(dP) k      early = -beta exp G (z S^T) + beta tril(dL) k      late = e (v_new dS^T) + triu(dP) q + triu(dL) beta k

    As in `pairs_of_keys`, what the pairs add to dG is formed from the operands as the products rounded them.
    """
    i_h, i_t = tl.program_id(0) % HV, tl.program_id(0) // HV
    i_b, first, n_rows, live = locate_rows(cu_seqlens, i_t, N, T)
    i_g, i_tile, token = i_h // (HV // H), tl.program_id(0).to(tl.int64), i_b * T + first
    o_r = tl.arange(0, 64)
    if (n_rows <= 0) | (live == 0):
        for i in range((K + BK - 1) // BK):
            clear_keys(dq, dk, None, None, None, None, i_tile, token, i_h, HV, n_rows, i * BK + tl.arange(0, BK), i, 1, K)
        clear_keys(None, None, dg, dbeta, dA_log, ddt_bias, i_tile, token, i_h, HV, n_rows, tl.arange(0, 1), 0, 1, 1)
        return
    TYPE: tl.constexpr = states.dtype.element_ty
    bound = tl.full((), lower_bound, tl.float32)
    b_q_norm, b_k_norm = load_norm(q_norm, i_tile), load_norm(k_norm, i_tile)
    b_beta = strength_column(beta, beta_s, i_b, i_h, first, n_rows, SIGMOID, NEG_EIGVAL)
    b_x = decay_column(g, g_s, A_log, dt_bias, bound, i_b, i_h, first, n_rows, ACTIVATE, BOUNDED)
    b_start, b_end, b_gamma = row_decay(b_x, EXACT)
    b_P, b_L = load_tile(dP, i_tile, o_r, o_r, 64), load_tile(dL, i_tile, o_r, o_r, 64)
    b_zero = tl.zeros_like(b_P)
    b_rows_q, b_columns_q = tl.where(o_r[:, None] >= o_r[None, :], b_P, b_zero), tl.where(o_r[:, None] <= o_r[None, :], b_P, b_zero)
    b_rows_k, b_columns_k = tl.where(o_r[:, None] > o_r[None, :], b_L, b_zero), tl.where(o_r[:, None] < o_r[None, :], b_L, b_zero)
    b_dG = tl.zeros((64,), tl.float32)
    b_dbeta, b_last = b_dG, b_dG
    for i in range((K + BK - 1) // BK):
        o_k = i * BK + tl.arange(0, BK)
        b_q = read_rows(q, q_s, i_b, i_g, first, n_rows, o_k, K).to(tl.float32) * b_q_norm[:, None]
        b_k = read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K).to(tl.float32) * b_k_norm[:, None]
        b_Q, b_K, b_beta_k = b_q.to(TYPE), b_k.to(TYPE), (b_k * b_beta[:, None]).to(TYPE)
        b_dq = query_gradient(do, do_s, states, i_tile, i_b, i_h, first, n_rows, o_k, K, V, BV, PREC) * (b_start * scale)[:, None]
        b_pair = tl.dot(b_rows_q, b_K, input_precision=PREC)
        b_dG += tl.sum(b_q * b_dq + b_Q.to(tl.float32) * b_pair, 1)
        if dq is not None:
            write_rows(dq, token, i_h, HV, n_rows, b_dq + b_pair, o_k, K)
        b_dkg, b_dk, b_dgamma = key_gradients(states, v_new, dstates, z, i_tile, o_k, K, V, BV, PREC)
        b_dkg = b_dkg * b_end[:, None]
        b_last += tl.sum(b_k * b_dkg, 1) + tl.where(o_r == 0, b_gamma * tl.sum(b_dgamma, 0), 0.0)
        b_dk = b_dk * -b_start[:, None]
        b_dG += tl.sum(b_k * (b_dk * b_beta[:, None] - b_dkg), 1)
        b_pair = tl.dot(b_rows_k, b_K, input_precision=PREC)
        b_dG += tl.sum(b_beta_k.to(tl.float32) * b_pair, 1)
        b_dk += b_pair
        b_dbeta += tl.sum(b_k * b_dk, 1)
        b_dk = b_dk * b_beta[:, None] + b_dkg
        b_pair = tl.dot(b_columns_k, b_beta_k, tl.dot(b_columns_q, b_Q, input_precision=PREC), input_precision=PREC)
        b_dG -= tl.sum(b_K.to(tl.float32) * b_pair, 1)
        if dk is not None:
            write_rows(dk, token, i_h, HV, n_rows, b_dk + b_pair, o_k, K)
    if dbeta is not None:
        write_column(dbeta, token, i_h, HV, n_rows, b_dbeta)
    if dg is not None:
        b_dg = tl.cumsum(b_dG, 0, reverse=True) + tl.sum(b_last, 0)
        if ACTIVATE:
            bias = 0.0
            if dt_bias is not None:
                bias = tl.load(dt_bias + i_h).to(tl.float32)
            b_dg, b_log = gate_gradient(b_dg, load_column(g, g_s, i_b, i_h, first, n_rows, o_r), bias, load_rate(A_log, i_h), bound, BOUNDED)
            if dA_log is not None:
                tl.store(dA_log + i_tile, tl.sum(tl.where(o_r < n_rows, b_log, 0.0), 0))
            if ddt_bias is not None:
                tl.store(ddt_bias + i_tile, tl.sum(tl.where(o_r < n_rows, b_dg, 0.0), 0))
        write_column(dg, token, i_h, HV, n_rows, b_dg)
