"""Locate a chunk, and read and write its rows, in gradient kernels."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kda_ops import problem
from kda_ops.backends.triton.device.operands import COUNT_KDA, Strided, constant
from kda_ops.backends.triton.device.sequence import find_sequence
from kda_ops.backends.triton.device.tile import (
    CHUNK,
    load_tile,
    locate_chunk,
    locate_sequence,
    rows_at,
)

SQUARE = constant(problem.CHUNK * problem.CHUNK)  # entries of a [64, 64] tile
VECTOR = constant(8)  # entries in each row of `fragment.as_vectors`


class Chunk(NamedTuple):
    """Where the rows of one chunk are, in tensors of the caller and in contiguous ones."""

    i_b: Any  # row of the batch, int64
    first: Any  # first token in it, int64
    token: Any  # the first token, counted over all B * T tokens, int64
    n_rows: Any  # tokens of the chunk, int32; at most 0 for a number that no chunk has
    live: Any  # whether the tokens belong to a sequence; those past cu_seqlens[-1] do not


class Kept(NamedTuple):
    """What the two scans left for the gradients, one tile per chunk and value head."""

    states: Any  # [K, V], the state that enters the chunk
    v_new: Any  # [64, V]
    dstates: Any  # [K, V], the gradient of the state that leaves it
    z: Any  # [64, V], or dv = beta z as rows of a [B T, HV, V] tensor


@triton.jit
def locate_rows(cu_seqlens, i_t, N, T):
    """Return (i_b, first, n_rows, live) of chunk i_t, fields of `Chunk`.

    The tail of a packed row counts as sequence N.
    """
    if cu_seqlens is not None:
        i_n = find_sequence(cu_seqlens, i_t, N + 1)
        i_b, bos, length, first = locate_sequence(cu_seqlens, i_n, N, T)
        start = (i_t - first) * CHUNK
        return i_b, bos + start, tl.minimum(length - start, CHUNK).to(tl.int32), i_n < N
    else:
        i_b, first, n_rows = locate_chunk(cu_seqlens, i_t, N, T)
        return i_b, first, n_rows, n_rows > 0


@triton.jit
def locate(cu_seqlens, i_t, N, T):
    """Return chunk number i_t, as `Chunk`."""
    i_b, first, n_rows, live = locate_rows(cu_seqlens, i_t, N, T)
    return Chunk(i_b, first, i_b * T + first, n_rows, live)


@triton.jit
def chunk_of(x, at, i_h):
    """Return x, a strided [B, T, X, D] tensor, with the pointer at a chunk's first row and head."""
    first = at.i_b * x.strides[0] + at.first * x.strides[1] + i_h.to(tl.int64) * x.strides[2]
    return Strided(x.pointer + first, x.strides)


@triton.jit
def read_rows(x, at, i_h, o_d, D: tl.constexpr):
    """Read columns o_d of a chunk and head of a strided [B, T, X, D] tensor, [64, width]; zero past
    the chunk's tokens and past D.
    """
    o_r = tl.arange(0, CHUNK)
    return tl.load(
        rows_at(x.pointer, x.strides, at.i_b, i_h, at.first, o_r, o_d),
        mask=(o_r < at.n_rows)[:, None] & (o_d < D)[None, :],
        other=0.0,
    )


@triton.jit
def read_back(x, at, i_h, HEADS, o_d, D: tl.constexpr):
    """Read like `read_rows`, from a contiguous [B T, HEADS, D] tensor that `write_rows` wrote."""
    x = Strided(x, (0, HEADS * D, D, 1))
    return read_rows(x, Chunk(0, at.token, at.token, at.n_rows, at.live), i_h, o_d, D)


@triton.jit
def read_values(z, at, i_tile, i_h, HV, o_v, V: tl.constexpr, TILED: tl.constexpr):
    """Read columns o_v of z if TILED, else of dv = beta z; [64, width]."""
    if TILED:
        return load_tile(z, i_tile, tl.arange(0, CHUNK), o_v, V)
    else:
        return read_back(z, at, i_h, HV, o_v, V)


@triton.jit
def load_kept_state(states, i_tile, o_k, o_v, K: tl.constexpr, V: tl.constexpr):
    """Load rows o_k and columns o_v of state i_tile of [tiles, K, V]; zero past K and V."""
    p_s = states + i_tile * (K * V) + (o_k[:, None] * V + o_v[None, :])
    return tl.load(p_s, mask=(o_k < K)[:, None] & (o_v < V)[None, :], other=0.0)


@triton.jit
def load_row(factors, i_tile, ROW: tl.constexpr):
    """Load vector ROW of the factors of KDA (`operands`), [64] fp32."""
    return tl.load(factors + i_tile * (COUNT_KDA * CHUNK) + ROW * CHUNK + tl.arange(0, CHUNK))


@triton.jit
def load_norm(factors, i_tile, ROW: tl.constexpr, L2NORM: tl.constexpr):
    """Load 1 / |x| of each row, or ones, [64] fp32."""
    if L2NORM:
        return load_row(factors, i_tile, ROW)
    else:
        return tl.full((CHUNK,), 1.0, tl.float32)


@triton.jit
def write_rows(x, at, i_h, HEADS, b_x, o_d, D: tl.constexpr):
    """Write columns o_d of a chunk and head of a contiguous [B T, HEADS, D] tensor."""
    o_r = tl.arange(0, CHUNK)
    p_x = x + (at.token * HEADS + i_h) * D + (o_r * (HEADS * D))[:, None] + o_d[None, :]
    m_x = (o_r < at.n_rows)[:, None] & (o_d < D)[None, :]
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=m_x)


@triton.jit
def write_column(x, at, i_h, HEADS, b_x):
    """Write one number per row, [64], to a contiguous [B T, HEADS] tensor."""
    o_r = tl.arange(0, CHUNK)
    tl.store(x + (at.token + o_r) * HEADS + i_h, b_x.to(x.dtype.element_ty), mask=o_r < at.n_rows)
