"""Register fake implementations, which check and allocate with the same passes as the kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kda_ops.operators import Operator
from kda_ops.registrations import schemas
from kda_ops.registrations.kernels import present


def _fake(operator: Operator, rank: int) -> Callable:
    lead, count = operator.names.index(operator.lead), len(operator.results)

    def fake(*args, **flags) -> Tensor | tuple[Tensor, ...] | None:
        args = operator.joined(args, flags)
        results = present(operator.kind(rank, args, flags).outputs(), args[lead])
        if not count:
            return None
        return results[0] if count == 1 else tuple(results)

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
