"""Refuse options that mean nothing, and inputs that do not suit a layer's parameters."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn

from kda_ops.arguments import (
    check_dense,
    check_flag,
    check_memory,
    check_number,
    check_tensor,
    check_whole,
    check_writable,
)
from kda_ops.checks import check_float, check_no_overlap
from kda_ops.nn.local import LocalLinear
from kda_ops.private import pre_hooks

__all__ = [
    "DTYPES",
    "check_buffer",
    "check_dense",
    "check_dtype",
    "check_eps",
    "check_flag",
    "check_float",
    "check_number",
    "check_size",
    "check_tensor",
    "check_writable",
    "check_x",
    "warn_of_a_rounded_gate",
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of parameters and inputs


def check_dtype(name: str, dtype: torch.dtype | None, hint: str = "") -> None:
    """Refuse a dtype in which a layer cannot compute; None means torch's default."""
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {dtype}{hint}.")


def check_size(name: str, size: int, most: int | None = None, least: int = 1) -> None:
    """Refuse a size that is not a whole number from `least` to `most`."""
    check_whole(name, size)
    if size < least or (most is not None and size > most):
        bound = "" if most is None else f" and at most {most}"
        raise ValueError(f"{name} must be at least {least}{bound}, got {size}.")


def check_eps(name: str, eps: float) -> None:
    """Refuse an epsilon that is not finite and above 0: norms could be NaN."""
    check_number(name, eps)
    if not 0.0 < eps < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {eps}.")


def check_buffer(name: str, x: Tensor) -> None:
    """Refuse a buffer that is not plain memory, before it or another one is written."""
    check_dense(name, x)
    if not torch.compiler.is_compiling():  # the operator in the graph checks the state again
        check_memory(name, x)
        check_no_overlap(name, x)


def check_x(x: Tensor, name: str, projection: nn.Module) -> None:
    """Refuse an x that the projection called `name` cannot multiply.

    Only a plain linear layer without hooks tells its input dtype by its weight. Wrapped, quantised,
    offloaded or sharded layers may convert x first, so they are not checked.
    """
    check_dtype("x", x.dtype, ": embed or convert it first")
    weight = getattr(projection, "weight", None)
    if (
        type(projection) not in (nn.Linear, LocalLinear)
        or pre_hooks(projection)
        or "forward" in vars(projection)
        or weight is None
        or not (type(weight) in (nn.Parameter, Tensor) or hasattr(type(weight), "to_local"))
        or weight.dtype not in DTYPES
    ):
        return
    if x.device != weight.device:
        raise TypeError(
            f"x must be on {weight.device}, where {name}.weight is, got {x.device}: "
            "move x or the layer."
        )
    if _computed_in(x) is not _computed_in(weight):
        raise TypeError(
            f"x must be {weight.dtype}, as {name}.weight is, got {x.dtype}: "
            "convert x, or call the layer under torch.autocast."
        )


def warn_of_a_rounded_gate(A_log: Tensor, dt_bias: Tensor) -> None:
    """Warn if the gate's parameters have 16 bits; not in compiled code."""
    rounded = [x.dtype for x in (A_log, dt_bias) if x.dtype.itemsize < 4]
    if rounded and not torch.compiler.is_compiling():
        warnings.warn(
            f"A_log and dt_bias must stay in float32, got {rounded[0]}, which rounds decays near "
            "1. Build the layer with dtype= instead of converting it; under FSDP2 shard "
            "list(layer.children()) with the MixedPrecisionPolicy, then the layer without one.",
            stacklevel=3,
        )


def _computed_in(x: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product uses x: autocast converts all but float64."""
    kind = x.device.type
    # Dynamo of torch 2.11 cannot trace `torch.amp.is_autocast_available`.
    if x.dtype is torch.float64 or kind not in ("cpu", "cuda"):
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
