"""The contract of a call: `kda_ops.problem.Problem` over stand-ins of JAX's arrays.

A stand-in is a torch tensor on the CPU with the shape and dtype of an array, all of whose entries
are one zero. So every check, and its message, is that of the torch operators. Values are checked
where JAX knows them: offsets on a CPU always, all of them under KDA_OPS_CHECK=1.
"""

from __future__ import annotations

import jax
import numpy as np
import torch

from kda_ops import checks, problem
from kda_ops.gates import Gate
from kda_ops.problem import Problem

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")


def _stand_in(name: str, x) -> torch.Tensor | None:
    if x is None:
        return None
    if isinstance(x, torch.Tensor) or not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(
            f"{name} must be an array of JAX or NumPy, got {type(x).__module__}."
            f"{type(x).__name__}: convert it, as with jax.numpy.asarray."
        )
    dtype = getattr(torch, str(x.dtype), None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} must have a dtype that torch has too, got {x.dtype}.")
    if not isinstance(x, jax.core.Tracer) and (
        checks.CHECK_VALUES or (name == "cu_seqlens" and _on_cpu(x))
    ):
        wide = x.astype(np.float32) if dtype is torch.bfloat16 else x
        return torch.from_numpy(np.array(wide)).to(dtype)
    return torch.zeros((), dtype=dtype).expand(x.shape)


def _on_cpu(x) -> bool:
    return not isinstance(x, jax.Array) or all(d.platform == "cpu" for d in x.devices())


def parse(rank: int, inputs: tuple, **flags) -> Problem:
    """Validate a call; the `Problem` has its sizes and flags, and stand-ins for its arrays."""
    return Problem.parse(rank, *map(_stand_in, NAMES, inputs), **flags)


def parse_gate(rank: int, gate: Gate, g, A_log, dt_bias) -> None:
    """Validate a call of `kda_gate` or `gdn_gate`."""
    logits, log, bias = map(_stand_in, ("g", "A_log", "dt_bias"), (g, A_log, dt_bias))
    problem.gate_problem(rank, logits, log, bias, gate)  # type: ignore[arg-type]
