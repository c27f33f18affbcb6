"""Map calls of FLA's signatures to these operators: check the arguments, name the operator.

`kda_ops.compat.fla` holds the signatures. A signature returns a `MappedCall`, which `mapped` makes.
`kda_ops.compat.fla_backend` only checks it, to decide whether FLA may hand the call to us.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from kda_ops import functional
from kda_ops.arguments import check_tensor, check_writable
from kda_ops.checks import check_float, check_no_overlap, check_offsets
from kda_ops.problem import CHUNK, Problem

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


@dataclass(frozen=True)
class MappedCall(Generic[R]):
    """A call of an operator: `check` raises what the operator would refuse, `run` makes it."""

    run: Callable[[], R]
    check: Callable[[], object]


def mapped(mapping: Callable[P, MappedCall[R]]) -> Callable[P, R]:
    """Turn a signature that returns a `MappedCall` into the function that makes the call.

    The signature stays available as the attribute ``mapping``.
    """

    @wraps(mapping)
    def function(*args: P.args, **given: P.kwargs) -> R:
        return mapping(*args, **given).run()

    signature = inspect.signature(mapping)
    result = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
    function.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
    function.mapping = mapping  # type: ignore[attr-defined]
    return function


_POOLS = "to decode on a pool of states, call `fused_recurrent_kda_fwd` or `kda_ops.recurrent_kda_`"
_RETIRED = {
    "safe_gate": "it describes the per-channel decay of chunk_kda: drop it",
    "disable_recompute": "it belongs to chunk_kda: drop it",
    "chunk_size": "there are no chunks: drop it",
    "head_first": (
        "tensors are [B, T, H, ...]: call transpose(1, 2) on tensors of shape [B, H, T, ...] and "
        "drop the keyword"
    ),
    "offsets": "pass it as cu_seqlens",
    "indices": "chunks are computed on the device: drop it",
    "chunk_indices": "chunks are computed on the device: drop it",
    "gk": "it belongs to fused_recurrent_gated_delta_rule; pass KDA a per-channel decay as g",
    "gv": "no operator of kda_ops decays value channels",
    "ssm_state_indices": _POOLS,
    "num_accepted_tokens": _POOLS,
    "inplace_final_state": _POOLS,
}


def refuse_unknown(function: str, unknown: dict[str, object]) -> None:
    """Refuse keywords that a function of FLA does not have."""
    for name in unknown:
        if name in _RETIRED:
            raise TypeError(f"{function} takes no {name}: {_RETIRED[name]}.")
        raise TypeError(f"{function} got an unexpected keyword argument {name!r}.")


def v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """Return the state layout, given by its current or its deprecated name."""
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError(
            "state_v_first and transpose_state_layout, its deprecated name, must not both be "
            "given: drop transpose_state_layout."
        )
    if not torch.compiler.is_compiling():  # a warning breaks the graph
        warnings.warn(
            "`transpose_state_layout` is deprecated and renamed to `state_v_first`.",
            DeprecationWarning,
            stacklevel=6,  # past this, the function and its three decorators
        )
    return transpose_state_layout


def per_head(A_log: Tensor | None) -> Tensor | None:
    """Flatten A_log to ``[HV]``; FLA accepts any shape with HV elements."""
    return None if A_log is None else A_log.flatten()


def state_of(state: Tensor | None, q: Tensor) -> Tensor | None:
    """Cast a state of 16 bits or more to the state dtype, as FLA does outside `chunk_kda`."""
    if state is None or q is None:
        return state
    check_float("initial_state", state, q.device)
    return state.to(torch.promote_types(q.dtype, torch.float32))


def check_sequences(
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_size: int,
    sizes: tuple[int, ...],
) -> None:
    """Check the arguments that describe sequences and chunks."""
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        raise ValueError(
            "cu_seqlens must be given with cu_seqlens_cpu, got None: pass the same offsets as "
            "cu_seqlens."
        )
    if chunk_size not in sizes:
        raise ValueError(f"chunk_size must be one of {list(sizes)}, got {chunk_size}.")


def check_beta(beta: Tensor | None, v: Tensor) -> None:
    """Refuse a beta per value channel."""
    if beta is not None and v is not None and beta.dim() == v.dim():
        raise ValueError(
            f"beta must have shape [B, T, HV], got {list(beta.shape)}: a beta per value channel "
            "is not supported."
        )


def check_channel_decay(gk: Tensor, g: Tensor | None, q: Tensor, v: Tensor) -> None:
    """Refuse decays that cannot be added, before broadcasting or promotion hides it."""
    check_tensor("q", q)
    check_tensor("v", v)
    shape = (*v.shape[:3], q.shape[-1])
    for name, x, letters, want in (
        ("gk", gk, "[B, T, HV, K]", shape),
        ("g", g, "[B, T, HV]", shape[:3]),
    ):
        if x is not None:
            if x.shape != want:
                raise ValueError(
                    f"{name} must have shape {letters} = {list(want)}, got {list(x.shape)}."
                )
            check_float(name, x, q.device)


def check_out(out: Tensor, v: Tensor) -> None:
    """Refuse an `out` that o cannot be copied to, before the pool is written."""
    if out.shape != v.shape or not out.is_floating_point():
        raise ValueError(
            f"out must be floating point and have v's shape {list(v.shape)}, got {out.dtype} "
            f"{list(out.shape)}."
        )
    check_float("out", out, v.device, "v")
    check_writable("out", out)
    check_no_overlap("out", out)
    if out.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("out is written in place and has no gradient: detach it.")


_RANKS: dict[Callable[..., Any], int] = {
    functional.chunk_kda: 1,
    functional.recurrent_kda: 1,
    functional.chunk_gdn: 0,
    functional.recurrent_gdn: 0,
}


def whole(function: Callable[..., R], *tensors: Tensor | None, **flags: Any) -> MappedCall[R]:
    """Return a call of `chunk` or `recurrent`; tensors in the order of the schema."""
    return MappedCall(
        partial(function, *tensors, **flags),
        partial(Problem.parse, _RANKS[function], *tensors, **flags),
    )


def decode(
    tensors: tuple[Any, ...], out: Tensor | None, flags: dict[str, Any]
) -> MappedCall[tuple[Tensor, Tensor | None]]:
    """Return a call of `recurrent_kda_`, whose results are o and the pool."""

    def check() -> None:
        p = Problem.parse_step(1, *tensors, **flags)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            raise RuntimeError(
                "initial_state is written in place and has no gradient: call under torch.no_grad()."
            )
        assert p.state is not None
        check_writable("initial_state", p.state)

    def run() -> tuple[Tensor, Tensor | None]:
        o = functional.recurrent_kda_(*tensors, **flags)
        return o if out is None else out.copy_(o), tensors[5]

    return MappedCall(run, check)


def copied(
    call: MappedCall[tuple[Tensor, Tensor | None]], out: Tensor
) -> MappedCall[tuple[Tensor, Tensor | None]]:
    """Return the call with o written to `out`."""

    def run() -> tuple[Tensor, Tensor | None]:
        o, final_state = call.run()
        return out.copy_(o), final_state

    return MappedCall(run, call.check)


def context_parallel(
    function: Callable[..., tuple[Tensor, Tensor | None]],
    cp_context: Any,
    *tensors: Any,
    **flags: Any,
) -> MappedCall[tuple[Tensor, Tensor | None]]:
    """Return a call on the shard that FLA's cp_context describes.

    A context without a group is a packed call on one rank.
    """
    # torch.distributed is imported where it is needed
    from kda_ops import distributed
    from kda_ops.compat.fla_context import check_context, shard_of

    check_context(cp_context, tensors[0].shape[1])
    *rest, initial_state, _ = tensors
    if initial_state is not None or flags["output_final_state"]:
        raise ValueError(
            "initial_state and output_final_state must not be given with cp_context, as in FLA: "
            "call `kda_ops.distributed`, which takes both."
        )
    local = whole(function, *rest, None, cp_context.cu_seqlens, **flags)
    if cp_context.group is None:
        return local
    sharded = getattr(distributed, function.__name__)

    def run() -> tuple[Tensor, Tensor | None]:
        # the offsets of this rank's tokens, which `distributed` does not see
        check_offsets(cp_context.cu_seqlens, rest[0].shape[0], rest[0].shape[1], rest[0].device)
        plan, cu_seqlens = shard_of(cp_context, rest[0])
        return sharded(*rest, None, cu_seqlens, group=plan, **flags)

    return MappedCall(run, local.check)


def with_intermediate_states(
    output_final_state: bool, *tensors: Tensor | None, **flags: Any
) -> MappedCall[tuple[Tensor, Tensor | None, Tensor]]:
    """Return a call of `chunk_kda_` whose slots are the states before each chunk."""
    check = partial(Problem.parse, 1, *tensors, **flags)

    def run() -> tuple[Tensor, Tensor | None, Tensor]:
        check()  # the errors of `chunk_kda`, before sizes are read
        return _states(output_final_state, *tensors, **flags)

    return MappedCall(run, check)


def _states(
    output_final_state, q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, **flags
):
    """Run `chunk_kda_` on a pool and return its slots as the states before each chunk.

    Slots 0 to N - 1 hold the sequences' states; the others hold the state before each chunk, in
    the order of the chunks.
    """
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    lengths = [T] * B if cu_seqlens is None else cu_seqlens.diff().tolist()
    chunks = [-(-n // CHUNK) for n in lengths]
    N = len(lengths)
    first = [N + sum(chunks[:n]) for n in range(N)]
    shape = (V, K) if flags["transpose_state_layout"] else (K, V)
    pool = q.new_zeros(
        (N + sum(chunks), HV, *shape), dtype=torch.promote_types(q.dtype, torch.float32)
    )
    if initial_state is not None:
        pool[:N] = initial_state
        started = [n for n in range(N) if chunks[n]]
        pool[[first[n] for n in started]] = initial_state[started]
    later = max([*chunks, 1])
    snapshots = torch.tensor(
        [[first[n] + j if j < chunks[n] else -1 for j in range(1, later + 1)] for n in range(N)],
        dtype=torch.int64,
        device=q.device,
    ).view(N, later)
    slots = torch.arange(N, device=q.device)
    o = functional.chunk_kda_(
        q, k, v, g, beta, pool, slots, snapshots, A_log, dt_bias, cu_seqlens, **flags
    )
    h = pool[N:].to(k.dtype).view(B, sum(chunks) // max(B, 1), HV, *shape)
    return o, pool[:N].clone() if output_final_state else None, h
