"""What a chunk needs besides the state that enters it: one program per chunk and head
(docs/maths.md, chunk form).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.decay import (
    block_scores,
    half_prefix,
    level_scores,
    pair_decay,
    row_decay,
    scores,
    upto,
)
from kda_ops.backends.triton.fragment import spread, store_spread
from kda_ops.backends.triton.gate import LOG2E, decay_column, load_rate, log2_decay, strength_column
from kda_ops.backends.triton.inverse import inverse, inverse_of_two, product
from kda_ops.backends.triton.launch import columns_of, launch, new, strides_of
from kda_ops.backends.triton.scan import rows_at
from kda_ops.backends.triton.tile import (
    FOLLOWED,
    Begun,
    add_two,
    dense,
    fit,
    inverse_norm,
    let_next_begin,
    load_rows,
    load_tile,
    locate_chunk,
    mark_ready,
    prefetch_rows,
    prefetch_tile,
    store_rows,
    store_tile,
    widen,
)
from kda_ops.problem import Problem
from kda_ops.sequences import count_chunks
from kda_ops.stages import Tile


@triton.jit
def half_norm(
    x,
    strides,
    i_b,
    i_h,
    first,
    n_rows,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    L2NORM: tl.constexpr,
):
    """1 / sqrt(sum of squares + 1e-6) of 32 rows, [32] fp32, or ones; slice by slice. A row that is
    one slice is left to `inverse_norm`.
    """
    b_norm = tl.full((32,), 1.0, tl.float32)
    if L2NORM and BLOCK < D:
        b_sum = tl.zeros((32,), tl.float32)
        for i in tl.range((D + BLOCK - 1) // BLOCK, num_stages=1):
            o_d = i * BLOCK + tl.arange(0, BLOCK)
            b_x = load_rows(x, strides, i_b, i_h, first, n_rows, o_d, D, R, 32).to(tl.float32)
            b_sum += tl.sum(b_x * b_x, 1)
        b_norm = tl.rsqrt(b_sum + 1e-6)
    return b_norm


@triton.jit
def load_unit(
    x,
    strides,
    norm,
    i_b,
    i_h,
    first,
    n_rows,
    b_norm,
    scale,
    o_d,
    D: tl.constexpr,
    R: tl.constexpr,
    L2NORM: tl.constexpr,
):
    """32 rows of one head times their inverse norms and the scale, [32, width] fp32. The norms are
    left at `norm`, if it is there.
    """
    b_x = widen(load_rows(x, strides, i_b, i_h, first, n_rows, o_d, D, R, 32))
    if o_d.shape[0] >= D:
        b_norm = inverse_norm(b_x, L2NORM)
    if norm is not None:
        tl.store(norm + tl.arange(0, 32), b_norm)
    return b_x * (b_norm * scale)[:, None]


@triton.jit
def load_decay(
    g,
    strides,
    A_log,
    dt_bias,
    lower_bound,
    i_b,
    i_h,
    first,
    n_rows,
    o_k,
    K: tl.constexpr,
    R: tl.constexpr,
    ACTIVATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    FAST: tl.constexpr,
):
    """The decay of each of 32 tokens in base 2, [32, width] fp32.

    0 for rows that are no tokens: the gate of minus infinity is zero for any rate that is neither
    zero nor infinite.
    """
    if g is None:
        b_g = tl.zeros((32, o_k.shape[0]), tl.float32)
    else:
        b_g = widen(
            load_rows(
                g,
                strides,
                i_b,
                i_h,
                first,
                n_rows,
                o_k,
                K,
                R,
                32,
                -float("inf") if ACTIVATE else 0.0,
            )
        )
        b_bias = tl.zeros((o_k.shape[0],), tl.float32)
        if ACTIVATE:
            if dt_bias is not None:
                b_bias = tl.load(dt_bias + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        rate = tl.minimum(tl.maximum(load_rate(A_log, i_h), 1e-30), 1e30)
        b_g = log2_decay(b_g, b_bias[None, :], rate, lower_bound, ACTIVATE, BOUNDED, FAST)
    return b_g


@triton.jit
def prepare_half(
    q,
    q_s,
    k,
    k_s,
    g,
    g_s,
    A_log,
    dt_bias,
    w,
    qg,
    kg,
    q_norm,
    k_norm,
    i_tile,
    i_b,
    i_g,
    i_h,
    first,
    n_rows,
    b_q_norm,
    b_k_norm,
    scale,
    lower_bound,
    log2_bound,
    beta,
    beta_s,
    b_Y,
    b_first,
    o_k,
    K: tl.constexpr,
    R: tl.constexpr,
    L2NORM: tl.constexpr,
    ACTIVATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    SHARE: tl.constexpr,
    SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    PREC: tl.constexpr,
    SCORES: tl.constexpr,
):
    """32 rows of one chunk and head, for one slice of K; the second half if b_Y, b_first are what
    the first half returned. Stores their rows of qg and kg, and of w and the norms, if they are
    there, and returns::

        (q k^T o E, k k^T o E on and below the diagonal,
        the same against the first half, over the root of `shift` [32, 32],
        k decayed to the end of the half [32, width] fp32, the decay of the half [width],
        w = beta k decayed since the start of the chunk, over `shift`)

    where shift is 2^(16 log2_bound) if all rows share an anchor, else 1; without SCORES the four
    tiles are zero. In an order that keeps few tiles alive.
    """
    TYPE: tl.constexpr = qg.dtype.element_ty
    ROW: tl.constexpr = 0 if b_Y is None else 32
    FAST: tl.constexpr = PREC != "tf32x3"
    b_x = load_decay(
        g,
        g_s,
        A_log,
        dt_bias,
        lower_bound,
        i_b,
        i_h,
        first,
        n_rows,
        o_k,
        K,
        R,
        ACTIVATE,
        BOUNDED,
        FAST,
    )
    centre = 16.0 * log2_bound if SHARE == 32 else 0.0
    shift = tl.exp2(centre) if SHARE == 32 else 1.0
    if q_norm is not None:
        q_norm, k_norm = q_norm + ROW, k_norm + ROW
    b_P = tl.zeros((32, 32), tl.float32)
    b_L = b_P
    if SHARE > 1:
        b_D, b_C = half_prefix(b_x if SHARE == 32 else tl.maximum(b_x, log2_bound), centre, R)
        total = upto(b_C, 32, R)
        b_total, b_start = tl.exp2(total), tl.exp2(b_D)
    b_k = load_unit(k, k_s, k_norm, i_b, i_g, first, n_rows, b_k_norm, 1.0, o_k, K, R, L2NORM)
    if SHARE == 1:
        b_q = load_unit(q, q_s, q_norm, i_b, i_g, first, n_rows, b_q_norm, scale, o_k, K, R, L2NORM)
        b_P, b_L, b_start, b_end, b_total = level_scores(b_q, b_k, b_x, R, PREC, TYPE, SCORES)
        b_ke = b_k * b_end
    elif SHARE == 8:
        b_ke = b_k * tl.exp2(total[None, :] - b_D)
    else:
        b_kc = b_k * tl.exp2(-b_D)
        b_ke = b_kc * tl.exp2(total - centre)[None, :]
    b_kr = b_k * b_start
    if b_Y is not None:
        store_rows(kg, i_tile, b_Y * b_total[None, :], o_k, K, R)
        store_rows(kg, i_tile, b_ke, o_k, K, R, 32)
    b_w = (
        b_kr
        * strength_column(beta, beta_s, i_b, i_h, first, n_rows, SIGMOID, NEG_EIGVAL, 32)[:, None]
    )
    if b_Y is not None:
        b_w *= b_first[None, :]
    if w is not None:
        store_rows(w, i_tile, b_w, o_k, K, R, ROW)
    b_kr = b_kr.to(TYPE)
    if SHARE == 32:
        b_kc = b_kc.to(TYPE)
        if SCORES:
            b_L = scores(b_kr, b_kc, PREC)
    b_L1 = b_L
    if b_Y is not None:
        # half of it now, or products above 6,000 would be beyond fp32
        b_Y = (b_Y * tl.exp2(0.5 * centre) if SHARE == 32 else b_Y).to(TYPE)
        if SCORES:
            b_L1 = scores(b_kr, b_Y, PREC)
    if SHARE > 1:  # q comes when the other rows have gone to the tensor cores
        b_q = load_unit(q, q_s, q_norm, i_b, i_g, first, n_rows, b_q_norm, scale, o_k, K, R, L2NORM)
    b_qr = b_q * b_start
    store_rows(
        qg,
        i_tile,
        b_qr * shift if b_Y is None else b_qr * (b_first * shift)[None, :],
        o_k,
        K,
        R,
        ROW,
    )
    b_qr = b_qr.to(TYPE)
    b_P1 = b_P
    if SCORES:
        if SHARE == 32:
            b_P = scores(b_qr, b_kc, PREC)
        b_P1 = b_P
        if b_Y is not None:
            b_P1 = scores(b_qr, b_Y, PREC)
        if SHARE == 8:  # last, where q, k and their decay are all that is alive
            b_P, b_L = block_scores(b_q, b_k, b_D, b_C, log2_bound, R, not ACTIVATE, PREC, TYPE)
    return b_P, b_L, b_P1, b_L1, b_ke, b_total, b_w.to(TYPE)


@triton.jit
def load_transposed(x, i_tile, o_r, o_c):
    """The block of rows o_c and columns o_r of tile i_tile of a [tiles, 64, 64] scratch tensor, as
    [o_r, o_c].
    """
    return tl.load(x + i_tile * 4096 + o_c[None, :] * 64 + o_r[:, None])


@triton.jit
def store_transposed(x, i_tile, b_x, o_r, o_c):
    """Write [o_r, o_c] to the block of rows o_c and columns o_r."""
    tl.store(x + i_tile * 4096 + o_c[None, :] * 64 + o_r[:, None], b_x)


@triton.jit
def square_norms(b_qq, b_kk, L2NORM: tl.constexpr):
    """`tile.inverse_norm` of q and k from the diagonals of q q^T and k k^T, whose products of 16
    bit numbers are exact.
    """
    if L2NORM:
        o_r = tl.arange(0, 64)
        own = o_r[:, None] == o_r[None, :]
        b_q, b_k = tl.reduce((tl.where(own, b_qq, 0.0), tl.where(own, b_kk, 0.0)), 1, add_two)
        return tl.rsqrt(b_q + 1e-6), tl.rsqrt(b_k + 1e-6)
    else:
        return tl.full((64,), 1.0, tl.float32), tl.full((64,), 1.0, tl.float32)


@triton.jit(
    do_not_specialize=[
        "N",
        "T",
        "begin",
        "scale",
        "lower_bound",
        "log2_bound",
        "beta_b",
        "beta_t",
        "beta_h",
    ]
)
def prepare_kda(
    q,
    q_s,
    k,
    k_s,
    g,
    g_s,
    beta,
    beta_b,
    beta_t,
    beta_h,
    A_log,
    dt_bias,
    cu_seqlens,
    kept,
    pairs,
    A,
    P,
    w,
    qg,
    kg,
    gamma,
    rows,
    ready,
    N,
    T,
    begin,
    H,
    HV,
    scale,
    lower_bound,
    log2_bound,
    K: tl.constexpr,
    BK: tl.constexpr,
    R: tl.constexpr,
    NORMS: tl.constexpr,
    L2NORM: tl.constexpr,
    ACTIVATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    SHARE: tl.constexpr,
    SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    PREC: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """One chunk, from number `begin` on, of one head; E_ij is the decay from row j to row i::

        P = tril(scale q k^T o E)   [64, 64]    A = (I + strict_tril(beta k k^T o E))^-1   [64, 64]
        w = A (beta k exp G)        [64, K]     gamma = exp(sum of g)    [K] fp32
        qg = scale q exp G,  kg = k exp(sum of g over the later rows)   [64, K]
        rows = (beta, 1 / |q|, 1 / |k|)   [3, 64] fp32

    the norms, ones without L2NORM, only if NORMS. u = A (beta v) is left to the scan, to which beta
    v is no more to read than u would be.

    A and P are triangles that share a tile between forward and backward (`pairs`, later given as
    `kept`): A below the diagonal; on and above it P, transposed inside the two blocks of 32 rows on
    the diagonal. From it neither scores nor an inverse need be formed.

    In two halves of 32 rows: a tile of half the rows and all of K takes as many registers as one of
    all rows and half of K, but its rows are complete (norms need no pass of their own), its scores
    are final, and what the halves do not share needs no choice per element. Only wider keys are cut
    into slices of BK columns, whose scores add up.
    """
    let_next_begin()
    i_h, i_t = tl.program_id(0) % HV, tl.program_id(0) // HV + begin
    i_b, first, n_rows = locate_chunk(cu_seqlens, i_t, N, T)
    i_g = i_h // (HV // H)  # the query and key head
    i_tile = i_t.to(tl.int64) * HV + i_h
    if n_rows > 0:
        prefetch_rows(g, g_s, i_b, i_h, first, n_rows, K)
        prefetch_rows(k, k_s, i_b, i_g, first, n_rows, K)
        prefetch_rows(q, q_s, i_b, i_g, first, n_rows, K)
        prefetch_tile(kept, i_tile, 4096)
    o_1, o_2 = tl.arange(0, 32), 32 + tl.arange(0, 32)
    TYPE: tl.constexpr = qg.dtype.element_ty
    second, n_second = first + 32, n_rows - 32

    strides = (beta_b, beta_t, beta_h)
    rows += i_tile * 192
    tl.store(
        rows + tl.arange(0, 64),
        strength_column(beta, strides, i_b, i_h, first, n_rows, SIGMOID, NEG_EIGVAL),
    )
    q_norm, k_norm = rows + 64 if NORMS else None, rows + 128 if NORMS else None
    shift, root = (
        tl.exp2(16.0 * log2_bound) if SHARE == 32 else 1.0,
        tl.exp2(8.0 * log2_bound) if SHARE == 32 else 1.0,
    )
    q_norm1, k_norm1 = (
        half_norm(q, q_s, i_b, i_g, first, n_rows, K, BK, R, L2NORM),
        half_norm(k, k_s, i_b, i_g, first, n_rows, K, BK, R, L2NORM),
    )
    q_norm2, k_norm2 = (
        half_norm(q, q_s, i_b, i_g, second, n_second, K, BK, R, L2NORM),
        half_norm(k, k_s, i_b, i_g, second, n_second, K, BK, R, L2NORM),
    )
    b_P11 = tl.zeros((32, 32), tl.float32)
    b_P21, b_P22, b_L11, b_L21, b_L22 = b_P11, b_P11, b_P11, b_P11, b_P11
    # w waits for A in registers, which there are without scores; else in its place in memory
    HELD: tl.constexpr = kept is not None and BK >= K
    b_k1 = tl.zeros((32, BK), TYPE)
    b_k2 = b_k1
    for i in tl.range((K + BK - 1) // BK, num_stages=1):
        o_k = i * BK + tl.arange(0, BK)
        b_P, b_L, _, _, b_Y, b_first, b_k1 = prepare_half(
            q,
            q_s,
            k,
            k_s,
            g,
            g_s,
            A_log,
            dt_bias,
            None if HELD else w,
            qg,
            kg,
            q_norm,
            k_norm,
            i_tile,
            i_b,
            i_g,
            i_h,
            first,
            n_rows,
            q_norm1,
            k_norm1,
            scale,
            lower_bound,
            log2_bound,
            beta,
            strides,
            None,
            None,
            o_k,
            K,
            R,
            L2NORM,
            ACTIVATE,
            BOUNDED,
            SHARE,
            SIGMOID,
            NEG_EIGVAL,
            PREC,
            kept is None,
        )
        b_P11, b_L11 = b_P11 + b_P, b_L11 + b_L
        b_P, b_L, b_P1, b_L1, _, b_second, b_k2 = prepare_half(
            q,
            q_s,
            k,
            k_s,
            g,
            g_s,
            A_log,
            dt_bias,
            None if HELD else w,
            qg,
            kg,
            q_norm,
            k_norm,
            i_tile,
            i_b,
            i_g,
            i_h,
            second,
            n_second,
            q_norm2,
            k_norm2,
            scale,
            lower_bound,
            log2_bound,
            beta,
            strides,
            b_Y,
            b_first,
            o_k,
            K,
            R,
            L2NORM,
            ACTIVATE,
            BOUNDED,
            SHARE,
            SIGMOID,
            NEG_EIGVAL,
            PREC,
            kept is None,
        )
        b_P21, b_L21, b_P22, b_L22 = b_P21 + b_P1, b_L21 + b_L1, b_P22 + b_P, b_L22 + b_L
        tl.store(gamma + i_tile * K + o_k, b_first * b_second, mask=o_k < K)

    lower, strict = o_1[:, None] >= o_1[None, :], o_1[:, None] > o_1[None, :]
    b_zero = tl.zeros((32, 32), TYPE)
    store_tile(P, i_tile, b_zero, o_1, o_2, 64)
    if kept is None:
        store_tile(P, i_tile, tl.where(lower, b_P11, 0.0), o_1, o_1, 64)
        store_tile(P, i_tile, b_P21 * root, o_2, o_1, 64)
        store_tile(P, i_tile, tl.where(lower, b_P22, 0.0), o_2, o_2, 64)
    else:
        store_tile(P, i_tile, load_tile(kept, i_tile, o_1, o_2, 64), o_2, o_1, 64)
        b_A11, b_A21, b_A22 = (
            load_tile(kept, i_tile, o_1, o_1, 64),
            load_tile(kept, i_tile, o_2, o_1, 64),
            load_tile(kept, i_tile, o_2, o_2, 64),
        )
        store_transposed(P, i_tile, tl.where(strict, b_zero, b_A11), o_1, o_1)
        store_transposed(P, i_tile, tl.where(strict, b_zero, b_A22), o_2, o_2)
        b_one = tl.where(o_1[:, None] == o_1[None, :], 1.0, 0.0).to(TYPE)
        b_A11, b_A22 = tl.where(strict, b_A11, b_one), tl.where(strict, b_A22, b_one)
    # Picked by a sum over an axis, past which the compiler does not compute beta again for every
    # layout it is used in.
    b_beta = strength_column(beta, strides, i_b, i_h, first, n_rows, SIGMOID, NEG_EIGVAL)
    b_beta = tl.reshape(b_beta, (2, 32))
    half = tl.arange(0, 2)[:, None]
    b_beta1, b_beta2 = (
        tl.sum(tl.where(half == 0, b_beta, 0.0), 0),
        tl.sum(tl.where(half == 1, b_beta, 0.0), 0),
    )
    o_k = tl.arange(0, BK)
    if not HELD:
        tl.debug_barrier()  # w holds beta k exp G so far, and P is there, written by other threads
        # the first slices arrive while the inverse is made
        b_k1, b_k2 = load_tile(w, i_tile, o_1, o_k, K), load_tile(w, i_tile, o_2, o_k, K)
    if kept is None:
        b_L11, b_L22 = (
            tl.where(strict, b_L11 * -b_beta1[:, None], 0.0),
            tl.where(strict, b_L22 * -b_beta2[:, None], 0.0),
        )
        b_A11, b_A22 = inverse_of_two(b_L11, b_L22, INVERSE)
        b_A21 = product(
            b_A22, b_L21 * (-root * b_beta2)[:, None], tl.zeros((32, 32), tl.float32), INVERSE
        )
        b_A21 = product(b_A21, b_A11, tl.zeros((32, 32), tl.float32), INVERSE)
        b_A11, b_A21, b_A22 = b_A11.to(TYPE), b_A21.to(TYPE), b_A22.to(TYPE)
    if pairs is not None:
        store_tile(
            pairs,
            i_tile,
            tl.where(strict, b_A11, load_transposed(P, i_tile, o_1, o_1)),
            o_1,
            o_1,
            64,
        )
        store_tile(pairs, i_tile, load_tile(P, i_tile, o_2, o_1, 64), o_1, o_2, 64)
        store_tile(pairs, i_tile, b_A21, o_2, o_1, 64)
        store_tile(
            pairs,
            i_tile,
            tl.where(strict, b_A22, load_transposed(P, i_tile, o_2, o_2)),
            o_2,
            o_2,
            64,
        )
    store_tile(A, i_tile, b_A11, o_1, o_1, 64)
    store_tile(A, i_tile, b_zero, o_1, o_2, 64)
    store_tile(A, i_tile, b_A21, o_2, o_1, 64)
    store_tile(A, i_tile, b_A22, o_2, o_2, 64)
    for i in tl.range((K + BK - 1) // BK, num_stages=1):
        b_k1, b_k2 = spread(b_k1), spread(b_k2)
        b_w1 = tl.dot(b_A11, b_k1, input_precision=PREC) * shift
        b_w2 = (
            tl.dot(b_A22, b_k2, tl.dot(b_A21, b_k1, input_precision=PREC), input_precision=PREC)
            * shift
        )
        store_spread(w, i_tile, b_w1, 0, i * BK, K)
        store_spread(w, i_tile, b_w2, 32, i * BK, K)
        o_k += BK
        b_k1, b_k2 = load_tile(w, i_tile, o_1, o_k, K), load_tile(w, i_tile, o_2, o_k, K)
    mark_ready(ready, i_t, begin, i_h, HV)


@triton.jit(
    do_not_specialize=[
        "N",
        "T",
        "begin",
        "scale",
        "lower_bound",
        "g_b",
        "g_t",
        "g_h",
        "beta_b",
        "beta_t",
        "beta_h",
    ]
)
def prepare_gdn(
    q,
    q_s,
    k,
    k_s,
    g,
    g_b,
    g_t,
    g_h,
    beta,
    beta_b,
    beta_t,
    beta_h,
    A_log,
    dt_bias,
    cu_seqlens,
    kept_A,
    A,
    P,
    rows,
    gamma,
    ready,
    N,
    T,
    begin,
    H,
    scale,
    lower_bound,
    K: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    L2NORM: tl.constexpr,
    ACTIVATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    EXACT: tl.constexpr,
    PREC: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """One chunk, from number `begin` on, for the value heads of one key head, which share q k^T and
    k k^T; n are the row norms and D_ij the decay from row j to row i::

        A = (I + strict_tril(beta n n k k^T o D))^-1,   P = scale tril(n n q k^T o D)   [64, 64]
        rows = (n_k exp G, n_k exp(sum of g over the later rows), beta,
                scale n_q exp G, n_k, n_q, G)   [7, 64] fp32

    G in base 2, or g for operands of 32 bits: what `pair_decay` takes. The scans read the first
    four rows, the gradients all of them.

    One decay per head is a factor per row, which moves past the dot products together with the
    norms: q and k go from memory to the tensor cores as they are, here and in the scan. The decay
    stays inside the inverse: inverting without it and multiplying afterwards is the same on paper
    and overflows for long keys.
    """
    let_next_begin()
    i_g, i_t = tl.program_id(0) % H, tl.program_id(0) // H + begin
    i_b, first, n_rows = locate_chunk(cu_seqlens, i_t, N, T)
    o_r, o_k = tl.arange(0, 64), tl.arange(0, BK)
    m_x = (o_r < n_rows)[:, None] & (o_k < K)[None, :]
    b_k = tl.load(rows_at(k, k_s, i_b, i_g, first, o_r, o_k), mask=m_x, other=0.0)
    b_q = tl.load(rows_at(q, q_s, i_b, i_g, first, o_r, o_k), mask=m_x, other=0.0)
    b_x = decay_column(
        g,
        (g_b, g_t, g_h),
        A_log,
        dt_bias,
        lower_bound,
        i_b,
        i_g * GROUP,
        first,
        n_rows,
        ACTIVATE,
        BOUNDED,
    )
    b_beta = strength_column(
        beta, (beta_b, beta_t, beta_h), i_b, i_g * GROUP, first, n_rows, SIGMOID, NEG_EIGVAL
    )
    b_qk, b_kk = (
        tl.dot(b_q, tl.trans(b_k), input_precision=PREC),
        tl.dot(b_k, tl.trans(b_k), input_precision=PREC),
    )
    if EXACT:
        b_q_norm, b_k_norm = inverse_norm(b_q, L2NORM), inverse_norm(b_k, L2NORM)
    else:
        b_q_norm, b_k_norm = square_norms(
            tl.dot(b_q, tl.trans(b_q), input_precision=PREC), b_kk, L2NORM
        )
    for i in tl.range(GROUP, num_stages=1):
        i_h = i_g * GROUP + i
        i_tile = i_t.to(tl.int64) * (H * GROUP) + i_h
        p_row = rows + i_tile * 448 + o_r
        tl.store(p_row + 256, b_k_norm)
        tl.store(p_row + 320, b_q_norm)
        if GROUP > 1:
            b_x = decay_column(
                g,
                (g_b, g_t, g_h),
                A_log,
                dt_bias,
                lower_bound,
                i_b,
                i_h,
                first,
                n_rows,
                ACTIVATE,
                BOUNDED,
            )
            b_beta = strength_column(
                beta, (beta_b, beta_t, beta_h), i_b, i_h, first, n_rows, SIGMOID, NEG_EIGVAL
            )
        b_start, b_end, b_gamma, b_x = row_decay(b_x, EXACT)
        tl.store(p_row + 128, b_beta)
        tl.store(p_row + 384, b_x)
        # read back: each use loads the layout it needs, where an exchange would take two barriers
        tl.debug_barrier()
        b_strength, b_k_own, b_q_own, b_G = (
            tl.load(p_row + 128),
            tl.load(p_row + 256),
            tl.load(p_row + 320) * scale,
            tl.load(p_row + 384),
        )
        tl.store(p_row, b_k_own * b_start)
        tl.store(p_row + 64, b_k_own * b_end)
        tl.store(p_row + 192, b_q_own * b_start)
        tl.store(gamma + i_tile, b_gamma)
        b_D = pair_decay(b_G, EXACT) * b_k_own[None, :]
        store_tile(P, i_tile, b_qk * b_D * b_q_own[:, None], o_r, o_r, 64)
        if kept_A is None:
            # the inverse takes from it only what it merges, below the diagonal
            b_L = b_kk * b_D * (b_k_own * -b_strength)[:, None]
            store_tile(A, i_tile, inverse(b_L, INVERSE), o_r, o_r, 64)
    mark_ready(ready, i_t, begin, i_g, H)


def _inverse_precision(p: Problem) -> str:
    """Of the operands of the inverse, from flags alone: fp16 holds it where keys are unit and beta
    is at most 1, for then no entry exceeds one.
    """
    if p.q.dtype is torch.float32:
        return "tf32x3"
    if p.l2norm and p.sigmoid_beta and not p.neg_eigval:
        return "fp16"
    return "bf16x3"


def prepare(
    p: Problem,
    A: Tensor | None = None,
    pack: bool = False,
    norms: bool = False,
    overlap: bool = False,
) -> Tile:
    """Everything about the chunks that does not depend on the state; see
    `kda_ops.stages.Backend.prepare`.

    For GDN these are A, P and seven numbers per row, and `scan` reads q, k and v themselves. For
    KDA it reads v, and a kept A is of use if it is packed: with P beside it.
    """
    q, k, g, beta, device, NT, exact = (
        fit(p.q),
        fit(p.k),
        fit(p.g),
        fit(p.beta),
        p.q.device,
        count_chunks(p),
        p.q.dtype is torch.float32,
    )
    inverse_precision, precision = _inverse_precision(p), "tf32x3" if exact else "tf32"
    parameters = (dense(p.A_log), dense(p.dt_bias), dense(p.cu_seqlens))
    # One number per token: its strides follow T, and a kernel that took them apart by divisibility
    # would compile again for some T.
    g_s, beta_s = [strides_of(g)] if p.rank else columns_of(g), columns_of(beta)
    flags = (p.l2norm, p.activate_gate, p.lower_bound is not None)
    options, kept = (
        tuning.choose("prepare_kda" if p.rank else "prepare_gdn", p),
        A if pack or not p.rank else None,
    )
    P = new(q, "P", (NT, p.HV, 64, 64))
    pairs = new(q, "pairs", (NT, p.HV, 64, 64)) if pack and kept is None else None
    A = new(q, "A", (NT, p.HV, 64, 64)) if kept is None or p.rank else kept
    w, qg, kg = (
        new(q, name, (NT, p.HV, 64, p.K)) if p.rank else None for name in ("w", "qg", "kg")
    )
    gamma = new(q, "gamma", (NT, p.HV, p.K if p.rank else 1), torch.float32)
    rows = new(q, "rows", (NT, p.HV, 3 if p.rank else 7, 64), torch.float32)
    share = tuning.anchored_rows(p)
    bound = p.gate_bound if share == 32 else tuning.FLOOR
    norms = norms and (p.l2norm or p.disable_recompute)  # what is kept is written, all of it
    given = (q, strides_of(q), k, strides_of(k), g, *g_s, beta, *beta_s, *parameters, kept)

    ahead, ready, missed = tuning.ahead(p) if overlap else None, None, None
    if ahead is not None:
        # a scan looks beyond the end, and has no more programs than columns
        groups = (NT - ahead) // FOLLOWED.value + 2
        ready = new(q, "ready", (groups * (p.HV if p.rank else p.H),), torch.int32, zero=True)
        missed = new(q, "missed", (p.HV * p.V,), torch.int32, zero=True)

    def form(begin: int, end: int) -> None:
        if p.rank:
            launch(
                prepare_kda,
                (end - begin) * p.HV,
                device,
                *given,
                pairs,
                A,
                P,
                w,
                qg,
                kg,
                gamma,
                rows,
                ready,
                p.N,
                p.T,
                begin,
                p.H,
                p.HV,
                p.scale,
                p.lower_bound or 0.0,
                bound * LOG2E.value,
                p.K,
                options.block_k,
                options.group,
                norms,
                *flags,
                share,
                p.sigmoid_beta,
                p.neg_eigval,
                precision,
                inverse_precision,
                **options.launch,
            )
        else:
            launch(
                prepare_gdn,
                (end - begin) * p.H,
                device,
                *given,
                A if kept is None else None,
                P,
                rows,
                gamma,
                ready,
                p.N,
                p.T,
                begin,
                p.H,
                p.scale,
                p.lower_bound or 0.0,
                p.K,
                tuning.width(p.K, q.dtype),
                p.HV // p.H if p.H else 1,
                *flags,
                p.sigmoid_beta,
                p.neg_eigval,
                exact,
                precision,
                inverse_precision,
                **options.launch,
            )

    end = NT if p.N else 0
    form(0, end if ahead is None else ahead)
    made = dict(A=A, P=P, w=w, qg=qg, kg=kg, gamma=gamma, rows=rows, pairs=pairs)
    return (
        Tile(**made)
        if ahead is None
        else Begun(**made, until=ahead, ready=ready, missed=missed, rest=lambda: form(ahead, end))
    )
