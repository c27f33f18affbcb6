"""Register autograd: the formulas, what they keep, and what they refuse.

If a gradient is wanted, `chunk` runs `chunk_fwd`. Its formula keeps what `kda_ops.chunk` names, and
its backward calls `chunk_bwd`. `recurrent` keeps its inputs and differentiates through the chunk
formulas. Double backward and forward mode raise an error. So do in-place operators with an input
that requires a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kda_ops import dispatch, operators
from kda_ops.chunk import has_walked
from kda_ops.private import (
    AFTER_AUTOGRAD,
    BelowAutograd,
    OpOverload,
    SingleLevelFunction,
    any_requires_grad,
    enable_single_level_autograd_function,
    is_fwd_grad_enabled,
    schema_of,
    set_fwd_grad_enabled,
    transforms_are_active,
)
from kda_ops.registrations import schemas
from kda_ops.registrations.opaque import opaque
from kda_ops.stages import CONVOLVED, GRADIENTS, KEPT

_INPUTS = len(operators.CHUNK.names)
_A, _STATES = (list(KEPT).index(name) for name in ("A", "states"))


def _wants_grad(args: tuple, kwargs: dict) -> bool:
    return torch.is_grad_enabled() and any_requires_grad(*args, **kwargs)


def _refuse_tangents(name: str, args: tuple, kwargs: dict) -> None:
    """Refuse tangents in forward mode; without a gradient torch would drop them silently."""
    if any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None
        for x in (*args, *kwargs.values())
    ):
        raise NotImplementedError(
            f"{name} has no forward-mode derivative (torch.func.jvp, forward_ad): use reverse "
            "mode, torch.autograd."
        )


class _Call(NamedTuple):
    """What a formula's forward takes besides the inputs."""

    keyset: torch.DispatchKeySet
    flags: dict
    tangents: bool = False  # whether forward mode is on


def _differentiable(op: OpOverload, setup: Callable, backward: Callable) -> Callable:
    """Register an autograd formula for `op`; return its Autograd kernel.

    The formula is ``setup(ctx, inputs, flags, output)`` and ``backward(ctx, *gradients)``. `inputs`
    and `flags` include the defaults that the dispatcher strips.

    `torch.library.register_autograd` does not serve. It reads the schema in every call, which
    doubles the Python time of a forward, and `torch.func.grad` refuses its kernel.
    """
    arguments = schema_of(op).arguments
    positional = tuple(a.default_value for a in arguments if not a.kwarg_only)
    keywords = {a.name: a.default_value for a in arguments if a.kwarg_only}

    def below(call: _Call, args: tuple):
        with BelowAutograd():
            return op.redispatch(call.keyset & AFTER_AUTOGRAD, *args, **call.flags)

    def forward(ctx, call: _Call, *args):
        if transforms_are_active():
            # Outer functorch levels run inside this forward, where gradients and tangents are off.
            # Re-enable both for them.
            with torch.enable_grad(), set_fwd_grad_enabled(call.tangents):
                output = below(call, args)
        else:
            output = below(call, args)
        setup(ctx, (*args, *positional[len(args) :]), keywords | call.flags, output)
        return output

    @opaque
    def reverse(ctx, *gradients):
        return None, *backward(ctx, *gradients)[: len(ctx.needs_input_grad) - 1]

    formula = type(
        op.name().replace("::", "_"),
        (SingleLevelFunction,),
        {"forward": staticmethod(forward), "backward": staticmethod(reverse)},
    )

    @opaque
    def kernel(keyset: torch.DispatchKeySet, *args, **flags):
        if forward_ad._current_level >= 0:
            _refuse_tangents(op.name(), args, flags)
        if not (torch.is_grad_enabled() and any_requires_grad(*args)):
            return below(_Call(keyset, flags), args)
        call = _Call(keyset, flags, is_fwd_grad_enabled())
        if not transforms_are_active():
            return formula.apply(call, *args)
        with enable_single_level_autograd_function():
            return formula.apply(call, *args)

    schemas.LIBRARIES[op.namespace].impl(op, kernel, "Autograd", with_keyset=True)
    return kernel


def _chunk(namespace: str, chunk_fwd: Callable):
    """Run the Autograd kernel of `chunk_fwd` in place of `chunk` where a gradient is wanted."""
    op = operators.CHUNK.overload(namespace)

    @opaque
    def chunk(keyset: torch.DispatchKeySet, *args, **flags) -> tuple[Tensor, Tensor]:
        if forward_ad._current_level >= 0:
            _refuse_tangents(f"{namespace}::chunk", args, flags)
        if _wants_grad(args, flags):
            return chunk_fwd(keyset, *args, **flags)[:2]
        with BelowAutograd():
            return op(*args, **flags)

    return chunk


@cache
def _reads_output(device: torch.device, rank: int, dtype: torch.dtype, l2norm: bool) -> bool:
    """Return whether backward reads o where it reads kept states of chunks."""
    return "o" in dispatch.keeps(device).names(rank, dtype, l2norm, disable_recompute=True)


def _setup(namespace: str):
    rank = schemas.VARIANTS[namespace]

    def setup(ctx, inputs, flags, output) -> None:
        (o, final_state, *kept), (q, *_) = output, inputs
        # A tensor that is not kept is empty, with one dimension: do not save it.
        there = [x.dim() > 1 for x in kept]
        has_states = bool(kept) and there[_STATES]
        l2norm = flags["use_qk_l2norm_in_kernel"]
        reads_o = has_states and not has_walked(kept[_A])
        ctx.kept = [reads_o and _reads_output(o.device, rank, q.dtype, l2norm), *there]
        ctx.save_for_backward(*inputs, *(x for x, there in zip((o, *kept), ctx.kept) if there))
        ctx.mark_non_differentiable(*kept, *(() if flags["output_final_state"] else (final_state,)))
        ctx.set_materialize_grads(False)
        ctx.flags = flags

    return setup


def _backward(namespace: str):
    op_bwd = operators.CHUNK_BWD.overload(namespace)

    def backward(ctx, do, dfinal_state, *_):
        # read once: activation checkpointing refuses to unpack a tensor twice
        saved_tensors = ctx.saved_tensors
        inputs, saved = saved_tensors[:_INPUTS], iter(saved_tensors[_INPUTS:])
        # The dispatcher strips trailing arguments that equal their defaults, and needs_input_grad,
        # which begins with the call, is short by as many.
        wanted = [*ctx.needs_input_grad[1:], *(False for _ in GRADIENTS)][: len(GRADIENTS)]
        flags = dict(ctx.flags)
        if not flags["output_final_state"]:
            dfinal_state = None  # compiled code passes zeros of the empty tensor's shape
        if do is None and dfinal_state is None:
            return (None,) * _INPUTS
        q, *_ = inputs
        none = q.new_empty((0,))
        keeps_output, *kept = ctx.kept
        o = next(saved) if keeps_output else None
        kept = [next(saved) if there else none for there in (kept or [False] * len(KEPT))]
        need = schemas.mask_of(wanted)
        recorded = torch.is_grad_enabled() or forward_ad._current_level >= 0
        traced = torch.compiler.is_compiling() or transforms_are_active()
        with (
            nullcontext()
            if recorded or traced
            else BelowAutograd()  # its Autograd kernel has nothing to do
        ):
            grads = op_bwd(do, dfinal_state, *kept, *inputs, o, need=need, **flags)
        return (*(d if n else None for d, n in zip(grads, wanted)), None)

    return backward


def _gate_setup(ctx, inputs, flags, output) -> None:
    ctx.save_for_backward(*inputs)
    ctx.flags = flags


def _gate_backward(namespace: str):
    op_bwd = operators.GATE_BWD.overload(namespace)

    def backward(ctx, dy):
        inputs = ctx.saved_tensors
        grads = op_bwd(dy, *inputs, **ctx.flags)
        return tuple(d if x is not None else None for d, x in zip(grads, inputs))

    return backward


def _short_conv_setup(ctx, inputs, flags, output) -> None:
    ctx.save_for_backward(*inputs)
    if not flags["output_final_tail"]:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.flags = flags


def _short_conv_backward(ctx, dy, dfinal_tail):
    inputs, flags = ctx.saved_tensors, ctx.flags
    if not flags["output_final_tail"]:
        dfinal_tail = None  # compiled code passes zeros of the empty tensor's shape
    if dy is None and dfinal_tail is None:
        return (None,) * len(inputs)
    # the dispatcher strips trailing arguments that equal their defaults
    wanted = [*ctx.needs_input_grad[1:], *(False for _ in CONVOLVED)][: len(CONVOLVED)]
    op_bwd = operators.SHORT_CONV_BWD.overload(schemas.KDA)
    grads = op_bwd(dy, dfinal_tail, *inputs, need=schemas.mask_of(wanted), **flags)
    return (*(d if n else None for d, n in zip(grads, wanted)), None)


def _norm_backward(ctx, dy):
    inputs = ctx.saved_tensors
    grads = operators.GATED_RMS_NORM_BWD.overload(schemas.KDA)(dy, *inputs, **ctx.flags)
    return tuple(d if x is not None else None for d, x in zip(grads, inputs))


def _no_setup(ctx, inputs, flags, output) -> None:
    pass


def _refuse_double_backward(name: str):
    def backward(ctx, *grads):
        raise RuntimeError(
            f"{name}: double backward is not implemented: call backward without "
            "create_graph=True and do not nest torch.func.grad. When compiling torch.func.grad, "
            "pass inputs with requires_grad=False."
        )

    return backward


def _refuse_half(namespace: str):
    def backward(ctx, *grads):
        raise RuntimeError(
            f"Half of a call on a shard has no gradient: call kda_ops.distributed.chunk_{namespace}"
            ", which is differentiable."
        )

    return backward


def _refuse_in_place(operator: operators.Operator, namespace: str):
    """Refuse gradients of an in-place operator, whose next call overwrites the state."""
    op, name = operator.overload(namespace), operator.name.partition(".")[0]
    instead = f"{namespace}::{name.rstrip('_')}"

    def guard(*args, **flags) -> Tensor | None:
        if forward_ad._current_level >= 0:
            _refuse_tangents(f"{namespace}::{operator.name}", args, flags)
        if _wants_grad(args, flags):
            raise RuntimeError(
                f"{namespace}::{name} writes its {operator.mutates} in place and has no "
                "gradient: "
                "call it under torch.no_grad() or torch.inference_mode(), "
                f"or use {instead}, which is differentiable."
            )
        with BelowAutograd():
            return op(*args, **flags)

    return guard


for _namespace, _library in schemas.LIBRARIES.items():
    _formula_of_chunk, _ = (
        _differentiable(_operator.overload(_namespace), _setup(_namespace), _backward(_namespace))
        for _operator in (operators.CHUNK_FWD, operators.RECURRENT)
    )
    _chunk_kernel = _chunk(_namespace, _formula_of_chunk)
    _library.impl("chunk", _chunk_kernel, "Autograd", with_keyset=True)
    _differentiable(operators.GATE.overload(_namespace), _gate_setup, _gate_backward(_namespace))
    if _namespace == schemas.KDA:
        for _operator, _setting, _formula in (
            (operators.SHORT_CONV, _short_conv_setup, _short_conv_backward),
            (operators.GATED_RMS_NORM, _gate_setup, _norm_backward),
        ):
            _differentiable(_operator.overload(_namespace), _setting, _formula)
    for _operator in (operators.CHUNK_MAP, operators.CHUNK_JOIN, operators.CHUNK_MAP_BWD):
        _differentiable(_operator.overload(_namespace), _no_setup, _refuse_half(_namespace))
    for _operator, _public in {
        operators.CHUNK_BWD: "chunk and recurrent",
        operators.CHUNK_JOIN_BWD: "kda_ops.distributed",
        operators.GATE_BWD: "gate",
        operators.SHORT_CONV_BWD: "short_conv",
        operators.GATED_RMS_NORM_BWD: "gated_rms_norm",
    }.items():
        if _operator in schemas.operators(_namespace):
            _differentiable(
                _operator.overload(_namespace),
                _no_setup,
                _refuse_double_backward(f"{_namespace}::{_public}"),
            )
    for _operator in schemas.operators(_namespace):
        if _operator.mutates:
            _library.impl(_operator.name, _refuse_in_place(_operator, _namespace), "Autograd")
