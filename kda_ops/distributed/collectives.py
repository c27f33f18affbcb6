"""Wrap the functional collectives, which ``torch.compile`` keeps in its graphs.

A compiler may move, repeat or drop a collective if all ranks compile the same graph. So no code
here or in its callers branches on the rank; masks depend on it instead.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kda_ops.private import COLLECTIVES


def start_all_gather(x: Tensor, size: int, name: str) -> Tensor:
    """Start to gather x ``[n, ...]`` of the group's `size` ranks as ``[size * n, ...]``.

    Call `wait` before reading the result.
    """
    return COLLECTIVES.all_gather_into_tensor(x.contiguous(), size, name)


def start_all_reduce(x: Tensor, name: str) -> Tensor:
    """Start to sum x over the group; call `wait` before reading the result."""
    return COLLECTIVES.all_reduce(x.contiguous(), "sum", name)


def wait(x: Tensor) -> Tensor:
    """Wait for the collective that makes x; on CUDA only the stream waits, not the host."""
    return COLLECTIVES.wait_tensor(x)


def gather_lengths(T, device: torch.device, size: int, name: str) -> Tensor:
    """Exchange the tokens of each shard within a graph; return [size] int64."""
    return wait(start_all_gather(torch.full((1,), T, dtype=torch.int64, device=device), size, name))


class GatherTokens(torch.autograd.Function):
    """A differentiable all-gather: a rank's gradient sums all ranks' gradients of its part."""

    @staticmethod
    def forward(ctx, x: Tensor, size: int, name: str) -> Tensor:
        """Gather ``[n, ...]`` to ``[size * n, ...]``."""
        ctx.size, ctx.group = size, name
        return wait(start_all_gather(x, size, name))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        """Reduce ``[size * n, ...]`` to ``[n, ...]``."""
        return (
            wait(COLLECTIVES.reduce_scatter_tensor(dy.contiguous(), "sum", ctx.size, ctx.group)),
            None,
            None,
        )
