"""Decays without a bound in Gluon kernels: 8 rows share an anchor, the start of their block.

64 rows are two halves of four blocks. A thread holds all rows of a half, so nothing is exchanged.
With P the sum of decays from the start of a block, B that over the block, and c = -SHIFT, rows have
k 2^(P - c), and keys have a tile for each kind of block that a row meets::

    own    k 2^(c - P)            the same block
    near   k 2^(B - P) LESS       the next block, which begins where this one ends
    far    near, decayed on       blocks 0 and 1 up to block 3, and in the places of blocks 2 and 3
                                  blocks 0 and 1 up to block 2
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.gluon_tile import LOG2E, SHIFT, ex2, growth, left_right

FLOOR = tl.constexpr(tuning.FLOOR)
LESS = gl.constexpr(2.0**-57)  # so that long queries stay in range
MORE = gl.constexpr(2.0**-58)  # what near and far scores lack: 2^c / LESS


@triton.jit
def clamp(g):
    """Return log decays of at least FLOOR."""
    return tl.maximum(g, FLOOR, tl.PropagateNan.ALL)


@gluon.jit
def pick(x, b, i: gl.constexpr):
    """Return entry i of axis 1 of x [2, 4, K], as [2, 1, K]; b counts the axis."""
    return gl.expand_dims(gl.sum(gl.where(b == i, x, 0.0), 1), 1)


@gluon.jit
def block_decays(g, E: gl.constexpr):
    """Return 2^(P - c) [64, K] of log decays g, then factors of blocks, [2, 4, K].

    They are 2^(B - c), the decay of the earlier and of the later blocks of a half, and what makes
    near keys far ones. The last is the decay of each half, [2, K].
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
    """Return rows x [64, K] with the first 16 rows of a half in place of its last 16 too."""
    x, _ = gl.split(gl.permute(gl.reshape(x, (2, 2, 16, x.shape[1])), (0, 2, 3, 1)))
    x = gl.permute(gl.join(x, x), (0, 3, 1, 2))
    return gl.convert_layout(gl.reshape(x, (64, x.shape[3])), E)


@gluon.jit
def of_half(x, row):
    """Return the columns of x [64, 64] that are of the half of their row, [64, 32]."""
    H: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    x_0, x_1 = left_right(x)
    return gl.where(row < 32, gl.convert_layout(x_0, H), gl.convert_layout(x_1, H))


@gluon.jit
def join_scores(own, near, far, row):
    """Join scores [64, 64] with three kinds of keys to those of each half, [64, 32].

    In accumulators a block of 8 is a register, and two are a warp. So which product counts is known
    when compiling, up to the parity of the warp. What is above the diagonal is undefined.
    """
    H: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    own, near, far = of_half(own, row), of_half(near, row), of_half(far, row)
    x, y = left_right(far)
    a = (gl.arange(0, 64, gl.SliceLayout(1, x.type.layout)) >> 3) & 1
    x = gl.where(a[:, None] == 0, y, x)  # blocks 2 and 3; no others have far keys
    far = gl.convert_layout(gl.reshape(gl.permute(gl.join(x, x), (0, 2, 1)), (64, 32)), H)
    a = ((gl.arange(0, 64, gl.SliceLayout(1, H)) >> 3) & 1)[:, None]
    b = (gl.arange(0, 32, gl.SliceLayout(0, H)) >> 3)[None, :]
    near, far = near * MORE, far * MORE
    first = gl.where(a == b, own, near)
    second = gl.where(a + 2 == b, own, gl.where(a + 1 == b, near, far))
    return gl.where((b >= 2) | (((row >> 4) & 1) == 1), second, first)
