"""Register how the operators run on sharded tensors (DTensor).

Rows of a batch and heads do not interact. Columns of V share only the scores. So each of these axes
can be sharded without communication::

    batch   where nothing is packed and the mesh divides B    parameters are replicated, their
                                                              gradients are partial sums
    heads   where the mesh divides H and HV                   everything has heads, nothing is
                                                              summed
    V       any; every rank computes the scores again         q, k, g, beta are replicated, their
                                                              gradients are partial sums

The convolution can be sharded over the batch or channels, the gated norm over batch, tokens or
heads.

`stages` names each axis by a letter, and a split is a set of letters. A tensor that has an axis of
the split is sharded on it. Other tensors are replicated; their gradients are partial sums. Inputs
sharded otherwise (over tokens or K) are first redistributed by DTensor.
"""

from __future__ import annotations

import math

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from kda_ops.private import (
    OpSchema,
    OpStrategy,
    RuntimeSchemaInfo,
    result_shapes,
    schema_of,
    sharding_propagator,
)
from kda_ops.registrations import schemas
from kda_ops.stages import CONVOLUTION, CONVOLVED, GRADIENTS, KEPT, NORM, NORMALISED

_STATES = frozenset(("initial_state", "final_state", "dfinal_state"))  # in the caller's layout
_BATCH, _HEADS, _V = "BNc", "Hh", "V"


def _placement(
    operator: schemas.Operator, name: str, split: str, transposed: bool, else_: Placement
) -> Placement:
    """Return the placement of tensor `name` under a split.

    That is `Shard` of the axis that the split names, or `else_` if the tensor lacks it.
    """
    axes = operator.axes_of(name)
    if transposed and name in _STATES:
        axes = axes[:-2] + axes[-1] + axes[-2]
    return next((Shard(i) for i, letter in enumerate(axes) if letter in split), else_)


def _is_empty(x) -> bool:
    """Return whether an input spec is the empty placeholder (0,) of an absent tensor."""
    return tuple(x.shape) == (0,)


def _arguments(operator: schemas.Operator, namespace: str) -> list[str]:
    return [a.name for a in schema_of(operator.overload(namespace)).arguments if not a.kwarg_only]


def _outputs(operator: schemas.Operator) -> list[tuple[str, bool]]:
    """Return for each output its name, and whether it is a gradient."""
    if operator is schemas.CHUNK_BWD:
        return [(n, True) for n in GRADIENTS]
    if operator is schemas.SHORT_CONV_BWD:
        return [(n, True) for n in CONVOLVED]
    if operator is schemas.GATED_RMS_NORM_BWD:
        return [(n, True) for n in NORMALISED]
    if operator is schemas.SHORT_CONV:
        return [("y", False), ("final_tail", False)]
    if operator is schemas.GATED_RMS_NORM:
        return [("y", False)]
    kept = KEPT if operator is schemas.CHUNK_FWD else ()
    return [(n, False) for n in ("o", "final_state", *kept)]


def _splits(operator: schemas.Operator, given: dict) -> list[str]:
    """Return the sets of axes over which a call may be spread, by their letters."""
    if operator.axes is NORM:
        # one row of weight serves all heads, or each rank has those of its heads
        heads = "h" if given["weight"].shape[0] == 1 else "hG"
        return ["", heads, "B", "T"]
    batch = [_BATCH] if given.get("cu_seqlens") is None else []
    return ["", "X", *batch] if operator.axes is CONVOLUTION else ["", _HEADS, _V, *batch]


def _rules(operator: schemas.Operator, namespace: str):
    """Return the rule that lists (outputs, inputs) placements along one axis of a mesh."""
    op, names = operator.overload(namespace), _arguments(operator, namespace)

    def rules(*args, **flags):
        given = dict(zip(names, args))
        transposed = flags.get("transpose_state_layout", False)
        # DTensor takes the shapes of results from the whole call. The shards may have too few heads
        # to walk, and then keep more than it does, which is dropped.
        empty = [tuple(shape) == (0,) for shape in result_shapes(op, args, flags)]
        acceptable = []
        for split in _splits(operator, given):
            ins = [
                None
                if x is None
                else Replicate()
                if _is_empty(x)
                else _placement(operator, n, split, transposed, Replicate())
                for n, x in given.items()
            ]
            outs = [
                Replicate()
                if absent
                else _placement(
                    operator, n, split, transposed, Partial() if gradient and split else Replicate()
                )
                for (n, gradient), absent in zip(_outputs(operator), empty, strict=True)
            ]
            acceptable.append((outs, ins))
        return acceptable

    return rules


def _parts(spec, axis: int) -> int:
    """Return the number of parts into which a spec cuts an axis."""
    return math.prod(
        spec.mesh.size(i) for i, placement in enumerate(spec.placements) if placement == Shard(axis)
    )


def _evenly(rules, operator: schemas.Operator, names: list[str]):
    """Wrap `rules`: keep only strategies that cut B, H and HV into equal parts.

    Then value heads stay with their key head, chunks with their row of the batch, and heads with
    their row of a norm's weight.
    """
    if operator.axes is CONVOLUTION:
        return rules  # its tensors are cut alike
    first, other = ("x", 1) if operator.axes is NORM else ("q", 2)
    other_axes = (0,) if operator.axes is NORM else (0, 2)

    def strategies(op_schema: OpSchema) -> OpStrategy:
        # where q, k, v, or x and weight, are among the tensors given
        i = sum(x is not None for x in op_schema.args_schema[: names.index(first)])
        every = rules(op_schema).strategies
        even = [
            s
            for s in every
            if all(
                x.shape[axis] % _parts(x, axis) == 0
                for x, axes in ((s.input_specs[i], (0, 2)), (s.input_specs[i + other], other_axes))
                for axis in axes
            )
        ]
        return OpStrategy(even)

    return strategies


def _register(operator: schemas.Operator, namespace: str) -> None:
    op, names = operator.overload(namespace), _arguments(operator, namespace)
    register_sharding(op)(_rules(operator, namespace))
    propagator = sharding_propagator()
    propagator.op_strategy_funcs[op] = _evenly(propagator.op_strategy_funcs[op], operator, names)
    # DTensor caches its decisions. By default the key holds only tensors and integers, but here
    # absent tensors and flags decide too.
    flags = [a.name for a in schema_of(op).arguments if a.kwarg_only]
    propagator.op_to_schema_info[op] = RuntimeSchemaInfo(
        static_argnum=0, static_kwargkey=flags, needs_pytree=True
    )


for _namespace in schemas.VARIANTS:
    for _operator in (schemas.CHUNK, schemas.CHUNK_FWD, schemas.CHUNK_BWD, schemas.RECURRENT):
        _register(_operator, _namespace)
for _operator in schemas.LAYER:
    if not _operator.mutates:
        _register(_operator, schemas.KDA)
