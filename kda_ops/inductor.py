"""Fold PyTorch code in front of the operators into their flags, as an Inductor pre-grad pass.

Opt in by option or by backend name. ``torch.compile`` knows the name if kda_ops is installed or
this module is imported::

    import kda_ops.inductor

    torch.compile(model, options={"pre_grad_custom_pass": kda_ops.inductor.fold_preprocessing})
    torch.compile(model, backend="kda_inductor")

The pass recognises these patterns in front of `chunk`, `recurrent`, `chunk_` and `recurrent_` of
both variants, written with Python operators, methods or torch functions::

    l2norm          x * rsqrt(sum(x^2) + 1e-6), for both q and k    use_qk_l2norm_in_kernel
    gate            -exp(A_log) * softplus(g + dt_bias)             use_gate_in_kernel, A_log,
                                                                    dt_bias
    bounded_gate    c * sigmoid(exp(A_log) * (g + dt_bias)), c < 0  the same, lower_bound = c
    sigmoid         sigmoid(beta)                                   use_beta_sigmoid_in_kernel
    double_sigmoid  2 * sigmoid(beta)                               the same, allow_neg_eigval

For an argument that does not fold, the pass sets the promise of `chunk` or `chunk_` that the graph
proves. A sigmoid proves ``safe_beta``, a norm of k ``safe_keys``, and c * sigmoid(x) with c in
[-5, 0] ``safe_gate``. Casts, shape changes and changes of grad mode may come between. An in-place
write prevents the proof, and so does a norm in float16.

A fold changes a result only by rounding: the operator computes in float32, or in float64 for
float64 inputs. So the pass leaves calls with ``invariant=True`` alone, whose bits must be those of
eager code. These are not folded, because rounding or range would differ by more:

- a cast of the decay or of beta to a narrower dtype;
- a cast of q or k to another dtype than that of the raw input;
- squares in float16, which overflow, whether written so or made by autocast;
- an expression in a wider dtype than the operator computes in;
- constants that float32 or the dtype of the expression does not hold, or only near its limits.

In bf16, KDA's `chunk` holds less of q and k if it knows a bound of the decay (docs/numerics.md).
So there a bounded gate folds, and ``safe_gate`` is set, only where q and k are normalised: by the
flag, which may come from the same pass, by the norm above or by `F.normalize`.

`F.normalize` is not folded, because it divides by ``max(norm, eps)``. It proves ``safe_keys``.

Dynamo graphs are not functional. So nothing is folded across a change of grad mode or autocast,
nor where a tensor that the fold reads or replaces is written in place (`kda_ops.writes`).
NOTE [Written in place]: a folded call saves the raw tensor for backward, so a later write also
prevents the fold.

Exported graphs (``torch.export``, AOTInductor) consist of ATen operators and skip this pass: set
the flags yourself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from kda_ops import gates, operators, patterns, proofs, writes
from kda_ops.backends import activations
from kda_ops.patterns import (
    GatePattern,
    Match,
    Refused,
    example,
    match_beta,
    match_l2norm,
    match_through,
    same_shape,
)
from kda_ops.private import (
    ENTERS,
    EXITS,
    CustomGraphPass,
    enter_autocast,
    get_hash_for_files,
    is_functorch_wrapped_tensor,
    is_wrapper,
    schema_of,
    set_grad_enabled,
    storage_of,
    takes_several_passes,
)
from kda_ops.proofs import prove_decay, prove_lengths, prove_strength
from kda_ops.registrations import schemas
from kda_ops.writes import written

# the largest scale of normalised queries that kernels hold under a promised bound, with a margin
# (docs/numerics.md)
MOST_SCALE = 5000.0

_TARGETS = {
    target: (rank, schema_of(op.overload(namespace)))
    for namespace, rank in schemas.VARIANTS.items()
    for op in (operators.CHUNK, operators.RECURRENT, operators.CHUNK_, operators.RECURRENT_)
    for target in (op.overload(namespace), op.overload(namespace).overloadpacket)
} | {
    op.overload(namespace): (rank, schema_of(op.overload(namespace)))
    for namespace, rank in schemas.VARIANTS.items()
    for op in (operators.CHUNK__OUT, operators.RECURRENT__OUT)
}


# --- what prevents a fold -------------------------------------------------------------------------


def _storage(node: Node) -> int | None:
    """Return the address of a tensor's storage; None if it is unknown, as in vmap."""
    x = example(node)
    # a wrapper, such as a DTensor, may share the memory of its parts
    known = x is not None and not is_functorch_wrapped_tensor(x) and not is_wrapper(x)
    return storage_of(x) if known and x.layout is torch.strided else None


def _cuts_gradient(node: Node) -> bool:
    return not example(node).requires_grad and any(
        x.requires_grad for n in node.all_input_nodes if (x := example(n)) is not None
    )


class _Surroundings:
    """Each node's position, grad mode and autocast, and the in-place writes of the graph."""

    def __init__(self, graph: Graph):
        self.place: dict[Node, int] = {}
        self.mode: dict[Node, tuple[object, tuple[Node, ...]]] = {}
        self.writes: list[tuple[int, int | None]] = []
        switches = [n for n in graph.nodes if n.target is set_grad_enabled]
        # A block restores the mode that it found, so the last switch gives the initial mode.
        grad: object = switches[-1].args[0] if switches else None
        entered: tuple[Node, ...] = ()
        for i, node in enumerate(graph.nodes):
            if node.target is set_grad_enabled:
                grad = node.args[0]
            elif node.target in ENTERS:
                entered = (*entered, node)
            elif node.target in EXITS:
                entered = tuple(n for n in entered if n is not node.args[0])
            self.place[node], self.mode[node] = i, (grad, entered)
            self.writes += [(i, _storage(x)) for x in written(node)]

    def refuse(self, call: Node, match: Match) -> None:
        """Raise if the match cannot move into the call."""
        for node in match.nodes:
            grad, entered = self.mode[node]
            if entered != self.mode[call][1]:
                raise Refused("autocast")
            if grad != self.mode[call][0] or (grad and _cuts_gradient(node)):
                raise Refused("grad mode")
        if self.is_written(match.nodes, match.leaves.values()):
            raise Refused("in-place")

    def is_written(self, nodes: Iterable[Node], leaves: Iterable[Node] = ()) -> bool:
        """Return whether nodes or leaves are written in place after the first node.

        See NOTE [Written in place].
        """
        nodes = [*nodes]
        first = min(self.place[n] for n in nodes)
        storages = {_storage(n) for n in (*nodes, *leaves)}
        return any(
            i > first and (s is None or s in storages or None in storages) for i, s in self.writes
        )

    def autocasts(self, call: Node, device: str) -> torch.dtype | None:
        """Return the dtype that autocast gives the tensors of this call; None if it is off."""
        for node in reversed(self.mode[call][1]):
            entered: Any = node.args
            if node.target is enter_autocast and entered[0] == device:
                return (entered[1] or torch.get_autocast_dtype(device)) if entered[2] else None
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


# --- the pass -------------------------------------------------------------------------------------


class FoldPreprocessing(CustomGraphPass):
    """The pass with its own counters; `fold_preprocessing` is the shared instance.

    Attributes:
        folded: a `collections.Counter` of folds, by kind: ``l2norm gate bounded_gate sigmoid
            double_sigmoid``.
        refused: a `collections.Counter` of recognised patterns that were not folded, by reason:
            ``precision``, ``grad mode``, ``autocast``, ``in-place``, ``flags`` (the call sets
            another bound), ``range`` (a bound would limit q and k, which are not normalised).
        promised: a `collections.Counter` of promises set, by flag: ``safe_beta``, ``safe_keys`` and
            ``safe_gate``.

    They count graphs compiled in this process. A graph from Inductor's cache does not count: it was
    folded before it was cached.

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
        self.promised: Counter[str] = Counter()

    def __call__(self, graph: Graph) -> None:
        """Fold every recognised pattern of the graph, in place."""
        calls = [
            n
            for n in graph.nodes
            if n.op == "call_function" and n.target in _TARGETS and not n.kwargs.get("invariant")
        ]
        if calls:
            around = _Surroundings(graph)
            for call in calls:
                ours = _Call(call, around, self)
                ours.fold()
                ours.promise()

    def uuid(self) -> bytes:
        """Return the key for Inductor's caches: a hash of the sources that decide a fold."""
        read = activations, gates, patterns, proofs, writes
        return get_hash_for_files((__file__, *(m.__file__ for m in read)))


# flag, the argument that it describes, the flag that makes it needless, and its proof
_PROOFS = (
    ("safe_beta", "beta", "use_beta_sigmoid_in_kernel", prove_strength),
    ("safe_keys", "k", "use_qk_l2norm_in_kernel", prove_lengths),
    ("safe_gate", "g", "use_gate_in_kernel", prove_decay),
)


class _Call:
    """One operator call, whose arguments the folds replace."""

    def __init__(self, node: Node, around: _Surroundings, counts: FoldPreprocessing):
        self.node, self.around, self.counts = node, around, counts
        self.rank, schema = _TARGETS[node.target]
        self.positional = [a.name for a in schema.arguments if not a.kwarg_only]
        self.args: dict[str, Any] = {
            a.name: a.default_value for a in schema.arguments if a.has_default_value()
        }
        self.args |= dict(zip((a.name for a in schema.arguments), node.args)) | node.kwargs

    def fold(self) -> None:
        args = self.args
        if all(example(args.get(n)) is not None for n in "qkv"):
            self._try(self._l2norm, not args["use_qk_l2norm_in_kernel"])
        g, beta = args.get("g"), args.get("beta")
        if g is not None and example(g) is not None:
            self.heads = example(g).shape[2:]
            self._try(
                self._gate,
                not args["use_gate_in_kernel"]
                and args["A_log"] is None
                and args["dt_bias"] is None,
            )
        if beta is not None and example(beta) is not None:
            self._try(
                lambda: [match_through(match_beta, beta)], not args["use_beta_sigmoid_in_kernel"]
            )

    def promise(self) -> None:
        """Set the promises that the graph proves, where no fold has made them needless."""
        args = self.args
        for flag, name, inside, proof in _PROOFS:
            if args.get(flag) is not False or args[inside] or example(args.get(name)) is None:
                continue  # recurrent operators have no promises
            nodes = proof(args[name])
            if flag == "safe_gate" and self._loses_range(gates.SAFE_BOUND):
                continue
            if nodes is not None and not self.around.is_written(nodes):
                args[flag] = True
                self.node.kwargs = {**self.node.kwargs, flag: True}
                self.counts.promised[flag] += 1

    def _l2norm(self) -> list[Match | None]:
        both = [match_l2norm(n, self.args[n]) for n in "qk"]
        for match in both:
            if match is not None:
                x = example(next(iter(match.leaves.values())))
                if self._taken(x) is torch.float16 is not x.dtype:
                    # the raw q and k may overflow float16, in which autocast would pass them
                    raise Refused("precision")
                match.flags = {"use_qk_l2norm_in_kernel": True}
        return both

    def _taken(self, x: Tensor) -> torch.dtype:
        """Return the dtype of q, k or v in the operator; autocast casts all but float64."""
        cast = self.around.autocasts(self.node, x.device.type)
        return x.dtype if cast is None or x.dtype is torch.float64 else cast

    def _gate(self) -> list[Match | None]:
        match = match_through(lambda value: GatePattern(self.rank, value).match(), self.args["g"])
        if match is not None and self.args["lower_bound"] not in (
            None,
            match.flags.get("lower_bound"),
        ):
            raise Refused("flags")  # the call's lower_bound, for safe_gate, is not the gate's
        if match is not None and self._loses_range(match.flags.get("lower_bound")):
            raise Refused("range")
        return [match]

    def _loses_range(self, bound: Any) -> bool:
        """Return whether results may leave the range of the call if it learns a bound of its decay.

        In bf16, KDA's `chunk` then holds less of q and k (docs/numerics.md). Normalised ones stay
        in that range, and a call that already promises a bound has no other.
        """
        args = self.args
        # recurrent operators have no promises, and use no bound
        if not self.rank or bound is None or args.get("safe_gate", True):
            return False
        if self._taken(example(args["q"])) is not torch.bfloat16:
            return False
        if isinstance(bound, (int, float)) and bound < gates.SAFE_BOUND:
            return False  # too low for kernels to use; one that is no constant may have any value
        scale = args["scale"]
        if scale is not None and (isinstance(scale, Node) or abs(scale) > MOST_SCALE):
            return True
        if args["use_qk_l2norm_in_kernel"]:
            return False
        found = [prove_lengths(args[name]) for name in "qk"]
        return None in found or self.around.is_written(n for nodes in found for n in nodes or ())

    def _try(self, find: Callable[[], list[Match | None]], free: bool) -> None:
        if not free:
            # the call already activates this input, so the graph only computes its logits
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
        """Return the leaf in the shape and dtype that the operator expects."""
        x = example(leaf)
        if name in dtypes and x.dtype is not dtypes[name]:
            leaf = self._insert("call_method", "to", leaf, dtypes[name])
        if (name == "A_log" and x.dim() != 1) or (
            name == "dt_bias" and x.dim() != 1 and not same_shape(x.shape, self.heads)
        ):
            leaf = self._insert("call_method", "reshape", leaf, -1)
        for node in reversed(layout):
            # The raw tensor may have strides that do not allow the view of the computed one.
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
    """Fold, then compile a graph with Inductor.

    This is the backend of ``torch.compile(model, backend="kda_inductor")``.

    Args:
        gm, example_inputs: a Dynamo graph and its inputs, any shapes.
        mode: as for Inductor: ``default``, ``reduce-overhead``, ``max-autotune``, ...
        options: as for Inductor. Passes in ``pre_grad_custom_pass``, here or set globally, run
            before the fold.

    Returns:
        The compiled function.

    Example:
        >>> import torch, kda_ops.inductor
        >>> torch.compile(  # doctest: +ELLIPSIS
        ...     kda_ops.chunk_kda, backend="kda_inductor", fullgraph=True)
        <function chunk_kda at ...>
    """
    from kda_ops.private import compile_fx, inductor_config, list_mode_options

    patches = (list_mode_options(mode) if mode else {}) | (options or {})
    before = patches.get("pre_grad_custom_pass", inductor_config.pre_grad_custom_pass)
    passes = [
        *(before if isinstance(before, (list, tuple)) else [] if before is None else [before]),
        fold_preprocessing,
    ]

    def in_turn(graph: Graph) -> None:
        for each in passes:
            each(graph)

    several = passes if takes_several_passes() else in_turn
    patches["pre_grad_custom_pass"] = several if len(passes) > 1 else fold_preprocessing
    return compile_fx(gm, example_inputs, config_patches=patches)


def _register() -> None:
    """Register the backend's name unless an entry point does; a name registered twice fails."""
    from importlib.metadata import entry_points

    from kda_ops.private import register_backend

    if not any(e.name == "kda_inductor" for e in entry_points(group="torch_dynamo_backends")):
        register_backend(kda_inductor)


_register()
