"""From the gradient of a chunk's sums of decays to those of the decays, and through the gate."""

import triton
import triton.language as tl

from kda_ops.backends.triton.gate import load_rate
from kda_ops.backends.triton.gradient_tile import gate_gradient, locate_rows


@triton.jit(do_not_specialize=["N", "T", "lower_bound"])
def sum_gradients(
    dG, g, g_s, A_log, dt_bias, cu_seqlens, dg, dA_log, ddt_bias, N, T, HV, lower_bound,
    K: tl.constexpr, WIDE: tl.constexpr, ACTIVATE: tl.constexpr, BOUNDED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """dg = sum of dG [64, K] over a row and those after it, and through the gate; zero for rows that are no tokens of a sequence."""
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
                b_g = tl.load(p_g + r * g_s[1], mask=m_k & live & (r < n_rows), other=0.0).to(tl.float32)
                b_dg, b_x = gate_gradient(b_sum, b_g, b_bias, rate, bound, BOUNDED, FAST)
                b_log += tl.where(r < n_rows, b_x, 0.0)
                b_ddt += tl.where(r < n_rows, b_dg, 0.0)
            tl.store(p_dg + r * (HV * K), b_dg.to(dg.dtype.element_ty), mask=m_k & (r < n_rows))
    if dA_log is not None:
        tl.store(dA_log + i_tile, tl.sum(tl.where(m_k & live, b_log, 0.0), 0))
    if ddt_bias is not None:
        tl.store(ddt_bias + i_tile * K + o_k, tl.where(live, b_ddt, 0.0), mask=m_k)
