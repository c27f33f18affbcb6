"""Define the operators of `kda_ops.operators` in the namespaces of both variants."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kda_ops.operators import ATTENTION, LAYER, Operator

KDA, GDN = "kda", "gdn"  # the namespaces, which `benchmarks/hub.py` makes unique
VARIANTS = {KDA: 1, GDN: 0}  # namespace -> rank of the decay per token and value head


def operators(namespace: str) -> tuple[Operator, ...]:
    """Return the operators of a namespace."""
    return (*ATTENTION, *LAYER) if namespace == KDA else ATTENTION


def mask_of(wanted: Iterable[bool]) -> int:
    """Return `need` of a backward: bit i asks for the gradient of differentiable input i."""
    return sum(bool(x) << i for i, x in enumerate(wanted))


def _define(namespace: str) -> torch.library.Library:
    if hasattr(getattr(torch.ops, namespace), "chunk"):
        raise ImportError(
            f"torch.ops.{namespace}.chunk is already registered: two copies of kda_ops are on the "
            "path, or another package took the name."
        )
    library = torch.library.Library(namespace, "FRAGMENT")  # noqa: TOR901  (held below for the life of the process)
    for operator in operators(namespace):
        library.define(operator.name + operator.schema, tags=(torch.Tag.pt2_compliant_tag,))
    return library


LIBRARIES = {namespace: _define(namespace) for namespace in VARIANTS}
