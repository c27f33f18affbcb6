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
- ``cp_context`` shards a call as in FLA: contiguous shards, no initial or final state. Its layout
  "zigzag" is refused. Conversion: `kda_ops.compat.fla_context`.
- These raise an error: ``head_first``, ``cu_seqlens_cpu`` without ``cu_seqlens``,
  different dtypes of q, k and v, and fp16 pools. In recurrent GDN also ``gv`` and a ``beta`` per
  value channel.
- Autocast casts q, k and v, and o has the autocast dtype, as in torch's attention; FLA keeps fp32.
- ``safe_gate`` allows a ``lower_bound`` below -5.
- The chunk functions take our promises ``safe_beta`` and ``safe_keys``. FLA ignores these keywords,
  so a program may pass them to either.
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

from typing import Any

import torch
from torch import Tensor

from kda_ops import functional
from kda_ops.arguments import all_dense, check_tensor, check_types
from kda_ops.compat.fla_calls import (
    MappedCall,
    check_beta,
    check_channel_decay,
    check_out,
    check_sequences,
    context_parallel,
    copied,
    decode,
    mapped,
    per_head,
    refuse_unknown,
    state_of,
    v_first,
    whole,
    with_intermediate_states,
)
from kda_ops.problem import CHUNK

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


@mapped
@check_types
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
    safe_beta: bool = False,
    safe_keys: bool = False,
    **unknown: object,
) -> MappedCall[tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]]:
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
    refuse_unknown("chunk_kda", unknown)
    check_sequences(cu_seqlens, cu_seqlens_cpu, chunk_size, (32, 64))
    if (
        use_graph
        and max_num_seqs is not None
        and cu_seqlens is not None
        and cu_seqlens.shape != (max_num_seqs + 1,)
    ):
        raise ValueError(
            f"cu_seqlens must have max_num_seqs + 1 = {max_num_seqs + 1} entries with "
            f"use_graph=True, got the shape {list(cu_seqlens.shape)}: repeat the last offset "
            "to add empty sequences."
        )
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError(
            "lower_bound must be given with safe_gate=True and use_gate_in_kernel=True, got None: "
            "pass -5.0."
        )
    flags: dict[str, Any] = dict(
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        safe_gate=safe_gate,
        safe_beta=safe_beta,
        safe_keys=safe_keys,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=v_first(state_v_first, transpose_state_layout),
    )
    tensors = (q, k, v, g, beta, per_head(A_log), dt_bias, initial_state, cu_seqlens)
    if not return_intermediate_states:
        flags |= dict(output_final_state=output_final_state, disable_recompute=disable_recompute)
        if cp_context is not None:
            return context_parallel(functional.chunk_kda, cp_context, *tensors, **flags)
        return whole(functional.chunk_kda, *tensors, **flags)
    if cp_context is not None:
        raise ValueError(
            "return_intermediate_states must be False with cp_context: a shard's states are not "
            "those of whole sequences."
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
    return with_intermediate_states(output_final_state, *tensors, **flags)


@mapped
@check_types
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
) -> MappedCall[tuple[Tensor, Tensor | None]]:
    """Run Kimi Delta Attention token by token, by FLA's signature; differentiable, unlike FLA's.

    Equation, shapes and errors: `kda_ops.recurrent_kda`.
    """
    refuse_unknown("fused_recurrent_kda", unknown)
    check_beta(beta, v)
    return whole(
        functional.recurrent_kda,
        q,
        k,
        v,
        g,
        beta,
        per_head(A_log),
        dt_bias,
        state_of(initial_state, q),
        cu_seqlens,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=v_first(state_v_first, transpose_state_layout),
    )


@mapped
@check_types
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
) -> MappedCall[tuple[Tensor, Tensor | None]]:
    """Decode on a pool of states, by the signature of FLA's serving function; inference only.

    ``initial_state`` is the pool, written in place and returned. Slots, speculative tokens and
    errors: `kda_ops.recurrent_kda_`. With ``inplace_final_state=False`` call
    `fused_recurrent_kda`, without slots. If ``out`` ``[B, T, HV, V]`` is given, write o to it in
    its dtype.
    """
    refuse_unknown("fused_recurrent_kda_fwd", unknown)
    check_beta(beta, v)
    if out is not None:
        check_out(out, v)
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
        pool = (initial_state, ssm_state_indices, num_accepted_tokens)
        tensors = (q, k, v, g, beta, *pool, per_head(A_log), dt_bias, cu_seqlens)
        return decode(tensors, out, flags | dict(transpose_state_layout=state_v_first))
    if ssm_state_indices is not None or num_accepted_tokens is not None:
        raise ValueError(
            "ssm_state_indices and num_accepted_tokens address a pool and need "
            "inplace_final_state=True."
        )
    call = fused_recurrent_kda.mapping(  # type: ignore[attr-defined]
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
    return call if out is None else copied(call, out)


@mapped
@check_types
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
    safe_beta: bool = False,
    safe_keys: bool = False,
    **unknown: object,
) -> MappedCall[tuple[Tensor, Tensor | None]]:
    """Run Gated DeltaNet over whole sequences, by FLA's signature; differentiable.

    Equation, shapes and errors: `kda_ops.chunk_gdn`.
    """
    refuse_unknown("chunk_gated_delta_rule", unknown)
    check_sequences(cu_seqlens, cu_seqlens_cpu, chunk_size, (16, 32, 64))
    tensors = (q, k, v, g, beta, per_head(A_log), dt_bias, state_of(initial_state, q), cu_seqlens)
    flags: dict[str, Any] = dict(
        scale=scale,
        output_final_state=output_final_state,
        safe_beta=safe_beta,
        safe_keys=safe_keys,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=v_first(state_v_first, transpose_state_layout),
    )
    if cp_context is not None:
        return context_parallel(functional.chunk_gdn, cp_context, *tensors, **flags)
    return whole(functional.chunk_gdn, *tensors, **flags)


@mapped
@check_types
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
) -> MappedCall[tuple[Tensor, Tensor | None]]:
    """Run Gated DeltaNet token by token, by FLA's signature; differentiable, unlike FLA's.

    Equation, shapes and errors: `kda_ops.recurrent_gdn`.

    Args:
        gk: ``[B, T, HV, K]``, a log decay per key channel, added to g: runs on ``kda::recurrent``.
        gv: not supported, nor is a ``beta`` of ``[B, T, HV, V]``; both raise ValueError.
    """
    refuse_unknown("fused_recurrent_gated_delta_rule", unknown)
    if gv is not None:
        raise ValueError(
            "gv must be None: no operator of kda_ops decays value channels; pass gk for a decay "
            "per key channel."
        )
    check_beta(beta, v)
    flags: dict[str, Any] = dict(
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=v_first(state_v_first, transpose_state_layout),
    )
    state = state_of(initial_state, q)
    if gk is None:
        return whole(
            functional.recurrent_gdn,
            q,
            k,
            v,
            g,
            beta,
            per_head(A_log),
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
        g, A_log, dt_bias = functional.gdn_gate(g, per_head(A_log), dt_bias), None, None
    check_channel_decay(gk, g, q, v)
    decay = gk if g is None else gk + g[..., None]
    return whole(
        functional.recurrent_kda, q, k, v, decay, beta, A_log, dt_bias, state, cu_seqlens, **flags
    )


@check_types
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
    check_tensor("g", g)
    rows = g.reshape(1, -1, *g.shape[-2:])
    y = functional.kda_gate(
        rows,
        per_head(A_log),
        None if dt_bias is None else dt_bias.flatten(),
        lower_bound=lower_bound,
    )
    return y.view(g.shape).to(output_dtype)


@check_types
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
    check_tensor("g", g)
    check_tensor("A_log", A_log)
    return (
        functional.gdn_gate(g.reshape(1, -1, *g.shape[-1:]), per_head(A_log), dt_bias)
        .view(g.shape)
        .to(output_dtype)
    )


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
