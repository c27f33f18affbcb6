"""Refuse tensors that no kernel can use: those without strides, and lazy views of a state.

Without these kernels the dispatcher would refuse them with messages about its keys, or torch would
fail an assertion.
"""

from __future__ import annotations

import torch

from kda_ops.arguments import check_memory, is_lazy, refuse_layout
from kda_ops.operators import Operator
from kda_ops.private import BelowAutograd, schema_of
from kda_ops.registrations import schemas
from kda_ops.registrations.opaque import opaque

_WITHOUT_STRIDES = [
    f"{kind}{device}"
    for kind in ("Sparse", "SparseCsr", "Quantized", "NestedTensor")
    for device in ("CPU", "CUDA")
] + ["MkldnnCPU"]
_LAZY = ("Negative", "Conjugate", "ZeroTensor")


def _refuse(operator: Operator, namespace: str):
    names = [a.name for a in schema_of(operator.overload(namespace)).arguments]

    @opaque
    def kernel(*args, **flags):
        refuse_layout([*names[: len(args)], *flags], [*args, *flags.values()])

    return kernel


def refuse_nested() -> None:
    """Refuse nested tensors with layout jagged too: a subclass without dispatch keys."""
    from kda_ops.private import NestedTensor

    def rule(cls, func, types, args=(), kwargs=None):
        names = [a.name for a in schema_of(func).arguments]
        refuse_layout([*names[: len(args)], *(kwargs or {})], [*args, *(kwargs or {}).values()])

    for namespace, library in schemas.LIBRARIES.items():
        for operator in schemas.operators(namespace):
            name = f"{namespace}::{operator.name}"
            torch.library.register_torch_dispatch(name, NestedTensor, rule, lib=library)


def _resolve(operator: Operator, namespace: str):
    """Make a kernel for lazy views as arguments of an in-place operator.

    It resolves lazy inputs to new memory. It refuses a lazy state, because a copy would be written.
    """
    op, written = operator.overload(namespace), operator.mutates
    place = [a.name for a in schema_of(op).arguments].index(written)

    @opaque
    def kernel(*args, **flags):
        check_memory(written, args[place])
        if operator.takes_out:
            check_memory("out", flags["out"])
        resolved = [x.clone().resolve_neg().resolve_conj() if is_lazy(x) else x for x in args]
        with BelowAutograd():
            return op(*resolved, **flags)

    return kernel


for _namespace, _library in schemas.LIBRARIES.items():
    for _operator in schemas.operators(_namespace):
        _refusal = _refuse(_operator, _namespace)
        for _key in _WITHOUT_STRIDES:
            _library.impl(_operator.name, _refusal, _key)
        for _key in _LAZY if _operator.mutates else ():
            _library.impl(_operator.name, _resolve(_operator, _namespace), _key)
