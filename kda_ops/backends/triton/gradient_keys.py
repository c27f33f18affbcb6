"""Gradients of q, k and g for one decay per key channel: BK channels of one chunk and value head per program."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton.gate import load_rate, log2_decay, strength_column
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
from kda_ops.backends.triton.tile import load_tile


@lru_cache(None)
def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """What `level_factors` and `load_pairs` pick by: rows [10, 64, 64] fp16 and pairs [8, 64, 64] int16.

    rows: one where row t belongs to the sum for row i. Levels 0 to 5: between i and the middle of its block; 6 and 7: up to i in its block of 16;
    8: up to i; 9: after i. pairs: all bits set where rows part at that level; 6 and 7: in blocks of 16 below the diagonal and above it.
    """
    i = torch.arange(64, device=device)
    parting, upto = i[:, None] ^ i[None, :], i[None, :] <= i[:, None]
    near = parting < 16
    rows = [(parting >> h == 0) & (upto == ((i >> h) & 1 == 1)[:, None]) for h in range(6)] + [near & upto, near & upto, upto, ~upto]
    pairs = [parting >> h == 1 for h in range(6)] + [near & upto & (parting > 0), near & ~upto]
    return torch.stack(rows).half(), -torch.stack(pairs).to(torch.int16)


@triton.jit
def load_decays(g, g_s, b_bias, rate, lower_bound, i_b, i_h, first, n_rows, o_k, K: tl.constexpr, ACTIVATE: tl.constexpr, BOUNDED: tl.constexpr):
    """The decay per token in base 2, [64, width] fp32, at least -160, which is zero as a factor; 0 for rows that are no tokens."""
    if g is None:
        return tl.zeros((64, o_k.shape[0]), tl.float32)
    else:
        b_g = read_rows(g, g_s, i_b, i_h, first, n_rows, o_k, K).to(tl.float32)
        b_x = tl.maximum(log2_decay(b_g, b_bias[None, :], rate, lower_bound, ACTIVATE, BOUNDED), -160.0)
        return tl.where((tl.arange(0, 64) < n_rows)[:, None], b_x, 0.0)


@triton.jit
def split(b_x):
    """fp32 [64, width], at most 160 in size, as a sum of three fp16 tiles: two hold 22 bits of it, three all."""
    b_high = b_x.to(tl.float16)
    b_x = b_x - b_high.to(tl.float32)
    b_low = b_x.to(tl.float16)
    return b_high, b_low, (b_x - b_low.to(tl.float32)).to(tl.float16)


@triton.jit
def decay_sum(rows, i, b_high, b_low, b_rest, EXACT: tl.constexpr):
    """The sum of some rows' decays, the rows that table i of `tables` picks for each row; [64, width] fp32.

    A sum of chosen rows, not a difference of prefix sums, as a product with zeros and ones: it comes out in the layout of the other products,
    where a scan over rows would have to be moved.
    """
    o_r = tl.arange(0, 64)
    b_ones = load_tile(rows, i, o_r, o_r, 64)
    b_sum = tl.dot(b_ones, b_low, tl.dot(b_ones, b_high))
    if EXACT:
        b_sum = tl.dot(b_ones, b_rest, b_sum)
    return b_sum


@triton.jit
def decay_over(rows, i, b_high, b_low, b_rest, EXACT: tl.constexpr):
    """The decay over those rows as a factor, at most one."""
    return tl.exp2(decay_sum(rows, i, b_high, b_low, b_rest, EXACT))


@triton.jit
def load_pairs(x, i_tile, pairs, h):
    """The entries of a tile [64, 64] whose rows part at level h; zero elsewhere."""
    o_r = tl.arange(0, 64)
    b_x, b_m = load_tile(x, i_tile, o_r, o_r, 64), load_tile(pairs, h, o_r, o_r, 64)
    if b_x.dtype == tl.float32:
        return tl.where(b_m != 0, b_x, 0.0)
    else:
        return (b_x.to(tl.int16, bitcast=True) & b_m).to(b_x.dtype, bitcast=True)


@triton.jit
def level_factors(rows, h, b_high, b_low, b_rest, centre, CENTRED: tl.constexpr, EXACT: tl.constexpr):
    """Level h as (whether a row gathers as the later of a pair, whether it is gathered from as the later, [64]; the factor it gathers with and the one
    it is gathered from with [64, width]).

    Levels 0 to 5: a pair belongs to the one at which its rows first fall into different halves of a block. The later row has the decay since the
    middle and the earlier row the decay up to the middle, so every row has one role and one factor, at most one, whatever the decay.

    CENTRED, with a bound on the decay, levels 6 and 7 stand for 0 to 3: the pairs inside blocks of 16 rows, once gathered by the later and once by the
    earlier row. Centred on a constant, never on a row, the decay since the start of the block and its inverse stay within 2^58 of one; blocks of
    32 rows would reach 2^115 and lose small gradients.
    """
    bit = ((tl.arange(0, 64) >> h) & 1) == 1
    b_sum = decay_sum(rows, h, b_high, b_low, b_rest, EXACT)
    if CENTRED:
        own, other = bit & (h < 6) | (h == 6), bit & (h < 6) | (h == 7)
        b_sum = b_sum - tl.where(h < 6, 0.0, centre)
        return own, other, tl.exp2(tl.where(h == 7, -b_sum, b_sum)), tl.exp2(tl.where(h == 6, -b_sum, b_sum))
    else:
        b_f = tl.exp2(b_sum)
        return bit, bit, b_f, b_f


@triton.jit
def pairs_of_keys(
    dL, rows, pairs, k, k_s, i_tile, i_b, i_g, first, n_rows, o_k, b_norm, b_beta, b_high, b_low, b_rest, centre, b_dk, b_dG, b_dbeta,
    K: tl.constexpr, SUMS: tl.constexpr, CENTRED: tl.constexpr, EXACT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Add what L passes on to one slice of K; E_ij is the decay from row j to row i::

        dk += beta_i sum_j dL_ij k_j E_ij + sum_i dL_ij beta_i k_i E_ij
        dG += the k of the later row times what it gets - the k of the earlier row times what it gets

    dL is filled on both sides of the diagonal, so that one product serves the rows and the columns of a level.

    dG is a difference whose sums over rows nearly vanish. It is formed from the operands as the products rounded them: then what a pair adds to its
    later row and takes from its earlier one is the same number, as if nothing had been rounded (bf16: 5 times less error of dt_bias).

    dL and k come from the cache again at every level: held in registers, they would push the sums out of them.
    """
    TYPE: tl.constexpr = dL.dtype.element_ty
    for h in range(4 if CENTRED else 0, 8 if CENTRED else 6):
        own, other, b_f, b_other = level_factors(rows, h, b_high, b_low, b_rest, centre, CENTRED, EXACT)
        b_f = b_f * tl.where(own, b_beta, 1.0)[:, None]
        b_k = read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K).to(tl.float32) * b_norm[:, None]
        b_own = (b_k * b_f).to(TYPE)
        b_other = (b_k * b_other * tl.where(other, b_beta, 1.0)[:, None]).to(TYPE) if CENTRED else b_own
        b_pair = tl.dot(load_pairs(dL, i_tile, pairs, h), b_other, input_precision=PREC)
        b_dk += b_pair * b_f
        b_own = b_own.to(tl.float32) * b_pair
        b_dG += tl.where(own[:, None], b_own, -b_own)
        if SUMS:
            b_k = read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K).to(tl.float32) * b_norm[:, None]
            b_f = level_factors(rows, h, b_high, b_low, b_rest, centre, CENTRED, EXACT)[2]
            b_dbeta += tl.where(own, tl.sum(b_k * b_pair * b_f, 1), 0.0)
    return b_dk, b_dG, b_dbeta


@triton.jit
def pairs_of_queries(
    dP, rows, pairs, q, q_s, k, k_s, i_tile, i_b, i_g, first, n_rows, o_k, b_q_norm, b_k_norm, b_high, b_low, b_rest, centre, b_dq, b_dk, b_dG,
    K: tl.constexpr, CENTRED: tl.constexpr, EXACT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The same for P, whose later row has q, without the diagonal, which adds nothing to dG::

    dq += sum_j dP_ij k_j E_ij      dk += sum_i dP_ij q_i E_ij
    """
    TYPE: tl.constexpr = dP.dtype.element_ty
    for h in range(4 if CENTRED else 0, 8 if CENTRED else 6):
        own, other, b_f, b_other = level_factors(rows, h, b_high, b_low, b_rest, centre, CENTRED, EXACT)
        b_q, b_k = read_rows(q, q_s, i_b, i_g, first, n_rows, o_k, K), read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K)
        b_own = (tl.where(own[:, None], b_q, b_k).to(tl.float32) * tl.where(own, b_q_norm, b_k_norm)[:, None] * b_f).to(TYPE)
        if CENTRED:
            b_other = (tl.where(other[:, None], b_q, b_k).to(tl.float32) * tl.where(other, b_q_norm, b_k_norm)[:, None] * b_other).to(TYPE)
        else:
            b_other = b_own
        b_pair = tl.dot(load_pairs(dP, i_tile, pairs, h), b_other, input_precision=PREC)
        b_own = b_own.to(tl.float32) * b_pair
        b_dG += tl.where(own[:, None], b_own, -b_own)
        b_pair = b_pair * b_f
        b_dq += tl.where(own[:, None], b_pair, 0.0)
        b_dk += tl.where(own[:, None], 0.0, b_pair)
    return b_dq, b_dk, b_dG


@triton.jit(do_not_specialize=["N", "T", "scale", "lower_bound", "log2_bound"])
def gradient_keys(
    q, q_s, k, k_s, g, g_s, beta, beta_s, A_log, dt_bias, do, do_s, states, v_new, dstates, z, dP, dL, q_norm, k_norm, rows, pairs, cu_seqlens,
    dq, dk, dg, dbeta, dbeta_slice, dA_log, ddt_bias, N, T, H, HV, scale, lower_bound, log2_bound,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CENTRED: tl.constexpr,
    ACTIVATE: tl.constexpr, BOUNDED: tl.constexpr, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr, EXACT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """BK key channels of one chunk and value head (e = exp(sum over the later rows), "rows" and "columns" of the pairs as in `pairs_of_keys`)::

        dq = scale exp G (do S^T) + rows of dP      early = -beta exp G (z S^T) + rows of dL      late = e (v_new dS^T) + columns of dP, dL
        dk = early + late      dG = q dq + k (early - late);  last row += gamma sum_v S dS + sum_i k_i e_i (v_new dS^T)_i
        dg = suffix sums of dG, and through the gate

    for unit q and k: the norm needs sums over all of K, which the program does not see. A slice per program keeps the fp32 tiles that are alive
    within the registers and several programs on a multiprocessor.
    """
    slices: tl.constexpr = (K + BK - 1) // BK
    i_s, i_tile = tl.program_id(0) % slices, tl.program_id(0) // slices
    i_h, i_t, i_tile = i_tile % HV, i_tile // HV, i_tile.to(tl.int64)
    i_b, first, n_rows, live = locate_rows(cu_seqlens, i_t, N, T)
    i_g, token = i_h // (HV // H), i_b * T + first
    o_r, o_k = tl.arange(0, 64), i_s * BK + tl.arange(0, BK)
    if dbeta is not None:
        dbeta += i_s * dbeta_slice
    if (n_rows <= 0) | (live == 0):
        clear_keys(dq, dk, dg, dbeta, dA_log, ddt_bias, i_tile, token, i_h, HV, n_rows, o_k, i_s, slices, K)
        return
    SUMS: tl.constexpr = dbeta is not None
    b_q_norm, b_k_norm = load_norm(q_norm, i_tile), load_norm(k_norm, i_tile)
    b_beta = strength_column(beta, beta_s, i_b, i_h, first, n_rows, SIGMOID, NEG_EIGVAL)
    rate, bound = load_rate(A_log, i_h), tl.full((), lower_bound, tl.float32)
    b_bias = tl.zeros((BK,), tl.float32)
    if dt_bias is not None:
        b_bias = tl.load(dt_bias + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    b_x = load_decays(g, g_s, b_bias, rate, bound, i_b, i_h, first, n_rows, o_k, K, ACTIVATE, BOUNDED)
    b_high, b_low, b_rest = split(b_x)
    centre = tl.full((), log2_bound, tl.float32) * 8.0
    b_dkg, b_dk, b_dgamma = key_gradients(states, v_new, dstates, z, i_tile, o_k, K, V, BV, PREC)
    b_k = read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K).to(tl.float32) * b_k_norm[:, None]
    b_dkg = b_dkg * decay_over(rows, 9, b_high, b_low, b_rest, EXACT)
    b_dk = b_dk * -decay_over(rows, 8, b_high, b_low, b_rest, EXACT)
    b_dbeta = tl.sum(b_k * b_dk, 1)
    b_dk = b_dk * b_beta[:, None]
    b_last = tl.exp2(tl.sum(b_x, 0)) * b_dgamma + tl.sum(b_k * b_dkg, 0)
    b_dG = b_k * (b_dk - b_dkg)
    b_dk, b_dG, b_dbeta = pairs_of_keys(
        dL, rows, pairs, k, k_s, i_tile, i_b, i_g, first, n_rows, o_k, b_k_norm, b_beta, b_high, b_low, b_rest, centre, b_dk + b_dkg, b_dG, b_dbeta,
        K, SUMS, CENTRED, EXACT, PREC,
    )  # fmt: skip
    b_dq = query_gradient(do, do_s, states, i_tile, i_b, i_h, first, n_rows, o_k, K, V, BV, PREC) * scale
    b_dq = b_dq * decay_over(rows, 8, b_high, b_low, b_rest, EXACT)
    b_q = read_rows(q, q_s, i_b, i_g, first, n_rows, o_k, K).to(tl.float32) * b_q_norm[:, None]
    b_dG += b_q * b_dq
    b_diagonal = tl.load(dP + i_tile * 4096 + o_r * 65).to(tl.float32)[:, None]
    b_dk += b_diagonal * b_q
    b_dq += b_diagonal * (read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K).to(tl.float32) * b_k_norm[:, None])
    b_dq, b_dk, b_dG = pairs_of_queries(
        dP, rows, pairs, q, q_s, k, k_s, i_tile, i_b, i_g, first, n_rows, o_k, b_q_norm, b_k_norm, b_high, b_low, b_rest, centre, b_dq, b_dk, b_dG,
        K, CENTRED, EXACT, PREC,
    )  # fmt: skip
    if dq is not None:
        write_rows(dq, token, i_h, HV, n_rows, b_dq, o_k, K)
        write_rows(dk, token, i_h, HV, n_rows, b_dk, o_k, K)
    if dbeta is not None:
        write_column(dbeta, token, i_h, HV, n_rows, b_dbeta)
    if dg is not None:
        b_dg = tl.cumsum(b_dG, 0, reverse=True) + b_last[None, :]
        if ACTIVATE:
            m_g = (o_r < n_rows)[:, None]
            b_g = read_rows(g, g_s, i_b, i_h, first, n_rows, o_k, K).to(tl.float32)
            b_dg, b_log = gate_gradient(b_dg, b_g, b_bias[None, :], rate, bound, BOUNDED)
            if dA_log is not None:
                b_log = tl.sum(tl.where(m_g, b_log, 0.0), 0)
                tl.store(dA_log + i_tile * slices + i_s, tl.sum(tl.where(o_k < K, b_log, 0.0), 0))
            if ddt_bias is not None:
                tl.store(ddt_bias + i_tile * K + o_k, tl.sum(tl.where(m_g, b_dg, 0.0), 0), mask=o_k < K)
        write_rows(dg, token, i_h, HV, n_rows, b_dg, o_k, K)
