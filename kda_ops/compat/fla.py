"""Call these operators by FLA's functions: change one import line, keep the calls.

::

    from fla.ops.kda import chunk_kda, fused_recurrent_kda                 # before
    from kda_ops.compat.fla import chunk_kda, fused_recurrent_kda          # after

Names, order, defaults and results match FLA 0.6.0. Intended differences:

- An unknown keyword is an error; FLA drops it. So is a keyword without effect: ``A_log``,
  ``dt_bias`` or ``lower_bound`` without an activated gate.
- The recurrent functions are differentiable.
- Every function compiles with ``fullgraph=True`` and without host synchronisation. The exception
  is ``return_intermediate_states`` with ``cu_seqlens``, whose output shape depends on the lengths.
- Where FLA's function has them, these are accepted and ignored: ``cu_seqlens_cpu``,
  ``chunk_indices``, ``chunk_size`` (always 64 tokens) and ``use_graph`` (any call can be captured).
- These raise an error: ``cp_context``, ``head_first``, ``cu_seqlens_cpu`` without ``cu_seqlens``,
  different dtypes of q, k and v, and fp16 pools. In recurrent GDN also ``gv`` and a ``beta`` per
  value channel.
- Autocast casts q, k and v, and o has the autocast dtype, as in torch's attention; FLA keeps fp32.
- ``safe_gate`` allows a ``lower_bound`` below -5.
- FLA's PyTorch references (``naive_recurrent_kda`` and others) are absent: run these operators in
  float64 on a CPU instead.

Example:
    >>> import torch
    >>> from kda_ops.compat.fla import chunk_kda, fused_recurrent_kda
    >>> q, k, v = (torch.randn(2, 100, 4, 32) for _ in range(3))
    >>> g, beta = -torch.rand(2, 100, 4, 32), torch.rand(2, 100, 4)
    >>> o, state = chunk_kda(
    ...     q, k, v, g, beta,
    ...     use_qk_l2norm_in_kernel=True, output_final_state=True, state_v_first=True)
    >>> token = (x[:, -1:] for x in (q, k, v, g, beta))
    >>> o, state = fused_recurrent_kda(
    ...     *token, initial_state=state,
    ...     output_final_state=True, use_qk_l2norm_in_kernel=True, state_v_first=True)
    >>> o.shape, state.shape
    (torch.Size([2, 1, 4, 32]), torch.Size([2, 4, 32, 32]))
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from kda_ops import functional
from kda_ops.arguments import all_dense, check_writable, in_words
from kda_ops.problem import CHUNK, Problem, check_float, check_no_overlap

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "fused_gdn_gate",
    "fused_kda_gate",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
    "fused_recurrent_kda_fwd",
]

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


def _refuse(function: str, unknown: dict[str, object]) -> None:
    for name in unknown:
        if name in _RETIRED:
            raise TypeError(f"{function} takes no {name}: {_RETIRED[name]}.")
        raise TypeError(f"{function} got an unexpected keyword argument {name!r}.")


def _v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
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
            stacklevel=5,  # past this, the function and its two decorators
        )
    return transpose_state_layout


def _per_head(A_log: Tensor | None) -> Tensor | None:
    """Flatten A_log to ``[HV]``; FLA accepts any shape with HV elements."""
    return None if A_log is None else A_log.flatten()


def _float(state: Tensor | None, q: Tensor) -> Tensor | None:
    """Cast a state of 16 bits or more to the state dtype, as FLA does outside `chunk_kda`."""
    if state is None:
        return None
    check_float("initial_state", state, q.device)
    return state.to(torch.promote_types(q.dtype, torch.float32))


def _check_sequences(
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_size: int,
    sizes: tuple[int, ...],
    cp_context: object,
) -> None:
    if cp_context is not None:
        raise ValueError(
            "cp_context must be None: for context parallelism call `kda_ops.distributed.chunk_kda` "
            "or `chunk_gdn` with group= and the global cu_seqlens."
        )
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        raise ValueError(
            "cu_seqlens must be given with cu_seqlens_cpu, got None: pass the same offsets as "
            "cu_seqlens."
        )
    if chunk_size not in sizes:
        raise ValueError(f"chunk_size must be one of {list(sizes)}, got {chunk_size}.")


def _check_beta(beta: Tensor | None, v: Tensor) -> None:
    if beta is not None and beta.dim() == v.dim():
        raise ValueError(
            f"beta must have shape [B, T, HV], got {list(beta.shape)}: a beta per value channel "
            "is not supported."
        )


def _check_channel_decay(gk: Tensor, g: Tensor | None, q: Tensor, v: Tensor) -> None:
    """Refuse decays that cannot be added, before broadcasting or promotion hides it."""
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


def _check_out(out: Tensor, v: Tensor) -> None:
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


@in_words
@all_dense
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = CHUNK,
    transpose_state_layout: bool | None = None,
    **unknown: object,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Run Kimi Delta Attention over whole sequences, by FLA's signature; differentiable.

    Equation, shapes and errors: `kda_ops.chunk_kda`.

    Args:
        state_v_first: states are ``[N, HV, V, K]``. ``transpose_state_layout`` is its deprecated
            name and warns.
        return_intermediate_states: also return h ``[B, NT, HV, K, V]`` in k's dtype, the state
            before each chunk of 64 tokens (``V, K`` with ``state_v_first``). Chunks of packed
            sequences follow one another. Needs ``torch.inference_mode()``.
        max_num_seqs: with ``use_graph``, the number of sequences in ``cu_seqlens``, empty ones
            included.

    Returns:
        o ``[B, T, HV, V]``, the final state or None, and h if requested.
    """
    _refuse("chunk_kda", unknown)
    _check_sequences(cu_seqlens, cu_seqlens_cpu, chunk_size, (32, 64), cp_context)
    if (
        use_graph
        and max_num_seqs is not None
        and cu_seqlens is not None
        and cu_seqlens.shape[0] != max_num_seqs + 1
    ):
        raise ValueError(
            f"cu_seqlens must have max_num_seqs + 1 = {max_num_seqs + 1} entries with "
            f"use_graph=True, got {cu_seqlens.shape[0]}: repeat the last offset "
            "to add empty sequences."
        )
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError(
            "lower_bound must be given with safe_gate=True and use_gate_in_kernel=True, got None: "
            "pass -5.0."
        )
    v_first = _v_first(state_v_first, transpose_state_layout)
    flags: dict[str, Any] = dict(
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        safe_gate=safe_gate,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=v_first,
    )
    if not return_intermediate_states:
        return functional.chunk_kda(
            q,
            k,
            v,
            g,
            beta,
            _per_head(A_log),
            dt_bias,
            initial_state,
            cu_seqlens,
            output_final_state=output_final_state,
            disable_recompute=disable_recompute,
            **flags,
        )
    if not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "return_intermediate_states=True has no gradient: use torch.inference_mode()."
        )
    if disable_recompute:
        raise ValueError(
            "disable_recompute must be False with return_intermediate_states=True, which has no "
            "backward: drop it."
        )
    if chunk_size != CHUNK:
        raise ValueError(
            f"chunk_size must be {CHUNK} with return_intermediate_states=True, got {chunk_size}: "
            f"states are returned every {CHUNK} tokens."
        )
    return _with_intermediate_states(
        q,
        k,
        v,
        g,
        beta,
        _per_head(A_log),
        dt_bias,
        initial_state,
        cu_seqlens,
        output_final_state,
        flags,
    )


def _with_intermediate_states(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, output_final_state, flags
):
    """Run `chunk_kda` on a pool and return its slots as the states before each chunk.

    Slots 0 to N - 1 hold the sequences' states; the others hold the state before each chunk, in
    the order of the chunks.
    """
    # raise the errors of `chunk_kda`, before the sizes below are read
    Problem.parse(1, q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, **flags)
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
        device=q.device,
    ).view(N, later)
    slots = torch.arange(N, device=q.device)
    o = functional.chunk_kda_(
        q, k, v, g, beta, pool, slots, snapshots, A_log, dt_bias, cu_seqlens, **flags
    )
    h = pool[N:].to(k.dtype).view(B, sum(chunks) // max(B, 1), HV, *shape)
    return o, pool[:N].clone() if output_final_state else None, h


@in_words
@all_dense
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    **unknown: object,
) -> tuple[Tensor, Tensor | None]:
    """Run Kimi Delta Attention token by token, by FLA's signature; differentiable, unlike FLA's.

    Equation, shapes and errors: `kda_ops.recurrent_kda`.
    """
    _refuse("fused_recurrent_kda", unknown)
    _check_beta(beta, v)
    return functional.recurrent_kda(
        q,
        k,
        v,
        g,
        beta,
        _per_head(A_log),
        dt_bias,
        _float(initial_state, q),
        cu_seqlens,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=_v_first(state_v_first, transpose_state_layout),
    )


@in_words
@all_dense
def fused_recurrent_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: Tensor | None = None,
    **unknown: object,
) -> tuple[Tensor, Tensor | None]:
    """Decode on a pool of states, by the signature of FLA's serving function; inference only.

    ``initial_state`` is the pool, written in place and returned. Slots, speculative tokens and
    errors: `kda_ops.recurrent_kda_`. With ``inplace_final_state=False`` call
    `fused_recurrent_kda`, without slots. If ``out`` ``[B, T, HV, V]`` is given, write o to it in
    its dtype.
    """
    _refuse("fused_recurrent_kda_fwd", unknown)
    _check_beta(beta, v)
    if out is not None:
        _check_out(out, v)
    flags: dict[str, Any] = dict(
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    if inplace_final_state:
        if initial_state is None:
            raise ValueError(
                "initial_state must be the pool of states with inplace_final_state=True, got None."
            )
        o = functional.recurrent_kda_(
            q,
            k,
            v,
            g,
            beta,
            initial_state,
            ssm_state_indices,
            num_accepted_tokens,
            _per_head(A_log),
            dt_bias,
            cu_seqlens,
            transpose_state_layout=state_v_first,
            **flags,
        )
        final_state: Tensor | None = initial_state
    else:
        if ssm_state_indices is not None or num_accepted_tokens is not None:
            raise ValueError(
                "ssm_state_indices and num_accepted_tokens address a pool and need "
                "inplace_final_state=True."
            )
        o, final_state = fused_recurrent_kda(
            q,
            k,
            v,
            g,
            beta,
            A_log,
            dt_bias,
            initial_state=initial_state,
            output_final_state=output_final_state,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            **flags,
        )
    return o if out is None else out.copy_(o), final_state


@in_words
@all_dense
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = CHUNK,
    transpose_state_layout: bool | None = None,
    **unknown: object,
) -> tuple[Tensor, Tensor | None]:
    """Run Gated DeltaNet over whole sequences, by FLA's signature; differentiable.

    Equation, shapes and errors: `kda_ops.chunk_gdn`.
    """
    _refuse("chunk_gated_delta_rule", unknown)
    _check_sequences(cu_seqlens, cu_seqlens_cpu, chunk_size, (16, 32, 64), cp_context)
    return functional.chunk_gdn(
        q,
        k,
        v,
        g,
        beta,
        _per_head(A_log),
        dt_bias,
        _float(initial_state, q),
        cu_seqlens,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=_v_first(state_v_first, transpose_state_layout),
    )


@in_words
@all_dense
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    **unknown: object,
) -> tuple[Tensor, Tensor | None]:
    """Run Gated DeltaNet token by token, by FLA's signature; differentiable, unlike FLA's.

    Equation, shapes and errors: `kda_ops.recurrent_gdn`.

    Args:
        gk: ``[B, T, HV, K]``, a log decay per key channel, added to g: runs on ``kda::recurrent``.
        gv: not supported, nor is a ``beta`` of ``[B, T, HV, V]``; both raise ValueError.
    """
    _refuse("fused_recurrent_gated_delta_rule", unknown)
    if gv is not None:
        raise ValueError(
            "gv must be None: no operator of kda_ops decays value channels; pass gk for a decay "
            "per key channel."
        )
    _check_beta(beta, v)
    flags: dict[str, Any] = dict(
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=_v_first(state_v_first, transpose_state_layout),
    )
    state = _float(initial_state, q)
    if gk is None:
        return functional.recurrent_gdn(
            q,
            k,
            v,
            g,
            beta,
            _per_head(A_log),
            dt_bias,
            state,
            cu_seqlens,
            use_gate_in_kernel=use_gate_in_kernel,
            **flags,
        )
    if use_gate_in_kernel:
        if g is None:
            raise ValueError(
                "g must be given with use_gate_in_kernel=True, got None: pass the gate's logits."
            )
        g, A_log, dt_bias = functional.gdn_gate(g, _per_head(A_log), dt_bias), None, None
    _check_channel_decay(gk, g, q, v)
    decay = gk if g is None else gk + g[..., None]
    return functional.recurrent_kda(
        q, k, v, decay, beta, A_log, dt_bias, state, cu_seqlens, **flags
    )


@in_words
@all_dense
def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute KDA's log decay from logits ``[..., HV, K]``, by FLA's signature; differentiable.

    Equation and errors: `kda_ops.kda_gate`.
    """
    rows = g.reshape(1, -1, *g.shape[-2:])
    y = functional.kda_gate(
        rows,
        _per_head(A_log),
        None if dt_bias is None else dt_bias.flatten(),
        lower_bound=lower_bound,
    )
    return y.view(g.shape).to(output_dtype)


@in_words
@all_dense
def fused_gdn_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute GDN's log decay from logits ``[..., HV]``, by FLA's signature; differentiable.

    Equation and errors: `kda_ops.gdn_gate`.
    """
    if A_log is None:
        raise TypeError("A_log must be a tensor, got None.")
    return (
        functional.gdn_gate(g.reshape(1, -1, *g.shape[-1:]), _per_head(A_log), dt_bias)
        .view(g.shape)
        .to(output_dtype)
    )


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
