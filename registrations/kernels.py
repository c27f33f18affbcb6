"""The CPU and CUDA kernels: each hands its call to the backend, as the pass of its operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kda_ops import dispatch
from kda_ops.arguments import check_apart, check_writable
from kda_ops.operators import Operator
from kda_ops.registrations import schemas
from kda_ops.registrations.opaque import opaque
from kda_ops.stages import Backend

_BUMP = torch.autograd.graph.increment_version


def _kernel(operator: Operator, rank: int, device: torch.device) -> Callable:
    kind, count, takes_out = operator.kind, len(operator.results), operator.takes_out
    gradients = operator.gradients
    lead = operator.names.index(operator.lead)
    written = [(name, operator.names.index(name)) for name in operator.writes]
    source = operator.names.index("source") if "source" in operator.names else None
    backend: Backend | None = None

    @opaque
    def kernel(*args, **flags) -> Tensor | tuple[Tensor, ...] | None:
        nonlocal backend
        if backend is None:  # loaded at the first call
            backend = dispatch.backend(device)
        if takes_out:
            args = operator.joined(args, flags)
            check_apart("out", args[-1], zip(operator.names, args[:-1]))
        if source is not None and len(args) > source:
            check_apart("state", args[written[0][1]], [("source", args[source])])
        for name, place in written:
            check_writable(name, args[place])
        results = backend.run(kind, rank, args, flags)
        for _, place in written:
            _BUMP(args[place])
        if count == 1:
            return results[0]
        if not count:
            return None
        return tuple(present(results, args[lead]) if gradients else results)

    return kernel


def present(results: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """Put an empty tensor in the place of None, because an operator returns tensors."""
    return [like.new_empty((0,)) if x is None else x for x in results]


for _namespace, _rank in schemas.VARIANTS.items():
    for _operator in schemas.operators(_namespace):
        for _key in ("CPU", "CUDA"):
            _made = _kernel(_operator, _rank, torch.device(_key.lower()))
            schemas.LIBRARIES[_namespace].impl(_operator.name, _made, _key)
