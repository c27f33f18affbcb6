"""Number the chunks of a call, and map tokens to the rows of chunks.

The chunks of a call lie on one axis, sequence after sequence. Chunk c of sequence n has number
``first(n) + c``. For dense rows ``first(n) = n * ceil(T / C)``; for packed sequences
``first(n) = cu_seqlens[n] // C + n``. The ranges of two sequences never meet. A kernel needs one
element of cu_seqlens to find its place: no prefix sum, no host synchronisation. Unused numbers
count as chunks without rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.problem import CHUNK, Problem


def count_chunks(p: Problem, tokens: int = CHUNK):
    """Return NT, the length of the chunk axis; it may be symbolic.

    NT is exact for dense rows and an upper bound for packed sequences. With another number of
    `tokens` than C, count pieces of that many tokens, numbered in the same way.
    """
    if p.cu_seqlens is None:
        return p.B * ((p.T + tokens - 1) // tokens)
    return p.T // tokens + p.N


class Chunks:
    """The chunks of a call, with their numbers on the host.

    For CPU backends, whose cu_seqlens lies in host memory. `first[n]` and `count[n]` give the
    chunks of sequence n. `rows` maps each of the B * T tokens to its row among NT * C; None means
    the identity. Tokens past the last sequence map to row NT * C, which does not exist.
    """

    def __init__(self, p: Problem):
        self.B, self.T, self.NT = p.B, p.T, count_chunks(p)
        if p.cu_seqlens is None:
            self.offsets = [n * p.T for n in range(p.B + 1)]
            self.count = [-(-p.T // CHUNK)] * p.B
            self.first = [n * -(-p.T // CHUNK) for n in range(p.B)]
            self.rows = None if p.T % CHUNK == 0 else self._rows(p.q.device)
        else:
            self.offsets = p.cu_seqlens.tolist()
            self.count = [-(-(b - a) // CHUNK) for a, b in zip(self.offsets, self.offsets[1:])]
            self.first = [a // CHUNK + n for n, a in enumerate(self.offsets[:-1])]
            self.rows = self._rows(p.q.device)

    def _rows(self, device: torch.device) -> Tensor:
        rows = torch.full((self.B * self.T,), self.NT * CHUNK, dtype=torch.int64)
        for a, b, first in zip(self.offsets, self.offsets[1:], self.first):
            rows[a:b] = torch.arange(first * CHUNK, first * CHUNK + b - a)
        return rows.to(device)

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Split x per token [B, T, X, ...] into chunks [NT, X, C, ...], contiguous, in `dtype`.

        Rows of a chunk without a token are zero.
        """
        flat = x.reshape(self.B * self.T, *x.shape[2:])
        if self.rows is not None:
            padded = flat.new_zeros((self.NT * CHUNK + 1, *flat.shape[1:]))
            flat = padded.index_copy_(0, self.rows, flat)[:-1]
        chunks = flat.reshape(self.NT, CHUNK, *flat.shape[1:]).transpose(1, 2)
        return chunks.to(dtype=dtype, memory_format=torch.contiguous_format).contiguous()

    def join(self, chunks: Tensor) -> Tensor:
        """Join chunks [NT, X, C, ...] to tokens [B, T, X, ...].

        Tokens past the last sequence are zero.
        """
        flat = chunks.transpose(1, 2).reshape(self.NT * CHUNK, chunks.shape[1], *chunks.shape[3:])
        if self.rows is not None:
            flat = torch.cat([flat, flat.new_zeros((1, *flat.shape[1:]))]).index_select(
                0, self.rows
            )
        return flat.reshape(self.B, self.T, *flat.shape[1:])
