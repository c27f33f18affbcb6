"""The unit-triangular inverse of a chunk, ``(I + L)^-1``, by level recursion on tensor cores
(docs/maths.md, numerics 3).
"""

import triton
import triton.language as tl

from kda_ops.backends.triton.tile import INTERPRETED


@triton.jit
def product(x, y, acc, PREC: tl.constexpr):
    """acc + x y of square fp32 tiles: fp16 operands for PREC "fp16", otherwise fp32 operands in the
    split that PREC names.
    """
    if PREC == "fp16":
        return tl.dot(x.to(tl.float16), y.to(tl.float16), acc)
    else:  # the interpreter computes any split in fp32, and knows one name
        return tl.dot(x, y, acc, input_precision="tf32x3" if INTERPRETED else PREC)


@triton.jit
def lower_left(level, ROWS: tl.constexpr):
    """The pairs of rows [ROWS, ROWS] in different halves of one block of 2^(level + 1) rows, the
    later one first.

    Written as conditions on the row and on the column, most of which are known when the kernel is
    compiled; a value per element, r ^ c say, would stay in registers from its first use to its
    last.
    """
    o_r = tl.arange(0, ROWS)
    block, half = o_r >> (level + 1), (o_r >> level) & 1
    return (block[:, None] == block[None, :]) & (half == 1)[:, None] & (half == 0)[None, :]


@triton.jit
def begin(negative_L):
    """The blocks of two rows on the diagonal of (I + L)^-1, fp32."""
    N: tl.constexpr = negative_L.shape[0]
    o_r = tl.arange(0, N)
    return tl.where(o_r[:, None] == o_r[None, :], 1.0, tl.where(lower_left(0, N), negative_L, 0.0))


@triton.jit
def merge(b_R, negative_L, level, PREC: tl.constexpr):
    """From blocks of 2^level rows to those of twice as many.

    Of the two products the first is the one whose operands have less to exchange between threads:
    rows of 64 are held by the warps that need them on the left, columns of 32 by those that need
    them on the right.
    """
    N: tl.constexpr = b_R.shape[0]
    b_0 = tl.zeros((N, N), tl.float32)
    if N < 64:
        b_X = product(b_R, product(negative_L, b_R, b_0, PREC), b_0, PREC)
    else:
        b_X = product(product(b_R, negative_L, b_0, PREC), b_R, b_0, PREC)
    return tl.where(lower_left(level, N), b_X, b_R)


@triton.jit
def invert_blocks(negative_L, PREC: tl.constexpr):
    """The blocks of 16 rows on the diagonals of (I + L)^-1, fp32, from -L [1, 64, 64] or [2, 32,
    32]; zero elsewhere.

    Each of four warps has one of them, and its products pass nothing on to other warps.
    """
    B: tl.constexpr = negative_L.shape[0]
    S: tl.constexpr = 4 // B
    o_b, o_r = tl.arange(0, S), tl.arange(0, 16)
    own = (o_b[:, None] == o_b[None, :])[None, :, :, None, None]
    b_L = tl.permute(tl.reshape(negative_L, (B, S, 16, S, 16)), (0, 1, 3, 2, 4))
    b_L = tl.reshape(tl.sum(tl.where(own, b_L, 0.0), 2), (4, 16, 16))
    b_0 = tl.zeros((4, 16, 16), tl.float32)
    b_R = tl.where(
        (o_r[:, None] == o_r[None, :])[None, :, :],
        1.0,
        tl.where(lower_left(0, 16)[None, :, :], b_L.to(tl.float32), b_0),
    )
    if PREC == "fp16":
        for level in tl.static_range(1, 4):
            b_R = tl.where(
                lower_left(level, 16)[None, :, :],
                product(product(b_R, b_L, b_0, PREC), b_R, b_0, PREC),
                b_R,
            )
    # with three products for one, a level is written once: all of them are more than the
    # instruction cache holds beside the rest
    else:
        for level in tl.range(1, 4, num_stages=1):
            b_R = tl.where(
                lower_left(level, 16)[None, :, :],
                product(product(b_R, b_L, b_0, PREC), b_R, b_0, PREC),
                b_R,
            )
    b_R = tl.where(own, tl.reshape(b_R, (B, S, 1, 16, 16)), 0.0)
    return tl.reshape(tl.permute(b_R, (0, 1, 3, 2, 4)), (B, 16 * S, 16 * S))


@triton.jit
def inverse(negative_L, PREC: tl.constexpr):
    """Return (I + L)^-1 [64, 64] fp32 from -L, by merging diagonal blocks::

        R <- R + M_b o (R -L R),   b = 1, 2, 4 ..

    Only entries of -L below the diagonal are used. M_b picks the lower left block of every pair of
    neighbouring blocks of b rows. R has blocks on the diagonal alone. So no other entry enters,
    and one tile of L serves all products. PREC fp16 is for keys of norm 1 with beta <= 1, where no
    entry of R exceeds 1. It is chosen from flags, never from values.
    """
    # here, for it takes half the registers while the blocks are made
    b_L = negative_L.to(tl.float16) if PREC == "fp16" else negative_L
    b_R = tl.reshape(invert_blocks(tl.reshape(negative_L, (1, 64, 64)), PREC), (64, 64))
    for level in tl.static_range(4, 6):
        b_R = merge(b_R, b_L, level, PREC)
    return b_R


@triton.jit
def inverse_of_two(negative_L1, negative_L2, PREC: tl.constexpr):
    """The same of two tiles [32, 32], which have no blocks for whole warps: to come by them costs
    more than fp16 products, and less than threefold ones.
    """
    if PREC == "fp16":
        b_R1, b_R2 = begin(negative_L1), begin(negative_L2)
        for level in tl.static_range(1, 5):
            b_R1 = merge(b_R1, negative_L1, level, PREC)
        for level in tl.static_range(1, 5):
            b_R2 = merge(b_R2, negative_L2, level, PREC)
    else:
        b_R1, b_R2 = tl.split(
            tl.permute(
                invert_blocks(tl.permute(tl.join(negative_L1, negative_L2), (2, 0, 1)), PREC),
                (1, 2, 0),
            )
        )
        b_R1, b_R2 = merge(b_R1, negative_L1, 4, PREC), merge(b_R2, negative_L2, 4, PREC)
    return b_R1, b_R2
