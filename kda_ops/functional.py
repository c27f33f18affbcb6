"""The Python faces of the operators: words, docstrings and ``None`` for a state that was not asked
for; no mathematics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.arguments import in_words

_KDA_CHUNK, _KDA_RECURRENT, _KDA_RECURRENT_ = (
    torch.ops.kda.chunk.default,
    torch.ops.kda.recurrent.default,
    torch.ops.kda.recurrent_.default,
)
_GDN_CHUNK, _GDN_RECURRENT, _GDN_RECURRENT_ = (
    torch.ops.gdn.chunk.default,
    torch.ops.gdn.recurrent.default,
    torch.ops.gdn.recurrent_.default,
)
_KDA_CHUNK_, _GDN_CHUNK_ = torch.ops.kda.chunk_.default, torch.ops.gdn.chunk_.default
_KDA_GATE, _GDN_GATE = torch.ops.kda.gate.default, torch.ops.gdn.gate.default


@in_words
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    safe_gate: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool = False,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run Kimi Delta Attention over whole sequences; differentiable.

    For each sequence and value head, starting from ``S = initial_state`` (or zero)::

        S  <- diag(exp(g_t)) S                       # forget, per key channel
        S  <- S + beta_t k_t (v_t - S^T k_t)^T       # delta rule: write what is missing
        o_t = scale * S^T q_t

    Args:
        q, k: ``[B, T, H, K]``, fp16, bf16 or fp32 (fp64 on CPU), any strides; K up to 256. Fast
            where channels are neighbours in memory, as in views of a fused projection:
            ``contiguous()`` gains nothing then.
        v: ``[B, T, HV, V]`` in q's dtype; HV is a multiple of H and value head h reads key head
            ``h // (HV // H)``.
        g: ``[B, T, HV, K]``, fp16 to fp64: natural-log decay, at most 0 (``-inf`` forgets
            everything); raw logits if ``use_gate_in_kernel``; None: no decay.
        beta: ``[B, T, HV]``, fp16 to fp64: write strength in [0, 2]; raw logits if
            ``use_beta_sigmoid_in_kernel``; None: 1.
        A_log: ``[HV]``, fp16 to fp64, parameter of the gate; the bounded gate can do without.
        dt_bias: ``[HV, K]`` or flat ``[HV * K]``, fp16 to fp64, parameter of the gate, or None.
        initial_state: ``[N, HV, K, V]`` (``[N, HV, V, K]`` with ``transpose_state_layout``), fp32
            (fp64 for fp64 inputs), any strides.
        cu_seqlens: ``[N + 1]`` int32 or int64 on the same device, from 0, non-decreasing; packs N
            sequences into one row, so ``B == 1``. Equal neighbours are empty sequences, whose state
            passes through; tokens after the last offset give zeros. Never read on the host on CUDA.
        scale: factor of q after its normalisation, a Python number (to learn one, multiply o by
            it); ``K ** -0.5`` by default.
        output_final_state: return the state after the last token too.
        use_qk_l2norm_in_kernel: use ``x / sqrt(sum(x^2) + 1e-6)`` for q and k.
        use_gate_in_kernel: activate g inside: ``-exp(A_log) * softplus(g + dt_bias)``, or
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`` if ``lower_bound`` is given.
        lower_bound: a finite number below 0; selects the bounded gate, or names the bound that
            ``safe_gate`` promises.
        safe_gate: promise that g stays in [-5, 0] (or above ``lower_bound``), so that kernels may
            take a cheaper road to the same result.
        use_beta_sigmoid_in_kernel: use ``sigmoid(beta)``; with ``allow_neg_eigval``
            ``2 * sigmoid(beta)``.
        transpose_state_layout: states are ``[N, HV, V, K]``, in and out.
        disable_recompute: keep every intermediate for backward instead of recomputing it; same
            bits. Per token and value head that is about 128 + 3 K + V + K V / 64 elements (of bf16
            at K = V = 128: 1.8 KB; exactly: `kda_ops.chunk`), in place of 64. With
            ``use_qk_l2norm_in_kernel`` o is one of them on a GPU: changed in place before backward,
            it is an error there.

    Returns:
        o ``[B, T, HV, V]`` in v's dtype, and the final state in the layout of ``initial_state``, or
        None if it was not asked for.

    Raises:
        ValueError: shapes or flags disagree; the message names the argument, what was expected and
            what was given.
        TypeError: dtypes or devices disagree.

    In fp16, backward on CUDA rounds gradients of states and values to fp16. Typical entries of the
    incoming gradients must lie between 0.004 and 256, for values and states of size 1. Smaller ones
    lose bits, larger ones give NaN; scale the loss.

    Values (offsets, decays, beta, slots) are checked only under the environment variable
    KDA_OPS_CHECK=1; on a CPU offsets and slots always are.

    Example:
        >>> import torch, kda_ops
        >>> q, k, v = (torch.randn(2, 100, 4, 32) for _ in range(3))
        >>> g, beta = -torch.rand(2, 100, 4, 32), torch.rand(2, 100, 4)
        >>> o, state = kda_ops.chunk_kda(
        ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 100, 4, 32]), torch.Size([2, 4, 32, 32]))

    Source: Kimi Linear technical report, arXiv:2510.26692 (chunkwise form).
    """
    o, final_state = _KDA_CHUNK(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        cu_seqlens,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        safe_gate=safe_gate,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=transpose_state_layout,
        disable_recompute=disable_recompute,
    )
    return o, final_state if output_final_state else None


@in_words
def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run Kimi Delta Attention token by token: for a few tokens per call; differentiable through
    the chunk formulas.

    Equation, arguments, result and errors are those of `chunk_kda`; there is nothing to promise or
    to keep, so ``safe_gate`` and ``disable_recompute`` are absent, and ``lower_bound`` belongs to
    the gate.

    Example:
        >>> import torch, kda_ops
        >>> q, k, v = (torch.randn(2, 1, 4, 32) for _ in range(3))
        >>> state = torch.zeros(2, 4, 32, 32)
        >>> o, state = kda_ops.recurrent_kda(
        ...     q, k, v, None, None, initial_state=state, output_final_state=True)
        >>> o.shape
        torch.Size([2, 1, 4, 32])

    Source: Kimi Linear technical report, arXiv:2510.26692 (recurrent form).
    """
    o, final_state = _KDA_RECURRENT(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        cu_seqlens,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=transpose_state_layout,
    )
    return o, final_state if output_final_state else None


@in_words
def recurrent_kda_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool = False,
) -> Tensor:
    """Decode: run Kimi Delta Attention token by token on a pool of states, in place; inference
    only.

    Equation and the other arguments are those of `chunk_kda`.

    Args:
        state: ``[slots, HV, K, V]`` (``[slots, HV, V, K]`` with ``transpose_state_layout``), fp32
            or bf16 (fp64 for fp64 inputs), any strides.
        state_indices: int32 or int64. ``[N]``: the slot of each sequence, read before its first
            token and written after its last. ``[N, S]`` with S at least the tokens of a sequence:
            the state after token t goes to slot ``[n, t]``, so that speculative tokens can be
            rolled back. A negative slot means that nothing is read or written and the output is
            zero. Live slots are distinct. None: sequence n has slot n.
        num_accepted_tokens: ``[N]`` int32 or int64, from 1; needs ``[N, S]`` indices: sequence n
            starts from slot ``[n, num_accepted_tokens[n] - 1]`` (column 0 without it).

    Returns:
        o ``[B, T, HV, V]`` in v's dtype.

    Raises:
        ValueError: shapes or flags disagree; the message names the argument, what was expected and
            what was given.
        TypeError: dtypes or devices disagree.
        RuntimeError: grad mode is on and an input requires a gradient.

    Example:
        >>> import torch, kda_ops
        >>> q, k, v = (torch.randn(2, 1, 4, 32) for _ in range(3))
        >>> pool = torch.zeros(8, 4, 32, 32)
        >>> o = kda_ops.recurrent_kda_(q, k, v, None, None, pool, torch.tensor([5, 2]))
        >>> [slot for slot in range(8) if pool[slot].any()]
        [2, 5]

    Source: Kimi Linear technical report, arXiv:2510.26692 (recurrent form).
    """
    return _KDA_RECURRENT_(
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices,
        num_accepted_tokens,
        A_log,
        dt_bias,
        cu_seqlens,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=transpose_state_layout,
    )


@in_words
def chunk_kda_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None = None,
    snapshot_indices: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    snapshot_every: int = 1,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    safe_gate: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool = False,
) -> Tensor:
    """Prefill: run Kimi Delta Attention over whole sequences on a pool of states, in place;
    inference only.

    Equation and the other arguments are those of `chunk_kda`.

    Args:
        state: the pool, as for `recurrent_kda_`; each sequence starts from its slot (zero it for a
            new request) and leaves its final state there.
        state_indices: ``[N]`` int32 or int64, the slot of each sequence; negative: nothing is read
            or written and the output is zero.
        snapshot_indices: ``[N, snapshots]`` int32 or int64: slot ``[n, j]`` takes the state after
            ``(j + 1) * snapshot_every`` whole chunks of 64 tokens of sequence n, where it has as
            many; negative: skipped. For prefix caching.

    Returns:
        o ``[B, T, HV, V]`` in v's dtype.

    Raises:
        ValueError, TypeError, RuntimeError: as for `recurrent_kda_`.

    Example:
        >>> import torch, kda_ops
        >>> q, k, v = (torch.randn(1, 150, 4, 32) for _ in range(3))
        >>> pool, offsets = torch.zeros(8, 4, 32, 32), torch.tensor([0, 20, 150])
        >>> slots, snapshots = torch.tensor([0, 1]), torch.tensor([[2], [3]])
        >>> o = kda_ops.chunk_kda_(
        ...     q, k, v, None, None, pool, slots, snapshots,
        ...     cu_seqlens=offsets, use_qk_l2norm_in_kernel=True)
        >>> [slot for slot in range(8) if pool[slot].any()]
        [0, 1, 3]

    Source: Kimi Linear technical report, arXiv:2510.26692 (chunkwise form).
    """
    return _KDA_CHUNK_(
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices,
        snapshot_indices,
        A_log,
        dt_bias,
        cu_seqlens,
        snapshot_every=snapshot_every,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        safe_gate=safe_gate,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=transpose_state_layout,
    )


@in_words
def kda_gate(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
) -> Tensor:
    """Compute KDA's log decay from raw logits; differentiable.

    ``-exp(A_log) * softplus(g + dt_bias)``, or ``lower_bound * sigmoid(exp(A_log) * (g +
    dt_bias))`` if ``lower_bound`` is given.

    Args:
        g: ``[B, T, HV, K]`` logits, fp16 to fp64.
        A_log: ``[HV]``; None means a factor of 1 and needs ``lower_bound``.
        dt_bias: ``[HV, K]``, flat ``[HV * K]``, or None.
        lower_bound: a finite number below 0, or None.

    Returns:
        ``[B, T, HV, K]`` natural-log decay in fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: shapes disagree, or there is neither A_log nor a bound.

    Example:
        >>> import torch, kda_ops
        >>> kda_ops.kda_gate(torch.zeros(1, 1, 2, 4), None, lower_bound=-5.0)[0, 0, 0]
        tensor([-2.5000, -2.5000, -2.5000, -2.5000])

    Source: Kimi Linear technical report, arXiv:2510.26692 (gate).
    """
    return _KDA_GATE(g, A_log, dt_bias, lower_bound=lower_bound)


@in_words
def chunk_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    safe_gate: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool = False,
    disable_recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run Gated DeltaNet over whole sequences; differentiable.

    For each sequence and value head, starting from ``S = initial_state`` (or zero)::

        S  <- exp(g_t) S                             # forget, one number per head
        S  <- S + beta_t k_t (v_t - S^T k_t)^T       # delta rule: write what is missing
        o_t = scale * S^T q_t

    Args:
        g: ``[B, T, HV]``, fp16 to fp64: natural-log decay, at most 0; raw logits if
            ``use_gate_in_kernel``; None: no decay.
        dt_bias: ``[HV]``, parameter of the gate, or None.
        q, k, v, beta, A_log, initial_state, cu_seqlens and the flags: as for `chunk_kda`.

    Returns:
        o ``[B, T, HV, V]`` in v's dtype, and the final state in the layout of ``initial_state``, or
        None if it was not asked for.

    Raises:
        ValueError: shapes or flags disagree; the message names the argument, what was expected and
            what was given.
        TypeError: dtypes or devices disagree.

    Example:
        >>> import torch, kda_ops
        >>> q, k, v = (torch.randn(2, 100, 4, 32) for _ in range(3))
        >>> o, _ = kda_ops.chunk_gdn(
        ...     q, k, v, -torch.rand(2, 100, 4), torch.rand(2, 100, 4),
        ...     use_qk_l2norm_in_kernel=True)
        >>> o.shape
        torch.Size([2, 100, 4, 32])

    Source: Gated Delta Networks, arXiv:2412.06464.
    """
    o, final_state = _GDN_CHUNK(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        cu_seqlens,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        safe_gate=safe_gate,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=transpose_state_layout,
        disable_recompute=disable_recompute,
    )
    return o, final_state if output_final_state else None


@in_words
def recurrent_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run Gated DeltaNet token by token: `recurrent_kda` with the decay of `chunk_gdn`,
    ``[B, T, HV]``, and ``dt_bias`` ``[HV]``.

    Example:
        >>> import torch, kda_ops
        >>> q, k, v = (torch.randn(2, 1, 4, 32) for _ in range(3))
        >>> o, state = kda_ops.recurrent_gdn(
        ...     q, k, v, -torch.rand(2, 1, 4), None, output_final_state=True)
        >>> state.shape
        torch.Size([2, 4, 32, 32])

    Source: Gated Delta Networks, arXiv:2412.06464.
    """
    o, final_state = _GDN_RECURRENT(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        cu_seqlens,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=transpose_state_layout,
    )
    return o, final_state if output_final_state else None


@in_words
def recurrent_gdn_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool = False,
) -> Tensor:
    """Decode with Gated DeltaNet on a pool of states, in place: `recurrent_kda_` with the decay of
    `chunk_gdn`, ``[B, T, HV]``.

    Example:
        >>> import torch, kda_ops
        >>> q, k, v = (torch.randn(2, 1, 4, 32) for _ in range(3))
        >>> pool = torch.zeros(8, 4, 32, 32, dtype=torch.bfloat16)
        >>> o = kda_ops.recurrent_gdn_(
        ...     q, k, v, -torch.rand(2, 1, 4), None, pool, torch.tensor([5, -1]))
        >>> o[1].any()
        tensor(False)

    Source: Gated Delta Networks, arXiv:2412.06464.
    """
    return _GDN_RECURRENT_(
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices,
        num_accepted_tokens,
        A_log,
        dt_bias,
        cu_seqlens,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=transpose_state_layout,
    )


@in_words
def chunk_gdn_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None = None,
    snapshot_indices: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    snapshot_every: int = 1,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    safe_gate: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool = False,
) -> Tensor:
    """Prefill with Gated DeltaNet on a pool of states, in place: `chunk_kda_` with the decay of
    `chunk_gdn`, ``[B, T, HV]``.

    Example:
        >>> import torch, kda_ops
        >>> q, k, v = (torch.randn(1, 150, 4, 32) for _ in range(3))
        >>> pool = torch.zeros(8, 4, 32, 32)
        >>> o = kda_ops.chunk_gdn_(
        ...     q, k, v, -torch.rand(1, 150, 4), None, pool, torch.tensor([6]),
        ...     use_qk_l2norm_in_kernel=True)
        >>> [slot for slot in range(8) if pool[slot].any()]
        [6]

    Source: Gated Delta Networks, arXiv:2412.06464.
    """
    return _GDN_CHUNK_(
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices,
        snapshot_indices,
        A_log,
        dt_bias,
        cu_seqlens,
        snapshot_every=snapshot_every,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        safe_gate=safe_gate,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        transpose_state_layout=transpose_state_layout,
    )


@in_words
def gdn_gate(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
) -> Tensor:
    """Compute GDN's log decay from raw logits ``[B, T, HV]`` with ``A_log`` and ``dt_bias``
    ``[HV]``; otherwise as `kda_gate`.

    Example:
        >>> import torch, kda_ops
        >>> kda_ops.gdn_gate(torch.zeros(1, 1, 2), torch.zeros(2))
        tensor([[[-0.6931, -0.6931]]])

    Source: Gated Delta Networks, arXiv:2412.06464 (gate).
    """
    return _GDN_GATE(g, A_log, dt_bias, lower_bound=lower_bound)
