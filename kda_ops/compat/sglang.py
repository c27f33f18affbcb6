"""Run SGLang's Triton kernels for KDA and GDN on the operators of kda_ops.

Install kda_ops next to SGLang and set ``KDA_OPS_SGLANG=1``: SGLang loads the plugin, which puts
these functions around methods of ``TritonKDAKernel`` and ``TritonGDNKernel`` in every process.
Order and results match SGLang 0.5.23. The first argument is the operator in place of the kernel
object. Differences:

- A call that the operators refuse, or that an option below excludes, runs on SGLang's own method.
  The logger ``kda_ops.compat.sglang`` gives the reason, at level WARNING when it is new. Tensors
  on a CPU or an AMD GPU always stay on SGLang's method.
- If a slot is negative, every output of its sequence is zero. SGLang's ``decode`` computes it from
  a zero state.
- `packed_decode` and `target_verify` do not run here with ReplaySSM, nor `target_verify` on a tree
  of drafts. `extend` does not return the states before all chunks; it runs here if SGLang takes the
  states of its prefix cache from ``track_state``, or takes none.
- `target_verify` keeps the state in fp32 from draft to draft. On a bf16 pool SGLang rounds it after
  each.
- GDN's ``extend``, which returns the states before all chunks, stays on SGLang's kernels.

States are ``[slots, HV, V, K]``, fp32 or bf16.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kda_ops import functional
from kda_ops.arguments import check_tensor
from kda_ops.checks import can_read, check_index, check_slots
from kda_ops.compat import engines
from kda_ops.compat.fla_calls import per_head
from kda_ops.problem import CHUNK

__all__ = ["decode", "enable", "extend", "packed_decode", "target_verify"]

VERSIONS = ("0.5.23",)
DEVICES = ("cuda",)  # on a CPU, SGLang has kernels of its own

_KERNELS = "sglang.srt.layers.attention.linear.kernels"
_HOOKED: set[str] = set()  # the methods that run these functions


def decode(
    operator: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    lower_bound: float | None = None,
    **unused: object,
) -> Tensor:
    """Decode on the pool ``ssm_states``, by `kda_ops.recurrent_kda_` or `kda_ops.recurrent_gdn_`.

    ``a`` and ``b`` are the logits of the decay and of beta, ``[T, HV K]`` and ``[T, HV]`` or with
    more axes.
    """
    check_tensor("v", v)
    return engines.decode(
        operator,
        (q, k, v),
        _gates(operator, q, v, a, b, A_log, dt_bias),
        ssm_states,
        cache_indices,
        cu_seqlens=query_start_loc,
        use_qk_l2norm_in_kernel=True,
        lower_bound=lower_bound,
    )


def packed_decode(
    operator: Callable[..., Tensor],
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    ssm_states: Tensor,
    cache_indices: Tensor,
    num_v_heads: int,
    head_v_dim: int,
    lower_bound: float | None = None,
    **replay: Any,
) -> Tensor:
    """Decode one token of each of B sequences, from ``[B, 2 H K + HV V]``.

    Return o ``[1, B, HV, V]``.
    """
    refused = [name for name, x in replay.items() if x is not None]
    if refused:
        raise ValueError(f"{refused[0]} must be None to run on kda_ops.")
    q, k, v = engines.split_mixed(mixed_qkv, ssm_states)
    if v.shape[2:] != (num_v_heads, head_v_dim):
        raise ValueError(
            f"ssm_states must have {num_v_heads} heads of {head_v_dim} values, as num_v_heads and "
            f"head_v_dim say, got {list(ssm_states.shape)}."
        )
    o = engines.decode(
        operator,
        (q, k, v),
        _gates(operator, q, v, a, b, A_log, dt_bias),
        ssm_states,
        cache_indices,
        scale=scale,
        use_qk_l2norm_in_kernel=True,
        lower_bound=lower_bound,
    )
    return o.transpose(0, 1)


def target_verify(
    operator: Callable[..., Tensor],
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    intermediate_states_buffer: Tensor,
    intermediate_state_indices: Tensor,
    cache_steps: int,
    retrieve_parent_token: Tensor | None,
    lower_bound: float | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
    **unused: object,
) -> Tensor:
    """Run a chain of drafts of each sequence from its slot of ``ssm_states``, which stays.

    The state after draft t of sequence n goes to row ``intermediate_state_indices[n]`` and step t
    of ``intermediate_states_buffer`` ``[rows, steps, HV, V, K]``.
    """
    if retrieve_parent_token is not None or cache_ring:
        name = "cache_ring" if cache_ring else "retrieve_parent_token"
        raise ValueError(f"{name} must not be set to run on kda_ops.")
    check_tensor("v", v)
    check_tensor("query_start_loc", query_start_loc)
    buffer, N = intermediate_states_buffer, query_start_loc.shape[0] - 1
    if buffer.dim() != 5 or not buffer.is_contiguous():
        raise ValueError(
            "intermediate_states_buffer must be contiguous, [rows, steps, HV, V, K], to run on "
            "kda_ops."
        )
    steps = torch.arange(buffer.shape[1], device=buffer.device)
    rows = intermediate_state_indices[:N].long()[:, None] * buffer.shape[1] + steps
    return engines.decode(
        operator,
        (q, k, v),
        _gates(operator, q, v, a, b, A_log, dt_bias),
        buffer.flatten(0, 1),
        rows,
        cu_seqlens=query_start_loc,
        source=ssm_states,
        source_indices=cache_indices[:N],
        use_qk_l2norm_in_kernel=True,
        lower_bound=lower_bound,
    )


def extend(
    operator: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_is_raw: bool = False,
    return_intermediate_states: bool = False,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
    track_ssm_h_src: Tensor | None = None,
    **unused: object,
) -> Tensor | tuple[Tensor, None]:
    """Prefill KDA on the pool ``ssm_states``, by `kda_ops.chunk_kda_`; return o.

    Without ``A_log``, ``g`` is the log decay. ``beta`` holds logits if ``beta_is_raw``. With
    ``track_state``, the state of sequence n after ``track_chunk_idx[n]`` chunks of 64 tokens is
    written to ``track_state[n]`` in fp32, unless that number is negative or beyond the prompt.

    With ``return_intermediate_states`` the result is (o, None), without the states before all
    chunks. This needs ``track_state``, or an empty ``track_ssm_h_src``: SGLang then reads none of
    those states.
    """
    engines.check_platform()
    reads = track_ssm_h_src is None or track_ssm_h_src.numel() > 0
    if return_intermediate_states and track_state is None and reads:
        raise ValueError(
            "return_intermediate_states must be False without track_state to run on kda_ops."
        )
    raw = A_log is not None

    def run(pool: Tensor, slots: Tensor, into: Tensor | None) -> Tensor:
        return operator(
            q,
            k,
            v,
            g,
            beta,
            pool,
            slots,
            into,
            per_head(A_log),
            None if dt_bias is None or not raw else dt_bias.flatten(),
            query_start_loc,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=raw,
            lower_bound=lower_bound if raw else None,
            use_beta_sigmoid_in_kernel=beta_is_raw,
            transpose_state_layout=True,
        )

    if track_state is None:
        o = run(ssm_states, cache_indices, None)
    else:
        check_tensor("q", q)
        check_tensor("cache_indices", cache_indices)
        check_tensor("query_start_loc", query_start_loc)
        T = q.shape[1]
        o = _track(run, ssm_states, cache_indices, query_start_loc, T, track_state, track_chunk_idx)
    return (o, None) if return_intermediate_states else o


def _track(
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    T: int,
    tracked: Tensor,
    chunks: Tensor | None,
) -> Tensor:
    """Run a prefill on two fp32 copies of each state: one is updated, one takes the snapshot."""
    N, shape = slots.shape[0], states.shape[1:]
    if chunks is None or chunks.dim() != 1 or chunks.shape[0] < N:
        got = None if chunks is None else list(chunks.shape)
        raise ValueError(f"track_chunk_idx must be given with track_state, [N] = [{N}], got {got}.")
    if tracked.shape[1:] != shape or tracked.shape[0] < N or tracked.dtype is not torch.float32:
        raise ValueError(
            f"track_state must be float32, [N, ...] = {[N, *shape]}, got {tracked.dtype} "
            f"{list(tracked.shape)}."
        )
    check_index("cache_indices", slots, states.device)
    if can_read(slots):
        check_slots(slots, states.shape[0], "cache_indices")
    if N == 0:
        return run(states, slots, None)
    live, at = slots >= 0, slots.clamp(min=0).long()
    chunks, n = chunks[:N], torch.arange(N, device=states.device)
    own = states.index_select(0, at).float()
    pool, column = torch.cat([own, own]), torch.arange(1, T // CHUNK + 1, device=states.device)
    due = live[:, None] & (column == chunks[:, None])
    o = run(pool, n.where(live, -1), (n + N)[:, None].where(due, -1))
    own, copies = pool.chunk(2)
    # a sequence without a slot repeats what the first sequence with a slot writes
    n = n.where(live, live.int().argmax())
    states.index_copy_(0, at[n], own[n].to(states.dtype))
    asked = (live & (chunks >= 0) & (CHUNK * chunks <= starts.diff()))[:, None, None, None]
    tracked[:N].copy_(copies.where(asked, tracked[:N]))
    return o


def _gates(
    operator: Callable[..., Tensor],
    q: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the logits of the decay and of beta per token and head, A_log and dt_bias."""
    channels = (q.shape[-1],) if operator is functional.recurrent_kda_ else ()
    g = engines.shaped("a", a, (*v.shape[:3], *channels))
    beta = engines.shaped("b", b, v.shape[:3])
    return g, beta, A_log, None if dt_bias is None else dt_bias.flatten()


_METHODS: dict[str, Callable[..., Any]] = {
    f"{_KERNELS}.{kernel}.{function.__name__}": partial(function, operator)
    for kernel, function, operator in (
        ("kda_triton.TritonKDAKernel", decode, functional.recurrent_kda_),
        ("kda_triton.TritonKDAKernel", packed_decode, functional.recurrent_kda_),
        ("kda_triton.TritonKDAKernel", extend, functional.chunk_kda_),
        ("gdn_triton.TritonGDNKernel", decode, functional.recurrent_gdn_),
        ("gdn_triton.TritonGDNKernel", packed_decode, functional.recurrent_gdn_),
        ("kda_triton.TritonKDAKernel", target_verify, functional.recurrent_kda_),
        ("gdn_triton.TritonGDNKernel", target_verify, functional.recurrent_gdn_),
    )
}


def _around(target: str) -> Callable[..., Any]:
    """Return the function that SGLang calls in place of a method, with that method first."""
    name = f"{__name__}.{'.'.join(target.split('.')[-2:])}"
    ours = _METHODS[target]

    def method(own: Callable[..., Any], kernel: object, *args: Any, **given: Any) -> Any:
        if given["ssm_states"].device.type not in DEVICES:
            return own(kernel, *args, **given)
        return engines.serve(name, ours, partial(own, kernel), args, given)

    return method


def _register() -> Any:
    """Register the hooks that are not registered yet, and return SGLang's registry."""
    engines.check_engine("sglang", "SGLang", VERSIONS)
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    for target in _METHODS:
        if target not in _HOOKED:
            hooks.HookRegistry.register(target, _around(target), hooks.HookType.AROUND)
            _HOOKED.add(target)
    return hooks.HookRegistry


def enable() -> None:
    """Put these functions around SGLang's methods in this process; a second call has no effect.

    SGLang's registry of hooks keeps its own methods, for the calls that the operators refuse.

    Raises:
        ImportError: SGLang is not installed.
        RuntimeError: SGLang has a version that this module does not know.
    """
    _register().apply_hooks()


def plugin() -> None:
    """Register the hooks if the environment has ``KDA_OPS_SGLANG=1``; SGLang applies them.

    SGLang calls this in every process. If it raises, SGLang logs the error and goes on without us.
    """
    if os.environ.get("KDA_OPS_SGLANG") == "1":
        _register()
