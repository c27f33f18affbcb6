"""The CPU and CUDA kernels: each hands its call to the backend, as one of its passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kda_ops import chunk, convolution, dispatch, gate, norm, recurrent
from kda_ops.arguments import check_writable
from kda_ops.registrations import schemas
from kda_ops.registrations.opaque import opaque
from kda_ops.stages import Backend, Pass

_BUMP = torch.autograd.graph.increment_version


def _named(kind: type[Pass], name: str, args: tuple) -> Tensor:
    return args[kind.names.index(name)]


def _present(results: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Put an empty tensor in the place of None: an operator returns tensors."""
    return tuple(like.new_empty((0,)) if x is None else x.contiguous() for x in results)


def _kernels(rank: int, device: torch.device) -> dict[schemas.Operator, Callable]:
    backend: Backend | None = None

    def run(kind: type[Pass], args: tuple, flags: dict) -> Sequence[Tensor | None]:
        nonlocal backend
        if backend is None:  # loaded at the first call
            backend = dispatch.backend(device)
        return backend.run(kind, rank, args, flags)

    def on_pool(kind: type[Pass], args: tuple, flags: dict, name: str = "state") -> Tensor:
        pool = _named(kind, name, args)
        check_writable(name, pool)
        (o,) = run(kind, args, flags)
        _BUMP(pool)
        return o  # type: ignore[return-value]

    def chunk_forward(*args, **flags) -> tuple[Tensor, ...]:
        return tuple(run(chunk.Infer, args, flags))

    def chunk_fwd(*args, **flags) -> tuple[Tensor, ...]:
        return tuple(run(chunk.Forward, args, flags))

    def chunk_bwd(*args, **flags) -> tuple[Tensor, ...]:
        grads = run(chunk.Backward, args, flags)
        return _present(grads, _named(chunk.Backward, "q", args))

    def recurrent_forward(*args, **flags) -> tuple[Tensor, ...]:
        return tuple(run(recurrent.Recur, args, flags))

    def recurrent_in_place(*args, **flags) -> Tensor:
        return on_pool(recurrent.Decode, args, flags)

    def chunk_in_place(*args, **flags) -> Tensor:
        return on_pool(chunk.Prefill, args, flags)

    def gate_forward(*args, **flags) -> Tensor:
        (y,) = _present(run(gate.GatePass, args, flags), _named(gate.GatePass, "g", args))
        return y

    def gate_bwd(*args, **flags) -> tuple[Tensor, ...]:
        grads = run(gate.GateBackwardPass, args, flags)
        return _present(grads, _named(gate.GateBackwardPass, "g", args))

    def short_conv(*args, **flags) -> tuple[Tensor, ...]:
        return _present(
            run(convolution.Convolve, args, flags), _named(convolution.Convolve, "x", args)
        )

    def short_conv_bwd(*args, **flags) -> tuple[Tensor, ...]:
        kind = convolution.ConvolveBackward
        return _present(run(kind, args, flags), _named(kind, "x", args))

    def short_conv_in_place(*args, **flags) -> Tensor:
        return on_pool(convolution.ConvolveInPlace, args, flags, "tail")

    def gated_rms_norm(*args, **flags) -> Tensor:
        (y,) = _present(run(norm.NormPass, args, flags), _named(norm.NormPass, "x", args))
        return y

    def gated_rms_norm_bwd(*args, **flags) -> tuple[Tensor, ...]:
        grads = run(norm.NormBackwardPass, args, flags)
        return _present(grads, _named(norm.NormBackwardPass, "x", args))

    return {
        schemas.CHUNK: chunk_forward,
        schemas.CHUNK_FWD: chunk_fwd,
        schemas.CHUNK_BWD: chunk_bwd,
        schemas.RECURRENT: recurrent_forward,
        schemas.RECURRENT_: recurrent_in_place,
        schemas.CHUNK_: chunk_in_place,
        schemas.GATE: gate_forward,
        schemas.GATE_BWD: gate_bwd,
        schemas.SHORT_CONV: short_conv,
        schemas.SHORT_CONV_BWD: short_conv_bwd,
        schemas.SHORT_CONV_: short_conv_in_place,
        schemas.GATED_RMS_NORM: gated_rms_norm,
        schemas.GATED_RMS_NORM_BWD: gated_rms_norm_bwd,
    }


for _namespace, _rank in schemas.VARIANTS.items():
    for _key in ("CPU", "CUDA"):
        _kernel = _kernels(_rank, torch.device(_key.lower()))
        for _operator in schemas.operators(_namespace):
            schemas.LIBRARIES[_namespace].impl(_operator.name, opaque(_kernel[_operator]), _key)
