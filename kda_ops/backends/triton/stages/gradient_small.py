"""Compute KDA's gradient of a beta with ``safe_beta`` where beta is too small for the formula of
`gradient_pairs`.
"""

import triton
import triton.language as tl

from kda_ops.backends.triton.device.gradient_chunk import (
    chunk_of,
    load_kept_state,
    load_norm,
    load_row,
    locate,
)
from kda_ops.backends.triton.device.operands import BETA_KDA, COUNT_KDA, NORM_K_KDA
from kda_ops.backends.triton.device.tile import CHUNK, load_tile

# From this beta on, z . v_new / beta is as accurate as a rounding. For a smaller given beta, the
# products of the inverse in fp16 lose digits of A's row: at 2^-18 dbeta is off by 2.7e-2 (RMS).
SMALL = tl.constexpr(2.0**-10)


@triton.jit(do_not_specialize=["N", "T"])
def gradient_small(
    k,
    v,
    factors,
    kept,
    z,
    G,
    cu_seqlens,
    dbeta,
    N,
    T,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    L2NORM: tl.constexpr,
):
    """Write dbeta of the tokens i of one chunk and value head whose beta is below SMALL::

        dbeta_i = z_i . v_i - sum_k k_ik (exp(G_ik) (S z_i)_k + sum_{j<i} E_ijk k_jk z_i . v_new_j)

    The dot sums over V, and k is unit if L2NORM. The formula of `gradient_pairs`, z . v_new / beta,
    would divide by zero. Such tokens are rare. So a program takes them one at a time, and returns
    at once if its chunk has none. Only their rows of `z` are written. The tensor G
    (`sum_decays`) is in base 2.
    """
    i_h, i_t, i_tile = tl.program_id(0) % HV, tl.program_id(0) // HV, tl.program_id(0).to(tl.int64)
    at = locate(cu_seqlens, i_t, N, T)
    if (at.n_rows > 0) & at.live:
        o_r = tl.arange(0, CHUNK)
        b_small = (load_row(factors, i_tile, BETA_KDA) < SMALL) & (o_r < at.n_rows)
        b_left = tl.where(b_small, o_r, CHUNK)
        i = tl.min(b_left, 0)
        p_k = chunk_of(k, at, i_h // (HV // H)).pointer
        p_v = chunk_of(v, at, i_h).pointer
        m_r = o_r < at.n_rows
        while i < CHUNK:
            p_z, b_c = z + (i_tile * CHUNK + i) * V, tl.zeros((CHUNK,), tl.float32)
            b_dbeta = tl.full((), 0.0, tl.float32)
            for i_v in tl.range(0, V, BV, num_stages=1):
                o_v = i_v + tl.arange(0, BV)
                m_v = o_v < V
                b_z = tl.load(p_z + o_v, mask=m_v, other=0.0).to(tl.float32)
                b_v = tl.load(p_v + i * v.strides[1] + o_v * v.strides[3], mask=m_v, other=0.0)
                b_dbeta += tl.sum(b_z * b_v.to(tl.float32), 0)
                b_vn = load_tile(kept.v_new, i_tile, o_r, o_v, V).to(tl.float32)
                b_c += tl.sum(b_vn * b_z[None, :], 1)
            b_c = tl.where(o_r < i, b_c, 0.0)
            if L2NORM:
                b_c *= load_norm(factors, i_tile, NORM_K_KDA, L2NORM)
                norm = tl.load(factors + (i_tile * COUNT_KDA + NORM_K_KDA) * CHUNK + i)
            else:
                norm = 1.0
            for i_k in tl.range(0, K, BK, num_stages=1):
                o_k = i_k + tl.arange(0, BK)
                m_k = o_k < K
                b_e = tl.zeros((BK,), tl.float32)
                for i_v in tl.range(0, V, BV, num_stages=1):
                    o_v = i_v + tl.arange(0, BV)
                    b_z = tl.load(p_z + o_v, mask=o_v < V, other=0.0).to(tl.float32)
                    b_S = load_kept_state(kept.states, i_tile, o_k, o_v, K, V).to(tl.float32)
                    b_e += tl.sum(b_S * b_z[None, :], 1)
                p_G = G + i_tile * (CHUNK * K) + o_k
                b_Gi = tl.load(p_G + i * K, mask=m_k, other=0.0)
                b_G = tl.load(p_G[None, :] + o_r[:, None] * K, mask=m_k[None, :], other=0.0)
                b_E = tl.exp2(tl.minimum(b_Gi[None, :] - b_G, 0.0))
                p_ki = p_k + o_k * k.strides[3]
                m_x = m_r[:, None] & m_k[None, :]
                b_k = tl.load(p_ki[None, :] + (o_r * k.strides[1])[:, None], mask=m_x, other=0.0)
                b_e = b_e * tl.exp2(b_Gi) + tl.sum(b_E * b_k.to(tl.float32) * b_c[:, None], 0)
                b_ki = tl.load(p_ki + i * k.strides[1], mask=m_k, other=0.0).to(tl.float32)
                b_dbeta -= norm * tl.sum(b_ki * b_e, 0)
            p_dbeta = dbeta + (at.token + i) * HV + i_h
            tl.store(p_dbeta, b_dbeta.to(dbeta.dtype.element_ty))
            b_left = tl.where(b_left > i, b_left, CHUNK)
            i = tl.min(b_left, 0)
