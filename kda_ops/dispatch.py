"""Choose the backend of a device; no other module knows backends by name.

CPU tensors go to `native`, CUDA tensors to `triton`. For tests, the environment variable
KDA_OPS_CPU names another backend for CPU tensors: ``reference`` (the definition), or ``triton``
(the kernels under the Triton interpreter, with TRITON_INTERPRET=1). Nothing here imports triton
before a call needs it.
"""

from __future__ import annotations

import importlib
import os

import torch

from kda_ops.backends.triton.keeps import KEEPS
from kda_ops.stages import Backend, Keeps

_CPU = os.environ.get("KDA_OPS_CPU", "native")
_LOADED: dict[str, Backend] = {}

if _CPU not in ("native", "reference", "triton"):
    raise ImportError(f"KDA_OPS_CPU must be 'native', 'reference' or 'triton', got {_CPU!r}.")


def backend_name(device: torch.device) -> str:
    """Return the name of the backend for tensors on `device`."""
    if device.type == "cpu":
        return _CPU
    if device.type in ("cuda", "meta"):
        return "triton"
    raise TypeError(
        f"q must be on a CPU or CUDA device, got {device}: kda_ops has no kernels for it."
    )


def backend(device: torch.device) -> Backend:
    """Return the backend for tensors on `device`; the first call loads it."""
    name = backend_name(device)
    if name not in _LOADED:
        if name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(
                "KDA_OPS_CPU=triton runs the kernels under Triton's interpreter: set "
                "TRITON_INTERPRET=1 before the process starts."
            )
        _LOADED[name] = load(name)
    return _LOADED[name]


def keeps(device: torch.device) -> Keeps:
    """Return what training keeps for tensors on `device`; Dynamo can trace it."""
    return KEEPS if backend_name(device) == "triton" else Backend.keeps


def load(name: str) -> Backend:
    """Load a backend by name."""
    return importlib.import_module(f"kda_ops.backends.{name}").BACKEND
