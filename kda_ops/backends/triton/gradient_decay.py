"""The decay of a chunk as sums from its start, for the kernel that takes factors between any two of
its rows; and back from the gradient of those sums.
"""

import triton
import triton.language as tl

from kda_ops.backends.triton.gate import load_rate, log2_decay
from kda_ops.backends.triton.gradient_tile import gate_gradient, locate_rows

# in base 2: an anchored factor and its inverse stay within 2^(REACH / 2) of one
REACH = tl.constexpr(116.0)


@triton.jit(do_not_specialize=["N", "T", "lower_bound"])
def sum_decays(
    g,
    g_s,
    A_log,
    dt_bias,
    cu_seqlens,
    G,
    anchored,
    N,
    T,
    HV,
    lower_bound,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    ACTIVATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    FAST: tl.constexpr,
):
    """G = sum of the decay in base 2 up to and including each row of one chunk and value head, [64,
    K]; a decay counts as -160 at least, which is zero as a factor, and rows that are no tokens have
    none.

    G is fp32 for 16 bit operands, which do not see what a difference of such sums loses; fp64 for
    fp32, where the difference is as good as the sum. anchored: the number of rows, 64, 32, 16 or 8,
    over which no channel of the chunk decays by more than 2^REACH, as 6, 5, 4 or 3; else 0.
    """
    i_h, i_t, i_tile = tl.program_id(0) % HV, tl.program_id(0) // HV, tl.program_id(0).to(tl.int64)
    i_b, first, n_rows, live = locate_rows(cu_seqlens, i_t, N, T)
    if (n_rows > 0) & live:
        o_k = tl.arange(0, WIDE)
        m_k = o_k < K
        rate, bound, b_bias = (
            load_rate(A_log, i_h),
            tl.full((), lower_bound, tl.float32),
            tl.zeros((WIDE,), tl.float32),
        )
        if dt_bias is not None:
            b_bias = tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_G = tl.zeros((WIDE,), G.dtype.element_ty)
        b_half, b_8, b_16, b_32 = b_G, b_G, b_G, b_G
        p_G = G + i_tile * (64 * K) + o_k
        if g is not None:
            p_g = g + (i_b * g_s[0] + first * g_s[1] + i_h.to(tl.int64) * g_s[2]) + o_k * g_s[3]
        for i in range(4):
            b_start, b_eight = b_G, b_G
            for j in tl.static_range(16):
                r = i * 16 + j
                if g is not None:
                    b_x = tl.load(p_g + r * g_s[1], mask=m_k & (r < n_rows), other=0.0).to(
                        tl.float32
                    )
                    b_x = tl.maximum(
                        log2_decay(b_x, b_bias, rate, bound, ACTIVATE, BOUNDED, FAST), -160.0
                    )
                    b_G += tl.where(m_k & (r < n_rows), b_x, 0.0)
                tl.store(p_G + r * K, b_G, mask=m_k)
                if j % 8 == 7:
                    b_8 = tl.maximum(b_8, b_eight - b_G)
                    b_eight = b_G
            b_16 = tl.maximum(b_16, b_start - b_G)
            if i % 2 == 1:
                b_32 = tl.maximum(b_32, b_half - b_G)
                b_half = b_G
        if anchored is not None:
            b_level = tl.where(b_16 <= REACH, 4, tl.where(b_8 <= REACH, 3, 0))
            b_level = tl.where(-b_G <= REACH, 6, tl.where(b_32 <= REACH, 5, b_level))
            tl.store(anchored + i_tile, tl.min(b_level, 0))


@triton.jit(do_not_specialize=["N", "T", "lower_bound"])
def sum_gradients(
    dG,
    g,
    g_s,
    A_log,
    dt_bias,
    cu_seqlens,
    dg,
    dA_log,
    ddt_bias,
    N,
    T,
    HV,
    lower_bound,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    ACTIVATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    FAST: tl.constexpr,
):
    """dg = sum of dG [64, K] over a row and those after it, and through the gate; zero for rows
    that are no tokens of a sequence.
    """
    i_h, i_t, i_tile = tl.program_id(0) % HV, tl.program_id(0) // HV, tl.program_id(0).to(tl.int64)
    i_b, first, n_rows, live = locate_rows(cu_seqlens, i_t, N, T)
    o_k = tl.arange(0, WIDE)
    m_k, b_zero = o_k < K, tl.zeros((WIDE,), tl.float32)
    rate, bound, b_bias = load_rate(A_log, i_h), tl.full((), lower_bound, tl.float32), b_zero
    if dt_bias is not None:
        b_bias = tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_sum, b_log, b_ddt = b_zero, b_zero, b_zero
    p_dG = dG + i_tile * (64 * K) + o_k
    p_g = g + (i_b * g_s[0] + first * g_s[1] + i_h.to(tl.int64) * g_s[2]) + o_k * g_s[3]
    p_dg = dg + ((i_b * T + first) * HV + i_h) * K + o_k
    for i in range(4):
        for j in tl.static_range(16):
            r = 63 - i * 16 - j
            b_sum += tl.load(p_dG + r * K, mask=m_k & live, other=0.0).to(tl.float32)
            b_dg = b_sum
            if ACTIVATE:
                b_g = tl.load(p_g + r * g_s[1], mask=m_k & live & (r < n_rows), other=0.0).to(
                    tl.float32
                )
                b_dg, b_x = gate_gradient(b_sum, b_g, b_bias, rate, bound, BOUNDED, FAST)
                b_log += tl.where(r < n_rows, b_x, 0.0)
                b_ddt += tl.where(r < n_rows, b_dg, 0.0)
            tl.store(p_dg + r * (HV * K), b_dg.to(dg.dtype.element_ty), mask=m_k & (r < n_rows))
    if dA_log is not None:
        tl.store(dA_log + i_tile, tl.sum(tl.where(m_k & live, b_log, 0.0), 0))
    if ddt_bias is not None:
        tl.store(ddt_bias + i_tile * K + o_k, tl.where(live, b_ddt, 0.0), mask=m_k)
