"""Let a layer use its rank's part of the parameters, and operators that reach across ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def local(parameter) -> Any:
    """Return a parameter as a plain tensor.

    For a parameter that `kda_ops.nn.tensor_parallel` has sharded, return this rank's heads. A
    replicated parameter serves the heads of every rank, so backward sums its gradients over the
    ranks.
    """
    if not hasattr(type(parameter), "to_local"):
        return parameter
    from torch.distributed.tensor import Partial

    placements = parameter.placements
    summed = [Partial() if placement.is_replicate() else placement for placement in placements]
    # redistribute moves no data forward; backward it sums
    return parameter.redistribute(placements=placements).to_local(grad_placements=summed)


class LocalLinear(nn.Linear):
    """A projection from or to this rank's heads."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W^T + b`` with this rank's part of W and b."""
        return F.linear(x, local(self.weight), local(self.bias))


def across(group, function: Callable) -> Callable:
    """Return `function`, or with a group its namesake in `kda_ops.distributed`, bound to it."""
    if group is None:
        return function
    import kda_ops.distributed

    return partial(getattr(kda_ops.distributed, function.__name__), group=group)
