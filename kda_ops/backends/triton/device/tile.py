"""Where a program is, and how tiles of the caller's tensors come into registers.

Tensors of the caller are read through their strides (`operands.Strided`). The offset of a chunk is
int64 before the first product. Inside a chunk offsets have 32 bits, which saves a register per row;
`fit` copies tensors that need more. Tiles are scratch of this package, contiguous
``[NT, HV, 64, width]``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from kda_ops import problem
from kda_ops.backends.triton.device.operands import constant
from kda_ops.backends.triton.device.sequence import find_sequence
from kda_ops.backends.triton.private import INTERPRET
from kda_ops.stages import Tile

INTERPRETED = tl.constexpr(INTERPRET)  # the interpreter knows no assembly
CHUNK = constant(problem.CHUNK)  # tokens of a chunk, and rows of a tile
HALF = constant(problem.CHUNK // 2)
# chunks of a head that `prepare` marks together for a scan that follows it
FOLLOWED = tl.constexpr(8)
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# whether LLVM joins the entries of a tile (docs/kernels/hazards.md, "Tiles as vectors")
JOINED = tl.constexpr(_VERSION >= (3, 9))
# whether a thread sums its entries as a tree (docs/kernels/hazards.md, "Sums as trees")
TREES = tl.constexpr(_VERSION >= (3, 8))


@dataclass
class UnfinishedTile(Tile):
    """A tile of a call's one sequence, whose chunks from `until` on are not written yet.

    `rest` launches `prepare` for them, and a scan may run at the same time. `prepare` counts the
    tiles that it has written in `ready` [groups of FOLLOWED chunks, heads]. A program of the scan
    polls it, a limited number of times. Then it sets its entry of `missed` [programs], and writes
    no state. That happens on a busy device, and under tools that run kernels one by one. A second
    scan, after `prepare`, redoes these programs. The bits are the same either way.
    """

    until: int = 0
    ready: Tensor | None = None
    missed: Tensor | None = None
    rest: Callable[[], None] = lambda: None


def spans(x: Tensor) -> bool:
    """Return whether offsets of 32 bits reach the 64 rows of a chunk of one head."""
    if x.dim() != 4:
        return 63 * x.stride(1) < 2**31 if x.dim() == 3 else True
    return 63 * x.stride(1) + (x.shape[3] - 1) * x.stride(3) < 2**31


@overload
def fit(x: Tensor) -> Tensor: ...
@overload
def fit(x: None) -> None: ...
def fit(x: Tensor | None) -> Tensor | None:
    """Return x, or a contiguous copy if offsets inside a chunk exceed 32 bits."""
    return x if x is None or spans(x) else x.contiguous()


def dense(x: Tensor | None) -> Tensor | None:
    """Return x, a gate parameter or offsets, contiguous, so that [HV, K] and flat are the same."""
    return None if x is None else x.contiguous()


@triton.jit
def wait_for_previous():
    """Wait for all work of the previous kernel.

    A launch with `tuning.begins_early` may begin while its last programs still run.
    """
    if not INTERPRETED and cuda_capability_geq(9):
        gdc_wait()


@triton.jit
def let_next_begin():
    """Let the next kernel begin early, once all programs of this one have called this."""
    if not INTERPRETED and cuda_capability_geq(9):
        gdc_launch_dependents()


@triton.jit
def mark_ready(ready, i_t, begin, i_h, H):
    """Count this program's tile as written, for a scan that runs at the same time.

    `UnfinishedTile` has the protocol.

    Chunks before the scan began, those of a launch with `begin` 0, need no count.
    """
    if ready is not None:
        if begin > 0:
            tl.debug_barrier()
            tl.atomic_add(
                ready + (((i_t - begin) // FOLLOWED).to(tl.int64) * H + i_h), 1, sem="release"
            )


@triton.jit
def locate_chunk(cu_seqlens, i_t, N, T):
    """Return chunk number i_t as (row of the batch, first token, how many rows are tokens).

    The last is at most 0 for a number that no chunk has.
    """
    if cu_seqlens is not None:
        i_n = find_sequence(cu_seqlens, i_t, N)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        eos = tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        i_b = i_n * 0
        first = bos + (i_t - bos // CHUNK - i_n) * CHUNK
    else:
        count = tl.cdiv(T, CHUNK)
        i_b = i_t // count
        first = ((i_t - i_b * count) * CHUNK).to(tl.int64)
        eos = first * 0 + T
    return i_b.to(tl.int64), first, tl.minimum(eos - first, CHUNK).to(tl.int32)


@triton.jit
def prefetch(p_x):
    """Prefetch the cache lines at some addresses into L2, without waiting for them.

    It is for late loads of a program, which the compiler cannot start early for want of registers.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [p_x.to(tl.int64)],
            tl.int32,
            False,
            1,
        )


@triton.jit
def prefetch_rows(
    x, strides, i_b, i_h, first, n_rows, D: tl.constexpr, WHOLE: tl.constexpr = False
):
    """Prefetch the rows, at least one, of one head of a tensor of the caller.

    With WHOLE, from Hopper on, one thread asks for a whole row. Rows must then begin at multiples
    of 16 bytes and have no gaps.
    """
    if x is not None and D > 0:
        LINE: tl.constexpr = 1024 // x.dtype.element_ty.primitive_bitwidth
        BYTES: tl.constexpr = D * 128 // LINE
        p_x = x + (i_b * strides[0] + first * strides[1] + i_h.to(tl.int64) * strides[2])
        if WHOLE and not INTERPRETED and BYTES % 16 == 0 and cuda_capability_geq(9):
            row = tl.minimum(tl.arange(0, CHUNK), n_rows - 1)
            tl.inline_asm_elementwise(
                "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.lt.u32 first, "
                "thread, 64; "
                "@first cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
                "=r,l,r",
                [(p_x + row * strides[1]).to(tl.int64), BYTES],
                tl.int32,
                False,
                1,
            )
        else:
            LINES: tl.constexpr = triton.next_power_of_2((D + LINE - 1) // LINE)
            o = tl.arange(0, CHUNK * LINES)
            row, column = tl.minimum(o // LINES, n_rows - 1), tl.minimum(o % LINES * LINE, D - 1)
            prefetch(p_x + (row * strides[1] + column * strides[3]))


@triton.jit
def prefetch_tile(x, i_tile, SIZE: tl.constexpr, WHOLE: tl.constexpr = True):
    """Prefetch tile i_tile of a scratch tensor with tiles of SIZE elements.

    With WHOLE, from Hopper on, one thread asks for all of it.
    """
    if x is not None and SIZE > 0:
        LINE: tl.constexpr = 1024 // x.dtype.element_ty.primitive_bitwidth
        BYTES: tl.constexpr = SIZE * 128 // LINE
        if WHOLE and not INTERPRETED and BYTES % 16 == 0 and cuda_capability_geq(9):
            tl.inline_asm_elementwise(
                "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, "
                "thread, 0; "
                "@first cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
                "=r,l,r",
                [(x + i_tile * SIZE).to(tl.int64), BYTES],
                tl.int32,
                False,
                1,
            )
        else:
            prefetch(
                x
                + i_tile * SIZE
                + tl.minimum(
                    tl.arange(0, triton.next_power_of_2((SIZE + LINE - 1) // LINE)) * LINE, SIZE - 1
                )
            )


@triton.jit
def locate_sequence(cu_seqlens, i_n, N, T, TOKENS: tl.constexpr = CHUNK):
    """Return sequence i_n as (row of the batch, first token, tokens, number of its first chunk).

    Packed, sequence N is the tail past cu_seqlens[-1]. If TOKENS is the length of a run, the last
    is the number of its first run.
    """
    if cu_seqlens is not None:
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        eos = tl.load(cu_seqlens + i_n + 1, mask=i_n < N, other=0).to(tl.int64)
        eos = tl.where(i_n < N, eos, T)
        i_b = (i_n * 0).to(tl.int64)
        first = bos // TOKENS + i_n
    else:
        i_b = i_n.to(tl.int64)
        bos = i_b * 0
        eos = bos + T
        first = i_b * tl.cdiv(T, TOKENS)
    return i_b, bos, (eos - bos).to(tl.int32), first


@triton.jit
def head_at(x, strides, i_b, i_h, first):
    """Return a pointer to row `first` of one head of a [B, T, X, D] tensor."""
    return x + (i_b * strides[0] + first * strides[1] + i_h.to(tl.int64) * strides[2])


@triton.jit
def rows_at(x, strides, i_b, i_h, first, o_r, o_d):
    """Return pointers to rows o_r, from `first` on, of one head of a [B, T, X, D] tensor, and
    columns o_d: [rows, width].
    """
    return head_at(x, strides, i_b, i_h, first) + (
        (o_r * strides[1])[:, None] + (o_d * strides[3])[None, :]
    )


@triton.jit
def load_rows(
    x,
    strides,
    i_b,
    i_h,
    first,
    n_rows,
    o_d,
    D: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr = 64,
    other=0.0,
):
    """Load rows of one head as [ROWS, width] in their own dtype, `other` past n_rows and past D.

    A thread gets R consecutive rows, so that prefix sums and products over them need no exchange
    between threads. Addresses have two dimensions, with the rows permuted: row r G + g of the load
    is row g R + r of the result. So the compiler spreads threads over the columns and the G groups
    and keeps the R rows in registers (docs/kernels/hazards.md, "Coalescing order").
    """
    W: tl.constexpr = o_d.shape[0]
    G: tl.constexpr = ROWS // R
    m = tl.arange(0, ROWS)
    o_r = m % G * R + m // G
    p_x = x + (i_b * strides[0] + first * strides[1] + i_h.to(tl.int64) * strides[2])
    p_x = p_x + ((o_r * strides[1])[:, None] + (o_d * strides[3])[None, :])
    b_x = tl.load(p_x, mask=(o_r < n_rows)[:, None] & (o_d < D)[None, :], other=other)
    return tl.reshape(tl.permute(tl.reshape(b_x, (R, G, W)), (1, 0, 2)), (ROWS, W))


@triton.jit
def store_rows(x, i_tile, b_x, o_d, D: tl.constexpr, R: tl.constexpr, ROW: tl.constexpr = 0):
    """Write rows from ROW on, columns o_d, of tile i_tile of a [tiles, 64, D] scratch tensor, the
    way `load_rows` holds them.

    Every row is written, padding too, so that a reader needs no row mask.
    """
    W: tl.constexpr = o_d.shape[0]
    ROWS: tl.constexpr = b_x.shape[0]
    G: tl.constexpr = ROWS // R
    m = tl.arange(0, ROWS)
    o_r = ROW + m % G * R + m // G
    p_x = x + i_tile * (64 * D) + (o_r * D)[:, None] + o_d[None, :]
    b_x = tl.permute(tl.reshape(b_x.to(x.dtype.element_ty), (G, R, W)), (1, 0, 2))
    tl.store(p_x, tl.reshape(b_x, (ROWS, W)), mask=(o_d < D)[None, :])


@triton.jit
def load_column(x, strides, i_b, i_h, first, n_rows, o_r):
    """Load one number per row of a [B, T, HV] tensor as [64] fp32, zero from row n_rows on."""
    p_x = x + (i_b * strides[0] + first * strides[1] + i_h.to(tl.int64) * strides[2])
    return tl.load(p_x + o_r * strides[1], mask=o_r < n_rows, other=0.0).to(tl.float32)


@triton.jit
def widen(b_x):
    """Return a tile in fp32.

    Two entries of bf16 take two instructions on their bits; the compiler's conversion takes three.
    """
    if b_x.dtype == tl.bfloat16 and not INTERPRETED:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [b_x], tl.float32, True, 2
        )
    else:
        return b_x.to(tl.float32)


@triton.jit
def not_vectorised(b_x):
    """Return an fp32 tile whose entries the compiler does not join to vectors.

    docs/kernels/hazards.md, "Tiles as vectors", says where that matters.
    """
    if JOINED and not INTERPRETED:
        b_x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [b_x], tl.float32, True, 1)
    return b_x


@triton.jit
def halves(b_x):
    """Return the left and the right half of a tile, [rows, width / 2] each."""
    ROWS: tl.constexpr = b_x.shape[0]
    HALF_WIDTH: tl.constexpr = b_x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(b_x, (ROWS, 2, HALF_WIDTH)), (0, 2, 1)))


@triton.jit
def fold_products(b_x, b_y, b_sum=None, RIGHT_FIRST: tl.constexpr = False):
    """Return b_sum + x y [rows, 8], adding columns that are 8 apart one by one, from the left.

    With RIGHT_FIRST it adds them from the right. Without `b_sum` the sum starts at 0. In results of
    wgmma by 4 warps, a thread holds both of two columns that are 8 apart.
    """
    if b_x.shape[1] > 8:
        b_left, b_right = halves(b_x)
        b_y_left, b_y_right = halves(b_y)
        if RIGHT_FIRST:
            b_sum = fold_products(b_right, b_y_right, b_sum, RIGHT_FIRST)
            return fold_products(b_left, b_y_left, b_sum, RIGHT_FIRST)
        else:
            b_sum = fold_products(b_left, b_y_left, b_sum)
            return fold_products(b_right, b_y_right, b_sum)
    elif b_sum is None:
        return b_x * b_y
    else:
        return b_sum + b_x * b_y


@triton.jit
def narrow(b_x, TYPE: tl.constexpr):
    """Return an fp32 tile rounded to TYPE, bf16 two entries at once.

    The compiler rounds some tiles one by one, at a sixteenth of the rate of other instructions.
    """
    if TYPE == tl.bfloat16 and not INTERPRETED:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [b_x], tl.bfloat16, True, 2
        )
    else:
        return b_x.to(TYPE)


@triton.jit
def add_two(a, b, x, y):
    """Add two pairs, for two sums in one reduction."""
    return a + x, b + y


@triton.jit
def on_diagonal(b_x):
    """Return the diagonal of a square tile, [rows]."""
    o_r = tl.arange(0, b_x.shape[0])
    return tl.sum(tl.where(o_r[:, None] == o_r[None, :], b_x, 0.0), 1)


@triton.jit
def inverse_norm(b_x, L2NORM: tl.constexpr):
    """Return 1 / sqrt(sum of squares + 1e-6) of each row of [rows, width], or ones; [rows] fp32."""
    if L2NORM:
        b_x = b_x.to(tl.float32)
        return tl.rsqrt(tl.sum(b_x * b_x, 1) + 1e-6)
    else:
        return tl.full((b_x.shape[0],), 1.0, tl.float32)


@triton.jit
def store_tile(x, i_tile, b_x, o_r, o_d, D: tl.constexpr):
    """Write rows o_r and columns o_d of tile i_tile of a [tiles, 64, D] scratch tensor."""
    p_x = x + i_tile * (CHUNK * D) + o_r[:, None] * D + o_d[None, :]
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=(o_d < D)[None, :])


@triton.jit
def load_tile(x, i_tile, o_r, o_d, D: tl.constexpr):
    """Load rows o_r and columns o_d of tile i_tile of a [tiles, 64, D] tensor, zero past D."""
    p_x = x + i_tile * (CHUNK * D) + o_r[:, None] * D + o_d[None, :]
    return tl.load(p_x, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def load_lower(x, i_tile):
    """Load tile i_tile of a [tiles, 64, 64] scratch tensor of lower triangles.

    Blocks of 16 rows above the diagonal are not read; they are zero in the result.
    """
    o_r = tl.arange(0, CHUNK)
    p_x = x + i_tile * (CHUNK * CHUNK) + o_r[:, None] * CHUNK + o_r[None, :]
    return tl.load(p_x, mask=(o_r // 16)[:, None] >= (o_r // 16)[None, :], other=0.0)
