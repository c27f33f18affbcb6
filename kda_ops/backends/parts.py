"""Sort the sequences of a call by length, so that short ones lie in chunks of few rows: for CPUs.

A sequence of at most h tokens, for the smallest fitting h of `HEIGHTS`, is one chunk of h rows. A
longer sequence has chunks of C rows. The height depends on the length alone, so other sequences
change no bit of a result. But a short sequence may round otherwise than the start of a longer one,
because the bits of a BLAS product depend on the shapes of its matrices. With `invariant` every
chunk has C rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kda_ops.problem import CHUNK, Problem
from kda_ops.sequences import count_chunks

# Rows of shorter chunks. Matrices of a multiple of 16 rows start on cache lines.
HEIGHTS = (1, 16, 32)


class Part:
    """Some sequences of a call, in chunks of `height` rows, numbered without gaps, step after step.

    `sequences` are sorted, longest first, so that the sequences with a chunk c come first. For each
    step c, `steps` holds their count and the slice of their chunks. For each chunk, `owner` is its
    index in `sequences`, and `number` its place on the axis of `kda_ops.sequences`. `places` pairs
    token indices of the call with rows of the part; it is None where they are equal.
    """

    def __init__(self, p: Problem, height: int, sequences: Tensor, begin: Tensor, length: Tensor):
        length = length[sequences]
        length, order = torch.sort(length, descending=True, stable=True)
        self.height, self.sequences, self.length = height, sequences[order], length
        begin = begin[self.sequences]
        count = (length + height - 1) // height
        most = int(count[0]) if len(count) else 0
        live = len(count) - torch.searchsorted(count.flip(0), torch.arange(most), right=True)
        base = live.cumsum(0) - live
        self.NT = int(count.sum())
        self.steps = [(n, slice(a, a + n)) for n, a in zip(live.tolist(), base.tolist())]
        step = torch.repeat_interleave(live)
        self.owner = torch.arange(self.NT) - base[step]
        first = begin // CHUNK + self.sequences
        if p.cu_seqlens is None:
            first = self.sequences * -(-p.T // CHUNK)
        self.number = first[self.owner] + step
        n = torch.repeat_interleave(length)
        t = torch.arange(len(n)) - (length.cumsum(0) - length)[n]
        token, row = begin[n] + t, (base[t // height] + n) * height + t % height
        whole = len(token) == p.B * p.T == self.NT * height and torch.equal(token, row)
        self.places = None if whole else (token, row)

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Split x per token [B, T, X, ...] into chunks [NT, X, height, ...].

        Rows without a token are zero.
        """
        flat = x.flatten(0, 1)
        if self.places is not None:
            token, row = self.places
            padded = flat.new_zeros((self.NT * self.height, *flat.shape[1:]))
            flat = padded.index_copy_(0, row, flat.index_select(0, token))
        chunks = flat.reshape(self.NT, self.height, *flat.shape[1:]).transpose(1, 2)
        return chunks.to(dtype=dtype, memory_format=torch.contiguous_format).contiguous()


def parts(p: Problem) -> list[Part]:
    """Group the sequences of a call by height.

    Empty sequences are in the group with C rows.
    """
    if p.cu_seqlens is None:
        begin, length = torch.arange(p.N) * p.T, torch.full((p.N,), p.T)
    else:
        begin, length = p.cu_seqlens[:-1].long(), p.cu_seqlens.diff().long()
    height = torch.full_like(length, CHUNK)
    for h in () if p.invariant else reversed(HEIGHTS):
        height.masked_fill_((length > 0) & (length <= h), h)
    found = [(h, torch.nonzero(height == h).flatten()) for h in (*HEIGHTS, CHUNK)]
    found = [(h, sequences) for h, sequences in found if len(sequences)] or found[-1:]
    return [Part(p, h, sequences, begin, length) for h, sequences in found]


def join(p: Problem, parts: Sequence[Part], chunks: Sequence[Tensor]) -> Tensor:
    """Join the chunks of each part, [NT, X, height, ...], to tokens [B, T, X, ...].

    Tokens past the last sequence are zero.
    """
    flat = [x.transpose(1, 2).flatten(0, 1) for x in chunks]
    if parts[0].places is None:
        return flat[0].unflatten(0, (p.B, p.T))
    out = flat[0].new_zeros((p.B * p.T, *flat[0].shape[1:]))
    for part, x in zip(parts, flat):
        assert part.places is not None  # only the first part can hold every token
        token, row = part.places
        out.index_copy_(0, token, x.index_select(0, row))
    return out.unflatten(0, (p.B, p.T))


# Conversion to and from the tensors of `kda_ops.stages`, whose chunks all have C rows.

_SQUARE, _WHOLE = ("A", "P"), ("gamma", "states", "dstates")


def gather(p: Problem, parts: Sequence[Part], name: str, xs: Sequence[Tensor]) -> Tensor:
    """Combine the tensor `name` of each part into that of the stage."""
    NT, tall = count_chunks(p), len(parts) == 1 and parts[0].height == CHUNK
    if tall and torch.equal(parts[0].number, torch.arange(NT)):
        return xs[0]
    like, rows = xs[0], [] if name in _WHOLE else [CHUNK]
    wide = [CHUNK] if name in _SQUARE else [*like.shape[2 + len(rows) :]]
    out = like.new_full([NT, p.HV, *rows, *wide], 1.0 if name == "gamma" else 0.0)
    if name == "A":
        out.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    for part, x in zip(parts, xs):
        corner: tuple[Any, ...] = (part.number, *_corner(part, name))
        out[corner] = x
    return out


def scatter(parts: Sequence[Part], name: str, x: Tensor) -> list[Tensor]:
    """Split the tensor `name` of a stage into that of each part: the inverse of `gather`."""
    if len(parts) == 1 and parts[0].NT == x.shape[0] and parts[0].height == CHUNK:
        number = parts[0].number
        return [x if torch.equal(number, torch.arange(len(number))) else x[number]]
    return [x[part.number][(slice(None), *_corner(part, name))].contiguous() for part in parts]


def _corner(part: Part, name: str) -> tuple[slice, ...]:
    """Index the heads, rows and (of a square) columns that the chunks of a part have."""
    rows = slice(part.height)
    return (slice(None), *(() if name in _WHOLE else (rows, rows) if name in _SQUARE else (rows,)))
