"""Register how the operators run on sharded tensors (DTensor).

Rows of a batch and heads do not interact. Columns of V share only the scores. So each of these axes
can be sharded without communication::

    batch   where nothing is packed and the mesh divides B    parameters are replicated, their
                                                              gradients are partial sums
    heads   where the mesh divides H and HV                   everything has heads, nothing is
                                                              summed
    V       any, but not with `invariant`; every rank         q, k, g, beta are replicated, their
            computes the scores again                         gradients are partial sums

The convolution can be sharded over the batch or channels, the gated norm over batch, tokens or
heads.

The record of an operator names each axis by a letter, and a split is a set of letters. A tensor
that has an axis of the split is sharded on it. Other tensors are replicated; their gradients are
partial sums. Inputs sharded otherwise (over tokens or K) are first redistributed by DTensor.
"""

from __future__ import annotations

import math

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from kda_ops.operators import Operator
from kda_ops.private import (
    OpSchema,
    OpStrategy,
    RuntimeSchemaInfo,
    result_shapes,
    schema_of,
    sharding_propagator,
)
from kda_ops.registrations import schemas

_STATES = frozenset(("initial_state", "final_state"))  # in the caller's layout


def _placement(
    operator: Operator, name: str, split: str, transposed: bool, else_: Placement
) -> Placement:
    """Return the placement of tensor `name` under a split.

    That is `Shard` of the axis that the split names, or `else_` if the tensor lacks it.
    """
    axes = operator.axes_of(name)
    if transposed and name.removeprefix("d") in _STATES:
        axes = axes[:-2] + axes[-1] + axes[-2]
    return next((Shard(i) for i, letter in enumerate(axes) if letter in split), else_)


def _is_empty(x) -> bool:
    """Return whether an input spec is the empty placeholder (0,) of an absent tensor."""
    return tuple(x.shape) == (0,)


def _splits(operator: Operator, given: dict, flags: dict) -> list[str]:
    """Return the sets of axes over which a call may be spread, by their letters."""
    splits = ["", *operator.splits]
    if given.get("cu_seqlens") is not None:
        splits = [split for split in splits if "B" not in split]
    if flags.get("invariant"):  # a head's bits are those of the whole head
        splits = [split for split in splits if split != "V"]
    if operator.axes_of("weight")[:1] == "G" and given["weight"].shape[0] == 1:
        # one row serves all heads; of several, each rank has those of its heads
        splits = [split.replace("G", "") for split in splits]
    return splits


def _rules(operator: Operator, namespace: str):
    """Return the rule that lists (outputs, inputs) placements along one axis of a mesh."""
    op = operator.overload(namespace)
    summed = Partial() if operator.gradients else Replicate()

    def rules(*args, **flags):
        given = dict(zip(operator.names, args))
        transposed = flags.get("transpose_state_layout", False)
        # DTensor takes the shapes of results from the whole call. The shards may have too few heads
        # to walk, and then keep more than it does, which is dropped.
        empty = [tuple(shape) == (0,) for shape in result_shapes(op, args, flags)]
        acceptable = []
        for split in _splits(operator, given, flags):
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
                else _placement(operator, n, split, transposed, summed if split else Replicate())
                for n, absent in zip(operator.results, empty, strict=True)
            ]
            acceptable.append((outs, ins))
        return acceptable

    return rules


def _parts(spec, axis: int) -> int:
    """Return the number of parts into which a spec cuts an axis."""
    return math.prod(
        spec.mesh.size(i) for i, placement in enumerate(spec.placements) if placement == Shard(axis)
    )


def _evenly(rules, operator: Operator):
    """Wrap `rules`: keep only strategies that cut B, H and HV into equal parts.

    Then value heads stay with their key head, chunks with their row of the batch, and heads with
    their row of a norm's weight.
    """
    if "X" in operator.folds:
        return rules  # a convolution's tensors are cut alike
    norm = "G" in operator.folds
    first, other, other_axes = ("x", 1, (0,)) if norm else ("q", 2, (0, 2))

    def strategies(op_schema: OpSchema) -> OpStrategy:
        # where q, k, v, or x and weight, are among the tensors given
        i = sum(x is not None for x in op_schema.args_schema[: operator.names.index(first)])
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


def _register(operator: Operator, namespace: str) -> None:
    op = operator.overload(namespace)
    register_sharding(op)(_rules(operator, namespace))
    propagator = sharding_propagator()
    propagator.op_strategy_funcs[op] = _evenly(propagator.op_strategy_funcs[op], operator)
    # DTensor caches its decisions. By default the key holds only tensors and integers, but here
    # absent tensors and flags decide too.
    flags = [a.name for a in schema_of(op).arguments if a.kwarg_only]
    propagator.op_to_schema_info[op] = RuntimeSchemaInfo(
        static_argnum=0, static_kwargkey=flags, needs_pytree=True
    )


for _namespace in schemas.VARIANTS:
    for _operator in schemas.operators(_namespace):
        if _operator.splits:
            _register(_operator, _namespace)
