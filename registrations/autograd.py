"""Autograd: which call stands in the training graph, the formulas, and the refusals.

With gradients wanted, `chunk` becomes `chunk_fwd`, whose formula keeps what `kda_ops.chunk` decided to keep and calls `chunk_bwd`. `recurrent` keeps its
inputs and differentiates through the chunk formulas. Double backward and tangents are refused, and so are the in-place operators under autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kda_ops import dispatch
from kda_ops.registrations import schemas
from kda_ops.stages import GRADIENTS, KEPT

_INPUTS = len(GRADIENTS) + 1  # the differentiable inputs, then cu_seqlens


def _wants_grad(args: tuple, kwargs: dict) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values()))


def _refuse_tangents(name: str, args: tuple, kwargs: dict) -> None:
    """Where forward mode is on: torch would drop a tangent without a word, if no gradient is wanted besides."""
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in (*args, *kwargs.values())):
        raise NotImplementedError(f"{name} has no forward-mode derivative (torch.func.jvp, forward_ad): use reverse mode, torch.autograd.")


@dataclass(frozen=True)
class _ReverseOnly:
    """The library that `torch.library.register_autograd` registers a formula with: there it refuses tangents first."""

    namespace: str

    def impl(self, name: str, kernel: Callable, key: str, with_keyset: bool) -> None:
        """Register a kernel."""

        def guard(keyset, *args, **kwargs):
            if forward_ad._current_level >= 0:
                _refuse_tangents(f"{self.namespace}::{name}", args, kwargs)
            return kernel(keyset, *args, **kwargs)

        schemas.LIBRARIES[self.namespace].impl(name, guard, key, with_keyset=with_keyset)


def _chunk(namespace: str):
    """`chunk` under autograd: `chunk_fwd` where a gradient is wanted, else itself."""
    op, op_fwd = schemas.CHUNK.overload(namespace), schemas.CHUNK_FWD.overload(namespace)

    def chunk(*args, **flags) -> tuple[Tensor, Tensor]:
        if forward_ad._current_level >= 0:
            _refuse_tangents(f"{namespace}::chunk", args, flags)
        if _wants_grad(args, flags):
            return op_fwd(*args, **flags)[:2]
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **flags)

    return chunk


def _setup(namespace: str):
    rank = schemas.VARIANTS[namespace]

    def setup(ctx, inputs, keyword_only_inputs, output) -> None:
        o, final_state, *kept = output
        reads_output = dispatch.reads_output(o.device, rank, keyword_only_inputs["use_qk_l2norm_in_kernel"])
        # What is not kept is an empty tensor of one dimension; only the rest is worth a place among the saved tensors.
        ctx.kept = [keyword_only_inputs.get("disable_recompute", False) and reads_output, *(x.dim() > 1 for x in kept)]
        ctx.save_for_backward(*inputs, *(x for x, there in zip((o, *kept), ctx.kept) if there))
        ctx.mark_non_differentiable(*kept, *(() if keyword_only_inputs["output_final_state"] else (final_state,)))
        ctx.set_materialize_grads(False)
        ctx.flags = keyword_only_inputs

    return setup


def _backward(namespace: str):
    op_bwd = schemas.CHUNK_BWD.overload(namespace)

    def backward(ctx, do, dfinal_state, *_):
        saved_tensors = ctx.saved_tensors  # read once: activation checkpointing refuses to unpack a tensor twice
        inputs, saved = saved_tensors[:_INPUTS], iter(saved_tensors[_INPUTS:])
        # The dispatcher strips trailing arguments that equal their defaults, and needs_input_grad is short by as many.
        need = [*ctx.needs_input_grad, *(False for _ in GRADIENTS)][: len(GRADIENTS)]
        flags = dict(ctx.flags)
        if not flags["output_final_state"]:
            dfinal_state = None  # compiled code passes zeros of the empty tensor's shape
        if do is None and dfinal_state is None:
            return (None,) * _INPUTS
        none = inputs[0].new_empty((0,))
        keeps_output, *kept = ctx.kept
        o = next(saved) if keeps_output else None
        kept = [next(saved) if there else none for there in (kept or [False] * len(KEPT))]
        grads = op_bwd(do, dfinal_state, *schemas.join_backward(kept, inputs, o), need=need, **flags)
        return (*(d if n else None for d, n in zip(grads, need)), None)

    return backward


def _gate_setup(ctx, inputs, keyword_only_inputs, output) -> None:
    ctx.save_for_backward(*inputs)
    ctx.flags = keyword_only_inputs


def _gate_backward(namespace: str):
    op_bwd = schemas.GATE_BWD.overload(namespace)

    def backward(ctx, dy):
        inputs = ctx.saved_tensors
        grads = op_bwd(dy, *inputs, **ctx.flags)
        return tuple(d if x is not None else None for d, x in zip(grads, inputs))

    return backward


def _no_setup(ctx, inputs, keyword_only_inputs, output) -> None:
    pass


def _refuse_double_backward(name: str):
    def backward(ctx, *grads):
        raise RuntimeError(f"{name}: double backward is not implemented: call backward without create_graph=True.")

    return backward


def _refuse_in_place(operator: schemas.Operator, namespace: str):
    """An in-place operator is for inference: autograd would record a state that the next call overwrites."""
    op, instead = operator.overload(namespace), f"{namespace}::{operator.name.rstrip('_')}"

    def guard(*args, **flags) -> Tensor:
        if forward_ad._current_level >= 0:
            _refuse_tangents(f"{namespace}::{operator.name}", args, flags)
        if _wants_grad(args, flags):
            raise RuntimeError(
                f"{namespace}::{operator.name} writes its state in place and has no gradient: call it under torch.no_grad() or torch.inference_mode(), "
                f"or use {instead}, which is differentiable."
            )
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **flags)

    return guard


for _namespace, _library in schemas.LIBRARIES.items():
    _library.impl("chunk", _chunk(_namespace), "Autograd")
    _guarded = _ReverseOnly(_namespace)
    for _operator in (schemas.CHUNK_FWD, schemas.RECURRENT):
        torch.library.register_autograd(f"{_namespace}::{_operator.name}", _backward(_namespace), setup_context=_setup(_namespace), lib=_guarded)
    torch.library.register_autograd(f"{_namespace}::gate", _gate_backward(_namespace), setup_context=_gate_setup, lib=_guarded)
    for _operator, _public in ((schemas.CHUNK_BWD, "chunk and recurrent"), (schemas.GATE_BWD, "gate")):
        torch.library.register_autograd(
            f"{_namespace}::{_operator.name}", _refuse_double_backward(f"{_namespace}::{_public}"), setup_context=_no_setup, lib=_guarded
        )
    for _operator in schemas.OPERATORS:
        if _operator.mutates:
            _library.impl(_operator.name, _refuse_in_place(_operator, _namespace), "Autograd")
