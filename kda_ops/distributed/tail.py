"""Exchange the tokens before a shard, which a short convolution reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_ops.arguments import check_dense, check_tensor, check_whole
from kda_ops.checks import check_offsets
from kda_ops.distributed import collectives
from kda_ops.distributed.plan import Contract, agree, offsets_of, place_of


def exchange_tail(x: Tensor, size: int, group, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the ``size - 1`` tokens before this rank's shard; differentiable, collective.

    A causal convolution of `size` taps reads them. They may come from several earlier ranks if
    shards are short or empty; before the first token of a sequence they are zero.

    Forward gathers ``B (size - 1) D`` elements of x's dtype from each rank; backward reduces as
    many per rank. To serve several convolutions with one exchange, concatenate their inputs in D.

    Args:
        x: ``[B, T, D]``, this rank's shard of the token axis, any float dtype; ``[1, T, D]`` with
            cu_seqlens. T may differ between ranks.
        size: taps of the convolution, at least 1.
        group: as for `chunk_kda`.
        cu_seqlens: ``[N + 1]`` global offsets; None for dense rows.

    Returns:
        ``[B, size - 1, D]``, oldest first, the ``initial_tail`` of `short_conv`; with cu_seqlens
        ``[N, size - 1, D]``, zero except for the sequence that enters the shard.

    Raises:
        ValueError, TypeError: a shape or dtype is not valid, or the ranks' calls differ.
        RuntimeError: some rank did not take part within the group's timeout.

    Example:
        >>> import torch, torch.distributed as dist, kda_ops.distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> # nothing is before the first token
        >>> kda_ops.distributed.exchange_tail(torch.ones(1, 10, 2), 4, dist.group.WORLD)
        tensor([[[0., 0.],
                 [0., 0.],
                 [0., 0.]]])
        >>> dist.destroy_process_group()

    Source: Gated Delta Networks, arXiv:2412.06464 (short convolutions on q, k and v).
    """
    plan, _ = agree(
        group,
        *place_of(x),
        cu_seqlens,
        "kda_ops.distributed.exchange_tail",
        lambda: _check(x, size, cu_seqlens),
        lambda _: _contract(x, size, cu_seqlens),
    )
    lengths, rank, ranks = plan.device_lengths, plan.rank, plan.size
    assert lengths is not None  # `agree` exchanges them by default
    offsets = offsets_of(lengths)
    past, B = size - 1, x.shape[0]
    # [B, past, D], padded with zeros at the front if the shard is shorter
    last = F.pad(x, (0, 0, past, 0))[:, x.shape[1] :]
    every = collectives.GatherTokens.apply(last, ranks, plan.name).unflatten(0, (ranks, B))
    # A token lies on the rank whose shard holds its place. Its distance to the end is the same in
    # that rank's tail and shard.
    place = offsets[rank] - torch.arange(past, 0, -1, device=x.device)  # [past], global
    owner = torch.searchsorted(offsets[1:], place.clamp(min=0), right=True).clamp(max=ranks - 1)
    row = (place - offsets[owner + 1] + past).clamp(0, max(past - 1, 0))
    tail = every[owner, :, row].transpose(0, 1)  # [B, past, D]
    if cu_seqlens is None:
        return torch.where((place >= 0)[:, None], tail, 0.0)
    begin, end = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    seen = (begin <= place) & (offsets[rank] < end)  # [N, past]
    return torch.where(seen[:, :, None], tail, 0.0)


def _check(x: Tensor, size: int, cu_seqlens: Tensor | None) -> None:
    check_tensor("x", x)
    check_dense("x", x)
    check_whole("size", size)
    if x.dim() != 3:
        raise ValueError(f"x must have shape [B, T, D], got {list(x.shape)}.")
    if size < 1:
        raise ValueError(f"size must be the convolution's taps, at least 1, got {size}.")
    if cu_seqlens is not None:
        check_offsets(cu_seqlens, x.shape[0], None, x.device, "x")


def _contract(x: Tensor, size: int, cu_seqlens: Tensor | None) -> Contract:
    packing = None if cu_seqlens is None else cu_seqlens.tolist()
    wanted = torch.is_grad_enabled() and x.requires_grad
    return {
        "x": f"{x.dtype} [{x.shape[0]}, T, {x.shape[2]}]",
        "size": size,
        "cu_seqlens": packing,
        "a gradient wanted": wanted,
    }
