"""Decay between the rows of a chunk, in logs, base 2.

Section 4 of docs/maths.md derives it.

A *group* is R consecutive rows, which one thread holds. ``pre`` is the decay from the start of a
block to a row, with the row's own. ``suf`` is the decay of the rows after it, up to the end of its
block.

There are two ways. `level_scores`, for fp32 and fp16, only adds decays. It restarts the sums at
every level, so they are exact for a decay of zero (g = -inf). For bf16, which holds 8 bits and has
the range of fp32, one prefix sum serves (`half_prefix`, `block_scores`). There no decay is below
`tuning.FLOOR` per row. So nothing is infinite, differences are exact to 10^-4, and some rows can
share an anchor. In both ways, later rows do not change the rounding of earlier ones.
"""

import math

import triton
import triton.language as tl

from kda_ops.backends.triton.device.inverse import lower_left
from kda_ops.backends.triton.device.tile import CHUNK
from kda_ops.backends.triton.tuning import FLOOR

ANCHOR_SHARE = tl.constexpr(0.875)  # see `check_anchor`


def check_anchor(floor: float, share: float) -> None:
    """Check that no factor or product of `block_scores` leaves the normal numbers of fp32.

    `floor` is the least log decay of a row, natural. With F = -floor / ln 2, a block of 8 rows
    decays by 2^-8F at most, and its anchor is 2^4F. A factor below 2^-126 would be flushed to zero
    although the other factor of its product makes up for it; a product above 2^128 would be
    infinite. The margins leave room for keys and scaled queries.

    Raises:
        ValueError: the pair breaks one of the limits; the message names it.
    """
    F = -floor / math.log(2)
    limits = {
        "the columns of the block before": (8 * F - 4 * share * F, 126),
        "products with them, for |q . k| up to 2^32": (4 * share * F + 32, 128),
        "the anchor, for entries up to 2^18": (4 * F + 18, 128),
    }
    for name, (exponent, most) in limits.items():
        if exponent > most:
            raise ValueError(
                f"floor {floor} and share {share}: {name} need 2^{exponent:.1f}, fp32 has 2^{most}."
            )


check_anchor(FLOOR, ANCHOR_SHARE.value)


@triton.jit
def pick(x, i: tl.constexpr, n: tl.constexpr):
    """Return x[:, i, :] of a [blocks, n, width] tensor."""
    return tl.sum(tl.where((tl.arange(0, n) == i)[None, :, None], x, 0.0), 1)


@triton.jit
def within(x, n: tl.constexpr):
    """Return pre and suf [rows, width] and total [rows / n, width] of blocks of n rows.

    One thread holds a block.
    """
    ROWS: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    i = tl.arange(0, n)[None, :, None]
    blocks = tl.reshape(x, (ROWS // n, n, W))
    pre = tl.zeros((ROWS // n, n, W), tl.float32)
    suf = pre
    total = tl.zeros((ROWS // n, W), tl.float32)
    for s in tl.static_range(n):
        row = pick(blocks, s, n)
        pre = tl.where(i >= s, pre + row[:, None, :], pre)
        suf = tl.where(i < s, suf + row[:, None, :], suf)
        total += row
    return tl.reshape(pre, (ROWS, W)), tl.reshape(suf, (ROWS, W)), total


@triton.jit
def double(before, after, total):
    """Merge neighbouring blocks.

    before, after [groups, width]: the decay of the groups of the same block that lie before and
    after each group; total [blocks, width].
    """
    W: tl.constexpr = before.shape[1]
    pairs: tl.constexpr = total.shape[0] // 2
    each: tl.constexpr = before.shape[0] // total.shape[0]  # groups per block
    halves = tl.reshape(total, (pairs, 2, W))
    earlier, later = pick(halves, 0, 2), pick(halves, 1, 2)
    side = tl.arange(0, 2)[None, :, None, None]
    before = tl.reshape(before, (pairs, 2, each, W))
    after = tl.reshape(after, (pairs, 2, each, W))
    before = tl.where(side == 1, before + earlier[:, None, None, :], before)
    after = tl.where(side == 0, after + later[:, None, None, :], after)
    return (
        tl.reshape(before, (2 * pairs * each, W)),
        tl.reshape(after, (2 * pairs * each, W)),
        earlier + later,
    )


@triton.jit
def by_group(x, y):
    """Add to every row of x [rows, width] its group's row of y [groups, width]."""
    ROWS: tl.constexpr = x.shape[0]
    G: tl.constexpr = y.shape[0]
    W: tl.constexpr = x.shape[1]
    return tl.reshape(tl.reshape(x, (G, ROWS // G, W)) + y[:, None, :], (ROWS, W))


@triton.jit
def scores(b_rows, b_columns, PREC: tl.constexpr):
    """Return the products of rows and columns, both [., width]."""
    return tl.dot(b_rows, tl.trans(b_columns), input_precision=PREC)


@triton.jit
def level_scores(
    b_q, b_k, b_x, R: tl.constexpr, PREC: tl.constexpr, TYPE: tl.constexpr, SCORES: tl.constexpr
):
    """Return scores and decays of one half and slice of K, for any decay b_x [rows, width]::

        q k^T o E, k k^T o E, on and below the diagonal     [rows, rows] fp32; zero unless SCORES
        decay from the start of the half to a row           [rows, width]
        decay from a row to the end of the half             [rows, width]
        decay of the whole half                             [width]

    A pair of rows has the level at which the two first lie in different halves of a block. There
    the later row has the decay from the middle on, and the earlier row the decay up to the middle.
    So one factor per row serves both sides, and no factor exceeds one.
    """
    ROWS: tl.constexpr = b_x.shape[0]
    W: tl.constexpr = b_x.shape[1]
    o_r, o_g = tl.arange(0, ROWS), tl.arange(0, ROWS // R)
    b_P = tl.zeros((ROWS, ROWS), tl.float32)
    b_L = b_P
    for h in tl.static_range(6):
        if 2**h < ROWS:
            if 2**h < R:
                near, far, _ = within(b_x, 2**h)
                b_f = tl.where((((o_r >> h) & 1) == 1)[:, None], near, far)
            else:
                if 2**h == R:
                    pre, suf, total = within(b_x, R)
                    before = tl.zeros((ROWS // R, W), tl.float32)
                    after = before
                later = ((o_g * R >> h) & 1) == 1
                b_f = tl.where(
                    later[:, None, None],
                    tl.reshape(pre, (ROWS // R, R, W)),
                    tl.reshape(suf, (ROWS // R, R, W)),
                )
                b_f = by_group(tl.reshape(b_f, (ROWS, W)), tl.where(later[:, None], before, after))
                before, after, total = double(before, after, total)
            if SCORES:
                b_f = tl.exp2(b_f)
                b_Y = (b_k * b_f).to(TYPE)
                b_L += tl.where(lower_left(h, ROWS), scores(b_Y, b_Y, PREC), 0.0)
                b_P += tl.where(lower_left(h, ROWS), scores((b_q * b_f).to(TYPE), b_Y, PREC), 0.0)
    if SCORES:
        b_P += tl.where(o_r[:, None] == o_r[None, :], tl.sum(b_q * b_k, 1)[:, None], 0.0)
    return (
        b_P,
        b_L,
        tl.exp2(by_group(pre, before)),
        tl.exp2(by_group(suf, after)),
        tl.reshape(tl.exp2(total), (W,)),
    )


@triton.jit
def half_prefix(b_x, centre, R: tl.constexpr):
    """Return two prefix sums of decays from the start of a half.

    The first is that of each row minus `centre`, [32, width]. The second is that at the end of each
    group, not centred, [groups, width], for `upto`.

    Centred on a constant, the decay and its inverse lie between 2^-|centre| and 2^|centre|, which
    bf16 operands can hold. The sum before a group is picked from the sums at the end of groups. As
    a sum minus the group's total, it would be rounded with the group's later rows.
    """
    pre, _, own = within(b_x, R)
    b_C = tl.cumsum(own, 0)
    o_g = tl.arange(0, own.shape[0])[:, None]
    b_before = tl.zeros(own.shape, tl.float32)
    for s in tl.static_range(1, own.shape[0]):
        b_before = tl.where(o_g == s, upto(b_C, s * R, R)[None, :], b_before)
    return by_group(pre, b_before - centre), b_C


@triton.jit
def upto(b_C, n: tl.constexpr, R: tl.constexpr):
    """Return the sum over the first n rows [width], from prefix sums over groups [groups, width].

    All groups of a column are in one thread. A sum over rows would go through shared memory again.
    """
    return tl.sum(tl.where((R * tl.arange(0, b_C.shape[0]) == n - R)[:, None], b_C, 0.0), 0)


@triton.jit
def block_scores(
    b_q,
    b_k,
    b_G,
    b_C,
    log2_floor,
    R: tl.constexpr,
    OWN: tl.constexpr,
    PREC: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Return the scores of `level_scores` for bf16, from the sums of `half_prefix`.

    No decay is below 2^log2_floor, so rows of a block of 8 share an anchor, its start. The caller
    masks what is above the diagonal of these blocks: garbage. A row is multiplied by 2^up times its
    decay from the anchor, a key of the block by the inverse. In the second and the last block, the
    same rows also meet the keys of the block before, decayed to the end of their block. The factor
    2^(ANCHOR_SHARE up) of these is divided out. Across row 16, each side has exp2(-|G - G_16|).

    With OWN, the diagonal of q k^T is of unrounded q and k; it is o at strong decays. Without OWN
    (activated gates), a row whose q . k cancels may be off by half; o keeps its error budget.
    """
    W: tl.constexpr = b_G.shape[1]
    o_r, o_g = tl.arange(0, 32), R * tl.arange(0, 32 // R)[:, None]
    s8, s16, s24 = upto(b_C, 8, R)[None, :], upto(b_C, 16, R)[None, :], upto(b_C, 24, R)[None, :]
    later = tl.where(o_g < 16, -1.0, 1.0)
    b_f = tl.exp2(
        by_group(
            tl.reshape(tl.reshape(b_G, (32 // R, R, W)) * later[:, :, None], (32, W)), -s16 * later
        )
    )
    b_kc = (b_k * b_f).to(TYPE)
    b_P = tl.where(lower_left(4, 32), scores((b_q * b_f).to(TYPE), b_kc, PREC), 0.0)
    b_L = tl.where(lower_left(4, 32), scores(b_kc, b_kc, PREC), 0.0)
    up = -4.0 * log2_floor
    shared = up * ANCHOR_SHARE
    b_D = by_group(
        b_G, up - tl.where(o_g < 16, tl.where(o_g < 8, 0.0, s8), tl.where(o_g < 24, s16, s24))
    )
    b_kc = b_k * tl.exp2(-b_D)
    b_end = tl.exp2(shared + tl.where(o_g < 16, s8, s24 - s16))
    b_ke = tl.reshape(tl.reshape(b_kc, (32 // R, R, W)) * b_end[:, None, :], (32, W)).to(TYPE)
    b_kc, b_row = b_kc.to(TYPE), tl.exp2(b_D)
    own, before = (o_r // 8)[:, None] == (o_r // 8)[None, :], lower_left(3, 32)
    # both products of q, then both of k: a thread holds the fragments of one
    b_r = (b_q * b_row).to(TYPE)
    b_P += tl.where(
        own,
        scores(b_r, b_kc, PREC),
        tl.where(before, scores(b_r, b_ke, PREC) * tl.exp2(-shared), 0.0),
    )
    if OWN:
        b_P = tl.where(o_r[:, None] == o_r[None, :], tl.sum(b_q * b_k, 1)[:, None], b_P)
    b_r = (b_k * b_row).to(TYPE)
    b_L += tl.where(
        own,
        scores(b_r, b_kc, PREC),
        tl.where(before, scores(b_r, b_ke, PREC) * tl.exp2(-shared), 0.0),
    )
    return b_P, b_L


@triton.jit
def row_decay(b_x, EXACT: tl.constexpr):
    """Return the factors of one log decay per row, b_x [64] in base 2, for GDN.

    They are the decay from the chunk's start to each row [64], from each row to the chunk's end
    [64], and of the whole chunk. The last result is what `pair_decay` takes [64].
    """
    o_r = tl.arange(0, CHUNK)
    b_total = tl.sum(b_x, 0)
    b_G = tl.cumsum(b_x, 0)
    if EXACT:
        b_end = tl.sum(tl.where(o_r[:, None] > o_r[None, :], b_x[:, None], 0.0), 0)
        return tl.exp2(b_G), tl.exp2(b_end), tl.exp2(b_total), b_x
    else:
        return tl.exp2(b_G), tl.exp2(b_total - b_G), tl.exp2(b_total), b_G


@triton.jit
def pair_decay(b_x, EXACT: tl.constexpr, STRICT: tl.constexpr = False):
    """Return E_ij [64, 64], the decay from row j to row i, zero for i < j, for one decay per row.

    If STRICT, E_ii is zero too; else it is one.

    Log decays are at least -160 in base 2. Without EXACT, b_x are their prefix sums [64], and E is
    formed of differences. These are wrong by at most 10^-3 of a factor, if all rows forget
    everything: less than one rounding of bf16, about two of fp16. With EXACT, b_x are the log
    decays themselves, and the sum restarts at every column.
    """
    o_r = tl.arange(0, CHUNK)
    if EXACT:
        b_E = tl.cumsum(tl.where(o_r[:, None] > o_r[None, :], b_x[:, None], 0.0), 0)
    else:
        b_E = b_x[:, None] - b_x[None, :]
    if STRICT:
        return tl.where(o_r[:, None] > o_r[None, :], tl.exp2(b_E), 0.0)
    else:
        return tl.where(o_r[:, None] >= o_r[None, :], tl.exp2(b_E), 0.0)


@triton.jit
def pair_decay_transposed(b_x, EXACT: tl.constexpr):
    """Return the transpose of `pair_decay` with STRICT, E_ij at [j, i].

    It serves transposed products, because a product must not be transposed itself
    (docs/kernels/hazards.md, "Transposed results").
    """
    o_r = tl.arange(0, CHUNK)
    if EXACT:
        b_E = tl.cumsum(tl.where(o_r[:, None] < o_r[None, :], b_x[None, :], 0.0), 1)
    else:
        b_E = b_x[None, :] - b_x[:, None]
    return tl.where(o_r[:, None] < o_r[None, :], tl.exp2(b_E), 0.0)
