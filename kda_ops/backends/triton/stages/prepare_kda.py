"""KDA's part of `prepare`: one program per chunk and value head (docs/maths.md, chunk form)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kda_ops.backends.triton.device.activations import strength_column
from kda_ops.backends.triton.device.decay import (
    block_scores,
    half_prefix,
    level_scores,
    scores,
    upto,
)
from kda_ops.backends.triton.device.fragment import spread, store_spread
from kda_ops.backends.triton.device.gate import GIVEN, load_bias, load_rate, log_decay
from kda_ops.backends.triton.device.inverse import inverse_of_two, square_product
from kda_ops.backends.triton.device.operands import (
    BETA_KDA,
    COUNT_KDA,
    NORM_K_KDA,
    NORM_Q_KDA,
    Pointer,
    Strided,
)
from kda_ops.backends.triton.device.tile import (
    CHUNK,
    HALF,
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


class Prepared(NamedTuple):
    """What `prepare_kda` writes: the tile of the scans, and A and P in one for backward."""

    AP: Pointer  # [NT, HV, 64, 64], `join_AP`, or None
    A: Pointer  # [NT, HV, 64, 64]
    P: Pointer  # [NT, HV, 64, 64]
    w: Pointer  # [NT, HV, 64, K]
    qg: Pointer  # [NT, HV, 64, K]
    kg: Pointer  # [NT, HV, 64, K]
    gamma: Pointer  # [NT, HV, K] fp32
    factors: Pointer  # [NT, HV, 3, 64] fp32, see `operands`


class Inputs(NamedTuple):
    """What `prepare_kda` reads of a call, and its numbers."""

    q: Strided
    k: Strided
    g: Strided
    beta: Strided
    scale: Any
    log2_bound: Any  # the least log decay per row where rows share an anchor, in base 2


class HalfPlace(NamedTuple):
    """Where 32 rows of a chunk and head are, and where their norms go, if they are kept."""

    i_tile: Any
    i_b: Any
    i_g: Any  # the query and key head
    i_h: Any  # the value head
    first: Any  # the first row's token
    n_rows: Any  # tokens of the sequence from `first` on; 32 or more if all rows are tokens
    q_norm: Any  # pointers to the norms [32] fp32, or None
    k_norm: Any
    b_q_norm: Any  # inverse norms [32] fp32 of rows that are cut into slices, else ones
    b_k_norm: Any


class HalfInputs(NamedTuple):
    """What is read of 32 rows and one slice of K; zero for rows that are no tokens."""

    q: Any  # [32, width] in the input's dtype, as k and g
    k: Any
    g: Any  # zero without a decay
    strength: Any  # beta after its activation, [32] fp32


class HalfRows(NamedTuple):
    """What the other rows of a chunk need of 32 rows, for one slice of K.

    `shift` is 2^(16 log2_bound) if all 32 rows share an anchor, else 1.
    """

    k_end: Any  # k decayed to the end of the half [32, width] fp32
    total: Any  # the decay of the half [width]
    w: Any  # beta k decayed from the start of the chunk, divided by `shift` [32, width]


class HalfScores(NamedTuple):
    """Scores of 32 rows, [32, 32] fp32 each, for one slice of K; zero unless SCORES.

    E_ij is the decay from row j to row i, and o multiplies entry by entry.
    """

    P: Any  # q k^T o E, on and below the diagonal
    L: Any  # k k^T o E, likewise
    P_across: Any  # q k^T o E with k of the first half, divided by the root of `shift`
    L_across: Any  # k k^T o E, likewise


@triton.jit
def half_norm(
    x, i_b, i_h, first, n_rows, D: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, flags
):
    """Return 1 / sqrt(sum of squares + 1e-6) of 32 rows, [32] fp32, summed slice by slice.

    Return ones without L2NORM, and where one slice holds a row: `unit_rows` forms the norm then.
    """
    b_norm = tl.full((HALF,), 1.0, tl.float32)
    if flags.L2NORM and BLOCK < D:
        b_sum = tl.zeros((HALF,), tl.float32)
        for i in tl.range((D + BLOCK - 1) // BLOCK, num_stages=1):
            o_d = i * BLOCK + tl.arange(0, BLOCK)
            b_x = load_rows(x.pointer, x.strides, i_b, i_h, first, n_rows, o_d, D, R, HALF)
            b_x = b_x.to(tl.float32)
            b_sum += tl.sum(b_x * b_x, 1)
        b_norm = tl.rsqrt(b_sum + 1e-6)
    return b_norm


@triton.jit
def load_half(x, at, o_k, K: tl.constexpr, R: tl.constexpr, flags):
    """Load what 32 rows need of one slice of K.

    All loads of a half come before its arithmetic. ptxas moves few of them up, and each one that
    it leaves behind costs the latency of L2 (docs/kernels/journal/loads-first.md).
    """
    b_k = load_rows(x.k.pointer, x.k.strides, at.i_b, at.i_g, at.first, at.n_rows, o_k, K, R, HALF)
    b_strength = strength_column(x.beta, at.i_b, at.i_h, at.first, at.n_rows, flags, HALF)
    b_q = load_rows(x.q.pointer, x.q.strides, at.i_b, at.i_g, at.first, at.n_rows, o_k, K, R, HALF)
    if x.g.pointer is None:
        b_g = tl.zeros((HALF, o_k.shape[0]), tl.float32)
    else:
        b_g = load_rows(
            x.g.pointer, x.g.strides, at.i_b, at.i_h, at.first, at.n_rows, o_k, K, R, HALF
        )
    return HalfInputs(b_q, b_k, b_g, b_strength)


@triton.jit
def unit_rows(b_x, norm, b_norm, scale, o_d, D: tl.constexpr, flags):
    """Return 32 rows of one key head times their inverse norms and the scale, [32, width] fp32.

    Write the inverse norms to `norm`, unless it is None.
    """
    b_x = widen(b_x)
    if o_d.shape[0] >= D:
        b_norm = inverse_norm(b_x, flags.L2NORM)
    if norm is not None:
        tl.store(norm + tl.arange(0, HALF), b_norm)
    return b_x * (b_norm * scale)[:, None]


@triton.jit
def half_decay(x, gate, b_g, at, o_k, K: tl.constexpr, FAST: tl.constexpr):
    """Return the log decay of 32 rows in base 2, [32, width] fp32; 0 where there are no tokens."""
    if x.g.pointer is None:
        return b_g
    else:
        b_bias, rate = load_bias(gate, at.i_h, o_k, K)[None, :], load_rate(gate, at.i_h)
        here = (tl.arange(0, HALF) < at.n_rows)[:, None]
        return log_decay(widen(b_g), b_bias, rate, gate, here, FAST=FAST)


@triton.jit
def anchored_scores(
    b_r,
    b_column,
    earlier,
    centre,
    b_own,
    SHARE: tl.constexpr,
    PREC: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Return two blocks of scores [32, 32] of rows b_r, k or q times their decay.

    The first is with the keys of the same half if all 32 rows share an anchor, else b_own. The
    second is with the keys of the first half, or b_own without `earlier`.
    """
    b_r, b_across = b_r.to(TYPE), b_own
    if SHARE == HALF:
        b_own = scores(b_r, b_column.to(TYPE), PREC)
    if earlier is not None:
        b_Y = earlier.k_end
        # half of the shift here: with all of it, products above 6,000 would overflow fp32
        b_Y = (b_Y * tl.exp2(0.5 * centre) if SHARE == HALF else b_Y).to(TYPE)
        b_across = scores(b_r, b_Y, PREC)
    return b_own, b_across


@triton.jit
def sum_decay(b_x, log2_bound, centre, R: tl.constexpr, SHARE: tl.constexpr):
    """Return both sums of `half_prefix` for rows that share anchors, and the whole half's decay."""
    b_x = b_x if SHARE == HALF else tl.maximum(b_x, log2_bound, tl.PropagateNan.ALL)
    b_D, b_C = half_prefix(b_x, centre, R)
    return b_D, b_C, upto(b_C, HALF, R)


@triton.jit
def prepare_half(
    x,
    gate,
    out,
    at,
    earlier,
    o_k,
    K: tl.constexpr,
    R: tl.constexpr,
    flags,
    SHARE: tl.constexpr,
    PREC: tl.constexpr,
    SCORES: tl.constexpr,
):
    """Return `HalfScores` and `HalfRows` of 32 rows, for one slice of K, and write qg.

    Write w and norms if they have places. With `earlier`, the first half's rows, write kg of both.
    """
    TYPE: tl.constexpr = out.qg.dtype.element_ty
    ROW: tl.constexpr = 0 if earlier is None else HALF
    given = load_half(x, at, o_k, K, R, flags)
    b_x = half_decay(x, gate, given.g, at, o_k, K, PREC != "tf32x3")
    centre = 16.0 * x.log2_bound if SHARE == HALF else 0.0
    shift = tl.exp2(centre) if SHARE == HALF else 1.0
    b_P = tl.zeros((HALF, HALF), tl.float32)
    b_L, b_P1, b_L1, b_kc = b_P, b_P, b_P, None
    if SHARE > 1:
        b_D, b_C, total = sum_decay(b_x, x.log2_bound, centre, R, SHARE)
        b_total, b_start = tl.exp2(total), tl.exp2(b_D)
    b_k = unit_rows(given.k, at.k_norm, at.b_k_norm, 1.0, o_k, K, flags)
    if SHARE == 1:
        b_q = unit_rows(given.q, at.q_norm, at.b_q_norm, x.scale, o_k, K, flags)
        b_P, b_L, b_start, b_end, b_total = level_scores(b_q, b_k, b_x, R, PREC, TYPE, SCORES)
        b_ke = b_k * b_end
    elif SHARE == 8:
        b_ke = b_k * tl.exp2(total[None, :] - b_D)
    else:
        b_kc = b_k * tl.exp2(-b_D)
        b_ke = b_kc * tl.exp2(total - centre)[None, :]
    b_kr = b_k * b_start
    if earlier is not None:
        store_rows(out.kg, at.i_tile, earlier.k_end * b_total[None, :], o_k, K, R)
        store_rows(out.kg, at.i_tile, b_ke, o_k, K, R, HALF)
    b_w = b_kr * given.strength[:, None]
    if earlier is not None:
        b_w *= earlier.total[None, :]
    if out.w is not None:
        store_rows(out.w, at.i_tile, b_w, o_k, K, R, ROW)
    if SCORES:
        b_L, b_L1 = anchored_scores(b_kr, b_kc, earlier, centre, b_L, SHARE, PREC, TYPE)
    if SHARE > 1:  # after the products of k: q takes half the registers until here
        b_q = unit_rows(given.q, at.q_norm, at.b_q_norm, x.scale, o_k, K, flags)
    b_qr = b_q * b_start
    b_qg = b_qr * shift if earlier is None else b_qr * (earlier.total * shift)[None, :]
    store_rows(out.qg, at.i_tile, b_qg, o_k, K, R, ROW)
    if SCORES:
        b_P, b_P1 = anchored_scores(b_qr, b_kc, earlier, centre, b_P, SHARE, PREC, TYPE)
        if SHARE == 8:  # last: only q, k and their decay are in registers here
            OWN: tl.constexpr = gate.kind == GIVEN
            b_P, b_L = block_scores(b_q, b_k, b_D, b_C, x.log2_bound, R, OWN, PREC, TYPE)
    return HalfScores(b_P, b_L, b_P1, b_L1), HalfRows(b_ke, b_total, b_w.to(TYPE))


class Lower(NamedTuple):
    """The three blocks [32, 32] of a lower triangle [64, 64]."""

    b_11: Any
    b_21: Any
    b_22: Any


@triton.jit
def load_transposed(x, i_tile, o_r, o_c):
    """Read a block of tile i_tile of a [tiles, 64, 64] scratch tensor, transposed.

    The block has rows o_c and columns o_r; the result is [o_r, o_c].
    """
    return tl.load(x + i_tile * (CHUNK * CHUNK) + o_c[None, :] * CHUNK + o_r[:, None])


@triton.jit
def store_transposed(x, i_tile, b_x, o_r, o_c):
    """Write b_x [o_r, o_c] transposed, to rows o_c and columns o_r of tile i_tile."""
    tl.store(x + i_tile * (CHUNK * CHUNK) + o_c[None, :] * CHUNK + o_r[:, None], b_x)


@triton.jit
def store_scores(P, i_tile, b_P, root, lower, o_1, o_2, TYPE: tl.constexpr):
    """Write P [64, 64] from its three blocks; b_21, below the diagonal, lacks the factor `root`."""
    store_tile(P, i_tile, tl.zeros((HALF, HALF), TYPE), o_1, o_2, CHUNK)
    store_tile(P, i_tile, tl.where(lower, b_P.b_11, 0.0), o_1, o_1, CHUNK)
    store_tile(P, i_tile, b_P.b_21 * root, o_2, o_1, CHUNK)
    store_tile(P, i_tile, tl.where(lower, b_P.b_22, 0.0), o_2, o_2, CHUNK)


@triton.jit
def split_AP(kept, P, i_tile, strict, o_1, o_2, TYPE: tl.constexpr):
    """Take apart the tile `kept` that `join_AP` wrote: write P and return A, as `Lower`."""
    b_zero = tl.zeros((HALF, HALF), TYPE)
    store_tile(P, i_tile, b_zero, o_1, o_2, CHUNK)
    store_tile(P, i_tile, load_tile(kept, i_tile, o_1, o_2, CHUNK), o_2, o_1, CHUNK)
    b_A11 = load_tile(kept, i_tile, o_1, o_1, CHUNK)
    b_A21 = load_tile(kept, i_tile, o_2, o_1, CHUNK)
    b_A22 = load_tile(kept, i_tile, o_2, o_2, CHUNK)
    store_transposed(P, i_tile, tl.where(strict, b_zero, b_A11), o_1, o_1)
    store_transposed(P, i_tile, tl.where(strict, b_zero, b_A22), o_2, o_2)
    b_one = tl.where(o_1[:, None] == o_1[None, :], 1.0, 0.0).to(TYPE)
    return Lower(tl.where(strict, b_A11, b_one), b_A21, tl.where(strict, b_A22, b_one))


@triton.jit
def join_AP(AP, P, i_tile, b_A, strict, o_1, o_2):
    """Write A and P to one tile [64, 64].

    A, whose diagonal is one, lies below the diagonal. On and above it lies P: its two diagonal
    blocks transposed, and its block below them as it is.
    """
    b_11 = tl.where(strict, b_A.b_11, load_transposed(P, i_tile, o_1, o_1))
    store_tile(AP, i_tile, b_11, o_1, o_1, CHUNK)
    store_tile(AP, i_tile, load_tile(P, i_tile, o_2, o_1, CHUNK), o_1, o_2, CHUNK)
    store_tile(AP, i_tile, b_A.b_21, o_2, o_1, CHUNK)
    b_22 = tl.where(strict, b_A.b_22, load_transposed(P, i_tile, o_2, o_2))
    store_tile(AP, i_tile, b_22, o_2, o_2, CHUNK)


@triton.jit
def store_inverse(A, i_tile, b_A, o_1, o_2, TYPE: tl.constexpr):
    """Write A [64, 64] from its three blocks."""
    store_tile(A, i_tile, b_A.b_11, o_1, o_1, CHUNK)
    store_tile(A, i_tile, tl.zeros((HALF, HALF), TYPE), o_1, o_2, CHUNK)
    store_tile(A, i_tile, b_A.b_21, o_2, o_1, CHUNK)
    store_tile(A, i_tile, b_A.b_22, o_2, o_2, CHUNK)


@triton.jit
def split_halves(b_x):
    """Return rows 0 to 31 and 32 to 63 of a vector [64].

    The split is a sum over an axis. Without it, the compiler would compute the vector again for
    each layout in which it is used.
    """
    b_x = tl.reshape(b_x, (2, HALF))
    half = tl.arange(0, 2)[:, None]
    return tl.sum(tl.where(half == 0, b_x, 0.0), 0), tl.sum(tl.where(half == 1, b_x, 0.0), 0)


@triton.jit
def invert(b_L, b_beta1, b_beta2, root, strict, TYPE: tl.constexpr, INVERSE: tl.constexpr):
    """Return A = (I + strict_tril(beta L))^-1, as `Lower` in the dtype of operands.

    b_L are the scores k k^T o E. The block below the diagonal is A21 = -A22 (beta L21) A11.
    """
    b_zero = tl.zeros((HALF, HALF), tl.float32)
    b_L11 = tl.where(strict, b_L.b_11 * -b_beta1[:, None], 0.0)
    b_L22 = tl.where(strict, b_L.b_22 * -b_beta2[:, None], 0.0)
    b_A11, b_A22 = inverse_of_two(b_L11, b_L22, INVERSE)
    b_A21 = square_product(b_A22, b_L.b_21 * (-root * b_beta2)[:, None], b_zero, INVERSE)
    b_A21 = square_product(b_A21, b_A11, b_zero, INVERSE)
    return Lower(b_A11.to(TYPE), b_A21.to(TYPE), b_A22.to(TYPE))


@triton.jit
def store_w(
    w,
    i_tile,
    b_A,
    b_k1,
    b_k2,
    shift,
    o_1,
    o_2,
    K: tl.constexpr,
    BK: tl.constexpr,
    PREC: tl.constexpr,
):
    """Write w = A (beta k exp G), [64, K], to tile i_tile.

    The place of w holds beta k exp G until then. b_k1 and b_k2 [32, BK] are its first slice.
    """
    o_k = tl.arange(0, BK)
    for i in tl.range((K + BK - 1) // BK, num_stages=1):
        b_k1, b_k2 = spread(b_k1), spread(b_k2)
        b_w1 = tl.dot(b_A.b_11, b_k1, input_precision=PREC) * shift
        b_w2 = tl.dot(b_A.b_21, b_k1, input_precision=PREC)
        b_w2 = tl.dot(b_A.b_22, b_k2, b_w2, input_precision=PREC) * shift
        store_spread(w, i_tile, b_w1, 0, i * BK, K)
        store_spread(w, i_tile, b_w2, HALF, i * BK, K)
        o_k += BK
        b_k1, b_k2 = load_tile(w, i_tile, o_1, o_k, K), load_tile(w, i_tile, o_2, o_k, K)


@triton.jit(
    do_not_specialize=["N", "T", "begin", "scale", "log2_bound", "beta_b", "beta_t", "beta_h"]
)
def prepare_kda(
    q,
    k,
    g,
    beta,
    beta_b,
    beta_t,
    beta_h,
    gate,
    cu_seqlens,
    kept,
    out,
    ready,
    N,
    T,
    begin,
    H,
    HV,
    scale,
    log2_bound,
    flags,
    K: tl.constexpr,
    BK: tl.constexpr,
    R: tl.constexpr,
    NORMS: tl.constexpr,
    SHARE: tl.constexpr,
    PREC: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Prepare one chunk of one value head; chunks are numbered from `begin` on.

    SHARE rows have one anchor: 32 under a bound of at least -5, 8 with clamped decays, else 1. A
    thread holds R consecutive rows. No log decay of a row is below `log2_bound`, base 2. E_ij is
    the decay from row j to row i, and o multiplies entry by entry::

        P = tril(scale q k^T o E)   [64, 64]    A = (I + strict_tril(beta k k^T o E))^-1   [64, 64]
        w = A (beta k exp G)        [64, K]     gamma = exp(sum of g)    [K] fp32
        qg = scale q exp G,  kg = k exp(sum of g over the later rows)    [64, K]

    and the factors of KDA (`operands`), norms only if NORMS. The scan forms u = A (beta v), because
    it reads v as fast as it would read u.

    Forward may keep A and P in one tile (`join_AP`). Backward passes it as `kept`, and neither
    scores nor the inverse are computed again.

    The kernel works on two halves of 32 rows. Half of the rows with all of K take as many registers
    as all rows with half of K. But halves hold whole rows. So norms need no pass of their own,
    scores need no sum over slices, and no entry has to choose its half. Only keys wider than BK are
    cut into slices of BK columns, whose scores add up.
    """
    let_next_begin()
    i_h, i_t = tl.program_id(0) % HV, tl.program_id(0) // HV + begin
    i_b, first, n_rows = locate_chunk(cu_seqlens, i_t, N, T)
    i_g = i_h // (HV // H)  # the query and key head
    i_tile = i_t.to(tl.int64) * HV + i_h
    if n_rows > 0:
        prefetch_rows(g.pointer, g.strides, i_b, i_h, first, n_rows, K)
        prefetch_rows(k.pointer, k.strides, i_b, i_g, first, n_rows, K)
        prefetch_rows(q.pointer, q.strides, i_b, i_g, first, n_rows, K)
        prefetch_tile(kept, i_tile, CHUNK * CHUNK)
    o_1, o_2 = tl.arange(0, HALF), tl.arange(0, HALF) + HALF
    TYPE: tl.constexpr = out.qg.dtype.element_ty
    second, n_second = first + HALF, n_rows - HALF

    beta = Strided(beta, (beta_b, beta_t, beta_h))
    x = Inputs(q, k, g, beta, scale, log2_bound)
    factors = out.factors + i_tile * (COUNT_KDA * CHUNK)
    p_beta = factors + BETA_KDA * CHUNK + tl.arange(0, CHUNK)
    tl.store(p_beta, strength_column(beta, i_b, i_h, first, n_rows, flags))
    q_norm = factors + NORM_Q_KDA * CHUNK if NORMS else None
    k_norm = factors + NORM_K_KDA * CHUNK if NORMS else None
    shift = tl.exp2(16.0 * log2_bound) if SHARE == HALF else 1.0
    root = tl.exp2(8.0 * log2_bound) if SHARE == HALF else 1.0
    b_q1 = half_norm(q, i_b, i_g, first, n_rows, K, BK, R, flags)
    b_k1 = half_norm(k, i_b, i_g, first, n_rows, K, BK, R, flags)
    b_q2 = half_norm(q, i_b, i_g, second, n_second, K, BK, R, flags)
    b_k2 = half_norm(k, i_b, i_g, second, n_second, K, BK, R, flags)
    at_1 = HalfPlace(i_tile, i_b, i_g, i_h, first, n_rows, q_norm, k_norm, b_q1, b_k1)
    if NORMS:
        q_norm, k_norm = q_norm + HALF, k_norm + HALF
    at_2 = HalfPlace(i_tile, i_b, i_g, i_h, second, n_second, q_norm, k_norm, b_q2, b_k2)
    # Until A is known, beta k exp G stays in registers if no scores need them. Else it lies in w.
    HELD: tl.constexpr = kept is not None and BK >= K
    SCORES: tl.constexpr = kept is None
    written = Prepared(None, None, None, None if HELD else out.w, out.qg, out.kg, None, None)
    b_P11 = tl.zeros((HALF, HALF), tl.float32)
    b_P21, b_P22, b_L11, b_L21, b_L22 = b_P11, b_P11, b_P11, b_P11, b_P11
    b_k1 = tl.zeros((HALF, BK), TYPE)
    b_k2 = b_k1
    for i in tl.range((K + BK - 1) // BK, num_stages=1):
        o_k = i * BK + tl.arange(0, BK)
        s_1, r_1 = prepare_half(x, gate, written, at_1, None, o_k, K, R, flags, SHARE, PREC, SCORES)
        b_P11, b_L11 = b_P11 + s_1.P, b_L11 + s_1.L
        s_2, r_2 = prepare_half(x, gate, written, at_2, r_1, o_k, K, R, flags, SHARE, PREC, SCORES)
        b_P21, b_L21 = b_P21 + s_2.P_across, b_L21 + s_2.L_across
        b_P22, b_L22 = b_P22 + s_2.P, b_L22 + s_2.L
        b_k1, b_k2 = r_1.w, r_2.w
        tl.store(out.gamma + i_tile * K + o_k, r_1.total * r_2.total, mask=o_k < K)

    lower, strict = o_1[:, None] >= o_1[None, :], o_1[:, None] > o_1[None, :]
    if kept is None:
        store_scores(out.P, i_tile, Lower(b_P11, b_P21, b_P22), root, lower, o_1, o_2, TYPE)
    else:
        b_A = split_AP(kept, out.P, i_tile, strict, o_1, o_2, TYPE)
    b_beta = strength_column(beta, i_b, i_h, first, n_rows, flags)
    b_beta1, b_beta2 = split_halves(b_beta)
    if not HELD:
        tl.debug_barrier()  # other threads have written P, and beta k exp G to w
        # the first slices arrive while the inverse is computed
        o_k = tl.arange(0, BK)
        b_k1, b_k2 = load_tile(out.w, i_tile, o_1, o_k, K), load_tile(out.w, i_tile, o_2, o_k, K)
    if kept is None:
        b_A = invert(Lower(b_L11, b_L21, b_L22), b_beta1, b_beta2, root, strict, TYPE, INVERSE)
    if out.AP is not None:
        join_AP(out.AP, out.P, i_tile, b_A, strict, o_1, o_2)
    store_inverse(out.A, i_tile, b_A, o_1, o_2, TYPE)
    store_w(out.w, i_tile, b_A, b_k1, b_k2, shift, o_1, o_2, K, BK, PREC)
    mark_ready(ready, i_t, begin, i_h, HV)
