"""Convolve along time with a few taps per channel, forward, backward and on a pool of tails.

A program takes ROWS tokens of GROUPS runs next to each other and a block of channels, [GROUPS, BD].
It walks along the runs and keeps the last W inputs in registers. So each input comes from memory
once, apart from the W - 1 before each run, which are in cache, and there are no products of tiles
shifted against each other. Windows are tuples of W tiles; a loop over a tuple is unrolled.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.gate import sigmoid
from kda_ops.backends.triton.device.operands import strided
from kda_ops.backends.triton.device.sequence import find_sequence
from kda_ops.backends.triton.device.state import drop_null, is_resumed
from kda_ops.backends.triton.device.tile import locate_sequence
from kda_ops.backends.triton.plans.launch import launch, new, total
from kda_ops.convolution import Convolution


@triton.jit
def find_tail_slot(slots, i_n, N, NULL: tl.constexpr):
    """Return the slot of sequence i_n, at most -1 for what is past the last sequence.

    Slots up to NULL become negative too.
    """
    i_slot = i_n
    if slots is not None:
        i_slot = tl.load(slots + i_n, mask=i_n < N, other=-1).to(tl.int64)
        i_slot = drop_null(i_slot, NULL)
    return tl.where(i_n < N, i_slot, -1)


@triton.jit
def slot_to_read(resumed, i_n, i_slot):
    """Return the slot of the tail before sequence i_n, negative if the sequence begins anew."""
    if resumed is not None:
        i_slot = tl.where(is_resumed(resumed, i_n, i_slot >= 0), i_slot, -1)
    return i_slot


@triton.jit
def locate_run(cu_seqlens, slots, i_t, N, T, TOKENS: tl.constexpr, NULL: tl.constexpr = -1):
    """Return where program i_t is, as (slot, row of the batch, token before which nothing is, first
    token counted from there, tokens of the sequence, the sequence).

    Packed, what is past the last sequence counts as sequence N.
    """
    if cu_seqlens is not None:
        i_n = find_sequence(cu_seqlens, i_t, N + 1, TOKENS)
    else:
        i_n = i_t // tl.cdiv(T, TOKENS)
    i_b, bos, n_tokens, first_run = locate_sequence(cu_seqlens, i_n, N, T, TOKENS)
    first = ((i_t - first_run) * TOKENS).to(tl.int32)
    return find_tail_slot(slots, i_n, N, NULL), i_b, bos, first, n_tokens, i_n


@triton.jit
def at(x, strides, i_b, t, o_d):
    """Return pointers to channels o_d of token t of a [B, T, D] tensor, 64-bit offsets."""
    return x + (i_b * strides[0] + t * strides[1]) + o_d.to(tl.int64) * strides[2]


@triton.jit
def load_taps(weight, o_d, D: tl.constexpr, W: tl.constexpr):
    """Return the W columns of weight [D, W], each [1, BD] fp32."""
    p_w = weight.pointer + o_d.to(tl.int64) * weight.strides[0]
    taps = (tl.load(p_w, mask=o_d < D, other=0.0).to(tl.float32),)
    for i in tl.static_range(1, W):
        b_w = tl.load(p_w + i * weight.strides[1], mask=o_d < D, other=0.0)
        taps = taps + (b_w.to(tl.float32),)  # type: ignore[assignment]
    return taps


@triton.jit
def load_channel_bias(bias, o_d, D: tl.constexpr):
    """Return the bias of channels o_d in fp32, zero without one."""
    b_bias = tl.zeros(o_d.shape, tl.float32)
    if bias is not None:
        b_bias += tl.load(bias + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    return b_bias


@triton.jit
def load_past(x, p_x, tail, i_slot, o_t, n_tokens, o_d, D: tl.constexpr, W: tl.constexpr):
    """Return the window before rows o_t: W tiles, of which the first is never used.

    The others are the inputs of the last W - 1 tokens. Inputs before the first token of a sequence
    are those of its tail, or zero. They are zero before an empty sequence, which multiplies none:
    in backward, zero times a NaN of its tail would reach the gradient of the weights.
    """
    o_w = tl.zeros(o_t.shape, tl.int32) + 0 * o_d
    window = (tl.zeros(o_w.shape, tl.float32),)
    for back in tl.static_range(W - 1, 0, -1):
        m_x = (o_t >= back) & (o_t - back < n_tokens) & (o_d < D)
        b_x = tl.load(p_x - back * x.strides[1], mask=m_x, other=0.0).to(tl.float32)
        if tail.pointer is not None:
            row = o_t + (W - 1 - back)
            m_t = (o_t < back) & (n_tokens > 0) & (i_slot >= 0) & (o_d < D)
            b_x += tl.load(
                at(tail.pointer, tail.strides, i_slot.to(tl.int64), row.to(tl.int64), o_d),
                mask=m_t,
                other=0.0,
            ).to(tl.float32)
        window = window + (b_x,)  # type: ignore[assignment]
    return window


@triton.jit
def weigh(window, taps, b_bias, W: tl.constexpr):
    """Return bias + sum_i taps[i] window[i], in this order."""
    b_z = window[0] * taps[0]
    for i in tl.static_range(1, W):
        b_z += window[i] * taps[i]
    return b_z + b_bias


@triton.jit
def next_tail(x, i_b, bos, tail, i_slot, n_tokens, final, o_d, D: tl.constexpr, W: tl.constexpr):
    """Return the last W - 1 inputs of a sequence as a tuple, oldest first, in the dtype of `final`.

    Of a sequence with fewer tokens, the first ones are the last of its tail. They do not pass
    through x's dtype, which may be narrower than that of a pool.
    """
    TYPE: tl.constexpr = final.pointer.dtype.element_ty
    rows = ()
    for j in tl.static_range(W - 1):
        t = n_tokens - (W - 1) + j
        m_x = (t >= 0) & (o_d < D)
        b_x = tl.load(at(x.pointer, x.strides, i_b, bos + t, o_d), mask=m_x, other=0.0).to(TYPE)
        if tail.pointer is not None:
            row = (t + (W - 1)).to(tl.int64)
            m_t = (t < 0) & (i_slot >= 0) & (o_d < D)
            p_t = at(tail.pointer, tail.strides, i_slot.to(tl.int64), row, o_d)
            b_t = tl.load(p_t, mask=m_t, other=0.0).to(TYPE)
            b_x = tl.where(t < 0, b_t, b_x)
        rows = rows + (b_x,)  # type: ignore[assignment]
    return rows


@triton.jit
def store_tail(final, i_slot, rows, o_d, D: tl.constexpr, W: tl.constexpr):
    """Write a tail to its slot, unless that is negative. All rows were read before."""
    tl.debug_barrier()  # another thread may read what this one writes
    for j in tl.static_range(W - 1):
        p_f = at(final.pointer, final.strides, i_slot.to(tl.int64), j, o_d)
        tl.store(p_f, rows[j], mask=(i_slot >= 0) & (o_d < D))


@triton.jit(do_not_specialize=["T", "N"], do_not_specialize_on_alignment=["resumed"])
def convolve(
    x,
    weight,
    bias,
    tail,
    slots,
    cu_seqlens,
    y,
    final,
    T,
    N,
    resumed,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    FAST: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUPS: tl.constexpr,
    BD: tl.constexpr,
    NULL: tl.constexpr,
):
    """Write y [B, T, D], and `final` if it is given, for whole sequences of one program::

        z_t = bias + sum_i weight[:, i] x_{t - W + 1 + i};   y = silu(z) or z

    Sums are fp32 and begin with the oldest input. `final` may be `tail`.
    """
    tl.static_assert(ROWS % UNROLL == 0)
    NB: tl.constexpr = (D + BD - 1) // BD
    TOKENS: tl.constexpr = ROWS * GROUPS
    i_d, i_t = tl.program_id(0) % NB, tl.program_id(0) // NB
    i_slot, i_b, bos, first, n_tokens, i_n = locate_run(cu_seqlens, slots, i_t, N, T, TOKENS, NULL)
    i_from = slot_to_read(resumed, i_n, i_slot)
    n_read = tl.where(i_slot >= 0, n_tokens, 0)
    o_c = i_d * BD + tl.arange(0, BD)
    o_d = o_c[None, :]
    o_t = (first + tl.arange(0, GROUPS) * ROWS)[:, None]
    taps, b_bias = load_taps(weight, o_d, D, W), load_channel_bias(bias, o_d, D)
    p_x = at(x.pointer, x.strides, i_b, bos + o_t, o_d)
    p_y = y + (i_b * T + bos + o_t) * D + o_d
    window = load_past(x, p_x, tail, i_from, o_t, n_read, o_d, D, W)
    for _ in range(ROWS // UNROLL):
        for r in tl.static_range(UNROLL):
            m_x = (o_t + r < n_read) & (o_d < D)
            b_x = tl.load(p_x + r * x.strides[1], mask=m_x, other=0.0).to(tl.float32)
            window = window[1:] + (b_x,)
            b_y = weigh(window, taps, b_bias, W)
            if SILU:
                b_y *= sigmoid(b_y, FAST)
            b_y = tl.where(i_slot >= 0, b_y, 0.0).to(y.dtype.element_ty)
            tl.store(p_y + r * D, b_y, mask=(o_t + r < n_tokens) & (o_d < D))
        o_t += UNROLL
        p_x += UNROLL * x.strides[1]
        p_y += UNROLL * D
    if final.pointer is not None:
        rows = next_tail(x, i_b, bos, tail, i_from, n_read, final, o_c, D, W)
        store_tail(final, i_slot, rows, o_c, D, W)


@triton.jit(do_not_specialize=["T", "N"], do_not_specialize_on_alignment=["resumed"])
def write_tails(
    x,
    tail,
    slots,
    cu_seqlens,
    final,
    T,
    N,
    resumed,
    D: tl.constexpr,
    W: tl.constexpr,
    BD: tl.constexpr,
    NULL: tl.constexpr,
):
    """Write the last W - 1 inputs of each sequence to `final`, which may be `tail`."""
    NB: tl.constexpr = (D + BD - 1) // BD
    i_n = tl.program_id(0) // NB
    i_slot = find_tail_slot(slots, i_n, N, NULL)
    i_b, bos, n_tokens, _ = locate_sequence(cu_seqlens, i_n, N, T)
    o_c = tl.program_id(0) % NB * BD + tl.arange(0, BD)
    n_read = tl.where(i_slot >= 0, n_tokens, 0)
    i_from = slot_to_read(resumed, i_n, i_slot)
    rows = next_tail(x, i_b, bos, tail, i_from, n_read, final, o_c, D, W)
    store_tail(final, i_slot, rows, o_c, D, W)


@triton.jit
def gradient_of_sum(b_dy, window, taps, b_bias, W: tl.constexpr, SILU: tl.constexpr, FAST):
    """Return dz = dy silu'(z), with z from the window."""
    b_dz = b_dy
    if SILU:
        b_z = weigh(window, taps, b_bias, W)
        b_s = sigmoid(b_z, FAST)
        b_dz = b_dy * (b_s * (1.0 + b_z * (1.0 - b_s)))
    return b_dz


@triton.jit
def add_products(sums, b_dz, window, W: tl.constexpr):
    """Return sums[i] + dz window[i]."""
    found = (sums[0] + b_dz * window[0],)
    for i in tl.static_range(1, W):
        found = found + (sums[i] + b_dz * window[i],)  # type: ignore[assignment]
    return found


@triton.jit
def weigh_back(gradients, taps, W: tl.constexpr):
    """Return dx_t = sum_i taps[i] dz_{t + W - 1 - i}, of W gradients from t on."""
    b_dx = gradients[0] * taps[W - 1]
    for back in tl.static_range(1, W):
        b_dx += gradients[back] * taps[W - 1 - back]
    return b_dx


@triton.jit
def take_row(
    x,
    p_x,
    dy,
    p_dy,
    r,
    o_t,
    n_read,
    o_d,
    window,
    taps,
    b_bias,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    FAST: tl.constexpr,
):
    """Move the window to row r after p_x, and return it with dz of that row."""
    m_x = (o_t + r < n_read) & (o_d < D)
    b_x = tl.load(p_x + r * x.strides[1], mask=m_x, other=0.0).to(tl.float32)
    b_dy = tl.zeros(b_x.shape, tl.float32)
    if dy.pointer is not None:
        b_dy = tl.load(p_dy + r * dy.strides[1], mask=m_x, other=0.0).to(tl.float32)
    window = window[1:] + (b_x,)
    return window, gradient_of_sum(b_dy, window, taps, b_bias, W, SILU, FAST)


@triton.jit
def load_final(dfinal, i_n, o_t, n_tokens, o_d, m_dx, b_zero, W: tl.constexpr):
    """Return the gradient of the final tail for tokens o_t - W + 1, zero for those before it."""
    b_f = b_zero
    if dfinal.pointer is not None:
        row = o_t - n_tokens  # of the W - 1 of the final tail
        p_f = at(dfinal.pointer, dfinal.strides, i_n.to(tl.int64), row.to(tl.int64), o_d)
        m_f = m_dx & (row >= 0) & (row < W - 1)
        b_f = tl.load(p_f, mask=m_f, other=0.0).to(tl.float32)
    return b_f


@triton.jit(do_not_specialize=["T", "N"])
def convolve_gradient(
    dy,
    dfinal,
    x,
    weight,
    bias,
    tail,
    cu_seqlens,
    dx,
    dweight,
    dbias,
    T,
    N,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    FAST: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    GROUPS: tl.constexpr,
    BD: tl.constexpr,
):
    """Write dx [B, T, D], and this program's shares of dweight and dbias::

        dz_t = dy_t silu'(z_t);               dx_t = sum_i weight[:, i] dz_{t + W - 1 - i}
        dweight[:, i] = sum_t dz_t x_{t - W + 1 + i};      dbias = sum_t dz_t

    z is computed again. A run reads W - 1 tokens more than it writes. dx of the last W - 1 tokens
    of a sequence has the gradient of the final tail added. Shares are [programs, D, W] and
    [programs, D], fp32, and are added afterwards in a fixed order.
    """
    tl.static_assert(ROWS % UNROLL == 0)
    NB: tl.constexpr = (D + BD - 1) // BD
    TOKENS: tl.constexpr = ROWS * GROUPS
    PAST: tl.constexpr = W - 1
    i_d, i_t = tl.program_id(0) % NB, tl.program_id(0) // NB
    i_slot, i_b, bos, first, n_tokens, _ = locate_run(cu_seqlens, None, i_t, N, T, TOKENS)
    n_read = tl.where(i_slot >= 0, n_tokens, 0)
    o_c = i_d * BD + tl.arange(0, BD)
    o_d = o_c[None, :]
    o_t = (first + tl.arange(0, GROUPS) * ROWS)[:, None]
    taps, b_bias = load_taps(weight, o_d, D, W), load_channel_bias(bias, o_d, D)
    p_x = at(x.pointer, x.strides, i_b, bos + o_t, o_d)
    p_dx = dx + (i_b * T + bos + o_t) * D + o_d
    window = load_past(x, p_x, tail, i_slot, o_t, n_read, o_d, D, W)
    b_zero = window[0]
    sums, gradients, b_bias_sum = (b_zero,), (b_zero,), b_zero
    for _ in tl.static_range(W - 1):
        sums, gradients = sums + (b_zero,), gradients + (b_zero,)  # type: ignore[assignment]
    p_dy = dy.pointer
    if dy.pointer is not None:
        p_dy = at(dy.pointer, dy.strides, i_b, bos + o_t, o_d)
    for step in range(ROWS // UNROLL):
        for r in tl.static_range(UNROLL):
            window, b_dz = take_row(
                x, p_x, dy, p_dy, r, o_t, n_read, o_d, window, taps, b_bias, D, W, SILU, FAST
            )
            sums, b_bias_sum = add_products(sums, b_dz, window, W), b_bias_sum + b_dz
            gradients = gradients[1:] + (b_dz,)
            m_dx = (step * UNROLL + r >= PAST) & (o_t + (r - PAST) < n_tokens) & (o_d < D)
            b_dx = weigh_back(gradients, taps, W)
            b_dx += load_final(dfinal, i_slot, o_t + r, n_read, o_d, m_dx, b_zero, W)
            tl.store(p_dx + (r - PAST) * D, b_dx.to(dx.dtype.element_ty), mask=m_dx)
        o_t += UNROLL
        p_x += UNROLL * x.strides[1]
        p_dx += UNROLL * D
        if dy.pointer is not None:
            p_dy += UNROLL * dy.strides[1]
    for r in tl.static_range(PAST):  # of the next run, for the last rows of this one
        window, b_dz = take_row(
            x, p_x, dy, p_dy, r, o_t, n_read, o_d, window, taps, b_bias, D, W, SILU, FAST
        )
        gradients = gradients[1:] + (b_dz,)
        # with more than ROWS taps before the last, the first of these rows belong to earlier runs
        m_dx = (ROWS + r >= PAST) & (o_t + (r - PAST) < n_tokens) & (o_d < D)
        b_dx = weigh_back(gradients, taps, W)
        b_dx += load_final(dfinal, i_slot, o_t + r, n_read, o_d, m_dx, b_zero, W)
        tl.store(p_dx + (r - PAST) * D, b_dx.to(dx.dtype.element_ty), mask=m_dx)
    share = i_t.to(tl.int64) * D
    if dweight is not None:
        for i in tl.static_range(W):
            p_w = dweight + (share + o_c) * W + i
            tl.store(p_w, tl.sum(sums[i], 0), mask=o_c < D)
    if dbias is not None:
        tl.store(dbias + share + o_c, tl.sum(b_bias_sum, 0), mask=o_c < D)


@triton.jit(do_not_specialize=["T", "N"])
def tail_gradient(
    dy,
    dfinal,
    x,
    weight,
    bias,
    tail,
    cu_seqlens,
    dtail,
    T,
    N,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    FAST: tl.constexpr,
    BD: tl.constexpr,
):
    """Write the gradient of each sequence's initial tail, [N, W - 1, D]::

        dtail_j = sum_{s <= j} weight[:, j - s] dz_s

    Rows that are in the final tail too, of a short sequence, have its gradient added.
    """
    NB: tl.constexpr = (D + BD - 1) // BD
    PAST: tl.constexpr = W - 1
    i_n = tl.program_id(0) // NB
    i_b, bos, n_tokens, _ = locate_sequence(cu_seqlens, i_n, N, T)
    o_d = (tl.program_id(0) % NB * BD + tl.arange(0, BD))[None, :]
    o_t = tl.zeros((1, 1), tl.int32)
    taps, b_bias = load_taps(weight, o_d, D, W), load_channel_bias(bias, o_d, D)
    p_x = at(x.pointer, x.strides, i_b, bos + o_t, o_d)
    window = load_past(x, p_x, tail, i_n, o_t, n_tokens, o_d, D, W)
    b_zero = window[0]
    gradients = (b_zero,)
    for _ in tl.static_range(W - 1):
        gradients = gradients + (b_zero,)  # type: ignore[assignment]
    p_dy = dy.pointer
    if dy.pointer is not None:
        p_dy = at(dy.pointer, dy.strides, i_b, bos + o_t, o_d)
    for j in tl.static_range(PAST):
        window, b_dz = take_row(
            x, p_x, dy, p_dy, j, o_t, n_tokens, o_d, window, taps, b_bias, D, W, SILU, FAST
        )
        # the newest first: gradients[i] is dz_{j - i}
        gradients = (b_dz,) + gradients[:PAST]
        b_dtail = gradients[0] * taps[0]
        for i in tl.static_range(1, j + 1):
            b_dtail += gradients[i] * taps[i]
        if dfinal.pointer is not None:
            row = j - n_tokens
            m_f = (row >= 0) & (o_d < D)
            p_f = at(dfinal.pointer, dfinal.strides, i_n.to(tl.int64), row.to(tl.int64), o_d)
            b_dtail += tl.load(p_f, mask=m_f, other=0.0).to(tl.float32)
        p_t = dtail + (i_n.to(tl.int64) * PAST + j) * D + o_d
        tl.store(p_t, b_dtail.to(dtail.dtype.element_ty), mask=o_d < D)


REGISTERS = 64  # of a thread, for the windows, weights and sums of a program


def _block(kernel: str, p: Convolution, tiles: int) -> dict[str, Any]:
    """Return the channels of a program, and the launch options.

    A thread has fewer channels where `tiles` times W taps would not fit its registers, but one at
    least.
    """
    o = _options(kernel, p, tuning.Channels)
    wide = o.channels // 32
    while wide > 1 and wide * tiles * p.W > REGISTERS:
        wide //= 2
    return dict(BD=min(32 * wide, max(32, triton.next_power_of_2(p.D))), **o.launch)


def _cut(kernel: str, p: Convolution, tiles: int) -> dict[str, Any]:
    """Return how tokens are cut among programs too: a run has ROWS, a program GROUPS of runs."""
    o = _options(kernel, p, tuning.Runs)
    return dict(ROWS=o.rows, UNROLL=o.unroll, GROUPS=o.groups, **_block(kernel, p, tiles))


def _options(kernel: str, p: Convolution, kind: type[tuning.Options]) -> tuning.Options:
    widths = tuning.Widths(p.x.dtype, p.x.device, min(p.W, tuning.ALL), p.D)
    return tuning.choose(kernel, widths, kind)


def _programs(p: Convolution, cut: dict[str, Any]) -> int:
    """Return the runs of a call: exact for dense rows, an upper bound for packed ones."""
    tokens = cut["ROWS"] * cut["GROUPS"]
    if p.cu_seqlens is None:
        return p.B * triton.cdiv(p.T, tokens)
    return p.T // tokens + p.N + 1


def _given(p: Convolution) -> dict:
    """Return the arguments that the kernels share."""
    return dict(
        x=strided(p.x),
        tail=strided(p.tail if p.W > 1 else None),
        cu_seqlens=p.cu_seqlens,
        T=p.T,
        N=p.N,
        D=p.D,
        W=p.W,
    )


def _parameters(p: Convolution) -> dict:
    bias = None if p.bias is None else p.bias.contiguous()
    fast = p.x.element_size() == 2
    return dict(weight=strided(p.weight), bias=bias, SILU=p.silu, FAST=fast)


def _run(p: Convolution, final: Tensor | None) -> Tensor:
    """Launch the forward; `final` [N or slots, W - 1, D] gets the tails."""
    y = new(p.x, "y", p.x.shape)
    final = final if p.W > 1 else None
    if not p.D:
        return y
    dense = p.cu_seqlens is None
    one = dense and bool(p.T == 1)
    cut = _cut("convolve" + "_one" * one, p, 2)
    # the program that has all of a sequence writes its tail too
    whole = dense and bool(0 < p.T) and bool(p.T <= cut["ROWS"] * cut["GROUPS"])
    launch(
        convolve,
        _programs(p, cut) * triton.cdiv(p.D, cut["BD"]),
        p.x.device,
        **_given(p),
        **_parameters(p),
        slots=p.tail_indices,
        resumed=p.has_initial_state,
        y=y,
        final=strided(final if whole else None),
        NULL=p.null_slot,
        **cut,
    )
    if final is not None and not whole:
        block = _block("write_tails", p, 2)
        launch(
            write_tails,
            p.N * triton.cdiv(p.D, block["BD"]),
            p.x.device,
            **_given(p),
            slots=p.tail_indices,
            resumed=p.has_initial_state,
            final=strided(final),
            NULL=p.null_slot,
            **block,
        )
    return y


def short_conv(p: Convolution) -> tuple[Tensor, Tensor | None]:
    """Return y and the final tail; see `kda_ops.stages.Backend.short_conv`."""
    final = None
    if p.output_final_tail:
        final = new(p.x, "final_tail", (p.N, p.W - 1, p.D))
    return _run(p, final), final


def short_conv_in_place(p: Convolution) -> Tensor:
    """Return y and write the pool; see `kda_ops.stages.Backend.short_conv_in_place`."""
    return _run(p, p.tail)


def short_conv_backward(
    p: Convolution, dy: Tensor | None, dfinal_tail: Tensor | None, need: frozenset[str]
) -> tuple[Tensor | None, ...]:
    """Return the gradients; see `kda_ops.stages.Backend.short_conv_backward`."""
    cut = _cut("convolve_gradient", p, 4)
    programs = _programs(p, cut)
    dx = new(p.x, "dx", p.x.shape)
    dweight, dbias = p.weight if "weight" in need else None, p.bias if "bias" in need else None
    weight_parts, bias_parts = (
        None if x is None else new(p.x, name, (programs, *x.shape), p.sum_dtype)
        for name, x in (("dweight_parts", dweight), ("dbias_parts", dbias))
    )
    given = _given(p) | _parameters(p)
    given |= dict(dy=strided(dy), dfinal=strided(dfinal_tail if p.W > 1 else None))
    if p.D:
        launch(
            convolve_gradient,
            programs * triton.cdiv(p.D, cut["BD"]),
            p.x.device,
            **given,
            dx=dx,
            dweight=weight_parts,
            dbias=bias_parts,
            **cut,
        )
    dtail = None
    if "initial_tail" in need and p.tail is not None:
        dtail = new(p.tail, "dinitial_tail", (p.N, p.W - 1, p.D))
        if p.W > 1 and p.D:
            block = _block("tail_gradient", p, 4)
            launch(
                tail_gradient,
                p.N * triton.cdiv(p.D, block["BD"]),
                p.x.device,
                **given,
                dtail=dtail,
                **block,
            )
    sums = total(weight_parts, dweight), total(bias_parts, dbias)
    return dx if "x" in need else None, *sums, dtail
