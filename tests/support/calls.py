"""Call an operator forward and backward, and return one dictionary of results by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS, Backend
from tests.support.cases import Case, Tensors
from tests.support.target import TARGET

Results = dict[str, Tensor]


class Recorded(TorchDispatchMode):
    """Record the eager calls of our operators: each one's name, and its arguments by name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("kda", "gdn"):
            given = dict(zip((a.name for a in func._schema.arguments), args)) | (kwargs or {})
            self.calls.append((str(func).removesuffix(".default"), given))
        return func(*args, **(kwargs or {}))

    @property
    def counts(self) -> Counter:
        """Return how often each operator was called."""
        return Counter(name for name, _ in self.calls)


def overload(variant: str, name: str) -> torch._ops.OpOverload:
    """Return the registered operator."""
    name, _, kind = name.partition(".")
    return getattr(getattr(getattr(torch.ops, variant), name), kind or "default")


def operator_of(name: str) -> torch._ops.OpOverload:
    """Return the operator of a public function, such as "chunk_kda_" or "short_conv"."""
    base, end = name.rstrip("_"), "_" * name.endswith("_")
    if hasattr(torch.ops.kda, base):  # of a layer
        return overload("kda", base + end)
    first, second = base.split("_")
    variant, op = (first, second) if second == "gate" else (second, first)
    return overload(variant, op + end)


def forward(
    case: Case, op: str = "chunk", inputs: Tensors | None = None, **flags: object
) -> Results:
    """Return o, and final_state if the case has one, without autograd."""
    inputs = case.inputs(TARGET.device) if inputs is None else inputs
    with torch.no_grad():
        o, final_state = overload(case.variant, op)(*inputs.values(), **(case.flags(op) | flags))
    return {"o": o, "final_state": final_state} if final_state.dim() > 1 else {"o": o}


def as_leaves(inputs: Tensors, need: Iterable[str] = GRADIENTS) -> Tensors:
    """Return the given inputs in `need` as leaves that record gradients."""
    need = frozenset(need)
    return {
        n: x.detach().requires_grad_() for n, x in inputs.items() if x is not None and n in need
    }


def with_gradients(outs: Results, leaves: Tensors, cotangents: Iterable[Tensor]) -> Results:
    """Return the outputs and ``d`` + name of every leaf; one cotangent for each output."""
    grads = torch.autograd.grad(
        list(outs.values()), list(leaves.values()), list(cotangents)[: len(outs)]
    )
    return {n: x.detach() for n, x in outs.items()} | {"d" + n: d for n, d in zip(leaves, grads)}


def run(
    case: Case,
    op: str = "chunk",
    inputs: Tensors | None = None,
    need: Iterable[str] = GRADIENTS,
    cotangents=None,
    **flags: object,
) -> Results:
    """Return o, final_state if the case has one, and ``d`` + name of each given input in `need`."""
    inputs = case.inputs(TARGET.device) if inputs is None else inputs
    leaves = as_leaves(inputs, need)
    o, final_state = overload(case.variant, op)(
        *(inputs | leaves).values(), **(case.flags(op) | flags)
    )
    outs = {"o": o} | ({"final_state": final_state} if final_state.dim() > 1 else {})
    cotangents = case.cotangents(o.device) if cotangents is None else cotangents
    return with_gradients(outs, leaves, cotangents)


def run_stages(
    backend: Backend,
    p: Problem,
    cotangents: tuple[Tensor, Tensor],
    need: Iterable[str] = GRADIENTS,
    step: bool = False,
) -> Results:
    """Return the results of `run` from one backend's stages, without operator and autograd."""
    given = frozenset(
        n for n in need if getattr(p, "state" if n == "initial_state" else n) is not None
    )
    o, final_state = p.new_output(), p.new_final_state()
    if step:
        backend.step(p, o, final_state)
    tile = backend.prepare(p, norms=True)
    trace = backend.scan(p, tile, None if step else o, None if step else final_state, keep=True)
    reverse = backend.reverse_scan(
        p, tile, cotangents[0], cotangents[1] if p.output_final_state else None, given
    )
    grads = backend.gradient(p, tile, trace, cotangents[0], reverse, given)
    outs = {"o": o} | ({"final_state": final_state} if p.output_final_state else {})
    return outs | {"d" + n: getattr(grads, n) for n in GRADIENTS if n in given}
