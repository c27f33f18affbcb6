"""Form the unit-triangular inverse ``(I + L)^-1`` of a chunk on tensor cores.

Each level doubles the size of the inverted diagonal blocks (docs/maths.md, section 4).
"""

import triton
import triton.language as tl

from kda_ops.backends.triton.device.tile import INTERPRETED


@triton.jit
def square_product(x, y, acc, PREC: tl.constexpr):
    """Return acc + x y of square fp32 tiles.

    With PREC "fp16", operands are rounded to fp16. Otherwise fp32 operands are split as PREC names.
    """
    if PREC == "fp16":
        return tl.dot(x.to(tl.float16), y.to(tl.float16), acc)
    else:  # the interpreter computes any split in fp32, and knows one name
        return tl.dot(x, y, acc, input_precision="tf32x3" if INTERPRETED else PREC)


@triton.jit
def lower_left(level, ROWS: tl.constexpr):
    """Return the mask [ROWS, ROWS] of one level's pairs: later row, earlier column.

    The two lie in different halves of one block of 2^(level + 1) rows. The mask combines conditions
    on the row and on the column, which are mostly known at compile time. One value per entry, such
    as r ^ c, would occupy registers from its first use to its last.
    """
    o_r = tl.arange(0, ROWS)
    block, half = o_r >> (level + 1), (o_r >> level) & 1
    return (block[:, None] == block[None, :]) & (half == 1)[:, None] & (half == 0)[None, :]


@triton.jit
def begin(negative_L):
    """Return the diagonal blocks of two rows of (I + L)^-1, fp32; zero elsewhere."""
    N: tl.constexpr = negative_L.shape[0]
    o_r = tl.arange(0, N)
    return tl.where(o_r[:, None] == o_r[None, :], 1.0, tl.where(lower_left(0, N), negative_L, 0.0))


@triton.jit
def merge(b_R, negative_L, level, PREC: tl.constexpr):
    """Merge diagonal blocks of 2^level rows of the inverse into blocks of twice as many.

    The first product is the one whose operands move least between threads. In tiles of 64 rows,
    warps hold the rows that they need of the left operand. In tiles of 32 rows, they hold the
    columns that they need of the right operand.
    """
    N: tl.constexpr = b_R.shape[0]
    b_0 = tl.zeros((N, N), tl.float32)
    if N < 64:
        b_X = square_product(b_R, square_product(negative_L, b_R, b_0, PREC), b_0, PREC)
    else:
        b_X = square_product(square_product(b_R, negative_L, b_0, PREC), b_R, b_0, PREC)
    return tl.where(lower_left(level, N), b_X, b_R)


@triton.jit
def invert_blocks(negative_L, PREC: tl.constexpr):
    """Return the diagonal blocks of 16 rows of (I + L)^-1, fp32; zero elsewhere.

    `negative_L` is [1, 64, 64] or [2, 32, 32], and the result has its shape. Each of four warps
    computes one block, so its products exchange nothing with other warps.
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
                square_product(square_product(b_R, b_L, b_0, PREC), b_R, b_0, PREC),
                b_R,
            )
    # Split precisions take three products for one. Unrolled, the levels and the rest of the
    # kernel would not fit the instruction cache.
    else:
        for level in tl.range(1, 4, num_stages=1):
            b_R = tl.where(
                lower_left(level, 16)[None, :, :],
                square_product(square_product(b_R, b_L, b_0, PREC), b_R, b_0, PREC),
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
    # convert here: fp16 takes half the registers while the blocks are formed
    b_L = negative_L.to(tl.float16) if PREC == "fp16" else negative_L
    b_R = tl.reshape(invert_blocks(tl.reshape(negative_L, (1, 64, 64)), PREC), (64, 64))
    for level in tl.static_range(4, 6):
        b_R = merge(b_R, b_L, level, PREC)
    return b_R


@triton.jit
def inverse_of_two(negative_L1, negative_L2, PREC: tl.constexpr):
    """Return `inverse` of two tiles [32, 32], fp32 each.

    Giving each warp a diagonal block costs more time than fp16 products take, but less than split
    products take. So only split precisions call `invert_blocks`.
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
