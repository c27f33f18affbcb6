"""Where a shard of the token axis lies among the sequences, without a look at the host.

A sequence *enters* a shard if it has tokens before it and does not end before it, *leaves* it if it
goes on behind it, and *ends* in it if its last token lies there. At most one packed sequence enters
and one leaves; of dense rows all do. The states that cross a boundary are the *slots*: B for dense
rows, 1 for packed sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.distributed.plan import local_offsets, offsets_of


class Span:
    """One rank's shard: masks over the sequences, and the packing of its own tokens.

    `entering`, `leaving` and `ending` are ``[N]`` booleans; each sequence ends in exactly one
    shard, empty ones too. `cu_seqlens` ``[N + 1]`` are local offsets (None for dense rows): all N
    sequences are there, those elsewhere empty. `before` and `behind` are ``[size]`` booleans over
    the ranks, and so is `through`: whether what leaves a shard entered it. Masks, not products with
    zero: what a sequence holds, NaN included, stays with it.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        B: int,
        cu_seqlens: Tensor | None,
        lengths: Tensor | None,
        device: torch.device,
    ):
        ranks = torch.arange(size, device=device)
        self.before, self.behind, self.packed = ranks < rank, ranks > rank, cu_seqlens is not None
        if cu_seqlens is None:
            self.cu_seqlens = None
            self.slots = B
            self.through = torch.ones_like(self.before)
            self.entering = self.before[0].expand(B)
            self.leaving = self.behind[-1].expand(B)
            self.ending = ~self.leaving
        else:
            assert lengths is not None  # they are asked for where sequences are packed
            offsets = offsets_of(lengths)
            start, stop = offsets[rank], offsets[rank + 1]
            begin, end = cu_seqlens[:-1], cu_seqlens[1:]
            self.cu_seqlens = local_offsets(cu_seqlens, lengths, rank)
            self.slots = 1
            self.entering = (begin < start) & (start < end)
            self.leaving = (begin < stop) & (stop < end)
            self.ending = ((start < end) | ~self.before[0]) & (end <= stop)
            self.through = ((begin < offsets[:-1, None]) & (offsets[1:, None] < end)).any(1)
            # where the tokens of what entered end
            self.last = torch.where(self.entering, self.cu_seqlens[1:], 0).sum()

    def pick(self, x: Tensor, mask: Tensor) -> Tensor:
        """The states ``[N, ...]`` of the sequences in the mask by slot ``[slots, ...]``; zero for a
        slot without one.
        """
        if not self.packed:
            return only(x, mask)
        if not mask.shape[0]:
            return x.new_zeros((1, *x.shape[1:]))
        return torch.where(mask.any(), x.index_select(0, mask.int().argmax(0, keepdim=True)), 0.0)

    def put(self, slots: Tensor, mask: Tensor, others: Tensor | None) -> Tensor:
        """The states ``[N, ...]`` that are those of the slots within the mask and `others` (None:
        zero) outside.
        """
        return torch.where(_wide(mask, slots), slots, 0.0 if others is None else others)

    def of_entered(self, x: Tensor, others: Tensor | float = 0.0) -> Tensor:
        """x ``[B, T, ...]`` for the tokens of sequences that entered, `others` elsewhere. Dense
        rows enter all or, with a state of zero, none.
        """
        if not self.packed:
            return x
        token = torch.arange(x.shape[1], device=x.device)
        return torch.where((token < self.last).view(-1, *(1 for _ in x.shape[2:])), x, others)


def only(x: Tensor, mask: Tensor) -> Tensor:
    """x ``[n, ...]`` where the mask ``[n]`` holds, zero elsewhere."""
    return torch.where(_wide(mask, x), x, 0.0)


def _wide(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(-1, *(1 for _ in x.shape[1:]))
