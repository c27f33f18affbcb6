"""Numbers, rows and states in Gluon kernels: one instruction each, or one access each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from kda_ops import problem
from kda_ops.backends.triton.device.gate import GIVEN, NO_TOKEN, log_decay

CHUNK = gl.constexpr(problem.CHUNK)
WIDTH = gl.constexpr(128)  # of keys and values
FAR = gl.constexpr(1 << 30)  # past the end of every tensor that is written
LOG2E = gl.constexpr(1.4426950408889634)
# Half of what 32 log decays of -5 amount to in base 2: 16 * 5 / ln 2, rounded to a whole number, so
# that multiplying by 2^SHIFT is exact. Without a bound it serves 8 log decays of -19.
SHIFT = gl.constexpr(115.0)
UNSHIFT = gl.constexpr(2.0**-115)
# how eight and four warps hold rows of 128 channels outside products
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
ROWS_4 = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
# how vectors lie in shared memory, one alone or several
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
PAIR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))


@gluon.jit
def product(a, b, none):
    """Issue the product of a and b; `none` is a tile of zeros with the layout of the result."""
    return warpgroup_mma(a, b, none, use_acc=False, is_async=True)


@gluon.jit
def ex2(x):
    """Return 2^x of fp32, in one instruction."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def rcp(x):
    """Return 1 / x of fp32, in one instruction."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def widen(x):
    """Return bf16 as fp32, two entries in two instructions; fp32 stays as it is."""
    if x.dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], gl.float32, True, 2
        )
    return x


@gluon.jit
def narrow(x):
    """Round fp32 to bf16, two entries in one instruction."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, True, 2
    )


@gluon.jit
def halve(x):
    """Round fp32 to fp16, two entries in one instruction."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, True, 2
    )


@gluon.jit
def plus(a, b):
    """Add, for scans."""
    return a + b


@gluon.jit
def decay_rows(tile, bias, rate, gate, E: gl.constexpr):
    """Return the natural log decay of the rows g in `tile`, as fp32 in layout E."""
    return log_decay(widen(tile.load(E)), bias, rate, gate, None, UNIT=1.0, FAST=True)


@gluon.jit
def sums_by_block(x, BLOCKS: gl.constexpr):
    """Return the sums of x [rows, K] from the start of each block, and over each [BLOCKS, K].

    A thread holds all rows of a block, so nothing is exchanged.
    """
    ROWS: gl.constexpr = x.shape[0] // BLOCKS
    D = gl.associative_scan(gl.reshape(x, (BLOCKS, ROWS, x.shape[1])), 1, plus)
    L: gl.constexpr = gl.SliceLayout(2, D.type.layout)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, L))[None, :, None]
    total = gl.sum(gl.where(row == ROWS - 1, D, 0.0), 1)
    return D, total


@gluon.jit
def growth(g, BLOCKS: gl.constexpr, E: gl.constexpr):
    """Return 2^(D + SHIFT) of the log decays g [rows, K] in layout E, and their sums over blocks.

    D sums them in base 2 from the start of each block; the sums [BLOCKS, K] are natural logs.
    Forward and `states_kda` share this function, because the states of both must have the same
    bits.
    """
    D, total = sums_by_block(g, BLOCKS)
    D = gl.convert_layout(gl.reshape(D, (g.shape[0], g.shape[1])), E)
    return ex2(D * LOG2E + SHIFT), total


@gluon.jit
def inverse_norms(x, norms):
    """Write the inverse norms of the rows x [rows, K]; four warps do."""
    x = widen(x.load(ROWS_4))
    norms.store(gl.rsqrt(gl.sum(x * x, 1) + 1e-6))


@gluon.jit
def load_rows(tile, norms, E: gl.constexpr, NORM: gl.constexpr):
    """Return the rows in `tile` as fp32 in layout E, times their inverse norms if NORM."""
    x = widen(tile.load(E))
    if NORM:
        x = x * norms.load(gl.SliceLayout(1, E))[:, None]
    return x


@gluon.jit
def left_right(x):
    """Split the columns of x [64, 2 n] into their left and right halves, [64, n] each."""
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def fill_rows(tile, here, value, R: gl.constexpr):
    """Overwrite the rows from `here` on, which are no tokens.

    Such a row belongs to another sequence and may be NaN. With q = k = v = beta = 0 and no decay
    (`fill_decays`) it changes nothing.
    """
    COUNT: gl.constexpr = tile.shape[0]
    if here < COUNT:
        row = gl.arange(0, COUNT, gl.SliceLayout(1, R))[:, None]
        tile.store(gl.where(row < here, tile.load(R), value).to(tile.dtype))


@gluon.jit
def fill_decays(tile, here, gate):
    """Overwrite the rows of g from `here` on, so that they do not decay."""
    if gate.kind == GIVEN:
        fill_rows(tile, here, 0.0, ROWS_4)
    else:
        fill_rows(tile, here, NO_TOKEN, ROWS_4)


@gluon.jit
def state_at(state, strides, i, i_h, W: gl.constexpr, V: gl.constexpr = 128, I: gl.constexpr = 0):
    """Return pointers to S[k, v] of row or slot i and a head, as [V, 128]; v counts from I V."""
    o_v, o_k = (
        gl.arange(I * V, I * V + V, gl.SliceLayout(1, W)),
        gl.arange(0, 128, gl.SliceLayout(0, W)),
    )
    p_s = state + (i.to(gl.int64) * strides[0] + i_h.to(gl.int64) * strides[1])
    return p_s + (o_v * strides[3])[:, None] + (o_k * strides[2])[None, :]
