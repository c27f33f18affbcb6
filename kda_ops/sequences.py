"""Where the sequences of a call lie, and how its chunks are numbered.

Chunks of one call lie on one axis, sequence after sequence. Chunk c of sequence n has number
``first(n) + c`` where ``first(n)`` is ``n * ceil(T / C)`` for dense rows, and
``cu_seqlens[n] // C + n`` for packed sequences: those ranges never meet, and a kernel finds its
place from one element of cu_seqlens, with no prefix sum and no host synchronisation. A number that
no chunk has stands for a chunk with no rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.problem import CHUNK, Problem


def count_chunks(p: Problem, tokens: int = CHUNK):
    """NT, the length of the chunk axis: exact for dense rows, an upper bound for packed sequences.
    May be symbolic.

    With other `tokens` than those of a chunk, the pieces of so many, which are numbered alike.
    """
    if p.cu_seqlens is None:
        return p.B * ((p.T + tokens - 1) // tokens)
    return p.T // tokens + p.N


class Chunks:
    """The chunks of a call as the host sees them (CPU backends: cu_seqlens is host memory there).

    `first[n]` and `count[n]` give the chunks of sequence n; `rows` maps each of the B*T tokens to
    its row among NT*C, or is None when that map is the identity. Tokens past the last sequence map
    to row NT*C, which is none.
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
        """[B, T, X, ...] per token to [NT, X, C, ...] per chunk, zero where a chunk has no token;
        contiguous, in `dtype`.
        """
        flat = x.reshape(self.B * self.T, *x.shape[2:])
        if self.rows is not None:
            padded = flat.new_zeros((self.NT * CHUNK + 1, *flat.shape[1:]))
            flat = padded.index_copy_(0, self.rows, flat)[:-1]
        chunks = flat.reshape(self.NT, CHUNK, *flat.shape[1:]).transpose(1, 2)
        return chunks.to(dtype=dtype, memory_format=torch.contiguous_format).contiguous()

    def join(self, chunks: Tensor) -> Tensor:
        """[NT, X, C, ...] back to [B, T, X, ...]; zero for tokens past the last sequence."""
        flat = chunks.transpose(1, 2).reshape(self.NT * CHUNK, chunks.shape[1], *chunks.shape[3:])
        if self.rows is not None:
            flat = torch.cat([flat, flat.new_zeros((1, *flat.shape[1:]))]).index_select(
                0, self.rows
            )
        return flat.reshape(self.B, self.T, *flat.shape[1:])
