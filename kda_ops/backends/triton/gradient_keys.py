"""Gradients of q, k and g for one decay per key channel: BK channels of one chunk and value head
per program.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton.fragment import (
    as_entries,
    as_tile,
    channel,
    diagonal_at,
    fragment,
    packed,
    unpack,
)
from kda_ops.backends.triton.gate import INTERPRETED, fast_reciprocal
from kda_ops.backends.triton.gradient_decay import REACH
from kda_ops.backends.triton.gradient_tile import (
    clear_keys,
    load_norm,
    load_row,
    load_state,
    locate_rows,
    read_rows,
    read_values,
    write_column,
)
from kda_ops.backends.triton.tile import load_tile, narrow, prefetch_rows, prefetch_tile, widen


@lru_cache(None)
def tables(device: torch.device) -> Tensor:
    """The masks `load_pairs` picks by, [14, 64, 64] int16, all bits set: in blocks of 8, 16, 32 and
    64 rows the pairs below the diagonal and those above it; then where rows part at level 0 to 5;
    each packed.

    They reach a GPU from a thread and on a stream of their own: the calling thread may be filling
    the memory pool of a CUDA graph (``mode="reduce-overhead"``), which must hold nothing that
    outlives the call.
    """
    i = torch.arange(64, device="cpu")
    parting, below = i[:, None] ^ i[None, :], i[:, None] > i[None, :]
    pairs = [(parting < m) & side for m in (8, 16, 32, 64) for side in (below, below.T)] + [
        parting >> h == 1 for h in range(6)
    ]
    masks = packed(-torch.stack(pairs).to(torch.int16))

    def bring() -> Tensor:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            there = masks.to(device)
            torch.cuda.current_stream(device).synchronize()
            return there

    if device.type != "cuda":
        return masks.to(device)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(bring).result()


@triton.jit
def load_pairs(x, pairs, h):
    """The entries of a packed tile [64, 64] that mask h of `tables` picks; zero elsewhere."""
    o = tl.arange(0, 512)[:, None] * 8 + tl.arange(0, 8)[None, :]
    b_x, b_m = tl.load(x + o), tl.load(pairs + h * 4096 + o)
    if b_x.dtype == tl.float32:
        return unpack(tl.where(b_m != 0, b_x, 0.0))
    elif not INTERPRETED:  # two entries at once, which the compiler takes apart
        return unpack(
            tl.inline_asm_elementwise(
                "and.b32 $0, $1, $2;", "=r,r,r", [b_x, b_m], b_x.dtype, True, 2
            )
        )
    else:
        return unpack((b_x.to(tl.int16, bitcast=True) & b_m).to(b_x.dtype, bitcast=True))


@triton.jit
def load_entries(p_x, column, m_row, K: tl.constexpr, BK: tl.constexpr):
    """A tile [64, BK] by pointers in the order of `fragment`, zero past K and where m_row is false.
    The column goes to a pointer last: then the entries of a row differ by constants, which cost no
    address.
    """
    if K % BK == 0:
        if m_row is None:
            return as_tile(tl.load(p_x))
        else:
            return as_tile(tl.load(p_x, mask=m_row & (column >= 0), other=0.0))
    else:
        m = column < K
        if m_row is not None:
            m = m & m_row
        return as_tile(tl.load(p_x, mask=m, other=0.0))


@triton.jit
def load_rows(x, x_s, held, i_s, K: tl.constexpr, BK: tl.constexpr):
    """Rows of q or k from their first one on, fp32; rows that are no tokens are the last one again,
    since nothing is passed to them.
    """
    row, column = fragment(BK, 128 // x.dtype.element_ty.primitive_bitwidth)
    column += i_s * BK
    return widen(
        load_entries(x + tl.minimum(row, held) * x_s[1] + column * x_s[3], column, None, K, BK)
    )


@triton.jit
def load_later(q, q_s, k, k_s, held, i_s, h, K: tl.constexpr, BK: tl.constexpr):
    """Rows of q where they are the later ones of level h, else of k."""
    row, column = fragment(BK, 128 // q.dtype.element_ty.primitive_bitwidth)
    column += i_s * BK
    later, row = ((row >> h) & 1) == 1, tl.minimum(row, held)
    p_x = tl.where(later, q + row * q_s[1] + column * q_s[3], k + row * k_s[1] + column * k_s[3])
    return widen(load_entries(p_x, column, None, K, BK))


@triton.jit
def load_sums(G, i_s, h, PARTED: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """The decay between each row and a row of its block of 2^(h + 1) or 2^h rows: if PARTED since
    the middle, or up to it for the rows before; else since the start.
    """
    row, column = fragment(BK, 128 // G.dtype.element_ty.primitive_bitwidth)
    column += i_s * BK
    if PARTED:
        middle, later = ((row >> (h + 1)) << (h + 1)) + (1 << h) - 1, ((row >> h) & 1) == 1
        b_G = load_entries(G + tl.where(later, row, middle) * K + column, column, None, K, BK)
        b_A = load_entries(G + tl.where(later, middle, row) * K + column, column, None, K, BK)
    else:
        b_G = load_entries(G + row * K + column, column, None, K, BK)
        row = ((row >> h) << h) - 1
        b_A = load_entries(G + row * K + column, column, row >= 0, K, BK)
    return (b_G - b_A).to(tl.float32)


@triton.jit
def store_entries(x, first, i_h, HV, n_rows, i_s, b_x, K: tl.constexpr, BK: tl.constexpr):
    """Write rows of one head of a contiguous [rows, HV, K] tensor from the registers they are
    in.
    """
    J: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    row, column = fragment(BK, J)
    column += i_s * BK
    b_x = as_entries(narrow(b_x, x.dtype.element_ty), J)
    p_x = x + (first * HV + i_h) * K + row * (HV * K) + column
    tl.store(p_x, b_x, mask=(row < n_rows) & (column < K))


@triton.jit
def through_norm(b_dy, x, x_s, held, b_norm, dot, i_tile, i_s, K: tl.constexpr, BK: tl.constexpr):
    """dx = r (dy - y (y . dy)) for y = r x, from the products y . dy [64] that `gradient_pairs`
    left; none are zero.

    Of one channel that is r dy (1 - y^2) and 1 - y^2 = 10^-6 r^2, of which rounding would leave
    nothing.
    """
    b_dx = b_dy * b_norm
    if K == 1:
        b_dx *= 1e-6 * b_norm * b_norm
    elif dot is not None:
        b_dot = tl.load(dot + i_tile * 64 + tl.arange(0, 64))[:, None]
        b_dx -= load_rows(x, x_s, held, i_s, K, BK) * (b_norm * b_norm * b_dot)
    return b_dx


@triton.jit
def state_gradients(
    do,
    do_s,
    states,
    v_new,
    dstates,
    z,
    i_tile,
    i_b,
    i_h,
    HV,
    first,
    token,
    n_rows,
    o_k,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    TILED: tl.constexpr,
    PREC: tl.constexpr,
):
    """(do S^T, v_new dS^T, z S^T [64, width], sum over V of S dS [width]) for the key channels o_k,
    fp32; `z` as in `gradient_pairs`.
    """
    W: tl.constexpr = o_k.shape[0]
    o_r = tl.arange(0, 64)
    b_dqg = tl.zeros((64, W), tl.float32)
    b_dkg, b_dstart = b_dqg, b_dqg
    b_dgamma = tl.zeros((W,), tl.float32)
    for i in range((V + BV - 1) // BV):
        o_v = i * BV + tl.arange(0, BV)
        # every load before any product: each product would wait, and the loads after it would wait
        # again
        b_S, b_dS = (
            load_state(states, i_tile, o_k, o_v, K, V),
            load_state(dstates, i_tile, o_k, o_v, K, V),
        )
        b_v, b_z = (
            load_tile(v_new, i_tile, o_r, o_v, V),
            read_values(z, i_tile, token, i_h, HV, n_rows, o_v, V, TILED),
        )
        if do is not None:
            b_do = read_rows(do, do_s, i_b, i_h, first, n_rows, o_v, V)
            b_dqg = tl.dot(b_do, tl.trans(b_S), b_dqg, input_precision=PREC)
        b_dkg = tl.dot(b_v, tl.trans(b_dS), b_dkg, input_precision=PREC)
        b_dstart = tl.dot(b_z, tl.trans(b_S), b_dstart, input_precision=PREC)
        b_dgamma += tl.sum(widen(b_S) * widen(b_dS), 1)
    return b_dqg, b_dkg, b_dstart, b_dgamma


@triton.jit
def parted_pairs(
    dP,
    dL,
    pairs,
    q,
    q_s,
    k,
    k_s,
    G,
    held,
    i_s,
    h,
    b_q_norm,
    b_k_norm,
    b_beta,
    b_dq,
    b_dk,
    b_dG,
    b_dbeta,
    K: tl.constexpr,
    BK: tl.constexpr,
    SUMS: tl.constexpr,
    PREC: tl.constexpr,
):
    """Add what P and L pass on over the pairs of level h, whose rows first fall into different
    halves of a block there; E_ij is the decay from row j to row i::

        dq += sum_j dP_ij k_j E_ij
        dk += beta_i sum_j dL_ij k_j E_ij + sum_i (dP_ij q_i + dL_ij beta_i k_i) E_ij
        dG += the q or k of the later row times what it gets
              - the k of the earlier row times what it gets

    The later row has the decay since the middle and the earlier row the decay up to the middle, so
    every row has one role and one factor, at most one, whatever the decay; and one product serves
    rows and columns, as dP and dL are filled on both sides of the diagonal.

    dG is a difference whose sums over rows nearly vanish. It is formed from the operands as the
    products rounded them: then what a pair adds to its later row and takes from its earlier one is
    the same number, as if nothing had been rounded (bf16: 5 times less error of dt_bias).
    """
    TYPE: tl.constexpr = dP.dtype.element_ty
    later = (((tl.arange(0, 64) >> h) & 1) == 1)[:, None]
    b_late, b_early, b_sign = (
        tl.where(later, 1.0, 0.0),
        tl.where(later, 0.0, 1.0),
        tl.where(later, 1.0, -1.0),
    )
    # zero, which the compiler does not know: it would read before the loop what to hold costs
    # registers
    here = (h >> 3) * 4096
    q, k, G, dP, dL = q + here, k + here, G + here, dP + here, dL + here
    b_f = tl.exp2(load_sums(G, i_s, h, True, K, BK))
    b_x = load_later(q, q_s, k, k_s, held, i_s, h, K, BK)
    b_y = narrow(b_x * (b_f * tl.where(later, b_q_norm, b_k_norm)), TYPE)
    b_x = load_rows(k, k_s, held, i_s, K, BK)
    b_strength = tl.where(later, b_beta, 1.0)
    b_z = narrow(b_x * (b_f * (b_k_norm * b_strength)), TYPE)
    b_pair = tl.dot(load_pairs(dP, pairs, h + 8), b_y, input_precision=PREC)
    b_dG += widen(b_y) * b_sign * b_pair
    b_pair = b_pair * b_f
    b_dq += b_pair * b_late
    b_dk += b_pair * b_early
    b_pair = tl.dot(load_pairs(dL, pairs, h + 8), b_z, input_precision=PREC)
    b_dG += widen(b_z) * b_sign * b_pair
    if SUMS:
        b_x = load_rows(k, k_s, held, i_s, K, BK) * (b_f * b_k_norm)
        b_dbeta += tl.sum(b_x * b_pair * b_late, 1)
    b_dk += b_pair * (b_f * b_strength)
    return b_dq, b_dk, b_dG, b_dbeta


@triton.jit
def anchored_pairs(
    dP,
    dL,
    pairs,
    q,
    q_s,
    k,
    k_s,
    G,
    held,
    i_s,
    h,
    b_q_norm,
    b_k_norm,
    b_beta,
    b_dq,
    b_dk,
    b_dG,
    b_dbeta,
    K: tl.constexpr,
    BK: tl.constexpr,
    SUMS: tl.constexpr,
    PREC: tl.constexpr,
):
    """The same for all pairs inside blocks of 2^h rows that decay by no more than 2^REACH: the
    decay since the start of the block and its inverse, centred on a constant, stay within 2^(REACH
    / 2) of one and serve all levels below h.
    """
    TYPE: tl.constexpr = dP.dtype.element_ty
    b_late = tl.exp2(load_sums(G, i_s, h, False, K, BK) + REACH / 2)
    b_x = (load_rows(k, k_s, held, i_s, K, BK) * (fast_reciprocal(b_late) * b_k_norm)).to(TYPE)
    below = 2 * h - 6
    b_pair = tl.dot(load_pairs(dP, pairs, below), b_x, input_precision=PREC)
    b_own = narrow(load_rows(q, q_s, held, i_s, K, BK) * (b_late * b_q_norm), TYPE)
    b_dG += widen(b_own) * b_pair
    b_dq += b_pair * b_late
    b_pair = tl.dot(load_pairs(dL, pairs, below), b_x, input_precision=PREC)
    b_x = load_rows(k, k_s, held, i_s, K, BK) * b_k_norm
    b_own = narrow(b_x * (b_late * b_beta), TYPE)
    b_dG += widen(b_own) * b_pair
    b_pair = b_pair * b_late
    if SUMS:
        b_dbeta += tl.sum(b_x * b_pair, 1)
    b_dk += b_pair * b_beta
    # what follows reads its tiles again: held, they would push the sums out of the registers
    tl.debug_barrier()
    b_late = tl.exp2(load_sums(G, i_s, h, False, K, BK) + REACH / 2)
    b_x = (load_rows(q, q_s, held, i_s, K, BK) * (b_late * b_q_norm)).to(TYPE)
    b_k = load_rows(k, k_s, held, i_s, K, BK) * b_k_norm
    b_early = fast_reciprocal(b_late)
    b_own = narrow(b_k * b_early, TYPE)
    b_y = (b_k * (b_late * b_beta)).to(TYPE)
    b_pair = tl.dot(load_pairs(dP, pairs, below + 1), b_x, input_precision=PREC)
    b_pair = tl.dot(load_pairs(dL, pairs, below + 1), b_y, b_pair, input_precision=PREC)
    b_dG -= widen(b_own) * b_pair
    b_dk += b_pair * b_early
    return b_dq, b_dk, b_dG, b_dbeta


@triton.jit(do_not_specialize=["N", "T", "scale"])
def gradient_keys(
    q,
    q_s,
    k,
    k_s,
    do,
    do_s,
    states,
    v_new,
    dstates,
    z,
    dP,
    dL,
    rows,
    q_dot,
    k_dot,
    G,
    anchored,
    pairs,
    cu_seqlens,
    dq,
    dk,
    dbeta,
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
    """BK key channels of one chunk and value head (e = exp(sum over the later rows), "rows" and
    "columns" of the pairs as in `parted_pairs`)::

        dq = scale exp G (do S^T) + rows of dP      early = -beta exp G (z S^T) + rows of dL
        late = e (v_new dS^T) + columns of dP, dL
        dk = early + late      dG = q dq + k (early - late);
        last row += gamma sum_v S dS + sum_i k_i e_i (v_new dS^T)_i
        dG is left in the place of G, for `sum_gradients`

    with beta one if `z` is dv, which has it already, as dL has. dq and dk leave through the norm,
    whose sums over all of K, which the program does not see, are sums over V as well
    (docs/maths.md). A slice per program keeps the fp32 tiles that are alive within the registers.
    q, k, G, dP and dL come from the cache again wherever they are needed, in the layout of the
    products (`fragment`): held in registers, they would push the sums out of them.
    """
    slices: tl.constexpr = (K + BK - 1) // BK
    i_s, i_tile = tl.program_id(0) % slices, tl.program_id(0) // slices
    i_h, i_t, i_tile = i_tile % HV, i_tile // HV, i_tile.to(tl.int64)
    i_b, first, n_rows, live = locate_rows(cu_seqlens, i_t, N, T)
    i_g, token = i_h // (HV // H), i_b * T + first
    o_r, o_k = tl.arange(0, 64), i_s * BK + channel(tl.arange(0, BK))
    if dbeta is not None:
        dbeta += i_s * dbeta_slice
    if (n_rows <= 0) | (live == 0):
        clear_keys(
            dq, dk, None, dbeta, None, None, i_tile, token, i_h, HV, n_rows, o_k, i_s, slices, K
        )
        return
    SUMS: tl.constexpr = dbeta is not None
    WHOLE: tl.constexpr = not SUMS  # with those sums it is slower so (docs/kernels/journal.md)
    if K % BK == 0:  # each slice asks for its part of what is one piece
        prefetch_tile(states, tl.program_id(0).to(tl.int64), BK * V, WHOLE)
        prefetch_tile(dstates, tl.program_id(0).to(tl.int64), BK * V, WHOLE)
        prefetch_tile(G, tl.program_id(0).to(tl.int64), 64 * BK, WHOLE)
    if i_s == 0:  # what the slices share
        prefetch_tile(v_new, i_tile, 64 * V, WHOLE)
        if TILED:
            prefetch_tile(z, i_tile, 64 * V, WHOLE)
        else:
            prefetch_rows(z, (0, HV * V, V, 1), 0, i_h, token, n_rows, V, True)
        prefetch_tile(dP, i_tile, 4096, WHOLE)
        prefetch_tile(dL, i_tile, 4096, WHOLE)
        prefetch_rows(do, do_s, i_b, i_h, first, n_rows, V)
        prefetch_rows(q, q_s, i_b, i_g, first, n_rows, K)
        prefetch_rows(k, k_s, i_b, i_g, first, n_rows, K)
    b_beta = load_row(rows, i_tile, 0)[:, None] if TILED else tl.full((64, 1), 1.0, tl.float32)
    b_q_norm, b_k_norm = (
        load_norm(rows, i_tile, 1, L2NORM)[:, None],
        load_norm(rows, i_tile, 2, L2NORM)[:, None],
    )
    held = n_rows - 1
    q += i_b * q_s[0] + first * q_s[1] + i_g.to(tl.int64) * q_s[2]
    k += i_b * k_s[0] + first * k_s[1] + i_g.to(tl.int64) * k_s[2]
    G += i_tile * (64 * K)
    dP += i_tile * 4096
    dL += i_tile * 4096
    b_dq, b_dkg, b_dk, b_dgamma = state_gradients(
        do,
        do_s,
        states,
        v_new,
        dstates,
        z,
        i_tile,
        i_b,
        i_h,
        HV,
        first,
        token,
        n_rows,
        o_k,
        K,
        V,
        BV,
        TILED,
        PREC,
    )
    b_end = tl.load(G + 63 * K + o_k, mask=o_k < K, other=0.0)
    row, column = fragment(BK, 128 // G.dtype.element_ty.primitive_bitwidth)
    column += i_s * BK
    b_G = load_entries(G + row * K + column, column, None, K, BK)
    b_start = tl.exp2(b_G.to(tl.float32))
    b_dq = b_dq * (b_start * scale)
    b_dk = b_dk * b_start
    b_dkg = b_dkg * tl.exp2((b_end[None, :] - b_G).to(tl.float32))
    b_x = load_rows(k, k_s, held, i_s, K, BK) * b_k_norm
    b_dbeta = tl.zeros((64,), tl.float32)
    if SUMS:
        b_dbeta -= tl.sum(b_x * b_dk, 1)
    b_dk = b_dk * -b_beta
    b_last = tl.exp2(b_end.to(tl.float32)) * b_dgamma + tl.sum(b_x * b_dkg, 0)
    b_dG = b_x * (b_dk - b_dkg) + tl.where((o_r == 63)[:, None], b_last[None, :], 0.0)
    b_dk += b_dkg
    # what follows reads its tiles again: held, they would push the sums out of the registers
    tl.debug_barrier()
    b_diagonal = tl.load(dP + diagonal_at(o_r)).to(tl.float32)[:, None]
    b_x = load_rows(q, q_s, held, i_s, K, BK) * b_q_norm
    b_dG += b_x * b_dq
    b_dk += b_diagonal * b_x
    b_dq += b_diagonal * (load_rows(k, k_s, held, i_s, K, BK) * b_k_norm)
    level = 0
    if anchored is not None:
        level = tl.load(anchored + i_tile)
    if level > 0:
        b_dq, b_dk, b_dG, b_dbeta = anchored_pairs(
            dP,
            dL,
            pairs,
            q,
            q_s,
            k,
            k_s,
            G,
            held,
            i_s,
            level,
            b_q_norm,
            b_k_norm,
            b_beta,
            b_dq,
            b_dk,
            b_dG,
            b_dbeta,
            K,
            BK,
            SUMS,
            PREC,
        )
    for h in tl.range(level, 6, num_stages=1):
        b_dq, b_dk, b_dG, b_dbeta = parted_pairs(
            dP,
            dL,
            pairs,
            q,
            q_s,
            k,
            k_s,
            G,
            held,
            i_s,
            h,
            b_q_norm,
            b_k_norm,
            b_beta,
            b_dq,
            b_dk,
            b_dG,
            b_dbeta,
            K,
            BK,
            SUMS,
            PREC,
        )
    tl.debug_barrier()  # dG takes the place of G, which other threads have read
    store_entries(G, i_tile * 0, 0, 1, 64, i_s, b_dG, K, BK)
    if dq is not None:
        if L2NORM:
            b_dq = through_norm(b_dq, q, q_s, held, b_q_norm, q_dot, i_tile, i_s, K, BK)
            b_dk = through_norm(b_dk, k, k_s, held, b_k_norm, k_dot, i_tile, i_s, K, BK)
        store_entries(dq, token, i_h, HV, n_rows, i_s, b_dq, K, BK)
        store_entries(dk, token, i_h, HV, n_rows, i_s, b_dk, K, BK)
    if dbeta is not None:
        write_column(dbeta, token, i_h, HV, n_rows, b_dbeta)
