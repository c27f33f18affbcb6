"""Pack padded rows into one row, and record where a call's tokens lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kda_ops.distributed.plan import ContextPlan


class Unpadding:
    """The permutation that packs the real tokens of padded rows into one row, and its inverse.

    Sizes do not depend on the mask ``[B, T]``, which is nonzero at real tokens, anywhere in a row.
    The padding goes behind the last sequence, past ``cu_seqlens[-1]``, where operators give zeros.
    `pack` fills it with zeros: a NaN there, times a gradient of zero, would reach the weights.
    """

    def __init__(self, mask: Tensor):
        self.real = real = mask.reshape(-1) != 0
        rank = real.cumsum(0)
        token = torch.arange(real.shape[0], device=mask.device)
        self.B, self.T = mask.shape
        self.target = torch.where(real, rank - 1, rank[-1:] + token - rank)  # where each token goes
        self.source = torch.empty_like(token).scatter_(0, self.target, token)  # the inverse
        lengths = (mask != 0).sum(1)
        self.cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

    def pack(self, x: Tensor) -> Tensor:
        """Pack ``[B, T, D]`` into ``[1, B * T, D]``."""
        return torch.where(self.real[:, None], x.flatten(0, 1), 0.0).index_select(0, self.source)[
            None
        ]

    def unpack(self, x: Tensor) -> Tensor:
        """Unpack ``[1, B * T, D]`` into ``[B, T, D]``."""
        return x[0].index_select(0, self.target).unflatten(0, (self.B, self.T))


class Tokens(NamedTuple):
    """The place of a call's tokens: in which sequences, padded rows and ranks they lie."""

    cu_seqlens: Tensor | None  # as passed to the operator; global across ranks
    offsets: Tensor | None  # of this rank's own tokens
    decode: bool = False  # one token for each sequence
    padding: Unpadding | None = None  # the permutation of padded rows
    plan: ContextPlan | None = None  # the shards of all ranks
    before: Tensor | None = None  # [N, conv_size - 1, hidden_size] inputs before this shard


def arrange(
    x: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tokens]:
    """Return x as the layer computes it, padded rows packed into one, and where its tokens lie."""
    T, padding = x.shape[1], None
    decode = T == 1 and cu_seqlens is None
    if attention_mask is not None:
        padding = Unpadding(attention_mask[:, attention_mask.shape[1] - T :])
        x, cu_seqlens = padding.pack(x), padding.cu_seqlens
    return x, Tokens(cu_seqlens, cu_seqlens, decode, padding)
