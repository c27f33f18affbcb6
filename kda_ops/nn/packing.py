"""Sequences of different lengths in one row: where each token lies, and how padded rows become
packed ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kda_ops.distributed.plan import ContextPlan


class Packing:
    """For each of T packed tokens, its sequence and its position there; nothing is read on the
    host.

    `sequence` ``[T]`` numbers the sequence, `position` ``[T]`` counts from 0 in it. Tokens past the
    last offset count on in the last sequence; what is computed for them is never used.
    """

    def __init__(self, cu_seqlens: Tensor, T: int):
        token = torch.arange(T, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        self.offsets = cu_seqlens
        after = torch.searchsorted(cu_seqlens, token, right=True)  # offsets at or before each token
        self.sequence = (after - 1).clamp(max=cu_seqlens.shape[0] - 2)
        self.position = token - cu_seqlens[self.sequence]


class Unpadding:
    """The permutation that moves the tokens of a padding mask to the front of one packed row, and
    back; sizes do not depend on the mask.

    mask: ``[B, T]``, nonzero at real tokens, anywhere in a row. The padding follows the last
    sequence, past ``cu_seqlens[-1]``, where operators give zeros. `pack` fills it with zeros: a NaN
    there, times a gradient of zero, would reach the weights.
    """

    def __init__(self, mask: Tensor):
        self.real = real = mask.reshape(-1) != 0
        rank = real.cumsum(0)
        token = torch.arange(real.shape[0], device=mask.device)
        self.B, self.T = mask.shape
        self.target = torch.where(real, rank - 1, rank[-1:] + token - rank)  # where each token goes
        self.source = torch.empty_like(token).scatter_(0, self.target, token)  # and which one comes
        lengths = (mask != 0).sum(1)
        self.cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

    def pack(self, x: Tensor) -> Tensor:
        """``[B, T, D]`` to ``[1, B * T, D]``."""
        return torch.where(self.real[:, None], x.flatten(0, 1), 0.0).index_select(0, self.source)[
            None
        ]

    def unpack(self, x: Tensor) -> Tensor:
        """``[1, B * T, D]`` to ``[B, T, D]``."""
        return x[0].index_select(0, self.target).unflatten(0, (self.B, self.T))


class Tokens(NamedTuple):
    """Where the tokens of a call lie: in which sequences, in which padded rows, on which ranks."""

    cu_seqlens: Tensor | None  # as the operator takes them, across ranks global
    packing: Packing | None  # of this rank's own tokens
    decode: bool = False  # one token for each sequence
    padding: Unpadding | None = None  # what has moved the tokens of padded rows into one row
    plan: ContextPlan | None = None  # the shards of all ranks
    before: Tensor | None = None  # [N, conv_size - 1, hidden_size] inputs in front of this shard


def arrange(
    x: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tokens]:
    """x as the layer computes it, padded rows packed into one, and where its tokens lie."""
    T, padding = x.shape[1], None
    decode = T == 1 and cu_seqlens is None
    if attention_mask is not None:
        padding = Unpadding(attention_mask[:, attention_mask.shape[1] - T :])
        x, cu_seqlens = padding.pack(x), padding.cu_seqlens
    packing = None if cu_seqlens is None else Packing(cu_seqlens, x.shape[1])
    return x, Tokens(cu_seqlens, packing, decode, padding)
