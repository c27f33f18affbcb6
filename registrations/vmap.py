"""vmap: the mapped dimension folds into the head axes, which is exact, and works for packed sequences and mapped parameters too."""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.registrations import schemas

# The head axis of each input, in the order of the schemas.
_SEQUENCE_AXES = {"q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "A_log": 0, "dt_bias": 0, "initial_state": 1}
_GATE_AXES = {"g": 2, "A_log": 0, "dt_bias": 0}


def _fold(x: Tensor | None, mapped: int | None, size: int, axis: int) -> Tensor | None:
    """[.., heads, ..] with a mapped dimension somewhere, or none, to [.., size * heads, ..]."""
    if x is None:
        return None
    x = x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:]) if mapped is None else x.movedim(mapped, axis)
    return x.flatten(axis, axis + 1)


def _rule(operator: schemas.Operator, namespace: str, axes: dict[str, int], out_axes: tuple[int, ...]):
    op, by_value_head = operator.overload(namespace), list(axes).index("v") if "v" in axes else 0

    def rule(info, in_dims, *args, **flags):
        size = info.batch_size
        folded = [_fold(x, d, size, axis) for x, d, axis in zip(args, in_dims, axes.values())]
        if any(d is not None for d in in_dims[len(axes) : len(args)]):
            raise ValueError(f"{namespace}::{operator.name}: cu_seqlens cannot be mapped by vmap: the packing is one for all slices.")
        shape = list(args[by_value_head].shape)
        if in_dims[by_value_head] is not None:
            del shape[in_dims[by_value_head]]
        out = op(*folded, *args[len(axes) :], **flags)
        outs = (out,) if isinstance(out, Tensor) else out
        # A final state that was not asked for is an empty tensor of one dimension and stays as it is.
        dims = tuple(axis if x.dim() > 1 else None for x, axis in zip(outs, out_axes))
        outs = tuple(x if d is None else x.unflatten(d, (size, shape[2])) for x, d in zip(outs, dims))
        return (outs[0], dims[0]) if isinstance(out, Tensor) else (outs, dims)

    return rule


def _refuse(name: str):
    def rule(info, in_dims, *args, **flags):
        raise ValueError(f"{name} writes its state in place and cannot be mapped by vmap: fold the mapped dimension into the heads or the pool yourself.")

    return rule


for _namespace, _library in schemas.LIBRARIES.items():
    for _operator, _axes, _out in ((schemas.CHUNK, _SEQUENCE_AXES, (2, 1)), (schemas.RECURRENT, _SEQUENCE_AXES, (2, 1)), (schemas.GATE, _GATE_AXES, (2,))):
        torch.library.register_vmap(f"{_namespace}::{_operator.name}", _rule(_operator, _namespace, _axes, _out), lib=_library)
    for _operator in (schemas.RECURRENT_, schemas.CHUNK_):
        torch.library.register_vmap(f"{_namespace}::{_operator.name}", _refuse(f"{_namespace}::{_operator.name}"), lib=_library)
