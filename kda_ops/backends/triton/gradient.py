"""From the two scans to the gradients of the inputs: one program per chunk and value head (MATHS.md, backward).

What the reverse scan leaves, z = A^T dv_new, is the gradient of ``beta (v - k exp(G) S)``, which v_new = A (..) solves for. The adjoint of a
linear solve is another solve, so the inverse needs no backward of its own::

    dv = beta z      dL = -strict_tril(z v_new^T)      dZk = -z S^T      dP = tril(do v_new^T)      dqg = do S^T      dkg = v_new dS^T
"""

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.decay import pair_decay, row_decay
from kda_ops.backends.triton.gate import decay_column, load_rate, log2_decay, sigmoid, softplus, strength_column
from kda_ops.backends.triton.reverse_scan import pair_decay_transposed
from kda_ops.backends.triton.scan import rows_at
from kda_ops.backends.triton.tile import dense, find_sequence, fit, inverse_norm, launch, load_column, load_tile, locate_chunk, locate_sequence, store_tile, strides_of
from kda_ops.problem import Problem
from kda_ops.sequences import count_chunks
from kda_ops.stages import Gradients, Reverse, Tile, Trace


@triton.jit
def locate_rows(cu_seqlens, i_t, N, T):
    """Chunk i_t as (batch row, first token, rows to write, whether they are tokens of a sequence); the tail of a packed row is sequence N."""
    if cu_seqlens is not None:
        i_n = find_sequence(cu_seqlens, i_t, N + 1)
        i_b, bos, length, first = locate_sequence(cu_seqlens, i_n, N, T)
        start = (i_t - first) * 64
        return i_b, bos + start, tl.minimum(length - start, 64).to(tl.int32), i_n < N
    else:
        i_b, first, n_rows = locate_chunk(cu_seqlens, i_t, N, T)
        return i_b, first, n_rows, n_rows > 0


@triton.jit
def read_rows(x, strides, i_b, i_h, first, n_rows, o_d, D: tl.constexpr):
    """Rows of one head of a [B, T, X, D] tensor, [64, width], zero past n_rows and past D."""
    o_r = tl.arange(0, 64)
    return tl.load(rows_at(x, strides, i_b, i_h, first, o_r, o_d), mask=(o_r < n_rows)[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def load_norm(norm, i_tile):
    """1 / |x| of each row as `gradient_pairs` left it, or ones; [64] fp32."""
    if norm is None:
        return tl.full((64,), 1.0, tl.float32)
    else:
        return tl.load(norm + i_tile * 64 + tl.arange(0, 64))


@triton.jit
def write_rows(x, token, i_h, HV, n_rows, b_x, o_d, D: tl.constexpr):
    """Write rows of one head of a contiguous [B T, HV, D] tensor."""
    o_r = tl.arange(0, 64)
    p_x = x + (token * HV + i_h) * D + o_r[:, None].to(tl.int64) * (HV * D) + o_d[None, :]
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=(o_r < n_rows)[:, None] & (o_d < D)[None, :])


@triton.jit
def write_column(x, token, i_h, HV, n_rows, b_x):
    """Write one number per row of a contiguous [B T, HV] tensor."""
    o_r = tl.arange(0, 64)
    tl.store(x + (token + o_r) * HV + i_h, b_x.to(x.dtype.element_ty), mask=o_r < n_rows)


@triton.jit
def clear_values(dv, dbeta, token, i_h, HV, n_rows, V: tl.constexpr, BV: tl.constexpr):
    """Zero gradients of rows that are no tokens of a sequence."""
    if dv is not None:
        for i in range((V + BV - 1) // BV):
            write_rows(dv, token, i_h, HV, n_rows, tl.zeros((64, BV), tl.float32), i * BV + tl.arange(0, BV), V)
    if dbeta is not None:
        write_column(dbeta, token, i_h, HV, n_rows, tl.zeros((64,), tl.float32))


@triton.jit
def clear_keys(dq, dk, dg, dbeta, dA_log, ddt_bias, i_tile, token, i_h, HV, n_rows, o_k, i_s, slices: tl.constexpr, K: tl.constexpr):
    """The same, and no part in the sums over tokens."""
    b_zero = tl.zeros((64, o_k.shape[0]), tl.float32)
    if dq is not None:
        write_rows(dq, token, i_h, HV, n_rows, b_zero, o_k, K)
        write_rows(dk, token, i_h, HV, n_rows, b_zero, o_k, K)
    if dg is not None:
        write_rows(dg, token, i_h, HV, n_rows, b_zero, o_k, K)
    if dbeta is not None:
        write_column(dbeta, token, i_h, HV, n_rows, tl.zeros((64,), tl.float32))
    if dA_log is not None:
        tl.store(dA_log + i_tile * slices + i_s, 0.0)
    if ddt_bias is not None:
        tl.store(ddt_bias + i_tile * K + o_k, tl.zeros((o_k.shape[0],), tl.float32), mask=o_k < K)


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
def gate_gradient(b_dg, b_g, bias, rate, lower_bound, BOUNDED: tl.constexpr):
    """From the gradient of the log decay to those of the logits and, summed by the caller, of A_log."""
    b_x = b_g + bias
    if BOUNDED:
        b_s = sigmoid(rate * b_x)
        b_slope = b_s * (1.0 - b_s)
        # A saturated sigmoid has slope 0 even where exp(A_log) overflowed, so select: 0 * inf would be NaN.
        b_dx = tl.where(b_slope > 0.0, b_dg * (lower_bound * b_slope * rate), 0.0)
        return b_dx, tl.where(b_slope > 0.0, b_dx * b_x, 0.0)
    else:
        return b_dg * (-rate * sigmoid(b_x)), b_dg * (-rate * softplus(b_x))


@triton.jit
def strength_gradient(b_sums, b_L, b_beta, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr):
    """The gradient of beta, or of its logit: sum_v z v_new is beta times that of beta, and on the diagonal of -dL; so a sigmoid needs no other sums."""
    if SIGMOID:
        return on_diagonal(b_L) * (b_beta * (0.5 if NEG_EIGVAL else 1.0) - 1.0)
    else:
        return b_sums


@triton.jit
def on_diagonal(b_x):
    """The diagonal of [64, 64], [64]."""
    o_r = tl.arange(0, 64)
    return tl.sum(tl.where(o_r[:, None] == o_r[None, :], b_x, 0.0), 1)


@triton.jit
def pair_gradients(
    do, do_s, v, v_s, v_new, z, dv, i_tile, i_b, i_h, first, n_rows, token, HV, scale, b_beta,
    V: tl.constexpr, BV: tl.constexpr, SUMS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of the scores and the part of v, all that reads V alone::

        scale dP on and below the diagonal, its transpose above it;   dL, likewise     [64, 64] fp32
        sum over V of z v [64], if SUMS;   dv = beta z is written

    Each triangle is a product of its own: a product is never transposed.
    """
    o_r = tl.arange(0, 64)
    lower = o_r[:, None] >= o_r[None, :]
    b_P = tl.zeros((64, 64), tl.float32)
    b_PT, b_L, b_LT = b_P, b_P, b_P
    b_zv = tl.zeros((64,), tl.float32)
    for i in range((V + BV - 1) // BV):
        o_v = i * BV + tl.arange(0, BV)
        b_vn, b_z = load_tile(v_new, i_tile, o_r, o_v, V), load_tile(z, i_tile, o_r, o_v, V)
        if do is not None:
            b_do = read_rows(do, do_s, i_b, i_h, first, n_rows, o_v, V)
            b_P = tl.dot(b_do, tl.trans(b_vn), b_P, input_precision=PREC)
            b_PT = tl.dot(b_vn, tl.trans(b_do), b_PT, input_precision=PREC)
        b_L = tl.dot(b_z, tl.trans(b_vn), b_L, input_precision=PREC)
        b_LT = tl.dot(b_vn, tl.trans(b_z), b_LT, input_precision=PREC)
        if SUMS:
            b_v = read_rows(v, v_s, i_b, i_h, first, n_rows, o_v, V)
            b_zv += tl.sum(b_v.to(tl.float32) * b_z.to(tl.float32), 1)
        if dv is not None:
            write_rows(dv, token, i_h, HV, n_rows, b_z.to(tl.float32) * b_beta[:, None], o_v, V)
    b_P = tl.where(lower, b_P, b_PT) * scale
    return b_P, -tl.where(lower, b_L, b_LT), b_zv


@triton.jit
def load_state(states, i_tile, o_k, o_v, K: tl.constexpr, V: tl.constexpr):
    """Rows o_k and columns o_v of a tile of [tiles, K, V], zero past both."""
    p_s = states + i_tile * (K * V) + (o_k[:, None] * V + o_v[None, :])
    return tl.load(p_s, mask=(o_k < K)[:, None] & (o_v < V)[None, :], other=0.0)


@triton.jit
def query_gradient(do, do_s, states, i_tile, i_b, i_h, first, n_rows, o_k, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PREC: tl.constexpr):
    """do S^T [64, width] fp32 for the key channels o_k."""
    b_dqg = tl.zeros((64, o_k.shape[0]), tl.float32)
    if do is not None:
        for i in range((V + BV - 1) // BV):
            o_v = i * BV + tl.arange(0, BV)
            b_do, b_S = read_rows(do, do_s, i_b, i_h, first, n_rows, o_v, V), load_state(states, i_tile, o_k, o_v, K, V)
            b_dqg = tl.dot(b_do, tl.trans(b_S), b_dqg, input_precision=PREC)
    return b_dqg


@triton.jit
def key_gradients(states, v_new, dstates, z, i_tile, o_k, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PREC: tl.constexpr):
    """(v_new dS^T, z S^T [64, width], sum over V of S dS [width]) for the key channels o_k, fp32."""
    W: tl.constexpr = o_k.shape[0]
    o_r = tl.arange(0, 64)
    b_dkg = tl.zeros((64, W), tl.float32)
    b_dstart = b_dkg
    b_dgamma = tl.zeros((W,), tl.float32)
    for i in range((V + BV - 1) // BV):
        o_v = i * BV + tl.arange(0, BV)
        b_S, b_dS = load_state(states, i_tile, o_k, o_v, K, V), load_state(dstates, i_tile, o_k, o_v, K, V)
        b_dkg = tl.dot(load_tile(v_new, i_tile, o_r, o_v, V), tl.trans(b_dS), b_dkg, input_precision=PREC)
        b_dstart = tl.dot(load_tile(z, i_tile, o_r, o_v, V), tl.trans(b_S), b_dstart, input_precision=PREC)
        b_dgamma += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 1)
    return b_dkg, b_dstart, b_dgamma


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


@triton.jit(do_not_specialize=["N", "T", "scale", "lower_bound"])
def gradient_pairs(
    q, q_s, k, k_s, v, v_s, beta, beta_s, g, g_s, A_log, dt_bias, do, do_s, v_new, z, cu_seqlens, dP, dL, dv, dbeta, q_norm, k_norm,
    N, T, H, HV, scale, lower_bound,
    K: tl.constexpr, WIDE: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, ACTIVATE: tl.constexpr, BOUNDED: tl.constexpr, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr,
    EXACT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Everything of one chunk and value head that reads V alone::

        dP = tril(scale do v_new^T)      dL = -strict_tril(z v_new^T)      each with its transpose above the diagonal, [64, 64]
        dv = beta z [64, V]              dbeta = sum_v z v_new / beta for a sigmoid, else its part sum_v z v [64]

    and the norms of q and k. One decay per head (g given) scales dP and dL here, E_ij on both sides of the diagonal. Apart from `gradient_keys` because the two need different registers, and so that its slices of K find the pairs ready: 16 KB more to move.
    """
    i_h, i_t = tl.program_id(0) % HV, tl.program_id(0) // HV
    i_b, first, n_rows, live = locate_rows(cu_seqlens, i_t, N, T)
    i_tile, token = tl.program_id(0).to(tl.int64), i_b * T + first
    if (n_rows <= 0) | (live == 0):
        clear_values(dv, dbeta, token, i_h, HV, n_rows, V, BV)
        return
    o_r = tl.arange(0, 64)
    if q_norm is not None:
        i_g = i_h // (HV // H)
        tl.store(q_norm + i_tile * 64 + o_r, inverse_norm(read_rows(q, q_s, i_b, i_g, first, n_rows, tl.arange(0, WIDE), K), True))
        tl.store(k_norm + i_tile * 64 + o_r, inverse_norm(read_rows(k, k_s, i_b, i_g, first, n_rows, tl.arange(0, WIDE), K), True))
    SUMS: tl.constexpr = dbeta is not None and not SIGMOID
    b_beta = strength_column(beta, beta_s, i_b, i_h, first, n_rows, SIGMOID, NEG_EIGVAL)
    b_P, b_L, b_zv = pair_gradients(do, do_s, v, v_s, v_new, z, dv, i_tile, i_b, i_h, first, n_rows, token, HV, scale, b_beta, V, BV, SUMS, PREC)
    if dbeta is not None:
        write_column(dbeta, token, i_h, HV, n_rows, strength_gradient(b_zv, b_L, b_beta, SIGMOID, NEG_EIGVAL))
    if g is not None:
        b_x = decay_column(g, g_s, A_log, dt_bias, tl.full((), lower_bound, tl.float32), i_b, i_h, first, n_rows, ACTIVATE, BOUNDED)
        b_E = tl.where(o_r[:, None] >= o_r[None, :], pair_decay(b_x, EXACT), pair_decay_transposed(b_x, EXACT))
        b_P, b_L = b_P * b_E, b_L * b_E
    store_tile(dP, i_tile, b_P, o_r, o_r, 64)
    store_tile(dL, i_tile, b_L, o_r, o_r, 64)


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
                tl.store(dA_log + i_tile * slices + i_s, tl.sum(tl.sum(tl.where(m_g & (o_k < K)[None, :], b_log, 0.0), 1), 0))
            if ddt_bias is not None:
                tl.store(ddt_bias + i_tile * K + o_k, tl.sum(tl.where(m_g, b_dg, 0.0), 0), mask=o_k < K)
        write_rows(dg, token, i_h, HV, n_rows, b_dg, o_k, K)


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


@triton.jit(do_not_specialize=["T"])
def gather_heads(x, x_s, dy, dx, T, H, HV, rows, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, L2NORM: tl.constexpr):
    """Sum the gradient of unit q or k over the value heads of a key head, in order, and pass it through the norm::

        dx = r (s - y sum_k y s),   y = r x,   s = sum of dy [B T, HV, K] fp32 over the group      [B T, H, K]
    """
    o_i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, BK)
    m_x = (o_i < rows)[:, None] & (o_k < K)[None, :]
    i_token, i_g = o_i // H, o_i % H
    group = HV // H
    p_y = dy + (i_token * HV + i_g * group)[:, None] * K + o_k[None, :]
    b_sum = tl.zeros((ROWS, BK), tl.float32)
    for i in range(group):
        b_sum += tl.load(p_y + i * K, mask=m_x, other=0.0)
    if L2NORM:
        p_x = x + ((i_token // T) * x_s[0] + (i_token % T) * x_s[1] + i_g * x_s[2])[:, None] + (o_k.to(tl.int64) * x_s[3])[None, :]
        b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
        b_r = tl.rsqrt(tl.sum(b_x * b_x, 1) + 1e-6)[:, None]
        b_x = b_x * b_r
        b_sum = b_r * (b_sum - b_x * tl.sum(b_x * b_sum, 1)[:, None])
    tl.store(dx + o_i[:, None] * K + o_k[None, :], b_sum.to(dx.dtype.element_ty), mask=m_x)


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


def with_strides(x: Tensor | None) -> tuple:
    """A tensor of the caller as a kernel takes it."""
    x = fit(x)
    return x, strides_of(x)


def _count(p: Problem):
    """Chunks to visit: the tail of a packed row may need one more."""
    return count_chunks(p) + (p.cu_seqlens is not None)


def _like(p: Problem, name: str, need: frozenset[str]) -> Tensor | None:
    """Where to write a gradient, if it is needed: contiguous."""
    x = getattr(p, name)
    return p.q.new_empty(x.shape, dtype=x.dtype) if x is not None and name in need else None


def _per_chunk(p: Problem, name: str, width: int, need: frozenset[str]) -> Tensor | None:
    """The parts that chunks add to the gradient of a parameter."""
    return p.q.new_empty((_count(p), p.HV, width), dtype=torch.float32) if getattr(p, name) is not None and name in need else None


def _total(parts: Tensor | None, like: Tensor | None) -> Tensor | None:
    """Sum the parts in a fixed order, in fp32 until the one cast at the end."""
    return None if parts is None else parts.sum(0).reshape(like.shape).to(like.dtype)


def gradient(p: Problem, tile: Tile, trace: Trace, do: Tensor | None, reverse: Reverse, need: frozenset[str]) -> Gradients:
    """Gradients of the inputs named in `need`; see `kda_ops.stages.Backend.gradient`."""
    q, device, NT, exact = p.q, p.q.device, _count(p), p.q.dtype is torch.float32
    options, values = tuning.choose("gradient_keys" if p.rank else "gradient_rows", p), tuning.choose("gradient_pairs", p)
    BK, precision, slices = options.block_k, "tf32x3" if exact else "tf32", 1
    if p.rank:
        slices = (p.K + BK - 1) // BK
    gates, gather = need & {"g", "A_log", "dt_bias"}, p.HV > p.H or p.l2norm
    dq = dk = dbeta = None
    if "q" in need or "k" in need:
        dq, dk = (torch.empty((p.B, p.T, p.HV, p.K), dtype=torch.float32 if gather else q.dtype, device=device) for _ in "qk")
    dv, dg = _like(p, "v", need), _like(p, "g", need | {"g"}) if gates else None
    dA_log, ddt_bias = _per_chunk(p, "A_log", slices, need), _per_chunk(p, "dt_bias", p.K if p.rank else 1, need)
    sums = p.beta is not None and "beta" in need and not p.sigmoid_beta
    if p.beta is not None and "beta" in need:
        dbeta = q.new_empty((slices + 1, p.B, p.T, p.HV), dtype=torch.float32) if sums else _like(p, "beta", need)
    dP, dL = q.new_empty((NT, p.HV, 64, 64)), q.new_empty((NT, p.HV, 64, 64))
    norms = [q.new_empty((NT, p.HV, 64), dtype=torch.float32) if p.l2norm else None for _ in "qk"]
    programs = NT * p.HV if p.H else 0
    strength, gate, ends, cu_seqlens = with_strides(p.beta), (*with_strides(p.g), dense(p.A_log), dense(p.dt_bias)), with_strides(do), dense(p.cu_seqlens)
    activate, bounded, centred = p.activate_gate, p.lower_bound is not None, tuning.centred(p)
    log2_bound = p.gate_bound / math.log(2.0) if centred else 0.0
    launch(
        gradient_pairs, programs, device, *with_strides(q), *with_strides(p.k), *with_strides(p.v), *strength, *((None,) * 4 if p.rank else gate), *ends, trace.v_new, reverse.z, cu_seqlens,
        dP, dL, dv, dbeta[slices] if sums else dbeta, *norms, p.N, p.T, p.H, p.HV, p.scale, p.lower_bound or 0.0,
        p.K, tuning.width(p.K, q.dtype), p.V, values.block_v, activate, bounded, p.sigmoid_beta, p.neg_eigval, exact, precision, num_stages=values.stages, **values.launch,
    )  # fmt: skip
    if dq is not None or gates or sums:
        launch(
            gradient_keys if p.rank else gradient_rows, programs * slices, device, *with_strides(q), *with_strides(p.k), *gate[:2], *strength, *gate[2:], *ends,
            trace.states, trace.v_new, reverse.dstates, reverse.z, dP, dL, *norms, *(tables(device) if p.rank else ()), cu_seqlens, dq, dk, dg, dbeta if sums else None, *((p.B * p.T * p.HV,) if p.rank else ()),
            dA_log, ddt_bias, p.N, p.T, p.H, p.HV, p.scale, p.lower_bound or 0.0, *((log2_bound,) if p.rank else ()), p.K, p.V, BK, options.block_v,
            *((centred,) if p.rank else ()), activate, bounded, p.sigmoid_beta, p.neg_eigval, exact, precision, num_stages=options.stages, **options.launch,
        )  # fmt: skip
    if gather and dq is not None:
        dq, dk = (_gather(p, x, d) if name in need else None for name, x, d in (("q", q, dq), ("k", p.k, dk)))
    return Gradients(
        dq if "q" in need else None, dk if "k" in need else None, dv, dg if "g" in need else None, dbeta.sum(0).to(p.beta.dtype) if sums else dbeta,
        None if dA_log is None else dA_log.sum((0, 2)).to(p.A_log.dtype), _total(ddt_bias, p.dt_bias),
        p.as_kv(reverse.dinitial_state) if "initial_state" in need and reverse.dinitial_state is not None else None,
    )  # fmt: skip


def _gather(p: Problem, x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of q or k from those per value head."""
    dx, rows, BK = x.new_empty(x.shape), p.B * p.T * p.H, tuning.width(p.K, x.dtype)
    per_program = max(1, 4096 // BK)
    launch(
        gather_heads, (rows + per_program - 1) // per_program, x.device, x, x.stride(), dy, dx, p.T, p.H, p.HV, rows,
        p.K, BK, per_program, p.l2norm, num_warps=4,
    )  # fmt: skip
    return dx
