"""Compute the short convolution and its gradients in plain torch, for the CPU backends.

The inputs of all sequences lie in one tensor, each sequence behind its tail of W - 1 rows. So the
inputs that a tap multiplies are one slice of it, without masks. The equations are those of
`kda_ops.stages.Backend.short_conv`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_ops.backends.activations import activate, slope
from kda_ops.convolution import Convolution


class _Rows:
    """The rows of tails and tokens on one axis, and where each lies: [B, rows, D].

    `token`, `tail` and `end` are the rows of tokens, tails and final tails: indices into axis 1 of
    one packed row. In dense rows these are slices, and `token` is None. `live` is true for tokens
    of sequences. Tokens past the last sequence are zero. They lie at the end, behind a tail of
    their own. Nothing is read on the host.
    """

    def __init__(self, p: Convolution, tail: Tensor | None):
        self.p, self.past = p, p.W - 1
        self.token: Tensor | None = None
        if p.cu_seqlens is not None:
            offsets, device = p.cu_seqlens.long(), p.x.device
            past, token = torch.arange(self.past, device=device), torch.arange(p.T, device=device)
            sequence = torch.searchsorted(offsets, token, right=True) - 1
            begin = offsets[:-1] + torch.arange(p.N, device=device) * self.past  # of each tail
            self.live = (token < offsets[-1])[:, None]
            self.token = token + self.past * (1 + sequence)
            self.tail = (begin[:, None] + past).flatten()
            self.end = ((begin + offsets.diff())[:, None] + past).flatten()
        self.x = self.join(p.x.to(p.sum_dtype), None if tail is None else tail.to(p.sum_dtype))

    def join(self, x: Tensor, tail: Tensor | None) -> Tensor:
        """Return x [B, T, D] and tails [N, W - 1, D], zero if None, on one axis."""
        p = self.p
        if self.token is None:
            if tail is None:  # a pad needs no memory in compiled code
                return F.pad(x, (0, 0, self.past, 0))
            return torch.cat([tail, x], 1)
        rows = x.new_zeros(1, p.T + (p.N + 1) * self.past, p.D)
        rows = rows.index_copy(1, self.token, torch.where(self.live, x, 0.0))
        return rows if tail is None else rows.index_copy(1, self.tail, tail.flatten(0, 1)[None])

    def tokens(self, rows: Tensor) -> Tensor:
        """Return the rows of tokens [B, T, D]; those past the last sequence are zero."""
        if self.token is None:
            return rows[:, self.past :]
        return torch.where(self.live, rows.index_select(1, self.token), 0.0)

    def window(self, i: int) -> Tensor:
        """Return the row that tap i of each token multiplies, [B, T, D]."""
        if self.token is None:
            return self.x[:, i : i + self.p.T]
        return self.x.index_select(1, self.token - self.past + i)

    def of_tokens(self, z: Tensor) -> Tensor:
        """Return what `_sums` gives for each token, [B, T, D].

        The other rows of z mix two sequences. They are left out before anything is multiplied with
        them, because zero times a NaN of one sequence would be a NaN of the other.
        """
        return z if self.token is None else z.index_select(1, self.token - self.past)

    def tails(self, rows: Tensor, end: bool) -> Tensor:
        """Return the rows of the tails, or with `end` of the final tails, [N, W - 1, D]."""
        if self.token is None:
            return rows[:, self.p.T :] if end else rows[:, : self.past]
        place = self.end if end else self.tail
        return rows[0, place].reshape(self.p.N, self.past, self.p.D)

    def add_end(self, rows: Tensor, dfinal: Tensor) -> Tensor:
        """Return the rows, with the gradients of final tails [N, W - 1, D] added to them."""
        if self.token is None:
            return rows + F.pad(dfinal, (0, 0, self.p.T, 0))
        # the final tails of two sequences share no row
        return rows.index_add(1, self.end, dfinal.flatten(0, 1)[None])


def _sums(p: Convolution, rows: Tensor) -> Tensor:
    """Return z, one row per row of `rows` that has W - 1 before it."""
    weight, count = p.weight.to(p.sum_dtype), rows.shape[1] - p.W + 1
    z = rows[:, :count] * weight[:, 0]
    for i in range(1, p.W):
        z = z + rows[:, i : i + count] * weight[:, i]
    return z if p.bias is None else z + p.bias.to(p.sum_dtype)


def _back(p: Convolution, dz: Tensor) -> Tensor:
    """Return the gradient of the rows: W - 1 more rows than dz has."""
    weight, past = p.weight.to(p.sum_dtype), p.W - 1
    padded, count = F.pad(dz, (0, 0, past, past)), dz.shape[1] + past
    drows = padded[:, past : past + count] * weight[:, 0]
    for i in range(1, p.W):
        drows = drows + padded[:, past - i : past - i + count] * weight[:, i]
    return drows


def short_conv(p: Convolution) -> tuple[Tensor, Tensor | None]:
    """Return y and the final tail; see `kda_ops.stages.Backend.short_conv`."""
    rows = _Rows(p, p.tail)
    y = _output(p, rows)
    return y, _final_tail(p, rows, p.tail, p.x.dtype) if p.output_final_tail else None


def _output(p: Convolution, rows: _Rows) -> Tensor:
    z = rows.of_tokens(_sums(p, rows.x))
    y = activate(z, True) if p.silu else z
    if rows.token is not None:
        y = torch.where(rows.live, y, 0.0)
    return y.to(p.x.dtype).contiguous()


def _final_tail(p: Convolution, rows: _Rows, before: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the last W - 1 inputs of each sequence in `dtype`, rounded once.

    `before` is the tail that the sequences begin with, in its own dtype.
    """
    x = rows.x
    if before is not None and before.dtype is torch.float64 and x.dtype is not torch.float64:
        x = rows.join(p.x.double(), before)  # sums of float32 have rounded it
    return rows.tails(x, end=True).to(dtype).contiguous()


def _resumed(p: Convolution, tails: Tensor) -> Tensor:
    """Return the tails, zero for sequences that begin anew."""
    resumed = p.has_initial_state
    return tails if resumed is None else torch.where(resumed[:, None, None], tails, 0.0)


def short_conv_in_place(p: Convolution) -> Tensor:
    """Return y and write the pool; see `kda_ops.stages.Backend.short_conv_in_place`."""
    pool = p.tail
    assert pool is not None  # as the pass has checked
    if p.tail_indices is None:
        before = _resumed(p, pool)
        rows = _Rows(p, before)
        y = _output(p, rows)
        pool.copy_(_final_tail(p, rows, before, pool.dtype))
        return y
    slots = p.slots(p.tail_indices)
    live = slots >= 0
    before = pool[slots.long().clamp(min=0)] if len(pool) else pool.new_zeros(p.N, p.W - 1, p.D)
    before = _resumed(p, torch.where(live[:, None, None], before, 0.0))
    rows = _Rows(p, before)
    y = _output(p, rows)
    pool[slots[live].long()] = _final_tail(p, rows, before, pool.dtype)[live]
    if p.cu_seqlens is None:
        return torch.where(live[:, None, None], y, 0.0)
    each = torch.repeat_interleave(live, p.cu_seqlens.diff())
    y[0, : len(each)].masked_fill_(~each[:, None], 0.0)
    return y


def short_conv_backward(
    p: Convolution, dy: Tensor | None, dfinal_tail: Tensor | None, need: frozenset[str]
) -> tuple[Tensor | None, ...]:
    """Return the gradients; see `kda_ops.stages.Backend.short_conv_backward`."""
    rows = _Rows(p, p.tail)
    drows, dweight, dbias = torch.zeros_like(rows.x), None, None
    if dy is not None:
        dz = dy.to(p.sum_dtype)
        if p.silu:
            dz = dz * slope(rows.of_tokens(_sums(p, rows.x)), True)
        if rows.token is not None:
            dz = torch.where(rows.live, dz, 0.0)
        # explicit strides make Inductor write dz to memory instead of computing it for each tap
        dz = dz.contiguous().as_strided(dz.shape, (p.T * p.D, p.D, 1))
        drows = _back(p, dz if rows.token is None else rows.join(dz, None)[:, p.W - 1 :])
        if "weight" in need:
            taps = [(dz * rows.window(i)).sum((0, 1)) for i in range(p.W)]
            dweight = torch.stack(taps, -1).to(p.weight.dtype)
        if "bias" in need and p.bias is not None:
            dbias = dz.sum((0, 1)).to(p.bias.dtype)
    elif "weight" in need:
        dweight = torch.zeros_like(p.weight)
    if dy is None and "bias" in need and p.bias is not None:
        dbias = torch.zeros_like(p.bias)
    if dfinal_tail is not None:
        drows = rows.add_end(drows, dfinal_tail.to(p.sum_dtype))
    dx = rows.tokens(drows).to(p.x.dtype) if "x" in need else None
    dtail = None
    if "initial_tail" in need and p.tail is not None:
        dtail = rows.tails(drows, end=False).to(p.tail.dtype)
    return dx, dweight, dbias, dtail
