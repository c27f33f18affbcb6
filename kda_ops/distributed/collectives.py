"""The collectives of this package, as the functional operators that ``torch.compile`` keeps in its
graphs.

A compiler may move a collective, repeat it or drop it where nothing reads the result, on the
assumption that all ranks compile the same graph. So nothing here or around it branches on the rank:
a rank is a number that masks are made of.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_OPS = torch.ops._c10d_functional


def start_all_gather(x: Tensor, size: int, name: str) -> Tensor:
    """``[n, ...]`` of each of the `size` ranks of the group called `name` as ``[size * n, ...]``;
    not to be read before `wait`.
    """
    return _OPS.all_gather_into_tensor(x.contiguous(), size, name)


def start_all_reduce(x: Tensor, name: str) -> Tensor:
    """The sum of x over the group; not to be read before `wait`."""
    return _OPS.all_reduce(x.contiguous(), "sum", name)


def wait(x: Tensor) -> Tensor:
    """x, once its collective is done (on CUDA the stream waits, not the host)."""
    return _OPS.wait_tensor(x)


def gather_lengths(T, device: torch.device, size: int, name: str) -> Tensor:
    """The tokens of each shard, [size] int64, exchanged within a graph."""
    return wait(start_all_gather(torch.full((1,), T, dtype=torch.int64, device=device), size, name))


class GatherTokens(torch.autograd.Function):
    """All-gather with a gradient: each rank gets back the sum of what all ranks' gradients hold for
    its part.
    """

    @staticmethod
    def forward(ctx, x: Tensor, size: int, name: str) -> Tensor:
        """``[n, ...]`` to ``[size * n, ...]``."""
        ctx.size, ctx.group = size, name
        return wait(start_all_gather(x, size, name))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        """``[size * n, ...]`` to ``[n, ...]``."""
        return (
            wait(_OPS.reduce_scatter_tensor(dy.contiguous(), "sum", ctx.size, ctx.group)),
            None,
            None,
        )
