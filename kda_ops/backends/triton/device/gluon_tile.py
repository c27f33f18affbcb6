"""Numbers, rows and states in Gluon kernels: one instruction each, or one access each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from kda_ops import problem

CHUNK = gl.constexpr(problem.CHUNK)
WIDTH = gl.constexpr(128)  # of keys and values
FAR = gl.constexpr(1 << 30)  # past the end of every tensor that is written
LOG2E = gl.constexpr(1.4426950408889634)
LEAST_RATE = gl.constexpr(2.0**-126)  # exp(A_log) is clamped to where products with it are finite
GREATEST_RATE = gl.constexpr(2.0**100)
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
def sums_by_block(x):
    """Return the sums of x [32, K] from the start of each block of 16 rows, and over each [2, K].

    A thread holds all rows of a block, so nothing is exchanged.
    """
    D = gl.associative_scan(gl.reshape(x, (2, 16, x.shape[1])), 1, plus)
    last = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, D.type.layout)))
    return D, gl.sum(gl.where(last[None, :, None] == 15, D, 0.0), 1)


@gluon.jit
def inverse_norms(x, norms):
    """Write the inverse norms of the rows x [rows, K]; four warps do."""
    x = widen(x.load(ROWS_4))
    norms.store(gl.rsqrt(gl.sum(x * x, 1) + 1e-6))


@gluon.jit
def left_right(x):
    """Split the columns of x [64, 2 n] into their left and right halves, [64, n] each."""
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def load_gate(A_log, dt_bias, i_h, K: gl.constexpr, E: gl.constexpr):
    """Return the slope of the gate's exponent in base 2, and its bias times that [K]."""
    rate = 1.0
    if A_log is not None:
        rate = gl.exp(gl.load(A_log + i_h).to(gl.float32))
        rate = gl.minimum(gl.maximum(rate, LEAST_RATE), GREATEST_RATE)
    bias = gl.zeros([K], gl.float32, gl.SliceLayout(0, E))
    if dt_bias is not None:
        bias = gl.load(dt_bias + i_h * K + gl.arange(0, K, gl.SliceLayout(0, E))).to(gl.float32)
    return rate * -LOG2E, bias * (rate * -LOG2E)


@gluon.jit
def fill_rows(tile, here, value, R: gl.constexpr):
    """Overwrite the rows from `here` on, which are no tokens.

    Such a row belongs to another sequence and may be NaN. With q = k = v = beta = 0 and no decay it
    changes nothing.
    """
    COUNT: gl.constexpr = tile.shape[0]
    if here < COUNT:
        row = gl.arange(0, COUNT, gl.SliceLayout(1, R))[:, None]
        tile.store(gl.where(row < here, tile.load(R), value).to(tile.dtype))


@gluon.jit
def state_at(state, strides, i, i_h, W: gl.constexpr, V: gl.constexpr = 128, I: gl.constexpr = 0):
    """Return pointers to S[k, v] of row or slot i and a head, as [V, 128]; v counts from I V."""
    o_v, o_k = (
        gl.arange(I * V, I * V + V, gl.SliceLayout(1, W)),
        gl.arange(0, 128, gl.SliceLayout(0, W)),
    )
    p_s = state + (i.to(gl.int64) * strides[0] + i_h.to(gl.int64) * strides[1])
    return p_s + (o_v * strides[3])[:, None] + (o_k * strides[2])[None, :]
