"""Run vLLM's functions for KDA and GDN on the operators of kda_ops.

Install kda_ops next to vLLM and set ``KDA_OPS_VLLM=1``: vLLM loads the plugin, which calls `enable`
in every process. Names, order and results of the functions match vLLM 0.33.0. Differences:

- A call that the operators refuse, or that an option below excludes, runs on vLLM's own function.
  The logger ``kda_ops.compat.vllm`` gives the reason, at level WARNING when it is new. vLLM warms
  up `fused_sigmoid_gating_delta_rule_update` with a flat pool, which is one such call.
- Slots up to 0 are nobody's, as in vLLM, and every output of such a sequence is zero; vLLM leaves
  some of these outputs as they are.
- ``fuse_gate``, ``chunk_indices`` and ``chunk_offsets`` change nothing.
- `fused_sigmoid_gating_delta_rule_update` runs here with ``inplace_final_state=True``,
  ``is_kda=False``, a table of slots, and the default ``beta`` and ``threshold`` of its softplus.

States are ``[slots, HV, V, K]``, fp32 or bf16. Without vLLM, the functions can be called too; then
a refusal is an error.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from torch import Tensor

from kda_ops import functional
from kda_ops.arguments import check_tensor
from kda_ops.compat import engines
from kda_ops.compat.fla_calls import check_out, per_head, state_of

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_kda_with_fused_gate",
    "enable",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_recurrent_kda",
    "fused_recurrent_kda_packed_decode",
    "fused_sigmoid_gating_delta_rule_update",
]

VERSIONS = ("0.33.0",)
NULL_SLOT = 0  # vLLM's null block

_KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
_GDN = "vllm.third_party.flash_linear_attention.ops"

Results = tuple[Tensor, "Tensor | None"]

_OURS: dict[str, dict[str, Callable[..., Results]]] = {}  # module of vLLM -> name -> function
_THEIRS: dict[str, Callable[..., Results]] = {}  # vLLM's functions, once replaced


def _replaces(module: str) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
    """Let a function replace the one of its name in a module of vLLM."""

    def decorate(ours: Callable[..., Results]) -> Callable[..., Results]:
        name = ours.__name__

        @wraps(ours)
        def function(*args: Any, **given: Any) -> Results:
            return engines.serve(f"{__name__}.{name}", ours, _THEIRS.get(name), args, given)

        _OURS.setdefault(module, {})[name] = function
        return function

    return decorate


@_replaces(f"{_KDA}.chunk")
def chunk_kda_with_fused_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    **unused: object,
) -> Results:
    """Prefill KDA from logits, by `kda_ops.chunk_kda`.

    ``initial_state`` ``[N, HV, V, K]`` holds gathered states, in the pool's dtype; the final state
    is fp32. If ``out`` ``[B, T, HV, V]`` is given, write o to it.
    """
    return _prefill(
        functional.chunk_kda,
        (q, k, v, raw_g, raw_beta, per_head(A_log), g_bias),
        initial_state,
        cu_seqlens,
        out,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=True,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=True,
    )


@_replaces(f"{_KDA}.fused_recurrent")
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,
) -> Results:
    """Decode KDA, with drafts or without, by `kda_ops.recurrent_kda_`.

    ``initial_state`` is the pool, written in place and returned.
    """
    o = engines.decode(
        functional.recurrent_kda_,
        (q, k, v),
        (raw_g, raw_beta, A_log, dt_bias),
        initial_state,
        ssm_state_indices,
        num_accepted_tokens,
        cu_seqlens,
        out=out,
        use_qk_l2norm_in_kernel=True,
        lower_bound=lower_bound,
        null_slot=NULL_SLOT,
    )
    return o, initial_state


@_replaces(f"{_KDA}.fused_recurrent")
def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Results:
    """Decode one token of each of B sequences with KDA, from ``[B, 2 H K + HV V]``.

    ``raw_g`` is ``[1, B, HV, K]``, ``raw_beta`` ``[1, B, HV]``, o and ``out`` ``[1, B, HV, V]``.
    """
    q, k, v = engines.split_mixed(mixed_qkv, initial_state)
    g = engines.shaped("raw_g", raw_g, (*v.shape[:3], q.shape[-1]))
    beta = engines.shaped("raw_beta", raw_beta, v.shape[:3])
    if out is not None and out.shape != v.transpose(0, 1).shape:
        raise ValueError(
            f"out must have shape [1, B, HV, V] = {list(v.transpose(0, 1).shape)}, got "
            f"{list(out.shape)}."
        )
    o = engines.decode(
        functional.recurrent_kda_,
        (q, k, v),
        (g, beta, A_log, dt_bias),
        initial_state,
        state_indices,
        out=None if out is None else out.transpose(0, 1),
        scale=scale,
        use_qk_l2norm_in_kernel=True,
        lower_bound=lower_bound,
        null_slot=NULL_SLOT,
    )
    return o.transpose(0, 1) if out is None else out, initial_state


@_replaces(f"{_GDN}.chunk")
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: Tensor | None = None,
) -> Results:
    """Prefill GDN from log decay and beta, by `kda_ops.chunk_gdn`.

    ``initial_state`` as for `chunk_kda_with_fused_gate`. If ``core_attn_out`` is given, a flat
    buffer of at least v's size, write o to its beginning.
    """
    out = core_attn_out
    if out is not None:
        check_tensor("core_attn_out", out)
        check_tensor("v", v)
        if out.dim() != 1 or out.numel() < v.numel():
            raise ValueError(
                f"core_attn_out must be flat and hold {v.numel()} numbers, got {list(out.shape)}."
            )
        out = out[: v.numel()].view(v.shape)
    return _prefill(
        functional.chunk_gdn,
        (q, k, v, g, beta, None, None),
        initial_state,
        cu_seqlens,
        out,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )


@_replaces(f"{_GDN}.fused_recurrent")
def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> Results:
    """Decode one token of each of B sequences with GDN, from ``[B, 2 H K + HV V]``.

    ``a`` and ``b`` ``[B, HV]`` are the logits of the decay and of beta; ``out`` is
    ``[B, 1, HV, V]``.
    """
    q, k, v = engines.split_mixed(mixed_qkv, initial_state)
    g, beta = (engines.shaped(name, x, v.shape[:3]) for name, x in (("a", a), ("b", b)))
    o = engines.decode(
        functional.recurrent_gdn_,
        (q, k, v),
        (g, beta, A_log, dt_bias),
        initial_state,
        ssm_state_indices,
        out=out,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        null_slot=NULL_SLOT,
    )
    return o, initial_state


@_replaces(f"{_GDN}.fused_sigmoid_gating")
def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> Results:
    """Decode GDN, with drafts or without, by `kda_ops.recurrent_gdn_`.

    ``a`` and ``b``, ``[tokens, HV]`` or ``[B, T, HV]``, are the logits of the decay and of beta.
    """
    for name, got, served in (
        ("beta", beta, 1.0),
        ("threshold", threshold, 20.0),
        ("inplace_final_state", inplace_final_state, True),
        ("is_kda", is_kda, False),
    ):
        if got != served:
            raise ValueError(f"{name} must be {served} to run on kda_ops, got {got}.")
    check_tensor("v", v)
    check_tensor("initial_state", initial_state)
    check_tensor("ssm_state_indices", ssm_state_indices)
    assert initial_state is not None and ssm_state_indices is not None
    g, logits = (engines.shaped(name, x, v.shape[:3]) for name, x in (("a", a), ("b", b)))
    o = engines.decode(
        functional.recurrent_gdn_,
        (q, k, v),
        (g, logits, A_log, dt_bias),
        initial_state,
        ssm_state_indices,
        num_accepted_tokens,
        cu_seqlens,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        null_slot=NULL_SLOT,
    )
    return o, initial_state


def _prefill(
    operator: Callable[..., Results],
    tensors: tuple[Tensor | None, ...],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor | None,
    **flags: Any,
) -> Results:
    """Run `chunk_*` on gathered states ``[N, HV, V, K]``; `tensors` are q to dt_bias."""
    engines.check_platform()
    q, _, v = tensors[:3]
    check_tensor("q", q)
    check_tensor("v", v)
    assert q is not None and v is not None
    if out is not None:
        check_out(out, v)
    o, final_state = operator(
        *tensors, state_of(initial_state, q), cu_seqlens, transpose_state_layout=True, **flags
    )
    return o if out is None else out.copy_(o), final_state


def enable() -> None:
    """Replace vLLM's functions in this process; a second call has no effect.

    Modules that vLLM has imported change at once, the others when vLLM imports them. vLLM's own
    functions are kept, for the calls that the operators refuse.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: vLLM has a version that this module does not know.
    """
    engines.check_engine("vllm", "vLLM", VERSIONS)
    for module in _OURS:
        if module in sys.modules:
            _replace(sys.modules[module])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def plugin() -> None:
    """Call `enable` if the environment has ``KDA_OPS_VLLM=1``; vLLM calls this in every process."""
    if os.environ.get("KDA_OPS_VLLM") == "1":
        enable()


def _replace(module: ModuleType) -> None:
    """Replace functions in their module, and in the modules of vLLM that imported them."""
    for name, ours in _OURS[module.__name__].items():
        own = getattr(module, name)
        if own is ours:
            continue
        _THEIRS[name] = own
        loaded = [m for n, m in list(sys.modules.items()) if n.split(".")[0] == "vllm"]
        for holder in (module, *filter(None, loaded)):
            for key, value in list(vars(holder).items()):
                if value is own:
                    setattr(holder, key, ours)


class _Finder(importlib.abc.MetaPathFinder):
    """Replace the functions of a module when it is imported.

    To import these modules early would initialise CUDA in vLLM's processes that use no GPU.
    """

    def find_spec(self, fullname, path, target=None):
        """Return the spec of a module with our functions, as the next finder finds it."""
        if fullname not in _OURS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module, execute=execute):
                    execute(module)
                    _replace(module)

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
                return spec
        return None
