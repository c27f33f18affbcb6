"""Form the products of GDN's gradient for one chunk and value head: scores, keys, queries.

`gradient_gdn.gradient_gdn` has the equations: M, N, part, rest, dq and dk are defined there.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from kda_ops.backends.triton.device.decay import pair_decay, pair_decay_transposed
from kda_ops.backends.triton.device.gradient_chunk import load_kept_state, read_rows, read_values
from kda_ops.backends.triton.device.operands import (
    BETA,
    FROM_START_K,
    FROM_START_Q,
    LOG_DECAY,
    NORM_K,
    NORM_Q,
    TO_END_K,
)
from kda_ops.backends.triton.device.tile import (
    CHUNK,
    INTERPRETED,
    TREES,
    add_two,
    fold_products,
    halves,
    load_tile,
    on_diagonal,
    widen,
)

FULL = tl.constexpr("tf32x3")  # the precision of products in fp32
# The fields of an fp32 number: sign and mantissa, exponent, and the exponent of 0.5.
MANTISSA, EXPONENT, HALF = (tl.constexpr(x) for x in (0x807FFFFF, 0x7F800000, 0x3F000000))


class Head(NamedTuple):
    """One value head of a chunk, and what the scans left."""

    at: Any  # the chunk
    i_h: Any
    HV: Any
    i_tile: Any  # number of the tile, int64
    do: Any  # Strided
    kept: Any  # Kept


class QueryKey(NamedTuple):
    """A slice of the rows of q and k, [64, BK] each."""

    q: Any
    k: Any


class ValueRows(NamedTuple):
    """What the scans left of one chunk and value head, [64, BV] each."""

    v_new: Any
    z: Any
    do: Any  # 0.0 where do is absent; no product reads it then


class RowFactors(NamedTuple):
    """Factors per row of one chunk and value head, [64] fp32."""

    strength: Any  # beta
    beta: Any  # beta, or one if z is dv = beta z
    digits: Any  # beta = digits * power
    power: Any
    q_norm: Any
    k_norm: Any
    decay: Any  # as `pair_decay` takes it


class Decays(NamedTuple):
    """Factors of rows that hold the decay, [64] fp32 each (`operands`, "Factors of GDN")."""

    from_start_k: Any
    to_end_k: Any
    from_start_q: Any


class ScoreGradients(NamedTuple):
    """M and N of `gradient_gdn` and their transposes, [64, 64] operands, and what comes with them.

    A product is never transposed (docs/kernels/hazards.md, "Transposed results").
    """

    M: Any
    MT: Any
    N: Any
    NT: Any
    one: Any  # the identity: `one @ k` is k in the layout of a result
    own: Any  # d of `gradient_gdn` on the diagonal, and zeros
    zv: Any  # sum_v z v, [64] fp32
    zv_new: Any  # sum_v z v_new, [64] fp32


class SumsOverK(NamedTuple):
    """Dot products over K of q and k with their gradients, for one chunk and value head.

    They are [64] fp32, except S_dS. q_dq and k_rest leave out the pair of a row with itself.
    """

    q_dq: Any
    k_part: Any
    k_rest: Any
    own: Any  # that pair's part of both, q . d k; only the norm needs it
    k_late: Any  # k . r_1 (v_new dS^T)
    S_dS: Any  # the sum of S dS over K and V, one number


@triton.jit
def split_power(b_x):
    """Return m and p of x = m p: |m| is in [0.5, 1), p a power of two; 0 if x is 0 or subnormal.

    So m is less than 1, as beta mostly is: in fp16 a larger factor overflows at a smaller loss.
    """
    b_bits = b_x.to(tl.uint32, bitcast=True)
    b_power = (b_bits & EXPONENT).to(tl.float32, bitcast=True)
    return ((b_bits & MANTISSA) | HALF).to(tl.float32, bitcast=True), 2.0 * b_power


@triton.jit
def form_here(b_x):
    """Return x, an operand of later products, and make the compiler form it here.

    Otherwise it forms x at its product and keeps two or three fp32 tiles in registers until then,
    instead of one 16-bit tile (docs/kernels/hazards.md, "Operands formed late").
    """
    if INTERPRETED:
        return b_x
    else:
        PACK: tl.constexpr = 32 // b_x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], b_x.dtype, False, PACK)


@triton.constexpr_function
def chained(PREC, ORDER):
    """Return whether to sum products one by one: docs/kernels/hazards.md, "Sums as trees".

    Operands then have 16 bits, and results of products the layout of wgmma with 4 warps. Without
    trees, the compiler does so from the left.
    """
    if INTERPRETED.value or PREC == FULL.value or not (TREES.value or ORDER != "left"):
        return False
    return bool(cuda_capability_geq(9)) and not cuda_capability_geq(10)


@triton.jit
def dot_rows(b_x, b_y, PREC: tl.constexpr, ORDER: tl.constexpr):
    """Return the sum over columns of x y, [rows] fp32, for results of products.

    If a product adds to y between two sums, they must differ in ORDER: from the "left", from the
    "right", or first from the "middle" to the right (docs/kernels/hazards.md, "Merged sums"). It
    has no effect unless `chained(PREC, ORDER)`.
    """
    if chained(PREC, ORDER):
        if ORDER == "middle":
            b_left, b_right = halves(b_x)
            b_y_left, b_y_right = halves(b_y)
            b_sum = fold_products(b_left, b_y_left, fold_products(b_right, b_y_right))
        elif ORDER == "right":
            b_sum = fold_products(b_x, b_y, None, True)
        else:
            b_sum = fold_products(b_x, b_y)
        return tl.sum(b_sum, 1)
    else:
        return tl.sum(b_x * b_y, 1)


@triton.jit
def dot_tiles(b_x, b_y, PREC: tl.constexpr):
    """Return the sum over rows and columns of x y, in fp32."""
    if chained(PREC, "left"):
        return tl.sum(widen(b_x) * widen(b_y))
    else:
        return tl.sum(b_x.to(tl.float32) * b_y.to(tl.float32))


@triton.jit
def load_row_factors(p_row, TILED: tl.constexpr):
    """Load the `RowFactors` of a tile, for the scores; `p_row` points at its `factors`."""
    b_strength = tl.load(p_row + BETA * CHUNK)
    b_k_norm = tl.load(p_row + NORM_K * CHUNK)
    b_q_norm = tl.load(p_row + NORM_Q * CHUNK)
    b_decay = tl.load(p_row + LOG_DECAY * CHUNK)
    b_beta = tl.full((CHUNK,), 1.0, tl.float32)
    b_digits, b_power = b_beta, b_beta
    if TILED:
        b_beta = b_strength
        b_digits, b_power = split_power(b_beta)
    return RowFactors(b_strength, b_beta, b_digits, b_power, b_q_norm, b_k_norm, b_decay)


@triton.jit
def load_row_decays(p_row):
    """Load the `Decays` of a tile, for products with states; `p_row` points at its `factors`."""
    b_start = tl.load(p_row + FROM_START_K * CHUNK)
    return Decays(b_start, tl.load(p_row + TO_END_K * CHUNK), tl.load(p_row + FROM_START_Q * CHUNK))


@triton.jit
def read_value_rows(head, o_v, V: tl.constexpr, TILED: tl.constexpr):
    """Load columns o_v of v_new, z and do (0 without a do), as `ValueRows`."""
    b_do = 0.0
    if head.do.pointer is not None:
        b_do = read_rows(head.do, head.at, head.i_h, o_v, V)
    b_vn = load_tile(head.kept.v_new, head.i_tile, tl.arange(0, CHUNK), o_v, V)
    return ValueRows(b_vn, read_z(head, o_v, V, TILED), b_do)


@triton.jit
def read_z(head, o_v, V: tl.constexpr, TILED: tl.constexpr):
    """Load columns o_v of z if TILED, else of dv = beta z; [64, BV]."""
    return read_values(head.kept.z, head.at, head.i_tile, head.i_h, head.HV, o_v, V, TILED)


@triton.jit
def score_gradients(
    v,
    sources,
    factors,
    head,
    scale,
    V: tl.constexpr,
    BV: tl.constexpr,
    TILED: tl.constexpr,
    SUMS: tl.constexpr,
    EXACT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Return the `ScoreGradients`; `zv` is 0 unless SUMS.

    M^T and N^T come first, so that registers hold at most two fp32 tiles of [64, 64].
    """
    TYPE: tl.constexpr = head.kept.states.dtype.element_ty
    values: tl.constexpr = (V + BV - 1) // BV
    o_r = tl.arange(0, CHUNK)
    diagonal = o_r[:, None] == o_r[None, :]
    b_zv = tl.zeros((CHUNK,), tl.float32)
    b_M = tl.zeros((CHUNK, CHUNK), tl.float32)
    b_MT, b_N, b_NT = b_M, b_M, b_M
    for j in tl.range(values, num_stages=1):
        if values > 1:
            sources = read_value_rows(head, j * BV + tl.arange(0, BV), V, TILED)
        if head.do.pointer is not None:
            b_MT = tl.dot(sources.v_new, tl.trans(sources.do), b_MT, input_precision=PREC)
        b_NT = tl.dot(sources.v_new, tl.trans(sources.z), b_NT, input_precision=PREC)
    b_q_norm, b_k_norm = factors.q_norm, factors.k_norm
    b_E = pair_decay_transposed(factors.decay, EXACT) * b_k_norm[:, None]
    b_MT = form_here((b_MT * b_E * (b_q_norm * scale)[None, :]).to(TYPE))
    b_NT = form_here((b_NT * b_E * -(b_k_norm * factors.beta)[None, :]).to(TYPE))
    for j in tl.range(values, num_stages=1):
        o_v = j * BV + tl.arange(0, BV)
        if values > 1:
            sources = read_value_rows(head, o_v, V, TILED)
        if SUMS:
            b_v = read_rows(v, head.at, head.i_h, o_v, V).to(tl.float32)
            b_zv += tl.sum(b_v * sources.z.to(tl.float32), 1)
        if head.do.pointer is not None:
            b_M = tl.dot(sources.do, tl.trans(sources.v_new), b_M, input_precision=PREC)
        b_N = tl.dot(sources.z, tl.trans(sources.v_new), b_N, input_precision=PREC)
    b_E = pair_decay(factors.decay, EXACT, True) * b_k_norm[None, :]
    b_zvn = on_diagonal(b_N)
    # The identity depends on a product, so that the compiler keeps it in registers. Then `one @ k`
    # brings k from shared memory into registers.
    b_one = tl.where(diagonal | (b_N < -float("inf")), 1.0, 0.0).to(TYPE)
    b_N = form_here((b_N * b_E * -(b_k_norm * factors.digits)[:, None]).to(TYPE))
    b_own = tl.where(diagonal, b_M * (b_q_norm * b_k_norm * scale)[:, None], 0.0)
    b_own = form_here(b_own.to(TYPE))
    b_M = form_here((b_M * b_E * (b_q_norm * scale)[:, None]).to(TYPE))
    return ScoreGradients(b_M, b_MT, b_N, b_NT, b_one, b_own, b_zv, b_zvn)


@triton.jit
def pair_sums(
    x, q, k, head, scores, factors, i_g, K: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr
):
    """Return what pairs of rows add to the sums over K, as rows and columns of one fp32 matrix.

    In fp32, q . M k and k . M^T q drop different digits of tf32x3, so they would not cancel in dG.
    So the sums start from these values, and later steps leave the products of pairs out.
    """
    b_zero = tl.zeros((CHUNK,), tl.float32)
    b_qk = tl.zeros((CHUNK, CHUNK), tl.float32)
    b_kk = b_qk
    b_q, b_k = x.q, x.k
    for i in tl.range((K + BK - 1) // BK, num_stages=1):
        if K > BK:
            o_k = i * BK + tl.arange(0, BK)
            b_q, b_k = read_rows(q, head.at, i_g, o_k, K), read_rows(k, head.at, i_g, o_k, K)
        b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=PREC)
        b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision=PREC)
    b_own = tl.sum(b_qk * scores.own, 1)
    b_qk, b_kk = b_qk * scores.M, b_kk * scores.N
    b_row_q, b_row_k = tl.reduce((b_qk, b_kk), 1, add_two)
    b_column = tl.sum(b_qk + b_kk * factors.power[:, None], 0)
    return SumsOverK(b_row_q, b_row_k, b_column, b_own, b_zero, 0.0)


@triton.jit
def key_gradient(
    x,
    head,
    sources,
    scores,
    sums,
    factors,
    decays,
    o_k,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    TILED: tl.constexpr,
    PREC: tl.constexpr,
):
    """Return k, rest and part [64, BK] fp32, the last S [BK, BV] that was loaded, and the sums.

    The sums are `sums` plus k_part, k_rest, k_late and S_dS of these channels. In fp32 they leave
    out the products of pairs, which `pair_sums` has.
    """
    values: tl.constexpr = (V + BV - 1) // BV
    o_r, o_v = tl.arange(0, CHUNK), tl.arange(0, BV)
    b_rest = tl.zeros((CHUNK, o_k.shape[0]), tl.float32)
    b_part = b_rest
    b_vn, b_z, S_dS = sources.v_new, sources.z, sums.S_dS
    for j in tl.range(values, num_stages=1):
        if values > 1:
            o_v = j * BV + tl.arange(0, BV)
            b_vn = load_tile(head.kept.v_new, head.i_tile, o_r, o_v, V)
        b_S = load_kept_state(head.kept.states, head.i_tile, o_k, o_v, K, V)
        b_dS = load_kept_state(head.kept.dstates, head.i_tile, o_k, o_v, K, V)
        S_dS += dot_tiles(b_S, b_dS, PREC)
        b_rest = tl.dot(b_vn, tl.trans(b_dS), b_rest, input_precision=PREC)
    # S is loaded again: held, it would take registers while dS is used
    tl.debug_barrier()
    b_x = tl.dot(scores.one, x.k, input_precision=PREC)
    b_rest *= decays.to_end_k[:, None]
    b_along = dot_rows(b_x, b_rest, PREC, "right")
    b_k_late = sums.k_late + b_along
    b_rest = tl.dot(scores.NT, x.k, b_rest, input_precision=PREC)
    if head.do.pointer is not None:
        b_rest = tl.dot(scores.MT, x.q, b_rest, input_precision=PREC)
    if PREC != FULL:
        b_along = dot_rows(b_x, b_rest, PREC, "left")
    b_k_rest = sums.k_rest + b_along
    if head.do.pointer is not None:
        b_rest = tl.dot(scores.own, x.q, b_rest, input_precision=PREC)
    b_own = sums.own
    if PREC != FULL:
        b_own += dot_rows(b_x, b_rest, PREC, "middle") - b_along
    b_S = load_kept_state(head.kept.states, head.i_tile, o_k, o_v, K, V)
    for j in tl.range(values, num_stages=1):
        if values > 1:
            o_v = j * BV + tl.arange(0, BV)
            b_z = read_z(head, o_v, V, TILED)
            b_S = load_kept_state(head.kept.states, head.i_tile, o_k, o_v, K, V)
        b_part = tl.dot(b_z, tl.trans(b_S), b_part, input_precision=PREC)
    b_part *= -(decays.from_start_k * factors.digits)[:, None]
    b_k_part = sums.k_part
    if PREC == FULL:
        b_k_part += tl.sum(b_x * b_part, 1)
    b_part = tl.dot(scores.N, x.k, b_part, input_precision=PREC)
    if PREC != FULL:
        b_k_part += dot_rows(b_x, b_part, PREC, "left")
    sums = SumsOverK(sums.q_dq, b_k_part, b_k_rest, b_own, b_k_late, S_dS)
    return b_x, b_rest, b_part, b_S, sums


@triton.jit
def query_gradient(
    x,
    b_S,
    head,
    sources,
    scores,
    sums,
    decays,
    o_k,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PREC: tl.constexpr,
):
    """Return q and dq, [64, BK] fp32 each, and the sums plus q_dq of these channels.

    In fp32 q_dq leaves out the product of pairs, which `pair_sums` has.
    """
    values: tl.constexpr = (V + BV - 1) // BV
    b_dq, b_q_dq = tl.zeros((CHUNK, o_k.shape[0]), tl.float32), sums.q_dq
    b_do = sources.do
    b_x = tl.dot(scores.one, x.q, input_precision=PREC)
    if head.do.pointer is not None:
        for j in tl.range(values, num_stages=1):
            if values > 1:
                o_v = j * BV + tl.arange(0, BV)
                b_do = read_rows(head.do, head.at, head.i_h, o_v, V)
                b_S = load_kept_state(head.kept.states, head.i_tile, o_k, o_v, K, V)
            b_dq = tl.dot(b_do, tl.trans(b_S), b_dq, input_precision=PREC)
        b_dq *= decays.from_start_q[:, None]
        if PREC == FULL:
            b_q_dq += tl.sum(b_x * b_dq, 1)
        b_dq = tl.dot(scores.M, x.k, b_dq, input_precision=PREC)
        if PREC != FULL:
            b_q_dq += dot_rows(b_x, b_dq, PREC, "left")
        b_dq = tl.dot(scores.own, x.k, b_dq, input_precision=PREC)
    sums = SumsOverK(b_q_dq, sums.k_part, sums.k_rest, sums.own, sums.k_late, sums.S_dS)
    return b_x, b_dq, sums
