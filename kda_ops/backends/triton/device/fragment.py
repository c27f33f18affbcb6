"""Hold tiles in the register layout of tensor core results, so that no data moves between products.

Four warps hold entry (16 w + 8 b + a, 8 n + 2 t + e) of a product of 64 rows in lane 4 a + t of
warp w (docs/kernels/design.md draws it). Triton spreads a list of vectors in the order (.., w, a,
t) just like that: over lanes first, then warps, then registers. If the compiler chooses another
layout, it exchanges entries between threads: slower, but right.

The columns of a product may be channels in any order, if all tiles have the same order. In that of
`channel`, the entries of a thread are neighbours in memory, eight by eight.

Rows may be permuted too. A product can take another's result as its left operand from registers, if
every warp has rows of its own. So the scans hold their states with the channels of V as rows
(`turn`). Row 16 w + 8 b + a is channel 16 w + 2 a + b, so that the two rows of a thread are
neighbours in memory. A tile is read from shared memory by pairs. `store_turned` writes pairs too.
Eight lanes fill one 32-byte sector of 16-bit entries.
"""

import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton.device.tile import CHUNK, INTERPRETED


@triton.jit
def channel(m):
    """Return the channel at column m of a product: its bits (n, t, e) in the order (t, n, e)."""
    return (m & ~31) + ((m & 6) << 2) + ((m & 24) >> 2) + (m & 1)


@triton.jit
def fragment(W: tl.constexpr, J: tl.constexpr):
    """Return row [X, 1] and channel [X, J] of a [64, W] tile as X vectors of J channels."""
    i = tl.arange(0, 64 * W // J)
    row, slow, j = (
        16 * ((i >> 5) & 3) + 8 * ((i >> 7) & 1) + ((i >> 2) & 7),
        i >> 8,
        tl.arange(0, J),
    )
    eights: tl.constexpr = 8 // J
    first = 32 * (slow // eights) + 8 * (i & 3) + J * (slow % eights)
    return row[:, None], first[:, None] + j[None, :]


@triton.jit
def as_tile(b_x):
    """Return [X, J] in the order of `fragment` as a tile [64, W], columns as in a product."""
    J: tl.constexpr = b_x.shape[1]
    W: tl.constexpr = b_x.shape[0] * J // 64
    b_x = tl.reshape(b_x, (W // 32, 8 // J, 2, 4, 8, 4, J // 2, 2))
    return tl.reshape(tl.permute(b_x, (3, 2, 4, 0, 1, 6, 5, 7)), (64, W))


@triton.jit
def as_entries(b_x, J: tl.constexpr):
    """Undo `as_tile`."""
    W: tl.constexpr = b_x.shape[1]
    b_x = tl.reshape(b_x, (4, 2, 8, W // 32, 8 // J, J // 2, 4, 2))
    return tl.reshape(tl.permute(b_x, (3, 4, 1, 0, 2, 6, 5, 7)), (64 * W // J, J))


@triton.jit
def turn(b_x):
    """Return the transpose [W, X] of [X, W], with rows permuted as the module's docstring says."""
    X: tl.constexpr = b_x.shape[0]
    W: tl.constexpr = b_x.shape[1]
    b_x = tl.permute(tl.reshape(b_x, (X, W // 16, 8, 2)), (1, 3, 2, 0))
    return tl.reshape(b_x, (W, X))


@triton.jit
def turn_back(b_x):
    """Undo `turn`."""
    W: tl.constexpr = b_x.shape[0]
    X: tl.constexpr = b_x.shape[1]
    b_x = tl.permute(tl.reshape(b_x, (W // 16, 2, 8, X)), (3, 0, 2, 1))
    return tl.reshape(b_x, (X, W))


@triton.jit
def store_turned(p_x, stride, stride_v, b_x, rows, columns, only=None):
    """Write a turned tile [W, X] to its first `rows` rows and `columns` columns in memory, from the
    registers it is in. With `only` [1, X], write only the rows in memory where it is true.
    """
    W: tl.constexpr = b_x.shape[0]
    X: tl.constexpr = b_x.shape[1]
    i = tl.arange(0, X * W // 2)  # (n, e, w, a, t) of column 8 n + 2 t + e
    row = 8 * (i // (4 * W)) + 2 * (i & 3) + i // (2 * W) % 2
    column = (16 * ((i >> 5) % (W // 16)) + 2 * ((i >> 2) & 7))[:, None] + tl.arange(0, 2)[None, :]
    b_x = tl.permute(tl.reshape(b_x, (W // 16, 2, 8, X // 8, 4, 2)), (3, 5, 0, 2, 4, 1))
    # rounded here, so that the two entries of a register are neighbours
    b_x = tl.reshape(b_x, (X * W // 2, 2)).to(p_x.dtype.element_ty)
    m_x = (row < rows)[:, None] & (column < columns)
    if only is not None:
        b_only = tl.reshape(tl.broadcast_to(only, (W, X)), (W // 16, 2, 8, X // 8, 4, 2))
        m_x = m_x & tl.reshape(tl.permute(b_only, (3, 5, 0, 2, 4, 1)), (X * W // 2, 2))
    tl.store(p_x + ((row * stride)[:, None] + column * stride_v), b_x, mask=m_x)


@triton.jit
def over_keys(b_s, b_x, PREC: tl.constexpr):
    """Return the product [W, 64] fp32 of a turned state [W, K] and the transpose of rows [64, K].

    For fp32 and K over 128 it is the sum of two products of half of the keys. A thread holds whole
    rows of an fp32 operand, in two parts each, and would run out of registers.
    """
    W: tl.constexpr = b_s.shape[0]
    K: tl.constexpr = b_s.shape[1]
    if b_s.dtype == tl.float32 and K > 128:
        # else the compiler keeps the parts of one product for the next (hazards, "Lost registers")
        if not INTERPRETED:
            b_s = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_s], tl.float32, False, 1)
        b_s1, b_s2 = tl.split(tl.permute(tl.reshape(b_s, (W, 2, K // 2)), (0, 2, 1)))
        b_x1, b_x2 = tl.split(tl.permute(tl.reshape(b_x, (CHUNK, 2, K // 2)), (0, 2, 1)))
        b_first = tl.dot(b_s1, tl.trans(b_x1), input_precision=PREC)
        return tl.dot(b_s2, tl.trans(b_x2), b_first, input_precision=PREC)
    else:
        return tl.dot(b_s, tl.trans(b_x), input_precision=PREC)


@triton.jit
def as_vectors(b_x):
    """Return a product [64, 64] as [512, 8], with entries in the order (n, b, w, a, t, n, e).

    Four warps write that, and read it as an operand, without a gap.
    """
    b_x = tl.reshape(b_x, (4, 2, 8, 2, 4, 4, 2))
    return tl.reshape(tl.permute(b_x, (3, 1, 0, 2, 5, 4, 6)), (512, 8))


@triton.jit
def from_vectors(b_x):
    """Undo `as_vectors`."""
    b_x = tl.reshape(b_x, (2, 2, 4, 8, 4, 4, 2))
    return tl.reshape(tl.permute(b_x, (2, 1, 3, 0, 5, 4, 6)), (64, 64))


@triton.jit
def spread(b_x):
    """Return [rows, W] with its columns (w, t, n, e) in the order (n, w, t, e).

    With this right operand, a product of 32 rows leaves neighbouring columns in one thread. Its
    four warps hold entry (8 b + a, 32 n + 8 w + 2 t + e) in lane 4 a + t of warp w.
    """
    R: tl.constexpr = b_x.shape[0]
    W: tl.constexpr = b_x.shape[1]
    b_x = tl.reshape(tl.permute(tl.reshape(b_x, (R, 4, 4, W // 32, 2)), (0, 3, 1, 2, 4)), (R, W))
    # else the compiler carries the operand's layout back to the load, and exchanges entries
    if not INTERPRETED and b_x.dtype.primitive_bitwidth == 16:
        b_x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], b_x.dtype, False, 2)
    return b_x


@triton.jit
def store_spread(x, i_tile, b_x, ROW: tl.constexpr, column, D: tl.constexpr):
    """Write a product of 32 rows with spread columns to a tile [64, D], without a layout change.

    It goes to rows from ROW on, and to columns from `column` on.
    """
    W: tl.constexpr = b_x.shape[1]
    i, j = tl.arange(0, 512), tl.arange(0, W // 16)
    b_x = tl.permute(tl.reshape(b_x, (4, 8, W // 32, 4, 4, 2)), (0, 3, 1, 4, 2, 5))
    o_d = column + (((i >> 5) & 3) * 4 + (i & 3))[:, None] * (W // 16) + j[None, :]
    p_x = x + i_tile * (CHUNK * D) + (ROW + 8 * (i >> 7) + ((i >> 2) & 7))[:, None] * D + o_d
    tl.store(p_x, tl.reshape(b_x, (512, W // 16)).to(x.dtype.element_ty), mask=o_d < D)


def as_vectors_on_host(x: Tensor) -> Tensor:
    """Return `as_vectors` of [.., 64, 64], on the host."""
    return x.reshape(-1, 4, 2, 8, 2, 4, 4, 2).permute(0, 4, 2, 1, 3, 6, 5, 7).reshape(x.shape)


@triton.jit
def diagonal_at(r):
    """Return the place of entry (r, r) in the result of `as_vectors`."""
    vector = ((((r >> 5) * 2 + ((r >> 3) & 1)) * 4 + (r >> 4)) * 8 + (r & 7)) * 4 + ((r >> 1) & 3)
    return vector * 8 + ((r >> 3) & 3) * 2 + (r & 1)
