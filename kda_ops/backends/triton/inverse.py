"""The unit-triangular inverse of a chunk, ``(I + L)^-1``, by level recursion on tensor cores (MATHS.md, numerics 3)."""

import triton
import triton.language as tl


@triton.jit
def product(x, y, acc, PREC: tl.constexpr):
    """acc + x y of square fp32 tiles: fp16 operands for PREC "fp16", otherwise fp32 operands in the split that PREC names."""
    if PREC == "fp16":
        return tl.dot(x.to(tl.float16), y.to(tl.float16), acc)
    else:
        return tl.dot(x, y, acc, input_precision=PREC)


@triton.jit
def lower_left(level, ROWS: tl.constexpr = 64):
    """The pairs of rows [ROWS, ROWS] in different halves of one block of 2^(level + 1) rows, the later one first.

    Written as conditions on the row and on the column, most of which are known when the kernel is compiled; a value per element, r ^ c say,
    would stay in registers from its first use to its last.
    """
    o_r = tl.arange(0, ROWS)
    block, half = o_r >> (level + 1), (o_r >> level) & 1
    return (block[:, None] == block[None, :]) & (half == 1)[:, None] & (half == 0)[None, :]


@triton.jit
def inverse(negative_L, PREC: tl.constexpr):
    """(I + L)^-1 fp32 from -L [32, 32] or [64, 64], strictly lower triangular, by merging diagonal blocks::

        R <- R + M_b o (R -L R),   b = 1, 2, 4 ..

    M_b picks the pairs whose rows part at bit b, the lower left block of every pair of blocks; what R is made of are blocks on the diagonal, so no
    other pair enters there, and one tile of L serves all products. fp16 is for unit keys with beta <= 1,
    where no entry of R exceeds one; the choice is made from flags, never from values. Of the two products the first is the one whose operands have
    less to exchange between threads: rows of 64 are held by the warps that need them on the left, columns of 32 by those that need them on the right.
    """
    N: tl.constexpr = negative_L.shape[0]
    o_r, b_0 = tl.arange(0, N), tl.zeros((N, N), tl.float32)
    b_R = tl.where(o_r[:, None] == o_r[None, :], 1.0, tl.where(lower_left(0, N), negative_L, 0.0))
    if N < 64 and PREC != "fp16":  # one level of code: with three products for one, all of them are more than the instruction cache holds beside the rest
        for level in tl.range(1, 5, num_stages=1):
            b_R = tl.where(lower_left(level, N), product(b_R, product(negative_L, b_R, b_0, PREC), b_0, PREC), b_R)
    else:
        for level in tl.static_range(1, 6):
            if 2**level < N:
                if N < 64:
                    b_X = product(b_R, product(negative_L, b_R, b_0, PREC), b_0, PREC)
                else:
                    b_X = product(product(b_R, negative_L, b_0, PREC), b_R, b_0, PREC)
                b_R = tl.where(lower_left(level, N), b_X, b_R)
    return b_R
