"""Gradients of GDN: one chunk, and all value heads of a key head, per program."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kda_ops.backends.triton.decay import pair_decay, pair_decay_transposed
from kda_ops.backends.triton.gate import load_rate, reciprocal
from kda_ops.backends.triton.gradient_chunk import (
    load_state,
    locate,
    read_back,
    read_rows,
    read_values,
    through_gate,
    write_column,
    write_rows,
)
from kda_ops.backends.triton.gradient_pairs import strength_gradient
from kda_ops.backends.triton.operands import (
    BETA,
    COUNT_GDN,
    FROM_START_K,
    FROM_START_Q,
    LOG_DECAY,
    NORM_K,
    NORM_Q,
    TO_END_K,
    Strided,
)
from kda_ops.backends.triton.tile import (
    CHUNK,
    INTERPRETED,
    add_two,
    load_column,
    load_tile,
    on_diagonal,
    prefetch_tile,
)

# The fields of an fp32 number: sign and mantissa, exponent, and the exponent of one.
MANTISSA, EXPONENT, ONE = (tl.constexpr(x) for x in (0x807FFFFF, 0x7F800000, 0x3F800000))


class HeadGradients(NamedTuple):
    """Where gradients go; each may be absent."""

    dq: Any  # [B T, H, K]
    dk: Any  # [B T, H, K]
    # the same in fp32, where slices of K or value heads add up
    dq_sum: Any
    dk_sum: Any
    dg: Any  # [B T, HV]
    dbeta: Any  # [B T, HV]
    # [NT, HV] fp32, the shares of a chunk
    dA_log: Any
    ddt_bias: Any


class Head(NamedTuple):
    """One value head of a chunk, and what the scans left."""

    at: Any  # the chunk
    i_h: Any
    HV: Any
    i_tile: Any  # number of the tile, int64
    do: Any  # Strided
    kept: Any


class Rows(NamedTuple):
    """A slice of the rows of q and k, [64, BK] each."""

    q: Any
    k: Any


class Sources(NamedTuple):
    """What the scans left of one chunk and value head, [64, BV] each."""

    v_new: Any
    z: Any
    do: Any  # garbage where do is absent


class Factors(NamedTuple):
    """Numbers per row of one chunk and value head, [64] fp32."""

    strength: Any  # beta
    beta: Any  # beta, or one if z is dv = beta z
    digits: Any  # beta = digits power
    power: Any
    q_norm: Any
    k_norm: Any
    decay: Any  # as `pair_decay` takes it


class Decays(NamedTuple):
    """Factors of rows with the decay, [64] fp32 each: rows FROM_START_K, TO_END_K, FROM_START_Q."""

    from_start_k: Any
    to_end_k: Any
    from_start_q: Any


class Scores(NamedTuple):
    """M and N of `gradient_gdn` and their transposes, [64, 64] operands, and what comes with them.

    A product is never transposed (docs/kernels/hazards.md, "Transposed results").
    """

    M: Any
    MT: Any
    N: Any
    NT: Any
    one: Any  # the identity: `one @ k` is k in the layout of a result
    zv: Any  # sum_v z v, [64] fp32
    zv_new: Any  # sum_v z v_new, [64] fp32


class Dots(NamedTuple):
    """Sums over K of one chunk and value head, [64] fp32: products of q and k with parts of their
    gradients.
    """

    q_dq: Any
    k_part: Any
    k_rest: Any
    k_late: Any  # k . r_1 (v_new dS^T)
    S_dS: Any  # the sum of S dS over K and V, one number


@triton.jit
def through_norm(b_dy, b_x, b_r, b_along, K: tl.constexpr, L2NORM: tl.constexpr):
    """Return dx = dy - r^2 x (x . dy) of y = r x, r = 1 / |x|, for a dy that has its factor r, and
    from x . dy [64].

    With one channel dx = dy (1 - y^2), and 1 - y^2 = 1e-6 r^2 would be lost to rounding.
    """
    if L2NORM and K == 1:
        b_dy *= (1e-6 * b_r * b_r)[:, None]
    elif L2NORM:
        b_dy -= b_x * (b_r * b_r * b_along)[:, None]
    return b_dy


@triton.jit
def split_power(b_x):
    """Return m and p of x = m p, |m| in [1, 2) and p a power of two, exactly; 1 and 0 for zero."""
    b_bits = b_x.to(tl.uint32, bitcast=True)
    b_power = (b_bits & EXPONENT).to(tl.float32, bitcast=True)
    return ((b_bits & MANTISSA) | ONE).to(tl.float32, bitcast=True), b_power


@triton.jit
def form_here(b_x):
    """Return x, an operand of products further down, and keep the compiler from forming it there.

    Moved down to its product, an operand keeps what it is made of in registers: two or three tiles
    of fp32 in place of one of 16 bits (docs/kernels/hazards.md, "Operands formed late").
    """
    if INTERPRETED:
        return b_x
    else:
        PACK: tl.constexpr = 32 // b_x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], b_x.dtype, False, PACK)


@triton.jit
def load_factors(p_row, TILED: tl.constexpr):
    """Load what the scores need of the vectors of a tile."""
    b_strength = tl.load(p_row + BETA * CHUNK)
    b_k_norm = tl.load(p_row + NORM_K * CHUNK)
    b_q_norm = tl.load(p_row + NORM_Q * CHUNK)
    b_decay = tl.load(p_row + LOG_DECAY * CHUNK)
    b_beta = b_strength if TILED else tl.full((CHUNK,), 1.0, tl.float32)
    b_digits, b_power = split_power(b_beta)
    return Factors(b_strength, b_beta, b_digits, b_power, b_q_norm, b_k_norm, b_decay)


@triton.jit
def load_decays(p_row):
    """Load what the products with the states need of the vectors of a tile."""
    b_start = tl.load(p_row + FROM_START_K * CHUNK)
    return Decays(b_start, tl.load(p_row + TO_END_K * CHUNK), tl.load(p_row + FROM_START_Q * CHUNK))


@triton.jit
def read_sources(head, o_v, V: tl.constexpr, TILED: tl.constexpr):
    """Load columns o_v of v_new, z and do, if there is a do."""
    b_do = 0.0
    if head.do.pointer is not None:
        b_do = read_rows(head.do, head.at, head.i_h, o_v, V)
    b_vn = load_tile(head.kept.v_new, head.i_tile, tl.arange(0, CHUNK), o_v, V)
    return Sources(b_vn, read_z(head, o_v, V, TILED), b_do)


@triton.jit
def read_z(head, o_v, V: tl.constexpr, TILED: tl.constexpr):
    """Load columns o_v of z, or of dv."""
    return read_values(head.kept.z, head.at, head.i_tile, head.i_h, head.HV, o_v, V, TILED)


@triton.jit
def score_gradients(
    v,
    sources,
    factors,
    triangles,
    head,
    scale,
    V: tl.constexpr,
    BV: tl.constexpr,
    TILED: tl.constexpr,
    SUMS: tl.constexpr,
    EXACT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Return the `Scores` of one chunk and value head; `zv` only with SUMS. M^T and N^T come first,
    so that two fp32 squares are alive.
    """
    TYPE: tl.constexpr = head.kept.states.dtype.element_ty
    values: tl.constexpr = (V + BV - 1) // BV
    lower, diagonal, upper = triangles
    b_zv = tl.zeros((CHUNK,), tl.float32)
    b_M = tl.zeros((CHUNK, CHUNK), tl.float32)
    b_MT, b_N, b_NT = b_M, b_M, b_M
    for j in tl.range(values, num_stages=1):
        if values > 1:
            sources = read_sources(head, j * BV + tl.arange(0, BV), V, TILED)
        if head.do.pointer is not None:
            b_MT = tl.dot(sources.v_new, tl.trans(sources.do), b_MT, input_precision=PREC)
        b_NT = tl.dot(sources.v_new, tl.trans(sources.z), b_NT, input_precision=PREC)
    b_q_norm, b_k_norm = factors.q_norm, factors.k_norm
    b_E = pair_decay_transposed(factors.decay, EXACT) * b_k_norm[:, None]
    b_MT = form_here((b_MT * b_E * (b_q_norm * scale)[None, :]).to(TYPE))
    b_NT = b_NT * b_E * -(b_k_norm * factors.beta)[None, :]
    b_NT = form_here(tl.where(upper, b_NT, 0.0).to(TYPE))
    for j in tl.range(values, num_stages=1):
        o_v = j * BV + tl.arange(0, BV)
        if values > 1:
            sources = read_sources(head, o_v, V, TILED)
        if SUMS:
            b_v = read_rows(v, head.at, head.i_h, o_v, V).to(tl.float32)
            b_zv += tl.sum(b_v * sources.z.to(tl.float32), 1)
        if head.do.pointer is not None:
            b_M = tl.dot(sources.do, tl.trans(sources.v_new), b_M, input_precision=PREC)
        b_N = tl.dot(sources.z, tl.trans(sources.v_new), b_N, input_precision=PREC)
    b_E = pair_decay(factors.decay, EXACT) * b_k_norm[None, :]
    b_zvn = on_diagonal(b_N)
    # The identity by way of a product: else it would lie in shared memory too, and `one @ k` would
    # not bring k from there into registers.
    b_one = tl.where(diagonal | (b_N < -float("inf")), 1.0, 0.0).to(TYPE)
    b_N = b_N * b_E * -(b_k_norm * factors.digits)[:, None]
    b_N = form_here(tl.where(lower, b_N, 0.0).to(TYPE))
    b_M = form_here((b_M * b_E * (b_q_norm * scale)[:, None]).to(TYPE))
    return Scores(b_M, b_MT, b_N, b_NT, b_one, b_zv, b_zvn)


@triton.jit
def key_gradient(
    x,
    head,
    sources,
    scores,
    dots,
    factors,
    decays,
    o_k,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    TILED: tl.constexpr,
    PREC: tl.constexpr,
):
    """Return k, rest and part of `gradient_gdn`, [64, BK] fp32 each, the dots with theirs, and the
    last S that was loaded.
    """
    values: tl.constexpr = (V + BV - 1) // BV
    o_r, o_v = tl.arange(0, CHUNK), tl.arange(0, BV)
    b_rest = tl.zeros((CHUNK, o_k.shape[0]), tl.float32)
    b_part = b_rest
    b_vn, b_z, S_dS = sources.v_new, sources.z, dots.S_dS
    for j in tl.range(values, num_stages=1):
        if values > 1:
            o_v = j * BV + tl.arange(0, BV)
            b_vn = load_tile(head.kept.v_new, head.i_tile, o_r, o_v, V)
        b_S = load_state(head.kept.states, head.i_tile, o_k, o_v, K, V)
        b_dS = load_state(head.kept.dstates, head.i_tile, o_k, o_v, K, V)
        S_dS += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32))
        b_rest = tl.dot(b_vn, tl.trans(b_dS), b_rest, input_precision=PREC)
    # S is loaded again: kept, it would take registers while dS is used
    tl.debug_barrier()
    b_x = tl.dot(scores.one, x.k, input_precision=PREC)
    b_rest *= decays.to_end_k[:, None]
    b_k_late = dots.k_late + tl.sum(b_x * b_rest, 1)
    b_rest = tl.dot(scores.NT, x.k, b_rest, input_precision=PREC)
    if head.do.pointer is not None:
        b_rest = tl.dot(scores.MT, x.q, b_rest, input_precision=PREC)
    b_k_rest = dots.k_rest + tl.sum(b_x * b_rest, 1)
    b_S = load_state(head.kept.states, head.i_tile, o_k, o_v, K, V)
    for j in tl.range(values, num_stages=1):
        if values > 1:
            o_v = j * BV + tl.arange(0, BV)
            b_z = read_z(head, o_v, V, TILED)
            b_S = load_state(head.kept.states, head.i_tile, o_k, o_v, K, V)
        b_part = tl.dot(b_z, tl.trans(b_S), b_part, input_precision=PREC)
    b_part *= -(decays.from_start_k * factors.digits)[:, None]
    b_part = tl.dot(scores.N, x.k, b_part, input_precision=PREC)
    b_k_part = dots.k_part + tl.sum(b_x * b_part, 1)
    return b_x, b_rest, b_part, b_S, Dots(dots.q_dq, b_k_part, b_k_rest, b_k_late, S_dS)


@triton.jit
def query_gradient(
    x,
    b_S,
    head,
    sources,
    scores,
    dots,
    decays,
    o_k,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PREC: tl.constexpr,
):
    """Return q and dq of `gradient_gdn`, [64, BK] fp32 each, and the dots with theirs."""
    values: tl.constexpr = (V + BV - 1) // BV
    b_dq, b_q_dq = tl.zeros((CHUNK, o_k.shape[0]), tl.float32), dots.q_dq
    b_do = sources.do
    b_x = tl.dot(scores.one, x.q, input_precision=PREC)
    if head.do.pointer is not None:
        for j in tl.range(values, num_stages=1):
            if values > 1:
                o_v = j * BV + tl.arange(0, BV)
                b_do = read_rows(head.do, head.at, head.i_h, o_v, V)
                b_S = load_state(head.kept.states, head.i_tile, o_k, o_v, K, V)
            b_dq = tl.dot(b_do, tl.trans(b_S), b_dq, input_precision=PREC)
        b_dq = tl.dot(scores.M, x.k, b_dq * decays.from_start_q[:, None], input_precision=PREC)
        b_q_dq += tl.sum(b_x * b_dq, 1)
    return b_x, b_dq, Dots(b_q_dq, dots.k_part, dots.k_rest, dots.k_late, dots.S_dS)


@triton.jit
def write_strength(
    dbeta,
    head,
    scores,
    factors,
    b_k_part,
    TILED: tl.constexpr,
    SUMS: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
):
    """Write the gradient of a given beta, if SUMS, or of the logit of a sigmoid."""
    if SUMS:
        b_dbeta = scores.zv + b_k_part / factors.digits
    else:
        b_zvn = scores.zv_new
        if not TILED:
            b_zvn *= reciprocal(factors.strength)
        b_dbeta = strength_gradient(b_zvn, factors.strength, NEG_EIGVAL)
    write_column(dbeta, head.at, head.i_h, head.HV, b_dbeta)


@triton.jit
def write_decay(grads, g, weights, lower_bound, gamma, head, dots, b_power, flags):
    """Write dg, the reverse cumsum of dG, through the gate if g are logits; and its shares of the
    gate's weights.
    """
    at, i_h, o_r = head.at, head.i_h, tl.arange(0, CHUNK)
    b_gamma = tl.load(gamma + head.i_tile)
    b_dG = dots.q_dq + dots.k_part * b_power - dots.k_rest
    b_dg = tl.cumsum(b_dG, 0, reverse=True) + (tl.sum(dots.k_late, 0) + b_gamma * dots.S_dS)
    if flags.ACTIVATE:
        b_x = load_column(g.pointer, g.strides, at.i_b, i_h, at.first, at.n_rows, o_r)
        bias = 0.0
        if weights.dt_bias is not None:
            bias = tl.load(weights.dt_bias + i_h).to(tl.float32)
        rate, bound = load_rate(weights.A_log, i_h), tl.full((), lower_bound, tl.float32)
        b_dg, b_log = through_gate(b_dg, b_x + bias, rate, bound, flags.BOUNDED)
        m_r = o_r < at.n_rows
        b_log, b_bias = tl.reduce((tl.where(m_r, b_log, 0.0), tl.where(m_r, b_dg, 0.0)), 0, add_two)
        if grads.dA_log is not None:
            tl.store(grads.dA_log + head.i_tile, b_log)
        if grads.ddt_bias is not None:
            tl.store(grads.ddt_bias + head.i_tile, b_bias)
    write_column(grads.dg, at, i_h, head.HV, b_dg)


@triton.jit
def clear(grads, at, i_t, i_g, H, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Write zeros to the gradients of a chunk that is no part of a sequence."""
    b_zero = tl.zeros((CHUNK,), tl.float32)
    if grads.dq is not None:
        for i in range((K + BK - 1) // BK):
            o_k = i * BK + tl.arange(0, BK)
            write_rows(grads.dq, at, i_g, H, tl.zeros((CHUNK, BK), tl.float32), o_k, K)
            write_rows(grads.dk, at, i_g, H, tl.zeros((CHUNK, BK), tl.float32), o_k, K)
    for i in range(GROUP):
        i_h, HV = i_g * GROUP + i, H * GROUP
        i_tile = i_t.to(tl.int64) * HV + i_h
        if grads.dg is not None:
            write_column(grads.dg, at, i_h, HV, b_zero)
        if grads.dbeta is not None:
            write_column(grads.dbeta, at, i_h, HV, b_zero)
        if grads.dA_log is not None:
            tl.store(grads.dA_log + i_tile, 0.0)
        if grads.ddt_bias is not None:
            tl.store(grads.ddt_bias + i_tile, 0.0)


@triton.jit
def add_up(x_sum, at, i_g, H, i_head, b_dx, o_k, K: tl.constexpr):
    """Add a slice of dq or dk to its sum over value heads in memory, if there is one."""
    if x_sum is not None:
        if i_head > 0:
            b_dx += read_back(x_sum, at, i_g, H, o_k, K)
        write_rows(x_sum, at, i_g, H, b_dx, o_k, K)
    return b_dx


@triton.jit
def write_sums(
    grads,
    q,
    k,
    at,
    i_g,
    H,
    p_row,
    b_along_q,
    b_along_k,
    K: tl.constexpr,
    BK: tl.constexpr,
    L2NORM: tl.constexpr,
):
    """Write dq and dk from their sums, through the norm."""
    for i in tl.range((K + BK - 1) // BK, num_stages=1):
        o_k = i * BK + tl.arange(0, BK)
        b_q, b_k = read_rows(q, at, i_g, o_k, K), read_rows(k, at, i_g, o_k, K)
        b_dq = read_back(grads.dq_sum, at, i_g, H, o_k, K)
        b_dk = read_back(grads.dk_sum, at, i_g, H, o_k, K)
        b_r = tl.load(p_row + NORM_Q * CHUNK)
        b_dq = through_norm(b_dq, b_q.to(tl.float32), b_r, b_along_q, K, L2NORM)
        write_rows(grads.dq, at, i_g, H, b_dq, o_k, K)
        b_r = tl.load(p_row + NORM_K * CHUNK)
        b_dk = through_norm(b_dk, b_k.to(tl.float32), b_r, b_along_k, K, L2NORM)
        write_rows(grads.dk, at, i_g, H, b_dk, o_k, K)


@triton.jit(do_not_specialize=["N", "T", "scale", "lower_bound", "g_b", "g_t", "g_h"])
def gradient_gdn(
    q,
    k,
    v,
    g,
    g_b,
    g_t,
    g_h,
    weights,
    rows,
    gamma,
    do,
    kept,
    cu_seqlens,
    grads,
    N,
    T,
    H,
    scale,
    lower_bound,
    flags,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    TILED: tl.constexpr,
    EXACT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Form all gradients of one chunk and the GROUP value heads of one key head. E_ij is the decay
    from row j to row i, n_q and n_k are inverse norms, and r the rows of GDN (`operands`)::

        M    = scale tril(n_q n_k do v_new^T o E)                             [64, 64]
        N    = -beta strict_tril(n_k n_k z v_new^T o E)                       [64, 64]
        dq   = r_3 (do S^T) + M k                                             [64, K]
        part = N k - r_0 beta (z S^T)                                         [64, K]
        rest = r_1 (v_new dS^T) + N^T k + M^T q                               [64, K]
        dk   = part + rest
        dG   = q . dq + k . part - k . rest                                   [64]
        dbeta = sum_v z v_new / beta for a sigmoid, else sum_v z v + (k . part) / beta

    `z` is z if TILED; else it is dv = beta z, and beta is one but in dbeta. A given beta may be
    zero. So it is digits times a power of two: N and part take the digits, and the power, which
    rounds nothing, follows the sum over K.

    Norms, decays and beta are factors of rows and of the [64, 64] tiles. So q and k go from memory
    to the tensor cores as they are. dq and dk leave through the norm, which needs q . dq and k . dk
    anyway. What pairs of rows add to dG cancels in a sum over a chunk: q . M k and k . M^T q are
    sums of the same rounded M, and N likewise.

    The phases keep few tiles alive: M^T and N^T, M and N, dk, dq. Two programs of four warps share
    a multiprocessor, whose shared memory holds five tiles of rows and one state each. So S is
    loaded twice. Slices of K and value heads add up in dq_sum and dk_sum.
    """
    i_g, i_t = tl.program_id(0) % H, tl.program_id(0) // H
    at = locate(cu_seqlens, i_t, N, T)
    slices: tl.constexpr = (K + BK - 1) // BK
    o_r, HV = tl.arange(0, CHUNK), H * GROUP
    if (at.n_rows <= 0) | (at.live == 0):
        clear(grads, at, i_t, i_g, H, GROUP, K, BK)
        return
    SUMS: tl.constexpr = grads.dbeta is not None and not flags.SIGMOID
    triangles = (
        o_r[:, None] > o_r[None, :],
        o_r[:, None] == o_r[None, :],
        o_r[:, None] < o_r[None, :],
    )
    b_zero = tl.zeros((CHUNK,), tl.float32)
    b_along_q, b_along_k = b_zero, b_zero  # q . dq and k . dk, over all value heads
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    x = Rows(read_rows(q, at, i_g, o_k, K), read_rows(k, at, i_g, o_k, K))
    for i_head in tl.range(GROUP, num_stages=1):
        i_h = i_g * GROUP + i_head
        i_tile = i_t.to(tl.int64) * HV + i_h
        head = Head(at, i_h, HV, i_tile, do, kept)
        p_row = rows + i_tile * (COUNT_GDN * CHUNK) + o_r
        dots = Dots(b_zero, b_zero, b_zero, b_zero, 0.0)
        prefetch_tile(kept.states, i_tile, K * V)
        prefetch_tile(kept.dstates, i_tile, K * V)
        sources = read_sources(head, o_v, V, TILED)
        factors = load_factors(p_row, TILED)
        scores = score_gradients(
            v, sources, factors, triangles, head, scale, V, BV, TILED, SUMS, EXACT, PREC
        )
        if T > 0:  # always: a block of its own, before which nothing of it is loaded
            decays = load_decays(p_row)
            for i in tl.range(slices, num_stages=1):
                if slices > 1:
                    o_k = i * BK + tl.arange(0, BK)
                    x = Rows(read_rows(q, at, i_g, o_k, K), read_rows(k, at, i_g, o_k, K))
                b_x, b_dk, b_part, b_S, dots = key_gradient(
                    x, head, sources, scores, dots, factors, decays, o_k, K, V, BV, TILED, PREC
                )
                if grads.dq is not None:
                    b_dk += b_part * factors.power[:, None]
                    b_along = dots.k_rest + dots.k_part * factors.power
                    b_dk = add_up(grads.dk_sum, at, i_g, H, i_head, b_dk, o_k, K)
                    if grads.dk_sum is None:
                        b_dk = through_norm(b_dk, b_x, factors.k_norm, b_along, K, flags.L2NORM)
                        write_rows(grads.dk, at, i_g, H, b_dk, o_k, K)
                b_x, b_dq, dots = query_gradient(
                    x, b_S, head, sources, scores, dots, decays, o_k, K, V, BV, PREC
                )
                if grads.dq is not None:
                    b_dq = add_up(grads.dq_sum, at, i_g, H, i_head, b_dq, o_k, K)
                    if grads.dq_sum is None:
                        b_dq = through_norm(b_dq, b_x, factors.q_norm, dots.q_dq, K, flags.L2NORM)
                        write_rows(grads.dq, at, i_g, H, b_dq, o_k, K)
        if grads.dq_sum is not None:
            b_along_q += dots.q_dq
            b_along_k += dots.k_rest + dots.k_part * factors.power
        if grads.dbeta is not None:
            b_part, NEG_EIGVAL = dots.k_part, flags.NEG_EIGVAL
            write_strength(grads.dbeta, head, scores, factors, b_part, TILED, SUMS, NEG_EIGVAL)
        if grads.dg is not None:
            logits = Strided(g, (g_b, g_t, g_h))
            write_decay(
                grads, logits, weights, lower_bound, gamma, head, dots, factors.power, flags
            )
    if grads.dq_sum is not None:
        tl.debug_barrier()  # written by other threads
        p_row = rows + (i_t.to(tl.int64) * H + i_g) * (GROUP * COUNT_GDN * CHUNK) + o_r
        write_sums(grads, q, k, at, i_g, H, p_row, b_along_q, b_along_k, K, BK, flags.L2NORM)
