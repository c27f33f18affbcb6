"""Between the caller's arrays and the kernels': whole chunks, heads in the lanes, padded widths.

[B, T, heads, W] is [B, rows, heads * W'] for a kernel, which is what a projection writes. From [B,
T, heads, W] in memory it is a copy on a TPU. A sequence that is packed begins a chunk of its own,
so its rows are gathered.
"""

from __future__ import annotations

import jax.numpy as jnp

from kda_ops.jax.plan import FIRST, LAST, NEXT, BlockPlan
from kda_ops.problem import CHUNK


def _flags(first, last):
    """Return the flags of the chunk table, int32.

    Where both values of `jnp.where` are Python's, they have 64 bits if x64 is on. Kernels take no
    such table, and XLA for CPUs ends the process on the or of two of them.
    """
    zero = jnp.int32(0)
    return jnp.where(first, jnp.int32(FIRST), zero) | jnp.where(last, jnp.int32(LAST), zero)


class Rows:
    """The rows of a plan: which token each holds, the chunk table, and the way there and back."""

    def __init__(self, plan: BlockPlan, T: int, cu_seqlens):
        self.plan, self.T = plan, T
        chunk = jnp.arange(plan.NT, dtype=jnp.int32)
        if not plan.packed:
            self.table = _flags(chunk == 0, chunk == plan.NT - 1)
            return
        offsets = cu_seqlens.astype(jnp.int32)
        self.lengths = offsets[1:] - offsets[:-1]
        counts = -(-self.lengths // CHUNK)
        ends = jnp.cumsum(counts, dtype=jnp.int32)
        starts, used = ends - counts, ends[-1]
        # What follows the last chunk repeats its sequence, with rows of zeros that pass the state.
        at = jnp.minimum(chunk, used - 1)
        sequence = jnp.clip(jnp.searchsorted(ends, at, side="right"), 0, plan.N - 1)
        sequence = sequence.astype(jnp.int32)
        first = (chunk == starts[sequence]) | (chunk == 0)
        last = chunk >= ends[sequence] - 1
        self.table = (sequence << NEXT) | _flags(first, last)
        row = jnp.arange(CHUNK, dtype=jnp.int32)
        token = ((chunk - starts[sequence]) * CHUNK + offsets[sequence])[:, None] + row
        live = (chunk < used)[:, None] & (token < offsets[sequence + 1][:, None])
        self.token = jnp.where(live, token, T).reshape(-1)  # T is out of range: a row of zeros
        t = jnp.arange(T, dtype=jnp.int32)
        of = jnp.clip(jnp.searchsorted(offsets[1:], t, side="right"), 0, plan.N - 1)
        self.live = t < offsets[-1]
        row = starts[of] * CHUNK + t - offsets[of]
        self.row = jnp.where(self.live, row, plan.rows).astype(jnp.int32)

    def split(self, x, width: int = 0):
        """[B, T, heads, W] as [B, rows, heads * width], or [B, T, heads] as [B, rows, heads]."""
        if width and x.shape[3] != width:
            x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - x.shape[3])))
        x = x.reshape(*x.shape[:2], -1)
        if self.plan.packed:
            return jnp.take(x, self.token, axis=1, mode="fill", fill_value=0)
        return jnp.pad(x, ((0, 0), (0, self.plan.rows - self.T), (0, 0)))

    def join(self, x, width: int = 0):
        """Undo `split`: [B, T, heads, width], or [B, T, heads] without a width."""
        if self.plan.packed:
            x = jnp.take(x, self.row, axis=1, mode="fill", fill_value=0)
        else:
            x = x[:, : self.T]
        return x.reshape(*x.shape[:2], -1, width) if width else x

    def split_row(self, x):
        """[B, T, HV] as [B, HV, NT, 1, C]: a last dimension of one head would fill one lane."""
        x = self.split(x).reshape(x.shape[0], self.plan.NT, CHUNK, -1)
        return x.transpose(0, 3, 1, 2)[:, :, :, None]

    def join_row(self, x):
        """Undo `split_row`."""
        x = x[:, :, :, 0].transpose(0, 2, 3, 1)
        return self.join(x.reshape(x.shape[0], self.plan.rows, -1))

    def passed(self, state, entering):
        """`state` [N, ...], but `entering` of the empty sequences, which no chunk has."""
        if not self.plan.packed:
            return state
        return jnp.where((self.lengths > 0)[:, None, None, None], state, entering)
