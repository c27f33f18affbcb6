"""Decays without a bound in Gluon kernels: 8 rows share an anchor, the start of their block.

64 rows are two halves of four blocks. A thread holds all rows of a half, so threads exchange
nothing. P is the sum of log decays in base 2 from the start of a block, B the sum over the block,
and c = -SHIFT. Rows are k 2^(P - c). Keys come in three tiles, by the distance to the row's block::

    own    k 2^(c - P)         for rows of the same block
    near   k 2^(B - P) LESS    for rows of the next block: decayed to the end of the key's block
    far    near, decayed on    for rows of later blocks of the half

Only keys of blocks 0 and 1 have far rows. The far tile holds these blocks decayed to the start of
block 3, and in the places of blocks 2 and 3 once more, decayed to the start of block 2.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.gluon_tile import LOG2E, SHIFT, ex2, growth, left_right

FLOOR = tl.constexpr(tuning.FLOOR)
LESS = gl.constexpr(2.0**-57)  # keeps scores of long queries in range
MORE = gl.constexpr(2.0**-58)  # 2^c / LESS, by which near and far scores must still be multiplied


@triton.jit
def clamp(g):
    """Return log decays of at least FLOOR."""
    return tl.maximum(g, FLOOR, tl.PropagateNan.ALL)


@gluon.jit
def pick(x, b, i: gl.constexpr):
    """Return entry i of axis 1 of x [2, 4, K], as [2, 1, K]; b holds the indices of that axis."""
    return gl.expand_dims(gl.sum(gl.where(b == i, x, 0.0), 1), 1)


@gluon.jit
def block_decays(g, E: gl.constexpr):
    """Return the factors that the natural log decays g [64, K], clamped at FLOOR, give.

    First 2^(P - c) of each row, [64, K]. Then four factors of each block, [2, 4, K]: 2^(B - c), the
    decay over all earlier blocks of the half, the decay over all later ones, and what near keys are
    multiplied by to become far keys. Last the decay over each half, [2, K].
    """
    K: gl.constexpr = g.shape[1]
    D, total = growth(clamp(g), 8, E)
    total = gl.reshape(total, (2, 4, K)) * LOG2E
    b = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, total.type.layout)))
    b = gl.expand_dims(gl.expand_dims(b, 0), 2)
    e = ex2(total)
    e0, e1, e2, e3 = pick(e, b, 0), pick(e, b, 1), pick(e, b, 2), pick(e, b, 3)
    e01, e12, e23 = e0 * e1, e1 * e2, e2 * e3
    early = gl.where(b == 0, 1.0, gl.where(b == 1, e0, gl.where(b == 2, e01, e01 * e2)))
    late = gl.where(b == 3, 1.0, gl.where(b == 2, e3, gl.where(b == 1, e23, e1 * e23)))
    on = gl.where(b == 0, e12, gl.where(b == 1, e2, gl.where(b == 2, e1, 1.0)))
    return D, ex2(total + SHIFT), early, late, on, gl.sum(gl.where(b == 3, early * e, 0.0), 1)


@gluon.jit
def by_block(x, f, E: gl.constexpr):
    """Multiply rows x [64, K] by factors of their blocks f [2, 4, K]."""
    y = gl.reshape(x, (2, 4, 8, x.shape[1]))
    f = gl.convert_layout(f, gl.SliceLayout(2, y.type.layout))
    return gl.convert_layout(gl.reshape(y * gl.expand_dims(f, 2), (64, x.shape[1])), E)


@gluon.jit
def repeated(x, E: gl.constexpr):
    """Return x [64, K] with the first 16 rows of each half copied over its last 16 rows."""
    x, _ = gl.split(gl.permute(gl.reshape(x, (2, 2, 16, x.shape[1])), (0, 2, 3, 1)))
    x = gl.permute(gl.join(x, x), (0, 3, 1, 2))
    return gl.convert_layout(gl.reshape(x, (64, x.shape[3])), E)


@gluon.jit
def of_half(x, row):
    """Return of each row of x [64, 64] the columns of its own half, [64, 32]."""
    H: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    x_0, x_1 = left_right(x)
    return gl.where(row < 32, gl.convert_layout(x_0, H), gl.convert_layout(x_1, H))


@gluon.jit
def join_scores(own, near, far, row):
    """Return the scores of each half, [64, 32], from products with three kinds of keys, [64, 64].

    Accumulators hold a block of 8 rows or columns in registers of its own, and a warp has 16 rows.
    So the compiler knows which product each register takes, up to the parity of the warp. Scores
    above the diagonal are undefined.
    """
    H: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    own, near, far = of_half(own, row), of_half(near, row), of_half(far, row)
    x, y = left_right(far)
    a = (gl.arange(0, 64, gl.SliceLayout(1, x.type.layout)) >> 3) & 1
    x = gl.where(a[:, None] == 0, y, x)  # for rows of blocks 2 and 3; other rows have no far keys
    far = gl.convert_layout(gl.reshape(gl.permute(gl.join(x, x), (0, 2, 1)), (64, 32)), H)
    a = ((gl.arange(0, 64, gl.SliceLayout(1, H)) >> 3) & 1)[:, None]
    b = (gl.arange(0, 32, gl.SliceLayout(0, H)) >> 3)[None, :]
    near, far = near * MORE, far * MORE
    first = gl.where(a == b, own, near)
    second = gl.where(a + 2 == b, own, gl.where(a + 1 == b, near, far))
    return gl.where((b >= 2) | (((row >> 4) & 1) == 1), second, first)
