"""Decay between the rows of a chunk as factors that are at most one (MATHS.md, numerics 1 and 2).

Decays of consecutive rows combine by one associative operation: in logs (base 2) they add, as factors they multiply. Products need one
exponential per element for all levels and lose a rounding per row, which a 16 bit operand does not see; fp32 inputs take sums. Both are
exact for a decay of zero (g = -inf) and never subtract, so no later row can touch the rounding of an earlier one.

A *group* is R consecutive rows, those that one thread holds. ``pre`` is the decay from the start of a block to a row, with the row's own;
``suf`` the decay of the rows after it up to the end of its block.
"""

import triton
import triton.language as tl

from kda_ops.backends.triton.inverse import lower_left


@triton.jit
def _product(x, y):
    return x * y


@triton.jit
def combine(x, y, LINEAR: tl.constexpr):
    """The decay over two spans of rows."""
    return x * y if LINEAR else x + y


@triton.jit
def factor(x, LINEAR: tl.constexpr):
    """What a combined decay multiplies by, in [0, 1]."""
    return x if LINEAR else tl.exp2(x)


@triton.jit
def pick(x, i: tl.constexpr, n: tl.constexpr, LINEAR: tl.constexpr):
    """x[:, i, :] of a [blocks, n, width] tensor."""
    here = (tl.arange(0, n) == i)[None, :, None]
    if LINEAR:
        return tl.reduce(tl.where(here, x, 1.0), 1, _product)
    else:
        return tl.sum(tl.where(here, x, 0.0), 1)


@triton.jit
def within(x, n: tl.constexpr, LINEAR: tl.constexpr):
    """(pre, suf [64, width], total [64/n, width]) of blocks of n rows, for the few rows of one thread."""
    neutral: tl.constexpr = 1.0 if LINEAR else 0.0
    W: tl.constexpr = x.shape[1]
    i = tl.arange(0, n)[None, :, None]
    blocks = tl.reshape(x, (64 // n, n, W))
    pre = tl.full((64 // n, n, W), neutral, tl.float32)
    suf = pre
    total = tl.full((64 // n, W), neutral, tl.float32)
    for s in tl.static_range(n):
        row = pick(blocks, s, n, LINEAR)
        pre = tl.where(i >= s, combine(pre, row[:, None, :], LINEAR), pre)
        suf = tl.where(i < s, combine(suf, row[:, None, :], LINEAR), suf)
        total = combine(total, row, LINEAR)
    return tl.reshape(pre, (64, W)), tl.reshape(suf, (64, W)), total


@triton.jit
def double(before, after, total, LINEAR: tl.constexpr):
    """Merge neighbouring blocks.

    before, after [groups, width]: the decay of the groups of the same block that lie before and after each group; total [blocks, width].
    """
    W: tl.constexpr = before.shape[1]
    pairs: tl.constexpr = total.shape[0] // 2
    each: tl.constexpr = before.shape[0] // total.shape[0]  # groups per block
    halves = tl.reshape(total, (pairs, 2, W))
    earlier, later = pick(halves, 0, 2, LINEAR), pick(halves, 1, 2, LINEAR)
    side = tl.arange(0, 2)[None, :, None, None]
    before = tl.reshape(before, (pairs, 2, each, W))
    after = tl.reshape(after, (pairs, 2, each, W))
    before = tl.where(side == 1, combine(before, earlier[:, None, None, :], LINEAR), before)
    after = tl.where(side == 0, combine(after, later[:, None, None, :], LINEAR), after)
    return tl.reshape(before, (2 * pairs * each, W)), tl.reshape(after, (2 * pairs * each, W)), combine(earlier, later, LINEAR)


@triton.jit
def by_group(x, y, LINEAR: tl.constexpr):
    """Combine every row of x [64, width] with its group's row of y [groups, width]."""
    G: tl.constexpr = y.shape[0]
    W: tl.constexpr = x.shape[1]
    return tl.reshape(combine(tl.reshape(x, (G, 64 // G, W)), y[:, None, :], LINEAR), (64, W))


@triton.jit
def score_blocks(b_S, b_q, b_Y, h: tl.constexpr, PREC: tl.constexpr):
    """Add the scores of level h to those of the diagonal blocks of 16 rows, [4, 16, 16] fp32: q, Y [64, width] in the operand's dtype.

    A block is the work of one warp, with the tensor core's small product; a dense one would do 16 times the pairs and wait for all warps.
    """
    W: tl.constexpr = b_Y.shape[1]
    o_r = tl.arange(0, 16)
    block, half = o_r >> (h + 1), (o_r >> h) & 1
    here = (block[:, None] == block[None, :]) & (half == 1)[:, None] & (half == 0)[None, :]
    b_s = tl.dot(tl.reshape(b_q, (4, 16, W)), tl.permute(tl.reshape(b_Y, (4, 16, W)), (0, 2, 1)), input_precision=PREC)
    return b_S + tl.where(here[None, :, :], b_s, 0.0)


@triton.jit
def from_blocks(b_S):
    """[4, 16, 16] on the diagonal of [64, 64], zero elsewhere."""
    i = tl.arange(0, 4)
    b_S = tl.where((i[:, None] == i[None, :])[:, None, :, None], b_S[:, :, None, :], 0.0)
    return tl.reshape(b_S, (64, 64))


@triton.jit
def score_levels(b_P, b_L, b_P16, b_L16, b_q, b_k, b_x, R: tl.constexpr, LINEAR: tl.constexpr, PREC: tl.constexpr, TYPE: tl.constexpr):
    """Add the scores of one slice of K, for any decay b_x [64, width]: tril(q k^T o E) and strict_tril(k k^T o E), fp32, as pairs of a dense
    part [64, 64] and diagonal blocks [4, 16, 16]; and (from the start of the chunk to a row, from a row to its end [64, width], the chunk [width]).

    A pair of rows belongs to the level at which their blocks first part; there the later row has the decay since the middle and the
    earlier row the decay up to the middle, so one factor per row serves both sides, and both are at most one. What the dense parts hold
    above the diagonal means nothing.
    """
    W: tl.constexpr = b_x.shape[1]
    o_r, o_g = tl.arange(0, 64), tl.arange(0, 64 // R)
    for h in tl.static_range(6):
        if 2**h < R:
            near, far, _ = within(b_x, 2**h, LINEAR)
            b_f = tl.where((((o_r >> h) & 1) == 1)[:, None], near, far)
        else:
            if 2**h == R:
                pre, suf, total = within(b_x, R, LINEAR)
                before = tl.full((64 // R, W), 1.0 if LINEAR else 0.0, tl.float32)
                after = before
            later = ((o_g * R >> h) & 1) == 1
            b_f = tl.where(later[:, None, None], tl.reshape(pre, (64 // R, R, W)), tl.reshape(suf, (64 // R, R, W)))
            b_f = by_group(tl.reshape(b_f, (64, W)), tl.where(later[:, None], before, after), LINEAR)
            before, after, total = double(before, after, total, LINEAR)
        b_f = factor(b_f, LINEAR)
        b_Y = (b_k * b_f).to(TYPE)
        b_qf = (b_q * b_f).to(TYPE)
        if h < 4:
            b_L16 = score_blocks(b_L16, b_Y, b_Y, h, PREC)
            b_P16 = score_blocks(b_P16, b_qf, b_Y, h, PREC)
        else:
            b_L += tl.where(lower_left(h), tl.dot(b_Y, tl.trans(b_Y), input_precision=PREC), 0.0)
            b_P += tl.where(lower_left(h), tl.dot(b_qf, tl.trans(b_Y), input_precision=PREC), 0.0)
    b_start, b_end = factor(by_group(pre, before, LINEAR), LINEAR), factor(by_group(suf, after, LINEAR), LINEAR)
    return b_P, b_L, b_P16, b_L16, b_start, b_end, tl.reshape(factor(total, LINEAR), (W,))


@triton.jit
def half_decay(b_x, log2_bound, R: tl.constexpr):
    """Factors for a decay of at least log2_bound per row, where the 32 rows of a half share one anchor.

    Inside a half the decay since its start is centred on a constant, never on a row, so that it and its inverse stay within
    2^(16 |log2_bound|) of one, which bf16 operands can hold: (row, column [64, width], from the centre to the end of the half, from the
    start of the chunk to the half, from the end of the half to the end of the chunk [groups, width], the whole chunk [width]).
    Sums are as small as 64 |log2_bound|, so that their differences are exact enough for bf16 and nothing is infinite.
    """
    G: tl.constexpr = 64 // R
    later = (tl.arange(0, G) >= G // 2)[:, None]
    pre, _, own = within(b_x, R, False)
    first, total = tl.sum(tl.where(later, 0.0, own), 0), tl.sum(own, 0)
    second = total - first
    centre = 16.0 * log2_bound
    b_G = by_group(pre, tl.cumsum(own, 0) - own - tl.where(later, first[None, :] + centre, centre), False)
    half_end = tl.exp2(tl.where(later, second[None, :], first[None, :]) - centre)
    half_before = tl.where(later, tl.exp2(first)[None, :], 1.0)
    half_after = tl.where(later, 1.0, tl.exp2(second)[None, :])
    return tl.exp2(b_G), tl.exp2(-b_G), half_end, half_before, half_after, tl.exp2(total)


@triton.jit
def row_decay(b_x, EXACT: tl.constexpr):
    """Factors of one decay per row [64]: (from the start of the chunk, to the end of it [64], the whole chunk), and what `pair_decay` takes."""
    o_r = tl.arange(0, 64)
    b_total = tl.sum(b_x, 0)
    b_G = tl.cumsum(b_x, 0)
    if EXACT:
        b_end = tl.sum(tl.where(o_r[:, None] > o_r[None, :], b_x[:, None], 0.0), 0)
        return tl.exp2(b_G), tl.exp2(b_end), tl.exp2(b_total), b_x
    else:
        return tl.exp2(b_G), tl.exp2(b_total - b_G), tl.exp2(b_total), b_G


@triton.jit
def pair_decay(b_x, EXACT: tl.constexpr):
    """E_ij [64, 64], the factor from row j to row i, zero for i < j, of one decay per row, at least -160; from the prefix sums [64].

    16 bit operands take the difference of prefix sums, whose rounding (up to 10^-3 of a factor, when all rows forget everything) they do not
    see; EXACT takes the decays themselves and restarts the sum at every column.
    """
    o_r = tl.arange(0, 64)
    if EXACT:
        b_E = tl.cumsum(tl.where(o_r[:, None] > o_r[None, :], b_x[:, None], 0.0), 0)
    else:
        b_E = b_x[:, None] - b_x[None, :]
    return tl.where(o_r[:, None] >= o_r[None, :], tl.exp2(b_E), 0.0)


@triton.jit
def pair_decay_transposed(b_x, EXACT: tl.constexpr):
    """E_ij at [j, i], the transpose of `pair_decay`, formed as such: a product that is transposed afterwards may be miscompiled (NOTES.md)."""
    o_r = tl.arange(0, 64)
    if EXACT:
        b_E = tl.cumsum(tl.where(o_r[:, None] < o_r[None, :], b_x[None, :], 0.0), 1)
    else:
        b_E = b_x[None, :] - b_x[:, None]
    return tl.where(o_r[:, None] <= o_r[None, :], tl.exp2(b_E), 0.0)
