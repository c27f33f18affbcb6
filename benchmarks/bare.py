"""Operators with our schemas and autograd formulas that only allocate their results.

``torch.ops.bare_kda`` and ``bare_gdn`` are what a call costs at the least. A kernel looks its
results up by the shapes, dtypes and flags of a call. On the first such call the fake implementation
of the real operator names them, so they follow the schemas and the table of what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from kda_ops import operators
from kda_ops.registrations import autocast, autograd, schemas
from kda_ops.registrations.opaque import opaque

OPERATORS = (operators.CHUNK, operators.CHUNK_FWD, operators.CHUNK_BWD, operators.RECURRENT_)


def operator(op: str, name: str) -> torch._ops.OpOverload:
    """Return the bare operator of "kda" or "gdn", such as "chunk"."""
    return getattr(getattr(torch.ops, f"bare_{op}"), name).default


def layer(mixer: nn.Module, *args: Tensor, group: None, **flags) -> tuple[Tensor, Tensor]:
    """Run the bare `chunk` in a layer of ours."""
    bounds = {n: getattr(mixer, n) for n in ("lower_bound", "safe_gate") if hasattr(mixer, n)}
    return operator("kda" if bounds else "gdn", "chunk")(*args, **bounds, **flags)


def _results(real: torch._ops.OpOverload, args: tuple, flags: dict) -> list[Tensor]:
    """Return tensors like the results of `real`, as its fake implementation has them."""
    with FakeTensorMode() as mode:
        fakes = (mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args)
        found = real(*fakes, **flags)
    like = found if isinstance(found, (tuple, list)) else (found,)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in like]


def _kernel(real: torch._ops.OpOverload) -> Callable[..., Any]:
    known: dict[tuple, list[Tensor]] = {}
    one = len(real._schema.returns) == 1

    @opaque
    def allocate(*args, **flags):
        call = (
            *[x if x is None else (x.shape, x.dtype) for x in args],
            *[(n, tuple(x) if type(x) is list else x) for n, x in flags.items()],
        )
        if (like := known.get(call)) is None:
            like = known[call] = _results(real, args, flags)
        results = [torch.empty_like(x) for x in like]
        return results[0] if one else tuple(results)

    return allocate


def _register(op: str, namespace: str, library: torch.library.Library) -> None:
    for entry in OPERATORS:
        library.define(entry.name + entry.schema, tags=(torch.Tag.pt2_compliant_tag,))
        real = entry.overload(op)
        for key in ("CPU", "CUDA"):
            library.impl(entry.name, _kernel(real), key)
            cast = autocast._cast if entry in autocast._CAST else autocast._as_it_is
            library.impl(entry.name, cast(entry, namespace, key.lower()), f"Autocast{key}")
        torch.library.register_fake(f"{namespace}::{entry.name}", real, lib=library)
    refuse = autograd._refuse_in_place(operators.RECURRENT_, namespace)
    library.impl("recurrent_", refuse, "Autograd")
    formula = autograd._setup(namespace), autograd._backward(namespace)
    chunk_fwd = autograd._differentiable(operators.CHUNK_FWD.overload(namespace), *formula)
    chunk = autograd._chunk(namespace, chunk_fwd)
    library.impl("chunk", chunk, "Autograd", with_keyset=True)
    again = autograd._no_setup, autograd._refuse_double_backward(f"{namespace}::chunk")
    autograd._differentiable(operators.CHUNK_BWD.overload(namespace), *again)


_NAMESPACES = {op: f"bare_{op}" for op in schemas.VARIANTS}
_LIBRARIES = {name: torch.library.Library(name, "FRAGMENT") for name in _NAMESPACES.values()}
_RANKS = {name: schemas.VARIANTS[op] for op, name in _NAMESPACES.items()}
# the formulas ask these tables for a namespace while they are made
with mock.patch.dict(schemas.LIBRARIES, _LIBRARIES), mock.patch.dict(schemas.VARIANTS, _RANKS):
    for _op, _name in _NAMESPACES.items():
        _register(_op, _name, _LIBRARIES[_name])
