"""Find in a Dynamo graph the patterns that `kda_ops.inductor` folds.

A Dynamo graph has one node per call of the program: a method, or a function of torch or Python.
``meta["example_value"]`` holds a fake tensor with its shape and dtype. `expand` normalises
products: the order of factors, the place of the sign, and ``/ sqrt(x)`` or ``* rsqrt(x)`` make no
difference. A match is not yet safe to fold: the caller checks in-place writes, grad mode and
autocast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kda_ops import operators
from kda_ops.backends.activations import EPS
from kda_ops.private import OpOverload, OpOverloadPacket
from kda_ops.registrations import schemas
from kda_ops.writes import written

_GATES = {
    target: rank
    for namespace, rank in schemas.VARIANTS.items()
    for target in (
        operators.GATE.overload(namespace),
        operators.GATE.overload(namespace).overloadpacket,
    )
}


class Refused(Exception):
    """A recognised pattern that must not be folded; the argument is the reason."""


# --- reading the graph ----------------------------------------------------------------------------

_ALIASES = {
    "multiply": "mul",
    "__mul__": "mul",
    "__rmul__": "mul",
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "__truediv__": "div",
    "negative": "neg",
    "__neg__": "neg",
    "__add__": "add",
    "__radd__": "add",
    "__pow__": "pow",
    "expit": "sigmoid",
    "special_expit": "sigmoid",
    "__getitem__": "getitem",
    "swapaxes": "transpose",
    "swapdims": "transpose",
}
# torch's own names of arguments, by the names that it takes as well
_KEYWORDS = {
    "self": "input",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
    "axis": "dim",
    "axis0": "dim0",
    "axis1": "dim1",
    "keepdims": "keepdim",
}
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
_RESHAPES = frozenset(
    {
        "view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "flatten",
        "unflatten",
        "view_as",
        "reshape_as",
        "ravel",
    }
)


def source(node: Node) -> Any:
    """Return a node's first argument, of any type; None if it has none."""
    return node.args[0] if node.args else None


def example(x: Any) -> Any:
    """Return the fake tensor of a node; None if x is not a node with a tensor."""
    value = x.meta.get("example_value") if isinstance(x, Node) else None
    return value if isinstance(value, Tensor) else None


def name_of(node: Any) -> str | None:
    """Return the canonical name of a node's function.

    Return None if torch does not define it, or if it writes a tensor, such as `out`.
    """
    name = _name_of(node)
    return None if name is None or written(node) else name


def _name_of(node: Any) -> str | None:
    if not isinstance(node, Node):
        return None
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        target: Any = node.target
        if isinstance(target, (OpOverload, OpOverloadPacket)):
            packet = getattr(target, "overloadpacket", target)
            if not str(packet).startswith("aten."):
                return None
            name = packet.__name__
        elif (getattr(target, "__module__", None) or "").split(".")[0] in ("torch", "_operator"):
            name = target.__name__
        else:
            return None
    else:
        return None
    return _ALIASES.get(name, name)


def operands(node: Node, *names: str) -> list:
    """Return the arguments ``input`` and `names`, positional or by keyword; None where absent.

    If the node has any other argument, all are None: its meaning is not known.
    """
    given = dict(zip(("input", *names), node.args))
    given |= {_KEYWORDS.get(name, name): x for name, x in node.kwargs.items()}
    known = len(node.args) <= 1 + len(names) and given.keys() <= {"input", *names}
    return [given.get(name) if known else None for name in ("input", *names)]


def _addends(node: Node) -> tuple[Any, Any]:
    """Return a and b of a + b; None and None of a + alpha b."""
    a, b, alpha = operands(node, "other", "alpha")
    # alpha has no position: three are the older add(a, alpha, b)
    return (a, b) if len(node.args) < 3 and alpha in (None, 1) else (None, None)


def _is_number(x: Any) -> bool:
    """Return whether x is a constant that every later product of constants can hold."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < 1e100


def _is_moderate(x: float, dtype: torch.dtype) -> bool:
    """Return whether a constant takes at most half of the exponents of fp32 and of `dtype`.

    The other half is for the factors next to it, so that neither overflows or underflows.
    """
    info = torch.finfo(torch.float32 if dtype.itemsize > 4 else dtype)
    return x == 0.0 or info.tiny**0.5 <= abs(x) <= info.max**0.5


def same_shape(a: Sequence, b: Sequence) -> bool:
    """Return whether two shapes are equal, without adding a guard on symbolic sizes."""
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b))


def _is_wider(a: torch.dtype, b: torch.dtype) -> bool:
    """Return whether dtype a represents every value of floating-point dtype b.

    torch does not promote 8-bit floats, so they are neither wider nor narrower than any other.
    """
    return a is b or (
        a.is_floating_point
        and b.is_floating_point
        and min(a.itemsize, b.itemsize) > 1
        and torch.promote_types(a, b) is a
    )


def _is_computed_in(raw: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether the operator computes a `raw` input in at least `dtype`."""
    return raw.itemsize > 1 and _is_wider(torch.promote_types(raw, torch.float32), dtype)


def is_cast(node: Any) -> bool:
    """Return whether a node only casts between floating-point dtypes."""
    if not isinstance(node, Node):
        return False
    x, y = example(source(node)), example(node)
    casts = name_of(node) in (
        "float",
        "double",
        "half",
        "bfloat16",
        "to",
        "type",
        "type_as",
        "_to_copy",
    )
    return (
        casts
        and x is not None
        and y is not None
        and x.device == y.device
        and x.dtype.is_floating_point
        and y.dtype.is_floating_point
    )


def _is_transparent(node: Any) -> bool:
    """Return whether a node is a lossless cast or a contiguous copy."""
    if is_cast(node):
        return _is_wider(example(node).dtype, example(source(node)).dtype)
    return _is_copy(node)


def _is_copy(node: Any) -> bool:
    """Return whether a node is a contiguous copy."""
    return name_of(node) == "contiguous" and example(source(node)) is not None


def _is_reshape(node: Any) -> bool:
    """Return whether a node only changes sizes, not the order of elements."""
    x, y = (example(source(node)), example(node)) if isinstance(node, Node) else (None, None)
    if x is None or y is None or x.dtype is not y.dtype:  # a view as another dtype
        return False
    if name_of(node) == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return all(i is None or i is Ellipsis or i == slice(None) for i in index)
    return name_of(node) in _RESHAPES


def strip(node: Any, nodes: list[Node], reshapes: bool) -> Any:
    """Skip lossless casts (and reshapes), append the skipped nodes to `nodes`, return the rest.

    Anything but a node is returned as it is.
    """
    while isinstance(node, Node) and (_is_transparent(node) or (reshapes and _is_reshape(node))):
        nodes.append(node)
        node = source(node)
    return node


# --- products -------------------------------------------------------------------------------------


@dataclass
class Factor:
    """base ** exponent; `shape` is the base's shape in the product, after reshapes."""

    base: Node
    exponent: float
    shape: Sequence


@dataclass
class Product:
    """coefficient * product of base ** exponent, and the nodes that make it up."""

    coefficient: float
    factors: list[Factor]
    nodes: list[Node] = field(default_factory=list)

    def times(self, other: Product) -> Product:
        """Return the product of both."""
        return Product(
            self.coefficient * other.coefficient,
            self.factors + other.factors,
            self.nodes + other.nodes,
        )

    def take(self, name: str, exponent: float = 1.0) -> Factor | None:
        """Return the only factor that calls `name` with this exponent, or None."""
        found = [f for f in self.factors if name_of(f.base) == name and f.exponent == exponent]
        return found[0] if len(found) == 1 else None


def expand(node: Any, exponent: float = 1.0, whole: Node | None = None) -> Product:
    """Write a node as a product of powers.

    Follow multiplications, divisions, signs, roots and lossless casts; treat the node `whole` as an
    atom, and constants near the ends of the range of their dtype (`_is_moderate`).
    """
    if _is_number(node):
        # a zero below the line is an infinite coefficient, which no pattern has
        power = math.inf if node == 0 and exponent < 0.0 else float(node) ** exponent
        return Product(power, [])
    x = example(node)
    atom = Product(1.0, [Factor(node, exponent, x.shape if x is not None else ())])
    if x is None or not x.dtype.is_floating_point or node is whole:
        return atom
    name, single = name_of(node), abs(exponent) == 1.0
    if _is_transparent(node):
        out = expand(source(node), exponent, whole)
    elif _is_reshape(node):
        # Follow a reshape only over the factors with one value per head or row: exp(A_log) and the
        # root of the sum of squares.
        out = expand(source(node), exponent, whole)
        factor = out.factors[0] if len(out.factors) == 1 else None
        if factor is None or not (
            name_of(factor.base) == "exp"
            or (name_of(factor.base) == "add" and abs(factor.exponent) == 0.5)
        ):
            return atom
        factor.shape = x.shape
    elif name == "neg" and single:
        out = Product(-1.0, []).times(expand(operands(node)[0], exponent, whole))
    elif name in ("mul", "div") and single:
        a, b = operands(node, "other")
        if a is None or b is None:
            return atom
        parts = [
            expand(a, exponent, whole),
            expand(b, exponent if name == "mul" else -exponent, whole),
        ]
        out = parts[0].times(parts[1])
        if not all(_is_moderate(p.coefficient, x.dtype) for p in (*parts, out)):
            return atom
    elif name in _POWERS or name == "pow":
        base, power = (
            (operands(node)[0], _POWERS[name]) if name in _POWERS else operands(node, "exponent")
        )
        # other powers lose the sign of the base, or leave its range
        if not isinstance(base, Node) or power not in (1, -1, 0.5, -0.5):
            return atom
        out = expand(base, exponent * power, whole)
    else:
        return atom
    out.nodes.append(node)
    return out


# --- the patterns ---------------------------------------------------------------------------------


@dataclass
class Match:
    """A fold of one argument: the leaves that the operator reads instead, and the flags to set.

    `nodes` are the folded nodes. `layout` are the shape changes after the activation, last first;
    the fold applies them to the first leaf.
    """

    kind: str
    nodes: list[Node]
    leaves: dict[str, Node]
    flags: dict[str, Any]
    layout: list[Node] = field(default_factory=list)


def is_layout(node: Node, rows: bool) -> bool:
    """Return whether a node only moves elements.

    With `rows` it must move whole rows of the last dimension, and may repeat them.
    """
    x, y = example(source(node)), example(node)
    if x is None or y is None:
        return False
    last, name = x.dim() - 1, name_of(node)
    if name == "transpose":
        swapped = operands(node, "dim0", "dim1")[1:]
        return not rows or all(isinstance(d, int) and d % x.dim() != last for d in swapped)
    if name == "permute":
        dims = (
            node.args[1]
            if len(node.args) == 2 and isinstance(node.args[1], (tuple, list))
            else node.args[1:]
        )
        return not rows or (
            len(dims) == x.dim() and isinstance(dims[-1], int) and dims[-1] % x.dim() == last
        )
    if name == "repeat_interleave":
        dim = operands(node, "repeats", "dim", "output_size")[2]
        return rows and isinstance(dim, int) and dim % x.dim() != last
    if _is_reshape(node) or (rows and name == "expand"):
        return not rows or same_shape(x.shape[-1:], y.shape[-1:])
    return name == "contiguous"  # whose source is a tensor, see above


def _sum_of_squares(node: Node, nodes: list[Node]) -> Node | None:
    """Return x if `node` is sum(x^2) + eps over the last dimension, with the operator's eps."""
    a, b = _addends(node)
    if _is_number(a):
        a, b = b, a
    if not _is_number(b) or abs(b - EPS) > 1e-3 * EPS:
        return None
    total = strip(a, nodes, reshapes=True)
    if name_of(total) != "sum":
        return None
    squares, dim = operands(total, "dim", "keepdim", "dtype")[:2]
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if (
        not isinstance(dim, int)
        or example(squares) is None
        or dim not in (-1, example(squares).dim() - 1)
        or not _is_wider(example(total).dtype, example(squares).dtype)
    ):
        return None
    nodes.append(total)
    square = strip(squares, nodes, reshapes=False)
    nodes.append(square)
    if name_of(square) == "mul":
        x, y = (strip(f, nodes, reshapes=False) for f in operands(square, "other"))
        return x if x is y and isinstance(x, Node) else None
    x, power = operands(square, "exponent")
    if isinstance(x, Node) and (
        name_of(square) == "square" or (name_of(square) == "pow" and power == 2)
    ):
        return strip(x, nodes, reshapes=False)
    return None


@dataclass
class NormPattern:
    """The norm x / sqrt(sum(x^2) + eps): its nodes, and the casts and shape changes after it."""

    x: Node
    nodes: list[Node]
    casts: list[Node]
    layout: list[Node]


def find_l2norm(value: Node) -> NormPattern | None:
    """Find x / sqrt(sum(x^2) + eps) behind casts and shape changes; refuse float16 (overflow)."""
    nodes: list[Node] = []
    layout: list[Node] = []
    core = value
    casts: list[Node] = []
    while is_cast(core) or is_layout(core, rows=True):
        nodes.append(core)
        (casts if is_cast(core) else layout).append(core)
        core = source(core)
    root = expand(core).take("add", -0.5)
    x = None if root is None else _sum_of_squares(root.base, nodes)
    if root is None or x is None or not example(x).dtype.is_floating_point:
        return None
    product = expand(core, whole=x)
    if product.coefficient != 1.0 or sorted((f.exponent, f.base is x) for f in product.factors) != [
        (-0.5, False),
        (1.0, True),
    ]:
        return None
    nodes += [*product.nodes, root.base]
    shape = example(x).shape
    if not same_shape(shape, example(core).shape) or not same_shape(root.shape, (*shape[:-1], 1)):
        return None
    if any(example(n).dtype is torch.float16 for n in nodes if not is_cast(n)):
        raise Refused("precision")
    return NormPattern(x, nodes, casts, layout)


def match_l2norm(name: str, value: Node) -> Match | None:
    """Match x / sqrt(sum(x^2) + eps), with or without a cast back to the dtype of x.

    Only that cast may round.
    """
    norm, dtype = find_l2norm(value), example(value).dtype
    if norm is None:
        return None
    casts = norm.casts
    back = example(norm.x).dtype is dtype and all(_is_wider(example(n).dtype, dtype) for n in casts)
    if not back and not all(_is_transparent(n) for n in casts):
        raise Refused("precision")
    return Match("l2norm", norm.nodes, {name: norm.x}, {}, norm.layout)


def match_beta(value: Node) -> Match | None:
    """Match c * sigmoid(beta), c = 1 or 2."""
    layout: list[Node] = []
    while is_layout(value, rows=False) or _is_transparent(value):
        layout.append(value)
        value = source(value)
    product = expand(value)
    found = product.take("sigmoid")
    if found is None or len(product.factors) != 1 or product.coefficient not in (1.0, 2.0):
        return None
    nodes, logits = [*layout, *product.nodes, found.base], operands(found.base)[0]
    if logits is None:
        return None
    raw = peel(logits, example(value).dtype, nodes)
    double = product.coefficient == 2.0
    flags: dict[str, Any] = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": double}
    return Match(
        "double_sigmoid" if double else "sigmoid",
        nodes,
        {"beta": raw},
        flags,
        [n for n in layout if not is_cast(n)],
    )


def peel(node: Node, dtype: torch.dtype, nodes: list[Node]) -> Node:
    """Skip lossless casts while the operator computes the raw tensor in at least `dtype`."""
    while _is_transparent(node):
        if not _is_computed_in(example(source(node)).dtype, dtype):
            break
        nodes.append(node)
        node = source(node)
    return node


class GatePattern:
    """Matches the gate of one call: g [B, T, HV, K], or [B, T, HV] for rank 0."""

    def __init__(self, rank: int, value: Node):
        self.rank, self.value, self.shape = rank, value, example(value).shape
        self.heads = self.shape[2:]  # [HV, K] or [HV]

    def match(self) -> Match | None:
        """Match either gate, or a call to the gate operator."""
        passed: list[Node] = []
        core = strip(self.value, passed, reshapes=False)
        self.computed = example(core).dtype
        if _GATES.get(core.target) == self.rank and core.args:
            g, A_log, dt_bias, bound = operands(core, "A_log", "dt_bias", "lower_bound")
            return self._found(g, A_log, dt_bias, [*passed, core], bound)
        product = expand(self.value)
        if product.coefficient == -1.0 and len(product.factors) == 2:
            softplus, exp = product.take("softplus"), product.take("exp")
            if (
                softplus is None
                or exp is None
                or not self._is_full(softplus.base)
                or not _is_plain_softplus(softplus.base)
            ):
                return None
            nodes = [*product.nodes, softplus.base]
            A_log = self._A_log(exp, nodes)
            return (
                None
                if A_log is None
                else self._linear(
                    operands(softplus.base, "beta", "threshold")[0], A_log, nodes, None
                )
            )
        sigmoid = product.take("sigmoid")
        bounded = product.coefficient < 0.0 and len(product.factors) == 1
        if sigmoid is None or not bounded or not self._is_full(sigmoid.base):
            return None
        nodes, bound = [*product.nodes, sigmoid.base], product.coefficient
        inner = expand(operands(sigmoid.base)[0])
        exp = inner.take("exp")
        rest = [f for f in inner.factors if f is not exp]
        if (
            exp is not None
            and inner.coefficient == 1.0
            and len(rest) == 1
            and rest[0].exponent == 1.0
            and self._is_full(rest[0].base)
        ):
            more = [*nodes, *inner.nodes]
            A_log = self._A_log(exp, more)
            if A_log is not None:
                return self._linear(rest[0].base, A_log, more, bound)
        return self._linear(operands(sigmoid.base)[0], None, nodes, bound)

    def _is_full(self, node: Node) -> bool:
        return same_shape(example(node).shape, self.shape)

    def _is_per_head(self, shape: Sequence, of: Sequence) -> bool:
        """Return whether a tensor of this shape, broadcast to g, has sizes `of` after [B, T].

        It must hold one value for all tokens.
        """
        padded = (1,) * (2 + len(of) - len(shape)) + tuple(shape)
        return same_shape(padded, (1, 1, *of))

    def _A_log(self, exp: Factor, nodes: list[Node]) -> Node | None:
        if not self._is_per_head(exp.shape, (*self.heads[:1], *(1 for _ in self.heads[1:]))):
            return None
        nodes.append(exp.base)
        return strip(operands(exp.base)[0], nodes, reshapes=True)

    def _linear(
        self, x: Node | None, A_log: Node | None, nodes: list[Node], bound: float | None
    ) -> Match | None:
        """Match x = g + dt_bias, or g alone."""
        if x is None:
            return None
        under: list[Node] = []
        add, layout, heads = strip(x, under, reshapes=False), [], tuple(self.heads)
        if _is_reshape(add) and self.rank and example(source(add)).dim() == 3:
            # The sum is [B, T, HV * K]; its heads are split afterwards.
            layout, add = [add], source(add)
            under += layout
            heads = (heads[0] * heads[1],)
        if name_of(add) == "add":
            full = (*self.shape[:2], *heads)
            a, b = _addends(add)
            for g, bias in ((a, b), (b, a)):
                one, other = example(g), example(bias)
                if (
                    one is not None
                    and other is not None
                    and same_shape(one.shape, full)
                    and self._is_per_head(other.shape, heads)
                ):
                    nodes += [*under, add]
                    return self._found(
                        g, A_log, strip(bias, nodes, reshapes=True), nodes, bound, layout
                    )
        return self._found(x, A_log, None, nodes, bound)

    def _found(
        self,
        g: Node,
        A_log: Node | None,
        dt_bias: Node | None,
        nodes: list[Node],
        bound: float | None,
        layout: Sequence[Node] = (),
    ) -> Match:
        raw = peel(g, self.computed, nodes)
        if not _is_computed_in(example(raw).dtype, self.computed):
            raise Refused("precision")
        leaves = {"g": raw, "A_log": A_log, "dt_bias": dt_bias}
        flags: dict[str, Any] = {"use_gate_in_kernel": True} | (
            {} if bound is None else {"lower_bound": bound}
        )
        return Match(
            "gate" if bound is None else "bounded_gate",
            nodes,
            {n: x for n, x in leaves.items() if x is not None},
            flags,
            list(layout),
        )


def _is_plain_softplus(node: Node) -> bool:
    x, beta, threshold = operands(node, "beta", "threshold")
    return x is not None and beta in (None, 1) and threshold in (None, 20)


def match_through(matcher: Callable[[Node], Match | None], value: Node) -> Match | None:
    """Match under casts; raise `Refused`, with its reason, if a cast loses precision."""
    lossy = False
    while is_cast(value) or _is_copy(value):
        if not _is_transparent(value):
            lossy = True
        elif not lossy:
            break
        value = source(value)
    match = matcher(value)
    if match is not None and lossy:
        raise Refused("precision")
    return match
