"""Register fake implementations, which check and allocate with the same classes as the kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kda_ops import chunk, dispatch
from kda_ops.convolution import Convolution, ConvolveBackward
from kda_ops.gate import GateBackwardPass
from kda_ops.norm import NormBackwardPass, NormPass
from kda_ops.problem import Problem, gate_problem
from kda_ops.registrations import schemas


def _like(x: Tensor | None, wanted: bool, empty_of: Tensor) -> Tensor:
    """Return a contiguous tensor like x, or an empty one if its gradient is not wanted."""
    return x.new_empty(x.shape) if wanted and x is not None else empty_of.new_empty((0,))


def _fakes(rank: int) -> dict[schemas.Operator, Callable]:
    def chunk_or_recurrent(*args, **flags):
        p = Problem.parse(rank, *args, **flags)
        return p.new_output(), p.new_final_state()

    def chunk_fwd(*args, **flags):
        p = Problem.parse(rank, *args, **flags)
        return p.new_output(), p.new_final_state(), *chunk.new_kept(dispatch.keeps(p.q.device), p)

    def chunk_bwd(*args, need, **flags):
        p = chunk.Backward(rank, args, flags | {"need": need}).p
        return tuple(_like(x, need >> i & 1, p.q) for i, x in enumerate(p.differentiable()))

    def recurrent_in_place(*args, **flags):
        return Problem.parse_step(rank, *args, **flags).new_output()

    def chunk_in_place(*args, **flags):
        return Problem.parse_prefill(rank, *args, **flags).new_output()

    def gate(g, A_log, dt_bias=None, *, lower_bound=None):
        return g.new_empty(g.shape, dtype=gate_problem(rank, g, A_log, dt_bias, lower_bound))

    def gate_bwd(*args, **flags):
        GateBackwardPass(rank, args, flags)
        _, g, A_log, dt_bias = args
        return _like(g, True, g), _like(A_log, True, g), _like(dt_bias, True, g)

    return {
        schemas.CHUNK: chunk_or_recurrent,
        schemas.CHUNK_FWD: chunk_fwd,
        schemas.CHUNK_BWD: chunk_bwd,
        schemas.RECURRENT: chunk_or_recurrent,
        schemas.RECURRENT_: recurrent_in_place,
        schemas.CHUNK_: chunk_in_place,
        schemas.GATE: gate,
        schemas.GATE_BWD: gate_bwd,
    }


def _short_conv(*args, **flags):
    p = Convolution(*args, **flags)
    return p.new_output(), p.new_final_tail()


def _short_conv_bwd(*args, need, **flags):
    p = ConvolveBackward(0, args, flags | {"need": need}).p
    return tuple(_like(x, need >> i & 1, p.x) for i, x in enumerate(p.differentiable()))


def _short_conv_in_place(*args, **flags):
    return Convolution.on_pool(*args, **flags).new_output()


def _gated_rms_norm(*args, **flags):
    x = NormPass(0, args, flags).x
    return x.new_empty(x.shape)


def _gated_rms_norm_bwd(*args, **flags):
    norm = NormBackwardPass(0, args, flags)
    return tuple(_like(x, True, norm.x) for x in (norm.x, norm.weight, norm.gate))


_LAYER: dict[schemas.Operator, Callable] = {
    schemas.SHORT_CONV: _short_conv,
    schemas.SHORT_CONV_BWD: _short_conv_bwd,
    schemas.SHORT_CONV_: _short_conv_in_place,
    schemas.GATED_RMS_NORM: _gated_rms_norm,
    schemas.GATED_RMS_NORM_BWD: _gated_rms_norm_bwd,
}


def register(namespace: str, name: str, fake: Callable) -> None:
    """Register the fake of an operator.

    Every operator of this package uses this function. For each new file that registers a fake,
    torch searches all loaded modules.
    """
    library = schemas.LIBRARIES[namespace]
    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)


for _namespace, _rank in schemas.VARIANTS.items():
    for _operator, _fake in (_fakes(_rank) | (_LAYER if _namespace == schemas.KDA else {})).items():
        register(_namespace, _operator.name, _fake)
