"""What the gradient kernels share: where a program writes, and how it reads and writes rows of the
caller's tensors.
"""

import triton
import triton.language as tl

from kda_ops.backends.triton.gate import LOG2E, log2_softplus, sigmoid
from kda_ops.backends.triton.scan import rows_at
from kda_ops.backends.triton.tile import find_sequence, load_tile, locate_chunk, locate_sequence


@triton.jit
def locate_rows(cu_seqlens, i_t, N, T):
    """Chunk i_t as (batch row, first token, rows to write, whether they are tokens of a sequence);
    the tail of a packed row is sequence N.
    """
    if cu_seqlens is not None:
        i_n = find_sequence(cu_seqlens, i_t, N + 1)
        i_b, bos, length, first = locate_sequence(cu_seqlens, i_n, N, T)
        start = (i_t - first) * 64
        return i_b, bos + start, tl.minimum(length - start, 64).to(tl.int32), i_n < N
    else:
        i_b, first, n_rows = locate_chunk(cu_seqlens, i_t, N, T)
        return i_b, first, n_rows, n_rows > 0


@triton.jit
def read_rows(x, strides, i_b, i_h, first, n_rows, o_d, D: tl.constexpr):
    """Rows of one head of a [B, T, X, D] tensor, [64, width], zero past n_rows and past D."""
    o_r = tl.arange(0, 64)
    return tl.load(
        rows_at(x, strides, i_b, i_h, first, o_r, o_d),
        mask=(o_r < n_rows)[:, None] & (o_d < D)[None, :],
        other=0.0,
    )


@triton.jit
def read_values(z, i_tile, token, i_h, HV, n_rows, o_v, V: tl.constexpr, TILED: tl.constexpr):
    """What the reverse scan left, [64, width]: z, if TILED, or rows of dv."""
    if TILED:
        return load_tile(z, i_tile, tl.arange(0, 64), o_v, V)
    else:
        return read_rows(z, (0, HV * V, V, 1), 0, i_h, token, n_rows, o_v, V)


@triton.jit
def load_row(rows, i_tile, ROW: tl.constexpr):
    """Numbers of the rows as `prepare_kda` left them, [64] fp32."""
    return tl.load(rows + i_tile * 192 + ROW * 64 + tl.arange(0, 64))


@triton.jit
def load_norm(rows, i_tile, ROW: tl.constexpr, L2NORM: tl.constexpr):
    """1 / |x| of each row, or ones; [64] fp32."""
    if L2NORM:
        return load_row(rows, i_tile, ROW)
    else:
        return tl.full((64,), 1.0, tl.float32)


@triton.jit
def write_rows(x, token, i_h, HV, n_rows, b_x, o_d, D: tl.constexpr):
    """Write rows of one head of a contiguous [B T, HV, D] tensor."""
    o_r = tl.arange(0, 64)
    p_x = x + (token * HV + i_h) * D + (o_r * (HV * D))[:, None] + o_d[None, :]
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=(o_r < n_rows)[:, None] & (o_d < D)[None, :])


@triton.jit
def write_column(x, token, i_h, HV, n_rows, b_x):
    """Write one number per row of a contiguous [B T, HV] tensor."""
    o_r = tl.arange(0, 64)
    tl.store(x + (token + o_r) * HV + i_h, b_x.to(x.dtype.element_ty), mask=o_r < n_rows)


@triton.jit
def clear_keys(
    dq,
    dk,
    dg,
    dbeta,
    dA_log,
    ddt_bias,
    i_tile,
    token,
    i_h,
    HV,
    n_rows,
    o_k,
    i_s,
    slices: tl.constexpr,
    K: tl.constexpr,
):
    """Zero gradients for the rows of a chunk that is no part of a sequence, and no part in the sums
    over tokens.
    """
    b_zero = tl.zeros((64, o_k.shape[0]), tl.float32)
    if dq is not None:
        write_rows(dq, token, i_h, HV, n_rows, b_zero, o_k, K)
        write_rows(dk, token, i_h, HV, n_rows, b_zero, o_k, K)
    if dg is not None:
        write_rows(dg, token, i_h, HV, n_rows, b_zero, o_k, K)
    if dbeta is not None:
        write_column(dbeta, token, i_h, HV, n_rows, tl.zeros((64,), tl.float32))
    if dA_log is not None:
        tl.store(dA_log + i_tile * slices + i_s, 0.0)
    if ddt_bias is not None:
        tl.store(ddt_bias + i_tile * K + o_k, tl.zeros((o_k.shape[0],), tl.float32), mask=o_k < K)


@triton.jit
def gate_gradient(
    b_dg, b_g, b_bias, rate, lower_bound, BOUNDED: tl.constexpr, FAST: tl.constexpr = False
):
    """From the gradient of the log decay to those of the logits and, summed by the caller, of A_log
    (without a bound that is dg g, so log2 will do).

    FAST as in `log2_decay`.
    """
    b_x = b_g + b_bias
    if BOUNDED:
        # A saturated sigmoid has slope 0 even where exp(A_log) overflowed or the logit is infinite:
        # no infinity may meet it.
        rate, b_x = tl.minimum(rate, 3e38), tl.minimum(tl.maximum(b_x, -3e38), 3e38)
        b_s = sigmoid(rate * b_x, FAST)
        b_dx = b_dg * (b_s * (1.0 - b_s) * rate * lower_bound)
        return b_dx, b_dx * b_x
    else:
        b_log = log2_softplus(b_x, FAST)
        # Where the decay is 0, dg is what rounding left of its sums, and A_log would take it times
        # the decay's log.
        b_dg = tl.where(rate * b_log < 126.0, b_dg * -rate, 0.0)
        return b_dg * sigmoid(b_x, FAST), b_dg * (tl.minimum(b_log, 3e38) * (1.0 / LOG2E))


@triton.jit
def load_state(states, i_tile, o_k, o_v, K: tl.constexpr, V: tl.constexpr):
    """Rows o_k and columns o_v of a tile of [tiles, K, V], zero past both."""
    p_s = states + i_tile * (K * V) + (o_k[:, None] * V + o_v[None, :])
    return tl.load(p_s, mask=(o_k < K)[:, None] & (o_v < V)[None, :], other=0.0)
