"""Which backend serves a call, and why; the only place that knows backends by name.

CPU tensors go to `native`, CUDA tensors to `triton`. For tests, the environment variable
KDA_OPS_CPU names another backend for CPU tensors: ``reference`` (the definition), or ``triton``
(the kernels under the Triton interpreter, with TRITON_INTERPRET=1). Nothing here imports triton
before a call needs it.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext

import torch

from kda_ops.problem import Problem
from kda_ops.stages import Backend

_CPU = os.environ.get("KDA_OPS_CPU", "native")
_LOADED: dict[str, Backend] = {}
_COMPILED: set[tuple] = set()

if _CPU not in ("native", "reference", "triton"):
    raise ImportError(f"KDA_OPS_CPU must be 'native', 'reference' or 'triton', got {_CPU!r}.")


def backend_name(device: torch.device) -> str:
    """The name of the backend for tensors on `device`."""
    if device.type == "cpu":
        return _CPU
    if device.type in ("cuda", "meta"):
        return "triton"
    raise TypeError(
        f"q must be on a CPU or CUDA device, got {device}: kda_ops has no kernels for it."
    )


def backend(device: torch.device) -> Backend:
    """The stage functions for tensors on `device`."""
    name = backend_name(device)
    if name not in _LOADED:
        if name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(
                "KDA_OPS_CPU=triton runs the kernels under Triton's interpreter: set "
                "TRITON_INTERPRET=1 before the process starts."
            )
        _LOADED[name] = load(name)
    return _LOADED[name]


def load(name: str) -> Backend:
    """A backend by name."""
    if name == "reference":
        return importlib.import_module("kda_ops.backends.reference").Reference()
    return importlib.import_module(f"kda_ops.backends.{name}")


def beside(p: Problem, wanted: bool) -> AbstractContextManager:
    """In it two stages may run at once, if that is wanted: it gives a context for the one that goes
    elsewhere, and ends when both have. Most calls leave no room for that.
    """
    triton = (
        importlib.import_module("kda_ops.backends.triton")
        if wanted and p.q.device.type == "cuda" and p.v.numel()
        else None
    )
    return (
        nullcontext(nullcontext())
        if triton is None or not triton.leaves_room(p)
        else triton.beside(p.q.device)
    )


def compiling(p: Problem, *kind: object) -> AbstractContextManager | None:
    """For the first call of its kind on a GPU: in it kernels compute nothing, but are compiled, all
    at once. None for calls after it.

    What tells kinds apart here is most of what kernels are compiled for; one that differs in the
    rest is compiled when it is launched.
    """
    if p.q.device.type != "cuda":
        return None
    flags = (
        p.l2norm,
        p.activate_gate,
        p.lower_bound is None,
        p.sigmoid_beta,
        p.disable_recompute,
        p.cu_seqlens is None,
    )
    mark = (*kind, *flags, p.q.device, p.q.dtype, p.rank, p.K, p.V, p.H == p.HV)
    if mark in _COMPILED or torch.cuda.is_current_stream_capturing():
        return None
    _COMPILED.add(mark)
    return importlib.import_module("kda_ops.backends.triton").compiling()


def operand_dtype(p: Problem) -> torch.dtype:
    """The dtype of a `Tile`'s operands: the input's on Triton, the dtype of the sums on the others,
    which round nothing.
    """
    return p.q.dtype if backend_name(p.q.device) == "triton" else p.state_dtype


def reads_output(device: torch.device, rank: int, l2norm: bool) -> bool:
    """Whether `gradient` asks for o: do · o is the product of unit q with its gradient, which the
    norm needs (docs/maths.md), and needs no sum over K.
    """
    return l2norm and rank == 1 and backend_name(device) == "triton"


def applies_beta(p: Problem) -> bool:
    """Whether the scans apply beta themselves, from `Tile.rows`, so that there is no u; `gradient`
    takes the norms of q and k from there.
    """
    return p.rank == 1 and backend_name(p.q.device) == "triton"


def packs_pairs(p: Problem) -> bool:
    """Whether `prepare` can leave A and P in one tile, and spares the scores of the backward when
    it gets that.
    """
    return backend_name(p.q.device) == "triton" and p.rank == 1


def forms_tile(p: Problem) -> bool:
    """Whether the scans read q, k and v themselves, so that a kept A is enough to make the rest of
    the tile again.
    """
    return backend_name(p.q.device) == "triton" and p.rank == 0
