"""Register fake implementations, which check and allocate with the same passes as the kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kda_ops.operators import Operator
from kda_ops.registrations import schemas
from kda_ops.registrations.kernels import present


def _fake(operator: Operator, rank: int) -> Callable:
    lead, one = operator.names.index(operator.lead), len(operator.results) == 1

    def fake(*args, **flags) -> Tensor | tuple[Tensor, ...]:
        results = present(operator.kind(rank, args, flags).outputs(), args[lead])
        return results[0] if one else tuple(results)

    return fake


def register(namespace: str, name: str, fake: Callable) -> None:
    """Register the fake of an operator.

    Every operator of this package uses this function. For each new file that registers a fake,
    torch searches all loaded modules.
    """
    library = schemas.LIBRARIES[namespace]
    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)


for _namespace, _rank in schemas.VARIANTS.items():
    for _operator in schemas.operators(_namespace):
        register(_namespace, _operator.name, _fake(_operator, _rank))
