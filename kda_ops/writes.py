"""Find which tensors a node of a Dynamo graph writes in place, for `kda_ops.inductor`.

Where it is not known that a node writes nothing, it counts as a write: a needless one prevents a
fold, a missed one makes a result wrong.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kda_ops.private import HigherOrderOperator, OpOverload, OpOverloadPacket, schema_of

_WRITES = (
    "setitem delitem iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift "
    "irshift"
).split()
_IN_PLACE = frozenset(getattr(operator, n) for n in _WRITES)
_IN_PLACE_METHODS = frozenset((*(f"__{n}__" for n in _WRITES), "set_data"))
# packages whose functions write nothing but what their names and arguments say
_KNOWN = frozenset(("torch", "_operator", "builtins", "math", "einops"))


def written(node: Node) -> list[Node]:
    """Return the nodes whose tensors a node may write."""
    target: Any = node.target
    if node.op == "call_method":
        return _nodes_in([node.args[:1] if _says_in_place(target) else (), node.kwargs.get("out")])
    if node.op == "call_module":
        return node.all_input_nodes
    if node.op != "call_function":
        return []
    if isinstance(target, HigherOrderOperator):
        return [] if _has_pure_bodies(node) else node.all_input_nodes
    if target in _IN_PLACE:
        return node.all_input_nodes[:1]
    name = getattr(target, "__name__", "").split(".")[0]
    if "batch_norm" in name or "instance_norm" in name:
        return node.all_input_nodes  # running statistics, which schemas do not name
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        found = _by_schema(node, target)
        # a schema without any write, of an operator whose name says that it writes
        return node.all_input_nodes if found is None and _says_in_place(name) else found or []
    given = _by_name(node)
    if (
        not _is_known(target)
        or type(target).__name__.startswith("numpy_")  # Dynamo's wrapper of a NumPy function
        or _says_in_place(name)
        or given.get("inplace")
        or given.get("max_norm") is not None
    ):
        return node.all_input_nodes
    same = getattr(torch.ops.aten, name, None)  # a function in C has no signature
    found = _by_schema(node, same) if isinstance(same, OpOverloadPacket) else None
    return [*_nodes_in(given.get("out")), *(found or [])]


def _says_in_place(name: str) -> bool:
    return name in _IN_PLACE_METHODS or (name.endswith("_") and not name.endswith("__"))


def _is_known(target: Any) -> bool:
    """Return whether a function belongs to a package of `_KNOWN`; any other may write."""
    owner = target if getattr(target, "__module__", None) else getattr(target, "__objclass__", None)
    return (getattr(owner, "__module__", None) or "").split(".")[0] in _KNOWN


def _has_pure_bodies(node: Node) -> bool:
    """Return whether a higher-order operator has bodies, and none of them writes."""
    owner = node.graph.owning_module
    names = (str(x.target) for x in node.all_input_nodes if x.op == "get_attr")
    found = (operator.attrgetter(name)(owner) for name in names)
    bodies = [m for m in found if isinstance(m, GraphModule)]
    return bool(bodies) and not any(written(n) for m in bodies for n in m.graph.nodes)


def _by_schema(node: Node, target: OpOverload | OpOverloadPacket) -> list[Node] | None:
    """Return the arguments that an operator writes; None if its schemas name no write.

    A packet chooses its overload by the types of its arguments, so a write by any of them counts.
    """
    overloads: Iterable[OpOverload] = (
        [target]
        if isinstance(target, OpOverload)
        else [getattr(target, name) for name in target.overloads()]
    )
    found: list[Node] | None = None
    for schema in map(schema_of, overloads):
        by_position = [a.name for a in schema.arguments if not a.kwarg_only]
        given = dict(zip(by_position, node.args)) | node.kwargs
        for a in schema.arguments:
            if a.alias_info is not None and a.alias_info.is_write:
                found = [*(found or []), *_nodes_in(given.get(a.name))]
    return found


def _by_name(node: Node) -> dict[str, Any]:
    """Return a node's arguments by name; for a C function only its keyword arguments."""
    target: Any = node.target
    try:
        return node.kwargs | inspect.signature(target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):
        return node.kwargs


def _nodes_in(x: Any) -> list[Node]:
    found: list[Node] = []

    def visit(node: Node) -> Node:
        found.append(node)
        return node

    torch.fx.node.map_arg(x, visit)
    return found
