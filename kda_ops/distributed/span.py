"""Locate a shard of the token axis among the sequences, without host synchronisation.

A sequence *enters* a shard if it has tokens both before the shard and at or after its start. It
*leaves* the shard if it continues after it, and *ends* in it if its last token lies in it. At most
one packed sequence enters and one leaves. Dense rows enter every shard but the first, and leave
every shard but the last. *Slots* hold the states that cross a boundary: B for dense rows, 1 for
packed sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.distributed.plan import local_offsets, offsets_of


class Span:
    """One rank's shard: masks over the sequences and the ranks, and local offsets.

    Attributes:
        entering, leaving, ending: ``[N]`` booleans. Each sequence ends in exactly one shard, empty
            ones included.
        cu_seqlens: ``[N + 1]`` offsets in the shard, where sequences of other shards are empty;
            None for dense rows.
        before, behind: ``[size]`` booleans, the earlier and the later ranks.
        through: ``[size]`` booleans, whether the sequence that leaves a rank's shard entered it.

    Masks select with `torch.where`: a product with zero would spread the NaN of one sequence to
    another.
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
            assert lengths is not None  # `agree` exchanges them for packed sequences
            offsets = offsets_of(lengths)
            start, stop = offsets[rank], offsets[rank + 1]
            begin, end = cu_seqlens[:-1], cu_seqlens[1:]
            self.cu_seqlens = local_offsets(cu_seqlens, lengths, rank)
            self.slots = 1
            self.entering = (begin < start) & (start < end)
            self.leaving = (begin < stop) & (stop < end)
            self.ending = ((start < end) | ~self.before[0]) & (end <= stop)
            self.through = ((begin < offsets[:-1, None]) & (offsets[1:, None] < end)).any(1)

    def pick(self, x: Tensor, mask: Tensor) -> Tensor:
        """Gather states ``[N, ...]`` of the sequences in the mask into slots ``[slots, ...]``.

        A slot without a sequence is zero.
        """
        if not self.packed:
            return only(x, mask)
        if not mask.shape[0]:
            return x.new_zeros((1, *x.shape[1:]))
        return torch.where(mask.any(), x.index_select(0, mask.int().argmax(0, keepdim=True)), 0.0)

    def put(self, slots: Tensor, mask: Tensor, others: Tensor | None) -> Tensor:
        """Return states ``[N, ...]``: the slots within the mask, `others` (None: zero) outside."""
        return torch.where(_wide(mask, slots), slots, 0.0 if others is None else others)


def only(x: Tensor, mask: Tensor) -> Tensor:
    """Return x ``[n, ...]`` where the mask ``[n]`` is true, zero elsewhere."""
    return torch.where(_wide(mask, x), x, 0.0)


def _wide(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(-1, *(1 for _ in x.shape[1:]))
