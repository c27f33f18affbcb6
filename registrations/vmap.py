"""Register vmap rules: fold the mapped dimension into the heads, or a convolution's channels.

Heads do not interact, so the fold is exact. Packed sequences, mapped parameters and per-sample
gradients work too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.operators import Operator
from kda_ops.registrations import schemas


def _folded(operator: Operator, name: str) -> int | None:
    """Return the axis of an argument or result into which the mapped dimension is folded."""
    axes = operator.axes_of(name)
    return next((i for i, letter in enumerate(axes) if letter in operator.folds), None)


def _absent(x: Tensor, mapped: int | None = None) -> bool:
    """Return whether x is the empty placeholder of a tensor not kept or not requested.

    `mapped` is the dimension that vmap maps, or None.
    """
    return not x.numel() and x.dim() == (1 if mapped is None else 2)


def _fold(name: str, x: Tensor | None, mapped: int | None, size: int, axis: int) -> Tensor | None:
    """Return x [.., heads, ..] with its mapped dimension folded in: [.., size * heads, ..].

    `mapped` is the position of that dimension. None: repeat x for each of `size` slices.
    """
    if x is None or _absent(x, mapped):
        return x if x is None else x.new_empty((0,))
    if x.dim() - (mapped is not None) <= axis:
        raise ValueError(
            f"{name} must have at least {axis + 1} dimensions besides those that vmap maps, got "
            f"shape {list(x.shape)} in all."
        )
    x = (
        x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:])
        if mapped is None
        else x.movedim(mapped, axis)
    )
    return x.flatten(axis, axis + 1)


def _rule(operator: Operator, namespace: str):
    op = operator.overload(namespace)
    in_axes, out_axes = (
        [_folded(operator, n) for n in names] for names in (operator.names, operator.results)
    )

    def rule(info, in_dims, *args, **flags):
        folded = []
        for name, axis, x, mapped in zip(operator.names, in_axes, args, in_dims):
            if name == "cu_seqlens" and mapped is not None:
                raise ValueError(
                    f"{namespace}::{operator.name}: cu_seqlens cannot be mapped by vmap: the "
                    "packing is one for all slices."
                )
            if not info.batch_size:  # run one slice of zeros to get the output shapes
                folded.append(x if mapped is None else x.new_zeros(x.movedim(mapped, 0).shape[1:]))
            else:
                folded.append(x if axis is None else _fold(name, x, mapped, info.batch_size, axis))
        out = op(*folded, **flags)
        outs = (out,) if isinstance(out, Tensor) else out
        if info.batch_size:
            dims = tuple(None if _absent(x) else axis for x, axis in zip(outs, out_axes))
            outs = tuple(
                x if d is None else x.unflatten(d, (info.batch_size, -1))
                for x, d in zip(outs, dims)
            )
        else:
            dims, outs = (0,) * len(outs), tuple(x.new_empty((0, *x.shape)) for x in outs)
        return (outs[0], dims[0]) if isinstance(out, Tensor) else (outs, dims)

    return rule


def _refuse(name: str, written: str):
    def rule(*args, **flags):
        raise ValueError(
            f"{name} writes its {written} in place and cannot be mapped by vmap: fold the mapped "
            "dimension into the heads or the pool yourself."
        )

    return rule


for _namespace, _library in schemas.LIBRARIES.items():
    for _operator in schemas.operators(_namespace):
        _mapped = (
            _refuse(f"{_namespace}::{_operator.name}", _operator.mutates)
            if _operator.mutates
            else _rule(_operator, _namespace)
        )
        if _operator.takes_out:  # torch takes no rule with a tensor among the keywords
            _library.impl(_operator.name, _mapped, "FuncTorchBatched")
            continue
        torch.library.register_vmap(f"{_namespace}::{_operator.name}", _mapped, lib=_library)
