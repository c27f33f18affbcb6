"""Offer the public functions of context parallelism: signatures and docstrings only."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kda_ops.distributed import chunk
from kda_ops.distributed.plan import ContextPlan

Group = dist.ProcessGroup | DeviceMesh | ContextPlan


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
    group: Group,
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
    """Run Kimi Delta Attention over sequences sharded across ranks; differentiable, collective.

    Every rank holds a contiguous shard of the token axis, in the order of the group's ranks. It
    gets the outputs of its tokens, as if `kda_ops.chunk_kda` had run over the whole sequences.
    Shards may differ in length and may be empty; a sequence may cross any number of them.

    Pass ``A_log``, ``dt_bias``, ``initial_state`` and ``cu_seqlens`` with equal values on every
    rank: they belong to whole sequences. Every rank gets the same final state, which may be the
    initial state of the next call.

    The loss is the sum of the ranks' losses. So a rank's gradients of ``A_log``, ``dt_bias`` and
    ``initial_state`` are partial sums over its tokens: sum them over the group. Data-parallel
    wrappers do so; if yours averages, multiply the loss by the size of the group. A final state
    contributes once for each rank whose loss uses it.

    Args:
        q, k, v, g, beta: this rank's shard; shapes and dtypes as for `kda_ops.chunk_kda`. T may
            differ between ranks.
        A_log, dt_bias: as for `kda_ops.chunk_kda`.
        initial_state: ``[N, HV, K, V]`` (``[N, HV, V, K]`` with ``transpose_state_layout``), the
            states before the first tokens of the whole sequences.
        cu_seqlens: ``[N + 1]`` int32 or int64, the **global** offsets over the tokens of all ranks.
            They pack N sequences into one row, so ``B == 1``. None: each of the B rows is one
            sequence.
        group: a ProcessGroup, a DeviceMesh of one dimension (``mesh["cp"]``) or a `ContextPlan`.
            Without a plan, every eager call first compares the ranks' calls on the host. A plan
            from `plan_context`, made once per batch, avoids that. Compiled code exchanges lengths
            within the graph and compares nothing.
        disable_recompute: as for `kda_ops.chunk_kda` on a group of one rank; more ranks ignore it.
        invariant: as for `kda_ops.chunk_kda` on a group of one rank. More ranks refuse it: the
            state that enters a shard is a product of maps, with other bits than in one call.
        The other flags: as for `kda_ops.chunk_kda`.

    Returns:
        o ``[B, T, HV, V]`` of this rank's tokens in v's dtype, and the final state of all sequences
        in the layout of ``initial_state``, or None if not requested. The rows of o may have gaps:
        call ``reshape``, not ``view``. Backward is collective: if one rank runs it, all must.
        Communication and memory: `kda_ops.distributed.chunk`.

    Raises:
        ValueError: shapes or flags disagree, on this rank or between ranks; the message names them,
            and every rank of the group raises.
        TypeError: dtypes or devices disagree, or group is not a group.
        RuntimeError: some rank did not take part within the group's timeout.

    Example:
        >>> import torch, torch.distributed as dist, kda_ops.distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> q, k, v = (torch.randn(2, 100, 4, 32) for _ in range(3))
        >>> g, beta = -torch.rand(2, 100, 4, 32), torch.rand(2, 100, 4)
        >>> o, _ = kda_ops.distributed.chunk_kda(
        ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True, group=dist.group.WORLD)
        >>> o.shape
        torch.Size([2, 100, 4, 32])
        >>> dist.destroy_process_group()

    Source: Kimi Linear technical report, arXiv:2510.26692 (chunkwise form); the affine map of a
    shard: `kda_ops.distributed.chunk`.
    """
    return chunk.run(
        "kda",
        group,
        (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens),
        dict(
            scale=scale,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            lower_bound=lower_bound,
            safe_gate=safe_gate,
            safe_beta=safe_beta,
            safe_keys=safe_keys,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            transpose_state_layout=transpose_state_layout,
            disable_recompute=disable_recompute,
            invariant=invariant,
        ),
    )


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
    group: Group,
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
    """Run Gated DeltaNet over sequences sharded across ranks; differentiable, collective.

    Shards, states, gradients and cost: see `chunk_kda`. The equation and the shapes of g and
    dt_bias: see `kda_ops.chunk_gdn`.

    Args:
        g: ``[B, T, HV]``, this rank's shard.
        dt_bias: ``[HV]``, or None.
        q, k, v, beta, A_log, initial_state, cu_seqlens, group and the flags: as for `chunk_kda`.

    Returns:
        o ``[B, T, HV, V]`` of this rank's tokens, and the final state of all sequences or None.

    Raises:
        ValueError, TypeError, RuntimeError: as for `chunk_kda`.

    Example:
        >>> import torch, torch.distributed as dist, kda_ops.distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> q, k, v = (torch.randn(1, 100, 4, 32) for _ in range(3))
        >>> flags = dict(use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> o, state = kda_ops.distributed.chunk_gdn(
        ...     q, k, v, None, None, cu_seqlens=torch.tensor([0, 30, 100]),
        ...     group=dist.group.WORLD, **flags)
        >>> state.shape
        torch.Size([2, 4, 32, 32])
        >>> dist.destroy_process_group()

    Source: Gated Delta Networks, arXiv:2412.06464; the affine map of a shard:
    `kda_ops.distributed.chunk`.
    """
    return chunk.run(
        "gdn",
        group,
        (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens),
        dict(
            scale=scale,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            lower_bound=lower_bound,
            safe_gate=safe_gate,
            safe_beta=safe_beta,
            safe_keys=safe_keys,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            transpose_state_layout=transpose_state_layout,
            disable_recompute=disable_recompute,
            invariant=invariant,
        ),
    )
