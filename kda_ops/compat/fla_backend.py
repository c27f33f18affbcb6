"""Run FLA's own functions on the operators of kda_ops: register them as a backend of FLA.

::

    import kda_ops.compat.fla_backend

    kda_ops.compat.fla_backend.enable()

FLA 0.6.0 hands calls of ``chunk_kda``, ``chunk_gated_delta_rule`` and ``fused_recurrent_kda_fwd``
(which ``fused_recurrent_kda`` calls) to the first registered backend that accepts them. So programs
that call these functions of FLA, and FLA's layers, use kda_ops without another change.

- A call that these operators refuse runs on FLA's kernels. FLA logs the reason at level INFO, from
  the logger ``fla.backends``. `kda_ops.compat.fla` lists what is refused.
- Results have FLA's dtypes: autocast does not cast q, k and v.
- ``FLA_KDA_OPS=0`` turns this backend off; FLA reads it at every call.
  ``FLA_DISABLE_BACKEND_DISPATCH=1`` turns all backends off, if set before the process starts.
- FLA disables ``torch.compile`` for its dispatched functions, so a compiled caller has a graph
  break at each call. The functions of `kda_ops.compat.fla` have none: import them instead.
- ``fused_recurrent_gated_delta_rule`` has no backends in FLA.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from kda_ops import dispatch
from kda_ops.compat import fla

__all__ = ["enable", "verdict"]

# function of FLA -> the operation whose registry FLA searches; None: the function has its own
_REGISTRIES = {
    "chunk_kda": None,
    "fused_recurrent_kda_fwd": "kda",
    "chunk_gated_delta_rule": "gated_delta_rule",
}


def verdict(name: str, *args: Any, **given: Any) -> tuple[bool, str | None]:
    """Return whether these operators accept a call of FLA's function `name`, and if not, why."""
    try:
        call = getattr(fla, name).mapping(*args, **given)
        call.check()
        q = args[0] if args else given["q"]
        dispatch.backend_name(q.device)
        if q.is_cuda and torch.version.hip is not None:
            return False, "q must be on a CPU or an NVIDIA GPU, got an AMD GPU."
    except (TypeError, ValueError, RuntimeError) as error:
        return False, str(error)
    return True, None


def _methods(name: str) -> dict[str, Callable]:
    """Return the two methods that FLA expects of a backend for function `name`: run and verify."""
    function = getattr(fla, name)

    def run(self, *args: Any, **given: Any):
        q = args[0] if args else given["q"]
        with torch.autocast(q.device.type, enabled=False):
            return function(*args, **given)

    def verifier(self, *args: Any, **given: Any) -> tuple[bool, str | None]:
        return verdict(name, *args, **given)

    run.__doc__ = inspect.getdoc(function)
    return {name: run, f"{name}_verifier": verifier}


def enable() -> None:
    """Register these operators as a backend of FLA; a second call has no effect.

    Raises:
        ImportError: FLA 0.6.0 or later is not installed.
    """
    try:
        from fla.backends import BaseBackend, register
        from fla.ops.kda import chunk_kda
    except ImportError as error:
        raise ImportError(
            "kda_ops.compat.fla_backend needs FLA 0.6.0 or later: pip install "
            "flash-linear-attention.",
            name="fla",
        ) from error
    methods: dict[str, Any] = {}
    for name in _REGISTRIES:
        methods |= _methods(name)
    backend = type(
        "KdaOpsBackend",
        (BaseBackend,),
        methods
        | {
            "__doc__": "The operators of kda_ops.",
            "backend_type": "kda_ops",
            "package_name": "kda_ops",
            "env_var": "FLA_KDA_OPS",
            "priority": 1,  # before FlashKDA and FlashQLA, which have 3
        },
    )
    for operation in _REGISTRIES.values():
        register(chunk_kda if operation is None else operation)(backend)
