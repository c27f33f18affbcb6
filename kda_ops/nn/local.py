"""A layer's part in a computation that several ranks share: its own part of the parameters, and
operators that reach across.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def local(parameter) -> Any:
    """A parameter as a plain tensor: this rank's heads of one that `kda_ops.nn.tensor_parallel` has
    spread, or itself.

    What is whole on every rank serves the heads of each, so its gradient is their sum.
    """
    if not hasattr(type(parameter), "to_local"):
        return parameter
    from torch.distributed.tensor import Partial

    placements = parameter.placements
    summed = [Partial() if placement.is_replicate() else placement for placement in placements]
    # redistribute: forward nothing, backward the sum
    return parameter.redistribute(placements=placements).to_local(grad_placements=summed)


class LocalLinear(nn.Linear):
    """A projection of, or to, this rank's heads."""

    def forward(self, x: Tensor) -> Tensor:
        """``x W^T + b`` with this rank's part of both."""
        return F.linear(x, local(self.weight), local(self.bias))


def across(group, function: Callable) -> Callable:
    """A function of `kda_ops.functional`, or its namesake for tokens that lie across the ranks of a
    group.
    """
    if group is None:
        return function
    import kda_ops.distributed

    return partial(getattr(kda_ops.distributed, function.__name__), group=group)
