"""Provide the operators as Python functions: named arguments, docstrings, no mathematics.

A final state that was not requested is returned as None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.arguments import calls


@calls(torch.ops.kda.chunk.default, asked="output_final_state")
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
    safe_beta: bool = False,
    safe_keys: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool = False,
    disable_recompute: bool = False,
    invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run Kimi Delta Attention over whole sequences; differentiable.

    For each sequence and value head, starting from ``S = initial_state`` (or zero)::

        S  <- diag(exp(g_t)) S                       # forget, per key channel
        S  <- S + beta_t k_t (v_t - S^T k_t)^T       # delta rule: write what is missing
        o_t = scale * S^T q_t

    B is the batch, T the tokens, H the query/key heads and HV the value heads. N is the number of
    sequences: B, or the number that ``cu_seqlens`` names.

    Args:
        q, k: ``[B, T, H, K]``, fp16, bf16 or fp32 (fp64 on CPU), any strides; K up to 256. Fastest
            with a contiguous last dimension. Views of a fused projection qualify; do not call
            ``contiguous()``.
        v: ``[B, T, HV, V]``, in q's dtype, any strides; any V. HV is a multiple of H. Value head h
            reads key head ``h // (HV // H)``.
        g: ``[B, T, HV, K]``, fp16 to fp64: natural-log decay, at most 0; ``-inf`` forgets
            everything (in bf16 on CUDA: see below). With ``use_gate_in_kernel``: raw logits. None:
            no decay.
        beta: ``[B, T, HV]``, fp16 to fp64: write strength in [0, 2]. With
            ``use_beta_sigmoid_in_kernel``: raw logits. None: 1.
        A_log: ``[HV]``, fp16 to fp64: log of the gate's factor. The softplus gate needs it; for the
            bounded gate None means a factor of 1.
        dt_bias: ``[HV, K]`` or flat ``[HV * K]``, fp16 to fp64: bias of the gate. None: 0.
        initial_state: ``[N, HV, K, V]`` (``[N, HV, V, K]`` with ``transpose_state_layout``), fp32
            (fp64 for fp64 inputs), any strides. None: zero.
        cu_seqlens: ``[N + 1]``, int32 or int64, on the same device. The offsets of N sequences
            packed into one row, so ``B == 1``. They start at 0 and never decrease. Equal neighbours
            are empty sequences, whose state passes through. Tokens past the last offset give zeros.
            Never read on the host on CUDA.
        scale: factor of q after its normalisation, a Python number; ``K ** -0.5`` by default. To
            learn a scale, multiply o by it.
        output_final_state: return the state after the last token too.
        use_qk_l2norm_in_kernel: normalise q and k to ``x / sqrt(sum(x^2) + 1e-6)``.
        use_gate_in_kernel: activate g inside the operator: ``-exp(A_log) * softplus(g + dt_bias)``.
            With ``lower_bound``: ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        lower_bound: a finite number below 0. It selects the bounded gate, or names the bound that
            ``safe_gate`` promises.
        safe_gate: promise that a given g stays in [-5, 0], or above ``lower_bound``. Kernels may
            then use faster formulas, of a smaller range (see below). It has no effect with
            ``use_gate_in_kernel``: there ``lower_bound`` alone bounds the decay.
        safe_beta: promise that a given beta stays in [0, 1]. It speeds up the backward of KDA, and
            forward with ``safe_keys`` or the norm inside. The result changes by rounding only.
        safe_keys: promise that keys have at most unit length, apart from rounding. It speeds up
            forward with ``safe_beta``, with the sigmoid inside or without beta.
        use_beta_sigmoid_in_kernel: use ``sigmoid(beta)``.
        allow_neg_eigval: use ``2 * sigmoid(beta)``; needs ``use_beta_sigmoid_in_kernel``.
        transpose_state_layout: states are ``[N, HV, V, K]``, in and out.
        disable_recompute: keep intermediates for backward instead of recomputing them; same bits.
            In 16 bits on a GPU, KDA then keeps about ``128 + 3 K + V + K V / 64`` elements per
            token and value head, instead of 64. At K = V = 128 that is 1.8 KB. GDN keeps about
            ``64 + V + K V / 64``. With ``use_qk_l2norm_in_kernel`` on a GPU, KDA keeps o too:
            modifying o in place before backward raises an error. Where KDA's training walks
            (docs/performance.md, "Memory"), it keeps 1.4 KB instead of 128 bytes per token and
            value head, and not o. There the flag saves time only if backward walks too. See
            `kda_ops.chunk`.
        invariant: let the bits of o, of states and of gradients of q, k, v, g, beta and the initial
            state depend on the sequence and the head alone: not on B, T, N, HV, the GPU's number of
            multiprocessors, strides, or the piece that a call begins with, if sequences are cut at
            multiples of 64 tokens. It may take longer for few heads (docs/numerics.md, "Invariant
            calls").

    Returns:
        o ``[B, T, HV, V]`` in v's dtype, and the final state in the layout and dtype of
        ``initial_state``, or None if not requested.

    Raises:
        ValueError: shapes or flags disagree; the message names the argument, what was expected and
            what was given.
        TypeError: dtypes or devices disagree.
        RuntimeError: in double backward.
        NotImplementedError: in forward mode (``torch.func.jvp``).

    In bf16 on CUDA the log decay of a token is clamped to -19. Entries of ``scale * q`` or k above
    262,000 overflow. If ``lower_bound`` or ``safe_gate`` promises decays of at least -5, nothing is
    clamped. But then entries above 6,000 overflow, and keys with a norm below 2^-8 lose bits.

    In fp16, backward on CUDA rounds gradients of states and values to fp16. With values and states
    of size 1, typical entries of the incoming gradients must lie between 0.004 and 256. Smaller
    ones lose bits and larger ones give NaN; scale the loss.

    Offsets, slots and counts of tokens are always checked on a CPU. Set the environment variable
    KDA_OPS_CHECK=1 before the import to check them on a GPU too, and to check decays, beta and the
    promises. Every call then waits for the GPU.

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


@calls(torch.ops.kda.recurrent.default, asked="output_final_state")
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
    """Run Kimi Delta Attention token by token, for calls of a few tokens; differentiable.

    Equation, arguments, result and errors are those of `chunk_kda`. Backward uses the chunk
    formulas. The promises ``safe_...`` and ``disable_recompute`` do not exist here, and
    ``lower_bound`` needs ``use_gate_in_kernel``.

    Args:
        q, k: ``[B, T, H, K]``, fp16, bf16 or fp32 (fp64 on CPU).
        v: ``[B, T, HV, V]`` in q's dtype.
        g: ``[B, T, HV, K]``, fp16 to fp64: natural-log decay or raw logits. None: no decay.
        beta: ``[B, T, HV]``, fp16 to fp64: write strength or raw logits. None: 1.
        initial_state: ``[N, HV, K, V]``, fp32 (fp64 for fp64 inputs). None: zero.
        lower_bound: a finite number below 0; selects the bounded gate.
        A_log, dt_bias, cu_seqlens and the flags: as for `chunk_kda`.

    Returns:
        o ``[B, T, HV, V]`` in v's dtype, and the final state, or None if not requested.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: as for `chunk_kda`.

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


@calls(torch.ops.kda.recurrent_.default, into=torch.ops.kda.recurrent_.out)
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
    source: Tensor | None = None,
    source_indices: Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool = False,
    null_slot: int = -1,
    out: Tensor | None = None,
) -> Tensor:
    """Decode with Kimi Delta Attention on a pool of states, in place; inference only.

    The equation is that of `chunk_kda`.

    Args:
        q, k: ``[B, T, H, K]``, fp16, bf16 or fp32 (fp64 on CPU).
        v: ``[B, T, HV, V]`` in q's dtype.
        g: ``[B, T, HV, K]``, fp16 to fp64: natural-log decay or raw logits. None: no decay.
        beta: ``[B, T, HV]``, fp16 to fp64: write strength or raw logits. None: 1.
        state: the pool, ``[slots, HV, K, V]`` (``[slots, HV, V, K]`` with
            ``transpose_state_layout``), fp32 or bf16 (fp64 for fp64 inputs). Any strides that do
            not overlap.
        state_indices: int32 or int64, ``[N]`` or ``[N, S]``. ``[N]``: the slot of each sequence,
            read before its first token and written after its last. ``[N, S]``, S at least the
            tokens of a sequence: the state after token t goes to slot ``[n, t]``, so that
            speculative tokens can be rolled back. A negative slot is neither read nor written, and
            its output is zero. A slot that the call writes belongs to one sequence. With
            ``[N, S]``, many sequences may read a slot that the call does not write (forks). None:
            sequence n has slot n.
        num_accepted_tokens: ``[N]``, int32 or int64, from 1 to S; needs ``[N, S]`` indices.
            Sequence n starts from slot ``[n, num_accepted_tokens[n] - 1]``. None: from column 0. If
            that slot is negative, the sequence reads and writes nothing, and its output is zero.
        source, source_indices: a second pool like ``state``, ``[slots, HV, K, V]``, which the call
            only reads, and ``[N]``, int32 or int64: sequence n starts from its slot
            ``source_indices[n]``, and writes ``state`` as before. Any number of sequences may
            start from one slot. If the slot is negative, the sequence writes nothing, and its
            output is zero. Not with ``num_accepted_tokens``. None: sequences start from ``state``.
        lower_bound: a finite number below 0; selects the bounded gate.
        null_slot: slots up to this one count as negative slots, from 0 on for a pool whose first
            slots are nobody's (0 for vLLM); needs ``state_indices``. -1: none.
        out: ``[B, T, HV, V]`` in v's dtype: where o is written, any strides that do not overlap.
            No other tensor of the call may share its memory. None: a new tensor.
        A_log, dt_bias, cu_seqlens and the flags: as for `chunk_kda`.

    Returns:
        o ``[B, T, HV, V]`` in v's dtype; ``out`` itself if it is given.

    Raises:
        ValueError: shapes or flags disagree; the message names the argument, what was expected and
            what was given.
        TypeError: dtypes or devices disagree.
        RuntimeError: grad mode is on and an input requires a gradient. Or the pool was made under
            ``torch.inference_mode()`` and is used outside.

    Example:
        >>> import torch, kda_ops
        >>> q, k, v = (torch.randn(2, 1, 4, 32) for _ in range(3))
        >>> pool = torch.zeros(8, 4, 32, 32)
        >>> o = kda_ops.recurrent_kda_(q, k, v, None, None, pool, torch.tensor([5, 2]))
        >>> [slot for slot in range(8) if pool[slot].any()]
        [2, 5]

    Source: Kimi Linear technical report, arXiv:2510.26692 (recurrent form).
    """


@calls(torch.ops.kda.chunk_.default, into=torch.ops.kda.chunk_.out)
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
    has_initial_state: Tensor | None = None,
    *,
    snapshot_every: int = 1,
    scale: float | None = None,
    output_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    safe_gate: bool = False,
    safe_beta: bool = False,
    safe_keys: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool = False,
    invariant: bool = False,
    null_slot: int = -1,
    out: Tensor | None = None,
) -> Tensor:
    """Run a prefill of Kimi Delta Attention on a pool of states, in place; inference only.

    The equation is that of `chunk_kda`. Each sequence starts from its slot, or from zero if it
    begins anew, and leaves its final state in its slot.

    Args:
        q, k: ``[B, T, H, K]``, fp16, bf16 or fp32 (fp64 on CPU).
        v: ``[B, T, HV, V]`` in q's dtype.
        g: ``[B, T, HV, K]``, fp16 to fp64: natural-log decay or raw logits. None: no decay.
        beta: ``[B, T, HV]``, fp16 to fp64: write strength or raw logits. None: 1.
        state: the pool, as for `recurrent_kda_`.
        state_indices: ``[N]``, int32 or int64: the slot of each sequence. A negative slot is
            neither read nor written, and its output is zero. None: sequence n has slot n.
        snapshot_indices: ``[N, M]``, int32 or int64, for prefix caching. Slot ``[n, j]`` takes the
            state of sequence n after ``(j + 1) * snapshot_every`` whole chunks of 64 tokens.
            Negative slots, and those of chunks that the sequence does not reach, are skipped. All
            other slots must be distinct, those of ``state_indices`` included: the call writes them.
        has_initial_state: ``[N]``, bool. Where it is false, a sequence starts from zero, whatever
            its slot holds, NaN included. None: every sequence starts from its slot.
        snapshot_every: whole chunks between two snapshots, at least 1.
        output_final_state: leave the final state in the slot. If False, slots of ``state_indices``
            are only read, so sequences may share one. A snapshot may take the slot of its own
            sequence, which then moves on by whole chunks alone.
        invariant: as for `chunk_kda`; needs a pool in fp32 (fp64 for fp64 inputs).
        null_slot: as for `recurrent_kda_`; it holds for ``snapshot_indices`` too.
        out: as for `recurrent_kda_`.
        A_log, dt_bias, cu_seqlens and the flags: as for `chunk_kda`.

    Returns:
        o ``[B, T, HV, V]`` in v's dtype; ``out`` itself if it is given.

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


@calls(torch.ops.kda.gate.default)
def kda_gate(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
) -> Tensor:
    """Compute KDA's log decay from raw logits; differentiable.

    The gate is ``-exp(A_log) * softplus(g + dt_bias)``. With ``lower_bound`` it is
    ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.

    Args:
        g: ``[B, T, HV, K]`` logits, fp16, bf16 or fp32 (fp64 on CPU).
        A_log: ``[HV]``, fp16 to fp64: log of the factor. None: a factor of 1; needs
            ``lower_bound``.
        dt_bias: ``[HV, K]`` or flat ``[HV * K]``, fp16 to fp64. None: 0.
        lower_bound: a finite number below 0, or None.

    Returns:
        ``[B, T, HV, K]`` natural-log decay in fp32 (fp64 for fp64 logits, on CPU).

    Raises:
        ValueError: shapes disagree, or both ``A_log`` and ``lower_bound`` are None.
        TypeError: dtypes or devices disagree.

    Example:
        >>> import torch, kda_ops
        >>> kda_ops.kda_gate(torch.zeros(1, 1, 2, 4), None, lower_bound=-5.0)[0, 0, 0]
        tensor([-2.5000, -2.5000, -2.5000, -2.5000])

    Source: Kimi Linear technical report, arXiv:2510.26692 (gate).
    """


@calls(torch.ops.gdn.chunk.default, asked="output_final_state")
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
    safe_beta: bool = False,
    safe_keys: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool = False,
    disable_recompute: bool = False,
    invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run Gated DeltaNet over whole sequences; differentiable.

    For each sequence and value head, starting from ``S = initial_state`` (or zero)::

        S  <- exp(g_t) S                             # forget, one number per head
        S  <- S + beta_t k_t (v_t - S^T k_t)^T       # delta rule: write what is missing
        o_t = scale * S^T q_t

    Only ``g`` and ``dt_bias`` differ from `chunk_kda`: they have no axis K. See there for layouts,
    flags and limits.

    Args:
        q, k: ``[B, T, H, K]``, fp16, bf16 or fp32 (fp64 on CPU), any strides; K up to 256.
        v: ``[B, T, HV, V]`` in q's dtype; HV is a multiple of H.
        g: ``[B, T, HV]``, fp16 to fp64: natural-log decay, at most 0. With ``use_gate_in_kernel``:
            raw logits. None: no decay.
        beta: ``[B, T, HV]``, fp16 to fp64: write strength in [0, 2] or raw logits. None: 1.
        A_log, dt_bias: ``[HV]``, fp16 to fp64, parameters of the gate.
        initial_state: ``[N, HV, K, V]``, fp32 (fp64 for fp64 inputs). None: zero.
        cu_seqlens and the flags: as for `chunk_kda`.

    Returns:
        o ``[B, T, HV, V]`` in v's dtype, and the final state in the layout and dtype of
        ``initial_state``, or None if not requested.

    Raises:
        ValueError: shapes or flags disagree; the message names the argument, what was expected and
            what was given.
        TypeError: dtypes or devices disagree.
        RuntimeError: in double backward.
        NotImplementedError: in forward mode (``torch.func.jvp``).

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


@calls(torch.ops.gdn.recurrent.default, asked="output_final_state")
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
    """Run Gated DeltaNet token by token, for calls of a few tokens; differentiable.

    The equation is that of `chunk_gdn`; everything else is as for `recurrent_kda`.

    Args:
        q, k, v, beta, initial_state: as for `recurrent_kda`.
        g: ``[B, T, HV]``, fp16 to fp64: natural-log decay or raw logits. None: no decay.
        A_log, dt_bias: ``[HV]``, fp16 to fp64, parameters of the gate.
        cu_seqlens and the flags: as for `recurrent_kda`.

    Returns:
        o ``[B, T, HV, V]`` in v's dtype, and the final state, or None if not requested.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: as for `chunk_gdn`.

    Example:
        >>> import torch, kda_ops
        >>> q, k, v = (torch.randn(2, 1, 4, 32) for _ in range(3))
        >>> o, state = kda_ops.recurrent_gdn(
        ...     q, k, v, -torch.rand(2, 1, 4), None, output_final_state=True)
        >>> state.shape
        torch.Size([2, 4, 32, 32])

    Source: Gated Delta Networks, arXiv:2412.06464.
    """


@calls(torch.ops.gdn.recurrent_.default, into=torch.ops.gdn.recurrent_.out)
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
    source: Tensor | None = None,
    source_indices: Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool = False,
    null_slot: int = -1,
    out: Tensor | None = None,
) -> Tensor:
    """Decode with Gated DeltaNet on a pool of states, in place; inference only.

    The equation is that of `chunk_gdn`; everything else is as for `recurrent_kda_`.

    Args:
        q, k, v, beta: as for `recurrent_kda_`.
        g: ``[B, T, HV]``, fp16 to fp64: natural-log decay or raw logits. None: no decay.
        state, state_indices, num_accepted_tokens, source, source_indices, null_slot, out: as for
            `recurrent_kda_`.
        A_log, dt_bias: ``[HV]``, fp16 to fp64, parameters of the gate.
        cu_seqlens and the flags: as for `recurrent_kda_`.

    Returns:
        o ``[B, T, HV, V]`` in v's dtype; ``out`` itself if it is given.

    Raises:
        ValueError, TypeError, RuntimeError: as for `recurrent_kda_`.

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


@calls(torch.ops.gdn.chunk_.default, into=torch.ops.gdn.chunk_.out)
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
    has_initial_state: Tensor | None = None,
    *,
    snapshot_every: int = 1,
    scale: float | None = None,
    output_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    safe_gate: bool = False,
    safe_beta: bool = False,
    safe_keys: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool = False,
    invariant: bool = False,
    null_slot: int = -1,
    out: Tensor | None = None,
) -> Tensor:
    """Run a prefill of Gated DeltaNet on a pool of states, in place; inference only.

    The equation is that of `chunk_gdn`; everything else is as for `chunk_kda_`.

    Args:
        q, k, v, beta: as for `chunk_kda_`.
        g: ``[B, T, HV]``, fp16 to fp64: natural-log decay or raw logits. None: no decay.
        state, state_indices, snapshot_indices, snapshot_every: as for `chunk_kda_`.
        has_initial_state, output_final_state, null_slot, out: as for `chunk_kda_`.
        A_log, dt_bias: ``[HV]``, fp16 to fp64, parameters of the gate.
        cu_seqlens and the flags: as for `chunk_kda_`.

    Returns:
        o ``[B, T, HV, V]`` in v's dtype; ``out`` itself if it is given.

    Raises:
        ValueError, TypeError, RuntimeError: as for `recurrent_kda_`.

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


@calls(torch.ops.gdn.gate.default)
def gdn_gate(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
) -> Tensor:
    """Compute GDN's log decay from raw logits; differentiable.

    The formulas are those of `kda_gate`.

    Args:
        g: ``[B, T, HV]`` logits, fp16, bf16 or fp32 (fp64 on CPU).
        A_log: ``[HV]``, fp16 to fp64: log of the factor. None: a factor of 1; needs
            ``lower_bound``.
        dt_bias: ``[HV]``, fp16 to fp64. None: 0.
        lower_bound: a finite number below 0, or None.

    Returns:
        ``[B, T, HV]`` natural-log decay in fp32 (fp64 for fp64 logits, on CPU).

    Raises:
        ValueError, TypeError: as for `kda_gate`.

    Example:
        >>> import torch, kda_ops
        >>> kda_ops.gdn_gate(torch.zeros(1, 1, 2), torch.zeros(2))
        tensor([[[-0.6931, -0.6931]]])

    Source: Gated Delta Networks, arXiv:2412.06464 (gate).
    """
