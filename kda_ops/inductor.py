"""Fold plain PyTorch around the operators into their flags, as a pass over the graph that Inductor
starts from.

Opt in for one compilation, or by name (known to ``torch.compile`` where kda_ops is installed, or
after this module is imported)::

    import kda_ops.inductor

    torch.compile(model, options={"pre_grad_custom_pass": kda_ops.inductor.fold_preprocessing})
    torch.compile(model, backend="kda_inductor")

What is recognised in front of `chunk`, `recurrent`, `chunk_` and `recurrent_` of both variants, in
the spellings of Python, methods and torch functions::

    l2norm          x * rsqrt(sum(x^2) + 1e-6), for both q and k    use_qk_l2norm_in_kernel
    gate            -exp(A_log) * softplus(g + dt_bias)             use_gate_in_kernel, A_log,
                                                                    dt_bias
    bounded_gate    c * sigmoid(exp(A_log) * (g + dt_bias)), c < 0  the same, lower_bound = c
    sigmoid         sigmoid(beta)                                   use_beta_sigmoid_in_kernel
    double_sigmoid  2 * sigmoid(beta)                               the same, allow_neg_eigval

A fold changes a result by rounding only: the operator computes in float32 (float64 for float64
inputs) what the graph computed in its dtypes. So nothing is folded where the program asked for
less: a cast of the decay or of beta to a narrower dtype, of q and k to another dtype than they came
in; nor squares in float16, whose range is too small, nor of what autocast would make float16; nor
where the operator would compute in less than the graph does. `F.normalize` divides by
``max(norm, eps)``, which is another function.

The graph is that of Dynamo: not functional. So nothing is folded across a change of grad mode or
autocast, nor where something that the fold reads, or replaces, is written in place. NOTE [Written
in place]: a folded call saves the raw tensor for backward, so a later write counts too.

Exported graphs (``torch.export``, AOTInductor) are of ATen operators and do not pass here: set the
flags yourself, which is the contract anyway.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, GraphModule, Node

from kda_ops import patterns
from kda_ops.patterns import (
    Gate,
    Match,
    Refused,
    example,
    match_beta,
    match_l2norm,
    match_through,
    same_shape,
)
from kda_ops.registrations import schemas

_TARGETS = {
    target: (rank, op.overload(namespace)._schema)
    for namespace, rank in schemas.VARIANTS.items()
    for op in (schemas.CHUNK, schemas.RECURRENT, schemas.CHUNK_, schemas.RECURRENT_)
    for target in (op.overload(namespace), op.overload(namespace).overloadpacket)
}


# --- what must not lie between --------------------------------------------------------------------


def _storage(node: Node) -> int | None:
    """Of a tensor; None if that is unknown, as within vmap."""
    x = example(node)
    return (
        None
        if x is None or torch._C._functorch.is_functorch_wrapped_tensor(x)
        else x.untyped_storage()._cdata
    )


def _written(node: Node) -> Iterable[Node]:
    """The tensors that a node writes in place."""
    target: Any = node.target
    args: Any = node.args
    out = node.kwargs.get("out")
    outs = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Node)]
    if node.op == "call_method":
        return [args[0]] if _says_in_place(target) or target in _IN_PLACE_METHODS else outs
    if node.op == "call_module":
        return node.all_input_nodes
    if node.op != "call_function":
        return []
    if isinstance(target, torch._ops.HigherOrderOperator):
        bodies = [
            getattr(node.graph.owning_module, str(x.target))
            for x in node.all_input_nodes
            if x.op == "get_attr"
        ]
        bodies = [m for m in bodies if isinstance(m, GraphModule)]
        pure = bool(bodies) and not any(
            True for m in bodies for n in m.graph.nodes for _ in _written(n)
        )
        return [] if pure else node.all_input_nodes
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = (
            target.default
            if "default" in target.overloads()
            else getattr(target, target.overloads()[0])
        )
    if isinstance(target, torch._ops.OpOverload):
        names = [a.name for a in target._schema.arguments]
        given = dict(zip(names, node.args)) | node.kwargs
        return [
            n
            for a in target._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
            for n in _nodes_in(given.get(a.name))
        ]
    if target in _IN_PLACE:
        return node.all_input_nodes[:1]
    name, given = getattr(target, "__name__", ""), _by_name(node)
    counts = name.endswith(("batch_norm", "instance_norm"))  # running statistics
    return (
        node.all_input_nodes
        if _says_in_place(name)
        or counts
        or given.get("inplace")
        or given.get("max_norm") is not None
        else outs
    )


def _says_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _by_name(node: Node) -> dict[str, Any]:
    """The arguments of a function of Python, those by keyword of one of C."""
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


_WRITES = (
    "setitem delitem iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift "
    "irshift"
).split()
_IN_PLACE = frozenset(getattr(operator, n) for n in _WRITES)
_IN_PLACE_METHODS = frozenset((*(f"__{n}__" for n in _WRITES), "set_data"))


def _cuts_gradient(node: Node) -> bool:
    return not example(node).requires_grad and any(
        x.requires_grad for n in node.all_input_nodes if (x := example(n)) is not None
    )


class _Surroundings:
    """For each node its place, and the grad mode and autocast it runs under; and the writes in
    place.
    """

    def __init__(self, graph: Graph):
        self.place: dict[Node, int] = {}
        self.mode: dict[Node, tuple[object, tuple[Node, ...]]] = {}
        self.writes: list[tuple[int, int | None]] = []
        switches = [n for n in graph.nodes if n.target is torch._C._set_grad_enabled]
        # A block gives the mode back that it found, so the last switch tells what the first nodes
        # run under.
        grad: object = switches[-1].args[0] if switches else None
        entered: tuple[Node, ...] = ()
        for i, node in enumerate(graph.nodes):
            name = getattr(node.target, "__name__", "")
            if node.target is torch._C._set_grad_enabled:
                grad = node.args[0]
            elif name in ("_enter_autocast", "_enter_inference_mode"):
                entered = (*entered, node)
            elif name in ("_exit_autocast", "_exit_inference_mode"):
                entered = tuple(n for n in entered if n is not node.args[0])
            self.place[node], self.mode[node] = i, (grad, entered)
            self.writes += [(i, _storage(x)) for x in _written(node)]

    def refuse(self, call: Node, match: Match) -> None:
        """Raise if the match cannot move into the call."""
        for node in match.nodes:
            grad, entered = self.mode[node]
            if entered != self.mode[call][1]:
                raise Refused("autocast")
            if grad != self.mode[call][0] or (grad and _cuts_gradient(node)):
                raise Refused("grad mode")
        first = min(self.place[n] for n in match.nodes)
        storages = {_storage(n) for n in (*match.nodes, *match.leaves.values())}
        # See NOTE [Written in place].
        if any(
            i > first and (s is None or s in storages or None in storages) for i, s in self.writes
        ):
            raise Refused("in-place")

    def autocasts(self, call: Node, device: str) -> torch.dtype | None:
        """What autocast makes of the tensors of this call, if it is on."""
        for node in reversed(self.mode[call][1]):
            entered: Any = node.args
            if node.target is torch.amp.autocast_mode._enter_autocast and entered[0] == device:
                return (entered[1] or torch.get_autocast_dtype(device)) if entered[2] else None
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


# --- the pass -------------------------------------------------------------------------------------


class FoldPreprocessing(CustomGraphPass):
    """The pass, with its own counters; `fold_preprocessing` is one for all.

    Attributes:
        folded: a `collections.Counter` of what was folded, by kind: ``l2norm gate bounded_gate
            sigmoid double_sigmoid``.
        refused: a `collections.Counter` of what was recognised and left alone, by reason:
            ``precision``, ``grad mode``, ``autocast``, ``in-place``, ``flags`` (the call already
            says something else).

    Both count the graphs that were compiled in this process; a graph that comes from Inductor's
    cache was folded when it was put there.

    Example:
        >>> import torch, kda_ops.inductor
        >>> fold = kda_ops.inductor.FoldPreprocessing()
        >>> def attend(q, k, v, b):
        ...     return kda_ops.chunk_kda(q, k, v, None, torch.sigmoid(b))[0]
        >>> options = {"pre_grad_custom_pass": fold, "fx_graph_cache": False}
        >>> compiled = torch.compile(attend, options=options)
        >>> o = compiled(*torch.rand(3, 1, 10, 2, 8).unbind(), torch.randn(1, 10, 2))
        >>> fold.folded
        Counter({'sigmoid': 1})
    """

    def __init__(self) -> None:
        self.folded: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def __call__(self, graph: Graph) -> None:
        """Fold what can be folded in the graph, in place."""
        calls = [n for n in graph.nodes if n.op == "call_function" and n.target in _TARGETS]
        if calls:
            around = _Surroundings(graph)
            for call in calls:
                _Call(call, around, self).fold()

    def uuid(self) -> bytes:
        """What keys Inductor's caches: the text of the pass."""
        return get_hash_for_files((__file__, patterns.__file__))


class _Call:
    """One call to an operator, whose arguments are replaced."""

    def __init__(self, node: Node, around: _Surroundings, counts: FoldPreprocessing):
        self.node, self.around, self.counts = node, around, counts
        self.rank, schema = _TARGETS[node.target]
        self.positional = [a.name for a in schema.arguments if not a.kwarg_only]
        self.args = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self.args |= dict(zip((a.name for a in schema.arguments), node.args)) | node.kwargs

    def fold(self) -> None:
        args = self.args
        if all(example(args.get(n)) is not None for n in "qkv"):
            self._try([args["q"], args["k"]], self._l2norm, not args["use_qk_l2norm_in_kernel"])
        g, beta = args.get("g"), args.get("beta")
        if g is not None and example(g) is not None:
            self.heads = example(g).shape[2:]
            self._try(
                [g],
                self._gate,
                not args["use_gate_in_kernel"]
                and args["A_log"] is None
                and args["dt_bias"] is None,
            )
        if beta is not None and example(beta) is not None:
            self._try(
                [beta],
                lambda: [match_through(match_beta, beta)],
                not args["use_beta_sigmoid_in_kernel"],
            )

    def _l2norm(self) -> list[Match | None]:
        both = [match_l2norm(n, self.args[n]) for n in "qk"]
        for match in both:
            if match is not None:
                x = example(next(iter(match.leaves.values())))
                if (
                    x.dtype not in (torch.float16, torch.float64)
                    and self.around.autocasts(self.node, x.device.type) is torch.float16
                ):
                    # before the norm, which may be what brings them into its range
                    raise Refused("precision")
                match.flags = {"use_qk_l2norm_in_kernel": True}
        return both

    def _gate(self) -> list[Match | None]:
        match = match_through(lambda value: Gate(self.rank, value).match(), self.args["g"])
        if match is not None and self.args["lower_bound"] not in (
            None,
            match.flags.get("lower_bound"),
        ):
            raise Refused("flags")  # the bound that safe_gate names is not the gate's
        return [match]

    def _try(self, values: list[Node], find: Callable[[], list[Match | None]], free: bool) -> None:
        if not free:
            # what stands before an activation that the call already asks for is a part of the
            # logits
            return
        try:
            found = find()
            matches = [m for m in found if m is not None]
            if len(matches) < len(found):
                return
            for match in matches:
                self.around.refuse(self.node, match)
        except Refused as reason:
            self.counts.refused[str(reason)] += 1
            return
        dtypes = {n: example(self.args[n]).dtype for n in "qk"}
        for match in matches:
            for i, (name, leaf) in enumerate(match.leaves.items()):
                self.args[name] = self._fit(name, leaf, dtypes, [] if i else match.layout)
            self.args |= match.flags
        keywords = dict(self.args)
        self.node.args = tuple(keywords.pop(n) for n in self.positional)
        self.node.kwargs = keywords
        for node in sorted(
            {n for m in matches for n in m.nodes}, key=self.around.place.__getitem__, reverse=True
        ):
            if not node.users:
                node.graph.erase_node(node)
        self.counts.folded[matches[0].kind] += 1

    def _fit(
        self, name: str, leaf: Node, dtypes: dict[str, torch.dtype], layout: list[Node]
    ) -> Node:
        """The leaf in the shape and dtype that the operator asks for."""
        x = example(leaf)
        if name in dtypes and x.dtype is not dtypes[name]:
            leaf = self._insert("call_method", "to", leaf, dtypes[name])
        if (name == "A_log" and x.dim() != 1) or (
            name == "dt_bias" and x.dim() != 1 and not same_shape(x.shape, self.heads)
        ):
            leaf = self._insert("call_method", "reshape", leaf, -1)
        for node in reversed(layout):
            # A view of what was computed may not be one of what it was computed from.
            target: Any = {"view": "reshape", "view_as": "reshape_as"}.get(
                str(node.target), node.target
            )
            leaf = self._insert(node.op, target, leaf, *node.args[1:], **node.kwargs)
        return leaf

    def _insert(self, op: str, target: Any, leaf: Node, *args: Any, **kwargs: Any) -> Node:
        with self.node.graph.inserting_before(self.node):
            new = self.node.graph.create_node(op, target, (leaf, *args), kwargs)
        args, kwargs = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        function = getattr(torch.Tensor, target) if op == "call_method" else target
        new.meta["example_value"] = function(example(leaf), *args, **kwargs)
        return new


fold_preprocessing = FoldPreprocessing()


# --- the backend ----------------------------------------------------------------------------------


def kda_inductor(
    gm: GraphModule,
    example_inputs: list[Tensor],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Compile a graph with Inductor, folding first: the backend of
    ``torch.compile(model, backend="kda_inductor")``.

    Args:
        gm, example_inputs: a Dynamo graph and its inputs, any shapes.
        mode: as for Inductor: ``default``, ``reduce-overhead``, ``max-autotune``, ...
        options: Inductor's; passes given here or set globally as ``pre_grad_custom_pass`` run
            first.

    Returns:
        The compiled function.

    Example:
        >>> import torch, kda_ops.inductor
        >>> torch.compile(  # doctest: +ELLIPSIS
        ...     kda_ops.chunk_kda, backend="kda_inductor", fullgraph=True)
        <function chunk_kda at ...>
    """
    from torch._inductor import config, custom_graph_pass, list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = (list_mode_options(mode) if mode else {}) | (options or {})
    before = patches.get("pre_grad_custom_pass", config.pre_grad_custom_pass)
    passes = [
        *(before if isinstance(before, (list, tuple)) else [] if before is None else [before]),
        fold_preprocessing,
    ]

    def in_turn(graph: Graph) -> None:
        for each in passes:
            each(graph)

    # torch 2.12 and older take one
    several = passes if hasattr(custom_graph_pass, "get_custom_graph_passes") else in_turn
    patches["pre_grad_custom_pass"] = several if len(passes) > 1 else fold_preprocessing
    return compile_fx(gm, example_inputs, config_patches=patches)


def _register() -> None:
    """Make the backend known by name where no installed entry point does: looking up a name twice
    registered is an error.
    """
    from importlib.metadata import entry_points

    if not any(e.name == "kda_inductor" for e in entry_points(group="torch_dynamo_backends")):
        torch._dynamo.register_backend(kda_inductor)


_register()
