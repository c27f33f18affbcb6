"""Sum KDA's decays from the start of each chunk, and go back from the gradient of these sums.

`gradient_keys`, which runs in between, forms the decay between any two rows from the sums.
"""

import triton
import triton.language as tl

from kda_ops.backends.triton.device.activations import LEAST_DECAY
from kda_ops.backends.triton.device.gate import GIVEN, load_bias, load_rate, log_decay, through_gate
from kda_ops.backends.triton.device.gradient_chunk import chunk_of, locate
from kda_ops.backends.triton.device.tile import CHUNK

# The rows of a block may share an anchor if no channel decays by more than 2^REACH in it. Centred,
# factors lie between 2^(-REACH / 2) and 2^(REACH / 2). The rest of fp32's range, up to 2^127, is
# left to keys and gradients.
REACH = tl.constexpr(116.0)
# Rows whose loop is unrolled, so that the next loads overlap the sums: the quarters of a chunk.
QUARTER = tl.constexpr(16)


@triton.jit(do_not_specialize=["N", "T"])
def sum_decays(
    g,
    gate,
    cu_seqlens,
    G,
    anchored,
    N,
    T,
    HV,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Sum the decays of one chunk and value head, in base 2, from its start::

        G_i = sum of max(log2 of decay j, LEAST_DECAY) over the tokens j <= i  [64, K]
        anchored = log2 of the largest of 64, 32, 16, 8 rows in whose blocks no channel
                   decays by more than 2^REACH, else 0                        int32

    G is fp32 for 16 bit operands, whose rounding exceeds that of a difference of two sums. It is
    fp64 for fp32 operands, so that a difference is exact enough. Rows that are no tokens add
    nothing.
    """
    i_h, i_t, i_tile = tl.program_id(0) % HV, tl.program_id(0) // HV, tl.program_id(0).to(tl.int64)
    at = locate(cu_seqlens, i_t, N, T)
    if (at.n_rows > 0) & at.live:
        o_k = tl.arange(0, WIDE)
        m_k = o_k < K
        rate = load_rate(gate, i_h)
        b_bias = load_bias(gate, i_h, o_k, K)
        b_G = tl.zeros((WIDE,), G.dtype.element_ty)
        # the largest decay in blocks of 8, 16 and 32 rows, and the sum at the start of the half
        b_8, b_16, b_32, b_half = b_G, b_G, b_G, b_G
        p_G = G + i_tile * (CHUNK * K) + o_k
        if g.pointer is not None:
            p_g = chunk_of(g, at, i_h).pointer + o_k * g.strides[3]
        for i in range(CHUNK // QUARTER):
            b_start, b_eight = b_G, b_G
            for j in tl.static_range(QUARTER):
                r = i * QUARTER + j
                if g.pointer is not None:
                    m_g = m_k & (r < at.n_rows)
                    b_x = tl.load(p_g + r * g.strides[1], mask=m_g, other=0.0).to(tl.float32)
                    b_x = log_decay(b_x, b_bias, rate, gate, m_g, FAST=FAST)
                    b_G += tl.maximum(b_x, LEAST_DECAY, tl.PropagateNan.ALL)
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


@triton.jit(do_not_specialize=["N", "T"])
def sum_gradients(
    dG,
    g,
    gate,
    cu_seqlens,
    dg,
    dA_log,
    ddt_bias,
    N,
    T,
    HV,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Turn the gradient of G, [64, K] of one chunk and value head, into those of g and the gate::

        dg_i = sum of dG_j over j >= i, through the gate if g are logits    [64, K]
        dA_log, ddt_bias: the chunk's shares, see `through_gate`        [], [K] fp32

    Tokens of no sequence get zeros.
    """
    i_h, i_t, i_tile = tl.program_id(0) % HV, tl.program_id(0) // HV, tl.program_id(0).to(tl.int64)
    at = locate(cu_seqlens, i_t, N, T)
    o_k = tl.arange(0, WIDE)
    m_k, b_zero = o_k < K, tl.zeros((WIDE,), tl.float32)
    rate = load_rate(gate, i_h)
    b_bias = load_bias(gate, i_h, o_k, K)
    b_sum, b_log, b_ddt = b_zero.to(dG.dtype.element_ty), b_zero, b_zero
    p_dG = dG + i_tile * (CHUNK * K) + o_k
    p_g = chunk_of(g, at, i_h).pointer + o_k * g.strides[3]
    p_dg = dg + (at.token * HV + i_h) * K + o_k
    for i in range(CHUNK // QUARTER):
        for j in tl.static_range(QUARTER):
            r = CHUNK - 1 - i * QUARTER - j
            here = r < at.n_rows
            b_sum += tl.load(p_dG + r * K, mask=m_k & at.live, other=0.0)
            b_dg = b_sum.to(tl.float32)
            if gate.kind != GIVEN:
                b_g = tl.load(p_g + r * g.strides[1], mask=m_k & at.live & here, other=0.0)
                b_x = b_g.to(tl.float32) + b_bias
                b_dg, b_share = through_gate(b_dg, b_x, rate, gate, FAST)
                b_log += tl.where(here, b_share, 0.0)
                b_ddt += tl.where(here, b_dg, 0.0)
            tl.store(p_dg + r * (HV * K), b_dg.to(dg.dtype.element_ty), mask=m_k & here)
    if dA_log is not None:
        tl.store(dA_log + i_tile, tl.sum(tl.where(m_k & at.live, b_log, 0.0), 0))
    if ddt_bias is not None:
        tl.store(ddt_bias + i_tile * K + o_k, tl.where(at.live, b_ddt, 0.0), mask=m_k)
