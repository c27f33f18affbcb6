"""Form KDA's gradients of q, k and G: BK key channels of one chunk and value head per program.

G is the sum of log decays from the start of the chunk. Tensors hold it in base 2
(`gradient_decay`), so code has ``2^G`` where formulas have ``exp G``.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kda_ops.backends.triton.device.fragment import channel, diagonal_at
from kda_ops.backends.triton.device.gate import fast_reciprocal
from kda_ops.backends.triton.device.gradient_chunk import (
    SQUARE,
    Chunk,
    chunk_of,
    load_kept_state,
    load_norm,
    load_row,
    locate_rows,
    read_rows,
    read_values,
    write_column,
    write_rows,
)
from kda_ops.backends.triton.device.gradient_loads import (
    LEVELS,
    PARTED,
    Sources,
    decay_from_middle,
    decay_from_start,
    entries,
    load_entries,
    load_later,
    load_operand,
    load_pairs,
    store_operand,
)
from kda_ops.backends.triton.device.operands import BETA_KDA, NORM_K_KDA, NORM_Q_KDA, Strided
from kda_ops.backends.triton.device.tile import (
    CHUNK,
    load_tile,
    narrow,
    not_vectorised,
    prefetch_rows,
    prefetch_tile,
    widen,
)
from kda_ops.backends.triton.stages.gradient_decay import REACH
from kda_ops.backends.triton.stages.gradient_pairs import Scores

SMALLEST = tl.constexpr(3)  # log2 of the rows of the smallest blocks that share an anchor


class KeyGradients(NamedTuple):
    """Where gradients go; each may be absent."""

    dq: Any  # [B T, HV, K]
    dk: Any  # [B T, HV, K]
    dbeta: Any  # [slices of K, B T, HV] fp32


class KeyFactors(NamedTuple):
    """What multiplies the rows of q and k, [64, 1] fp32 each."""

    q_norm: Any
    k_norm: Any
    beta: Any  # one if dL and z contain beta already


class Sums(NamedTuple):
    """Partial sums of the gradients: of unit q, unit k and G [64, BK], of beta [64].

    dG has the dtype of G, the others are fp32.
    """

    dq: Any
    dk: Any
    dbeta: Any
    dG: Any


@triton.jit
def through_norm(b_dy, x, at, b_norm, dot, i_tile, K: tl.constexpr, BK: tl.constexpr):
    """Return dx = r (dy - y (y . dy)) [64, BK], the gradient of x through the norm y = r x.

    `dot` is y . dy [64], from `gradient_pairs`; None counts as 0. With one channel dx = r dy (1 -
    y^2). There 1e-6 r^2 replaces 1 - y^2, which rounding would lose.
    """
    b_dx = b_dy * b_norm
    if K == 1:
        b_dx *= 1e-6 * b_norm * b_norm
    elif dot is not None:
        b_dot = tl.load(dot + i_tile * CHUNK + tl.arange(0, CHUNK))[:, None]
        b_dx -= load_operand(x, at, K, BK) * (b_norm * b_norm * b_dot)
    return b_dx


@triton.jit
def state_gradients(
    do,
    kept,
    at,
    i_tile,
    i_h,
    HV,
    o_k,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    TILED: tl.constexpr,
    PREC: tl.constexpr,
):
    """Return the products with the states for the key channels o_k, all fp32::

        do S^T,  v_new dS^T,  z S^T  [64, width];   sum_v S dS  [width]

    If `kept.z` is dv = beta z, the third contains beta.
    """
    W: tl.constexpr = o_k.shape[0]
    o_r = tl.arange(0, CHUNK)
    b_dqg = tl.zeros((CHUNK, W), tl.float32)
    b_dkg, b_zS = b_dqg, b_dqg
    b_dgamma = tl.zeros((W,), tl.float32)
    for i in range((V + BV - 1) // BV):
        o_v = i * BV + tl.arange(0, BV)
        # All loads come before any product. Else each product waits for its loads, and later loads
        # start only then.
        b_S = load_kept_state(kept.states, i_tile, o_k, o_v, K, V)
        b_dS = load_kept_state(kept.dstates, i_tile, o_k, o_v, K, V)
        b_v = load_tile(kept.v_new, i_tile, o_r, o_v, V)
        b_z = read_values(kept.z, at, i_tile, i_h, HV, o_v, V, TILED)
        if do.pointer is not None:
            b_do = read_rows(do, at, i_h, o_v, V)
            b_dqg = tl.dot(b_do, tl.trans(b_S), b_dqg, input_precision=PREC)
        b_dkg = tl.dot(b_v, tl.trans(b_dS), b_dkg, input_precision=PREC)
        b_zS = tl.dot(b_z, tl.trans(b_S), b_zS, input_precision=PREC)
        b_dgamma += tl.sum(widen(b_S) * widen(b_dS), 1)
    return b_dqg, b_dkg, b_zS, b_dgamma


@triton.jit
def start_sums(
    b_dqg,
    b_dkg,
    b_zS,
    b_dgamma,
    at,
    factors,
    scale,
    o_k,
    K: tl.constexpr,
    BK: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Return the `Sums` before any pair of rows, from the results of `state_gradients`::

    dq = scale exp G (do S^T)        early = -beta exp G (z S^T)      late = e (v_new dS^T)
    dk = early + late                dG = k (early - late)
    last row of dG += gamma sum_v S dS + sum_i k_i late_i
    dbeta = -sum_k k exp G (z S^T)

    G_n is the G of the last row, and e = exp(G_n - G). The late of the last token does not decay,
    and would cancel in dG. So dG and its sum leave it out. The others nearly cancel in the sums of
    `sum_gradients`, so dG has the dtype of G: fp64 for fp32 operands.
    """
    o_r = tl.arange(0, CHUNK)
    b_end = tl.load(at.G + (CHUNK - 1) * K + o_k, mask=o_k < K, other=0.0)
    row, column = entries(at.G, at.i_s, BK)
    b_G = load_entries(at.G + row * K + column, column, None, K, BK)
    b_start = tl.exp2(b_G.to(tl.float32))
    b_dq = b_dqg * (b_start * scale)
    b_dk = b_zS * b_start
    b_late = b_dkg * tl.exp2((b_end[None, :] - b_G).to(tl.float32))
    b_k = load_operand(at.k, at, K, BK) * factors.k_norm
    b_dbeta = tl.zeros((CHUNK,), tl.float32)
    if SUMS:
        b_dbeta -= tl.sum(b_k * b_dk, 1)
    b_dk = b_dk * -factors.beta
    b_left = tl.where((o_r < at.last)[:, None], b_k * b_late, 0.0).to(at.G.dtype.element_ty)
    b_last = tl.exp2(b_end.to(tl.float32)) * b_dgamma + tl.sum(b_left, 0)
    # nothing is left in the last row
    b_dG = b_k * b_dk + tl.where((o_r == CHUNK - 1)[:, None], b_last[None, :], -b_left)
    b_dk += b_late
    return Sums(b_dq, b_dk, b_dbeta, b_dG)


@triton.jit
def entrywise(sums, at):
    """Return the sums, for bf16 with the entries of each tile apart (`tile.not_vectorised`).

    Other dtypes spill less without.
    """
    if at.dscores.P.dtype.element_ty == tl.bfloat16:
        sums = Sums(
            not_vectorised(sums.dq), not_vectorised(sums.dk), sums.dbeta, not_vectorised(sums.dG)
        )
    return sums


@triton.jit
def add_diagonal(sums, at, factors, K: tl.constexpr, BK: tl.constexpr):
    """Return the sums plus each row's pair with itself, and dG plus q dq as dq is before that::

    dG += q dq      dq += dP_ii k      dk += dP_ii q      [64, BK]

    This pair does not decay, and would cancel in dG.
    """
    b_diagonal = tl.load(at.dscores.P + diagonal_at(tl.arange(0, CHUNK))).to(tl.float32)[:, None]
    b_q = load_operand(at.q, at, K, BK) * factors.q_norm
    b_dG = sums.dG + b_q * sums.dq
    b_dk = sums.dk + b_diagonal * b_q
    b_dq = sums.dq + b_diagonal * (load_operand(at.k, at, K, BK) * factors.k_norm)
    return Sums(b_dq, b_dk, sums.dbeta, b_dG)


@triton.jit
def add_parted(
    sums, at, factors, h, K: tl.constexpr, BK: tl.constexpr, SUMS: tl.constexpr, PREC: tl.constexpr
):
    """Return the sums plus the pairs of level h, which lie in different halves of a block.

    Blocks have 2^(h + 1) rows. E_ij is the decay from row j to row i::

        dq += sum_j dP_ij k_j E_ij
        dk += beta_i sum_j dL_ij k_j E_ij + sum_i (dP_ij q_i + dL_ij beta_i k_i) E_ij
        dG += the q or k of the later row times its new part of dq or dk
              - the k of the earlier row times its new part of dk

    E_ij is a product: the decay from the middle to the later row, and from the earlier row to the
    middle. So each row has one factor, and no factor exceeds 1, whatever the decay. One product
    serves rows and columns, because dP and dL are filled on both sides of the diagonal.

    The sums of dG over rows nearly cancel. So dG is formed from the operands as the products
    rounded them. Then a pair adds to its later row exactly what it takes from its earlier one. In
    bf16 that makes the error of dt_bias 5 times smaller.
    """
    TYPE: tl.constexpr = at.dscores.P.dtype.element_ty
    later = (((tl.arange(0, CHUNK) >> h) & 1) == 1)[:, None]
    b_late = tl.where(later, 1.0, 0.0)
    b_early = tl.where(later, 0.0, 1.0)
    b_sign = tl.where(later, 1.0, -1.0)
    # A 0 that the compiler does not know. With a constant, it loads before the loop, and spills.
    here = (h >> 3) * SQUARE
    at = Sources(
        Strided(at.q.pointer + here, at.q.strides),
        Strided(at.k.pointer + here, at.k.strides),
        at.G + here,
        Scores(at.dscores.P + here, at.dscores.L + here),
        at.masks,
        at.last,
        at.i_s,
    )
    b_f = tl.exp2(decay_from_middle(at.G, at.i_s, h, K, BK))
    b_x = load_later(at, h, K, BK)
    b_y = narrow(b_x * (b_f * tl.where(later, factors.q_norm, factors.k_norm)), TYPE)
    b_x = load_operand(at.k, at, K, BK)
    b_strength = tl.where(later, factors.beta, 1.0)
    b_z = narrow(b_x * (b_f * (factors.k_norm * b_strength)), TYPE)
    b_pair = tl.dot(load_pairs(at.dscores.P, at.masks, h + PARTED), b_y, input_precision=PREC)
    b_dG = sums.dG + widen(b_y) * b_sign * b_pair
    b_pair = b_pair * b_f
    b_dq = sums.dq + b_pair * b_late
    b_dk = sums.dk + b_pair * b_early
    b_pair = tl.dot(load_pairs(at.dscores.L, at.masks, h + PARTED), b_z, input_precision=PREC)
    b_dG += widen(b_z) * b_sign * b_pair
    b_dbeta = sums.dbeta
    if SUMS:
        b_x = load_operand(at.k, at, K, BK) * (b_f * factors.k_norm)
        b_dbeta += tl.sum(b_x * b_pair * b_late, 1)
    b_dk += b_pair * (b_f * b_strength)
    return Sums(b_dq, b_dk, b_dbeta, b_dG)


@triton.jit
def add_anchored(
    sums, at, factors, h, K: tl.constexpr, BK: tl.constexpr, SUMS: tl.constexpr, PREC: tl.constexpr
):
    """Return the sums plus all pairs inside blocks of 2^h rows, which decay by at most 2^REACH.

    Here E_ij is a quotient of decays from the start of the block. Centred by a constant factor,
    such a decay and its inverse lie between 2^(-REACH / 2) and 2^(REACH / 2). So one product serves
    all levels below h.
    """
    TYPE: tl.constexpr = at.dscores.P.dtype.element_ty
    P, L = at.dscores.P, at.dscores.L
    # pairs below the diagonal: what rows get, as q and as k
    b_late = tl.exp2(decay_from_start(at.G, at.i_s, h, K, BK) + REACH / 2)
    b_x = (load_operand(at.k, at, K, BK) * (fast_reciprocal(b_late) * factors.k_norm)).to(TYPE)
    below = 2 * h - 2 * SMALLEST
    b_pair = tl.dot(load_pairs(P, at.masks, below), b_x, input_precision=PREC)
    b_own = narrow(load_operand(at.q, at, K, BK) * (b_late * factors.q_norm), TYPE)
    b_dG = sums.dG + widen(b_own) * b_pair
    b_dq = sums.dq + b_pair * b_late
    b_pair = tl.dot(load_pairs(L, at.masks, below), b_x, input_precision=PREC)
    b_x = load_operand(at.k, at, K, BK) * factors.k_norm
    b_own = narrow(b_x * (b_late * factors.beta), TYPE)
    b_dG += widen(b_own) * b_pair
    b_pair = b_pair * b_late
    b_dbeta = sums.dbeta
    if SUMS:
        b_dbeta += tl.sum(b_x * b_pair, 1)
    b_dk = sums.dk + b_pair * factors.beta
    # later steps load their tiles again: held in registers, tiles would make the sums spill
    tl.debug_barrier()
    # pairs above the diagonal, the transposes: what columns get, as k
    b_late = tl.exp2(decay_from_start(at.G, at.i_s, h, K, BK) + REACH / 2)
    b_x = (load_operand(at.q, at, K, BK) * (b_late * factors.q_norm)).to(TYPE)
    b_k = load_operand(at.k, at, K, BK) * factors.k_norm
    b_early = fast_reciprocal(b_late)
    b_own = narrow(b_k * b_early, TYPE)
    b_y = (b_k * (b_late * factors.beta)).to(TYPE)
    b_pair = tl.dot(load_pairs(P, at.masks, below + 1), b_x, input_precision=PREC)
    b_pair = tl.dot(load_pairs(L, at.masks, below + 1), b_y, b_pair, input_precision=PREC)
    b_dG -= widen(b_own) * b_pair
    b_dk += b_pair * b_early
    return Sums(b_dq, b_dk, b_dbeta, b_dG)


@triton.jit
def clear_keys(grads, at, i_h, HV, o_k, K: tl.constexpr):
    """Write zeros to the gradients of a chunk that is no part of a sequence."""
    b_zero = tl.zeros((CHUNK, o_k.shape[0]), tl.float32)
    if grads.dq is not None:
        write_rows(grads.dq, at, i_h, HV, b_zero, o_k, K)
        write_rows(grads.dk, at, i_h, HV, b_zero, o_k, K)
    if grads.dbeta is not None:
        write_column(grads.dbeta, at, i_h, HV, tl.zeros((CHUNK,), tl.float32))


@triton.jit
def prefetch_slice(
    kept, G, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr
):
    """Prefetch this slice's part of the states and G, where BK divides K."""
    if K % BK == 0:
        i_slice = tl.program_id(0).to(tl.int64)
        prefetch_tile(kept.states, i_slice, BK * V, WHOLE)
        prefetch_tile(kept.dstates, i_slice, BK * V, WHOLE)
        prefetch_tile(G, i_slice, CHUNK * BK, WHOLE)


@triton.jit
def prefetch_shared(
    q,
    k,
    do,
    kept,
    dscores,
    at,
    i_tile,
    i_h,
    i_g,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    TILED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Prefetch what all slices of K read."""
    prefetch_tile(kept.v_new, i_tile, CHUNK * V, WHOLE)
    if TILED:
        prefetch_tile(kept.z, i_tile, CHUNK * V, WHOLE)
    else:
        prefetch_rows(kept.z, (0, HV * V, V, 1), 0, i_h, at.token, at.n_rows, V, True)
    prefetch_tile(dscores.P, i_tile, SQUARE, WHOLE)
    prefetch_tile(dscores.L, i_tile, SQUARE, WHOLE)
    prefetch_rows(do.pointer, do.strides, at.i_b, i_h, at.first, at.n_rows, V)
    prefetch_rows(q.pointer, q.strides, at.i_b, i_g, at.first, at.n_rows, K)
    prefetch_rows(k.pointer, k.strides, at.i_b, i_g, at.first, at.n_rows, K)


@triton.jit(do_not_specialize=["N", "T", "scale"])
def gradient_keys(
    q,
    k,
    do,
    kept,
    dscores,
    factors,
    dots,
    G,
    anchored,
    masks,
    cu_seqlens,
    grads,
    dbeta_slice,
    N,
    T,
    H,
    HV,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    TILED: tl.constexpr,
    L2NORM: tl.constexpr,
    PREC: tl.constexpr,
):
    """Form the gradients of q, k and G for BK key channels of one chunk and value head::

        early = -beta exp G (z S^T) + rows of dL        late = e (v_new dS^T) + columns of dP, dL
        dq = scale exp G (do S^T) + rows of dP          dk = early + late         [64, BK]
        dG = q dq + k (early - late),  last row += gamma sum_v S dS + sum_i k_i e_i (v_new dS^T)_i

    G_n is the G of the last row, and e = exp(G_n - G). `add_parted` has the terms of rows and
    columns. If `kept.z` is dv = beta z, beta is one here, because dv and dL contain it. With
    L2NORM, dq and dk are then taken through the norm. dG overwrites G, for `sum_gradients`.

    A program takes a slice of K, so that its fp32 tiles fit into registers. q, k, G, dP and dL are
    loaded from the cache wherever they are needed, in the layout of the products (`fragment`). Held
    in registers, they would make the sums spill.
    """
    slices: tl.constexpr = (K + BK - 1) // BK
    i_s, i_tile = tl.program_id(0) % slices, tl.program_id(0) // slices
    i_h, i_t, i_tile = i_tile % HV, i_tile // HV, i_tile.to(tl.int64)
    i_b, first, n_rows, live = locate_rows(cu_seqlens, i_t, N, T)
    i_g, token = i_h // (HV // H), i_b * T + first
    chunk = Chunk(i_b, first, token, n_rows, live)
    o_k = tl.arange(0, BK)
    o_k = i_s * BK + channel(o_k)
    dbeta = grads.dbeta
    if dbeta is not None:
        dbeta += i_s * dbeta_slice  # a slice has so many entries
    grads = KeyGradients(grads.dq, grads.dk, dbeta)
    if (chunk.n_rows <= 0) | (chunk.live == 0):
        clear_keys(grads, chunk, i_h, HV, o_k, K)
        return
    SUMS: tl.constexpr = grads.dbeta is not None
    # with the sums of dbeta, whole pieces are slower (docs/kernels/journal/prefetch.md)
    prefetch_slice(kept, G, K, V, BK, not SUMS)
    if i_s == 0:
        prefetch_shared(q, k, do, kept, dscores, chunk, i_tile, i_h, i_g, HV, K, V, TILED, not SUMS)
    b_beta = (
        load_row(factors, i_tile, BETA_KDA)[:, None]
        if TILED
        else tl.full((CHUNK, 1), 1.0, tl.float32)
    )
    b_q_norm = load_norm(factors, i_tile, NORM_Q_KDA, L2NORM)[:, None]
    b_k_norm = load_norm(factors, i_tile, NORM_K_KDA, L2NORM)[:, None]
    factors = KeyFactors(b_q_norm, b_k_norm, b_beta)
    last = chunk.n_rows - 1
    at = Sources(
        chunk_of(q, chunk, i_g),
        chunk_of(k, chunk, i_g),
        G + i_tile * (CHUNK * K),
        Scores(dscores.P + i_tile * SQUARE, dscores.L + i_tile * SQUARE),
        masks,
        last,
        i_s,
    )
    b_dqg, b_dkg, b_zS, b_dgamma = state_gradients(
        do, kept, chunk, i_tile, i_h, HV, o_k, K, V, BV, TILED, PREC
    )
    sums = start_sums(b_dqg, b_dkg, b_zS, b_dgamma, at, factors, scale, o_k, K, BK, SUMS)
    # later steps load their tiles again: held in registers, tiles would make the sums spill
    tl.debug_barrier()
    sums = entrywise(add_diagonal(sums, at, factors, K, BK), at)
    level = 0
    if anchored is not None:
        level = tl.load(anchored + i_tile)
    if level > 0:
        sums = entrywise(add_anchored(sums, at, factors, level, K, BK, SUMS, PREC), at)
    for h in tl.range(level, LEVELS, num_stages=1):
        sums = entrywise(add_parted(sums, at, factors, h, K, BK, SUMS, PREC), at)
    tl.debug_barrier()  # dG overwrites G, which other threads read until here
    store_operand(at.G, i_tile * 0, 0, 1, CHUNK, i_s, sums.dG, K, BK)
    if grads.dq is not None:
        b_dq, b_dk = sums.dq, sums.dk
        if L2NORM:
            b_dq = through_norm(b_dq, at.q, at, factors.q_norm, dots.q, i_tile, K, BK)
            b_dk = through_norm(b_dk, at.k, at, factors.k_norm, dots.k, i_tile, K, BK)
        store_operand(grads.dq, chunk.token, i_h, HV, chunk.n_rows, i_s, b_dq, K, BK)
        store_operand(grads.dk, chunk.token, i_h, HV, chunk.n_rows, i_s, b_dk, K, BK)
    if grads.dbeta is not None:
        write_column(grads.dbeta, chunk, i_h, HV, sums.dbeta)
