"""Put the operators under a serving engine's functions: what vLLM and SGLang have in common.

`kda_ops.compat.vllm` and `kda_ops.compat.sglang` hold the signatures. A call that the operators
refuse goes to the engine's own function. Operators refuse a call before they write anything, so
that function starts from the same pool.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda_ops.arguments import check_tensor
from kda_ops.compat.fla_calls import per_head

REASONS = 8  # warnings per function: reasons name shapes, which may differ in every call

_WARNED: dict[str, set[str]] = {}  # function -> the reasons that were logged as warnings


def check_engine(package: str, title: str, versions: tuple[str, ...]) -> None:
    """Refuse an engine that is missing, or a version whose functions this package does not know."""
    adapter = f"kda_ops.compat.{package}"
    try:
        found = str(getattr(importlib.import_module(package), "__version__", "without a version"))
    except ImportError as error:
        raise ImportError(
            f"{adapter} needs {title} {' or '.join(versions)}: pip install {package}.", name=package
        ) from error
    if found.split("+")[0] not in versions:  # a build tag such as +cu130 changes no function
        raise RuntimeError(
            f"{adapter} knows the functions of {title} {', '.join(versions)}, got {title} {found}: "
            f"install one of these, or unset KDA_OPS_{package.upper()} to run without kda_ops."
        )


def serve(
    name: str,
    ours: Callable[..., Any],
    own: Callable[..., Any] | None,
    args: tuple[Any, ...],
    given: dict[str, Any],
) -> Any:
    """Call `ours`; if it refuses, log the reason and call the engine's `own` function.

    Without an engine the refusal is raised. `name` is the function in the log.
    """
    try:
        return ours(*args, **given)
    except (TypeError, ValueError) as error:
        if own is None:
            raise
        reasons, reason = _WARNED.setdefault(name, set()), str(error)
        new = reason not in reasons and len(reasons) < REASONS
        if new:
            reasons.add(reason)
        logging.getLogger(name.rpartition(".")[0]).log(
            logging.WARNING if new else logging.DEBUG,
            "%s runs on the engine's kernels: %s",
            name,
            reason,
        )
    return own(*args, **given)  # outside of the handler: its errors are the engine's alone


def check_platform() -> None:
    """Refuse AMD GPUs, whose tensors torch calls CUDA tensors."""
    if torch.version.hip is not None:
        raise TypeError("q must be on a CPU or an NVIDIA GPU, got an AMD GPU.")


def shaped(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshape what an engine passes with other axes, per token and head."""
    check_tensor(name, x)
    if x.numel() != math.prod(shape):
        raise ValueError(
            f"{name} must have the {math.prod(shape)} numbers of {list(shape)}, got "
            f"{list(x.shape)}."
        )
    return x.reshape(shape)


def split_mixed(mixed_qkv: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k ``[B, 1, H, K]`` and v ``[B, 1, HV, V]``, views of ``[B, 2 H K + HV V]``.

    HV, V and K are those of the pool ``[slots, HV, V, K]``.
    """
    check_tensor("mixed_qkv", mixed_qkv)
    check_tensor("initial_state", state)
    if state.dim() != 4:
        raise ValueError(
            f"initial_state must have shape [slots, HV, V, K], got {list(state.shape)}."
        )
    HV, V, K = state.shape[1:]
    keys = (mixed_qkv.shape[-1] - HV * V) // 2 if mixed_qkv.dim() == 2 else 0
    if K == 0 or keys <= 0 or keys % K or 2 * keys + HV * V != mixed_qkv.shape[-1]:
        raise ValueError(
            f"mixed_qkv must have shape [B, 2 H K + HV V] with K = {K} and HV V = {HV * V}, as in "
            f"initial_state, got {list(mixed_qkv.shape)}."
        )
    q, k, v = mixed_qkv.unsqueeze(1).split([keys, keys, HV * V], dim=-1)
    return q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (HV, V))


def decode(
    operator: Callable[..., Tensor],
    vectors: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor, Tensor, Tensor | None],
    state: Tensor,
    slots: Tensor,
    accepted: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    out: Tensor | None = None,
    **flags: Any,
) -> Tensor:
    """Run `recurrent_*_` on an engine's pool ``[slots, HV, V, K]`` and return o, or `out`.

    `vectors` are q, k and v. `gates` are the logits of the decay and of beta, A_log and dt_bias.
    Engines keep tables for their largest batch, so `slots` and `accepted` may have rows past the
    last sequence.
    """
    check_platform()
    q, k, v = vectors
    g, beta, A_log, dt_bias = gates
    check_tensor("q", q)
    check_tensor("v", v)
    check_tensor("the table of slots", slots)
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens)
    N = (q if cu_seqlens is None else cu_seqlens[1:]).shape[0]
    return operator(
        q,
        k,
        v,
        g,
        beta,
        state,
        slots[:N],
        None if accepted is None else accepted[:N],
        per_head(A_log),
        dt_bias,
        cu_seqlens,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        transpose_state_layout=True,
        out=out,
        **flags,
    )
