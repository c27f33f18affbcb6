"""GDN's part of `prepare`: one program per chunk and key head (docs/maths.md, chunk form)."""

import triton
import triton.language as tl

from kda_ops.backends.triton.device.activations import decay_column, strength_column
from kda_ops.backends.triton.device.decay import pair_decay, row_decay
from kda_ops.backends.triton.device.inverse import inverse
from kda_ops.backends.triton.device.operands import (
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
from kda_ops.backends.triton.device.tile import (
    CHUNK,
    add_two,
    inverse_norm,
    let_next_begin,
    locate_chunk,
    mark_ready,
    rows_at,
    store_tile,
)


@triton.jit
def square_norms(b_qq, b_kk, L2NORM: tl.constexpr):
    """Return the inverse norms of q and k from q q^T and k k^T [64, 64]: [64] fp32 each, or ones.

    The diagonals are the sums of squares that `tile.inverse_norm` forms, because products of 16 bit
    numbers are exact.
    """
    if L2NORM:
        o_r = tl.arange(0, CHUNK)
        own = o_r[:, None] == o_r[None, :]
        b_q, b_k = tl.reduce((tl.where(own, b_qq, 0.0), tl.where(own, b_kk, 0.0)), 1, add_two)
        return tl.rsqrt(b_q + 1e-6), tl.rsqrt(b_k + 1e-6)
    else:
        return tl.full((CHUNK,), 1.0, tl.float32), tl.full((CHUNK,), 1.0, tl.float32)


@triton.jit(
    do_not_specialize=[
        "N",
        "T",
        "begin",
        "scale",
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
    k,
    g,
    g_b,
    g_t,
    g_h,
    beta,
    beta_b,
    beta_t,
    beta_h,
    gate,
    cu_seqlens,
    kept_A,
    out,
    ready,
    N,
    T,
    begin,
    H,
    scale,
    flags,
    K: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    PREC: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Prepare one chunk for the value heads of one key head; chunks are numbered from `begin` on.

    D_ij is the decay from row j to row i, n_q and n_k are inverse norms of rows, and o multiplies
    entry by entry::

        A = (I + strict_tril(beta n_k n_k k k^T o D))^-1      [64, 64]
        P = scale tril(n_q n_k q k^T o D)                     [64, 64]
        gamma = exp(sum of g)                                 [1] fp32

    and the factors of GDN (`operands`). The scans read the first four, the gradients all seven.

    Rows from `n_rows` on are no tokens: their q and k are loaded as 0, their log decay is 0. So A
    is the identity there, and P is 0.

    One decay per head is a factor per row, which moves past the dot products together with the
    norms. So the value heads share q k^T and k k^T. q and k go from memory to the tensor cores as
    they are, here and in the scan. The decay stays inside the inverse. Inverting without it and
    multiplying afterwards is the same on paper, but overflows for long keys.
    """
    let_next_begin()
    i_g, i_t = tl.program_id(0) % H, tl.program_id(0) // H + begin
    i_b, first, n_rows = locate_chunk(cu_seqlens, i_t, N, T)
    g, beta = Strided(g, (g_b, g_t, g_h)), Strided(beta, (beta_b, beta_t, beta_h))
    o_r, o_k = tl.arange(0, CHUNK), tl.arange(0, BK)
    m_x = (o_r < n_rows)[:, None] & (o_k < K)[None, :]
    b_x = decay_column(g, gate, i_b, i_g * GROUP, first, n_rows)
    b_beta = strength_column(beta, i_b, i_g * GROUP, first, n_rows, flags)
    b_k = tl.load(rows_at(k.pointer, k.strides, i_b, i_g, first, o_r, o_k), mask=m_x, other=0.0)
    b_q = tl.load(rows_at(q.pointer, q.strides, i_b, i_g, first, o_r, o_k), mask=m_x, other=0.0)
    b_qk = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
    b_kk = tl.dot(b_k, tl.trans(b_k), input_precision=PREC)
    if EXACT:
        b_q_norm, b_k_norm = inverse_norm(b_q, flags.L2NORM), inverse_norm(b_k, flags.L2NORM)
    else:
        b_qq = tl.dot(b_q, tl.trans(b_q), input_precision=PREC)
        b_q_norm, b_k_norm = square_norms(b_qq, b_kk, flags.L2NORM)
    for i in tl.range(GROUP, num_stages=1):
        i_h = i_g * GROUP + i
        i_tile = i_t.to(tl.int64) * (H * GROUP) + i_h
        p_row = out.factors + i_tile * (COUNT_GDN * CHUNK) + o_r
        tl.store(p_row + NORM_K * CHUNK, b_k_norm)
        tl.store(p_row + NORM_Q * CHUNK, b_q_norm)
        if GROUP > 1:
            b_x = decay_column(g, gate, i_b, i_h, first, n_rows)
            b_beta = strength_column(beta, i_b, i_h, first, n_rows, flags)
        b_start, b_end, b_gamma, b_x = row_decay(b_x, EXACT)
        tl.store(p_row + BETA * CHUNK, b_beta)
        tl.store(p_row + LOG_DECAY * CHUNK, b_x)
        # Read back behind one barrier: each use loads the layout it needs. To change the layout of
        # a vector in registers takes two (docs/kernels/hazards.md, "Vectors change layout").
        tl.debug_barrier()
        b_strength = tl.load(p_row + BETA * CHUNK)
        b_k_own = tl.load(p_row + NORM_K * CHUNK)
        b_q_own = tl.load(p_row + NORM_Q * CHUNK) * scale
        b_G = tl.load(p_row + LOG_DECAY * CHUNK)
        tl.store(p_row + FROM_START_K * CHUNK, b_k_own * b_start)
        tl.store(p_row + TO_END_K * CHUNK, b_k_own * b_end)
        tl.store(p_row + FROM_START_Q * CHUNK, b_q_own * b_start)
        tl.store(out.gamma + i_tile, b_gamma)
        b_D = pair_decay(b_G, EXACT) * b_k_own[None, :]
        store_tile(out.P, i_tile, b_qk * b_D * b_q_own[:, None], o_r, o_r, CHUNK)
        if kept_A is None:
            # `inverse` uses only what is below the diagonal
            b_L = b_kk * b_D * (b_k_own * -b_strength)[:, None]
            store_tile(out.A, i_tile, inverse(b_L, INVERSE), o_r, o_r, CHUNK)
    mark_ready(ready, i_t, begin, i_g, H)
