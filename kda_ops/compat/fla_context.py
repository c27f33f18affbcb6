"""Convert FLA's context of a sharded call to the arguments of `kda_ops.distributed`.

FLA cuts the packed token axis into shards of T tokens, one per rank. Its `FLACPContext` holds the
offsets of a rank's own tokens. ``pre_num_ranks`` counts the ranks before it that hold tokens of its
first sequence, ``post_num_ranks`` those after it that hold tokens of its last sequence.
`kda_ops.distributed` takes offsets over the tokens of all ranks. On rank r::

    global[i] = (r - pre_num_ranks) T         where local[i] = 0, the start of the first sequence
              = (r + 1 + post_num_ranks) T    where local[i] = T, the end of the last sequence
              = r T + local[i]                elsewhere

The result begins with an extra zero, so one sequence covers all tokens before global[0]. The start
of the first and the end of the last sequence are exact only to a shard: FLA counts ranks, not
tokens. That suffices. A rank needs only the ranks that its first and last sequence cross, and takes
the states of these ranks. So offsets differ between ranks.

The conversion stays on the device and exchanges nothing. It reads ``pre_num_ranks_dev`` and
``post_num_ranks_dev`` where they exist, so a captured CUDA graph follows them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_ops.distributed.plan import ContextPlan, equal_shards


def check_context(cp_context: Any, tokens: int) -> None:
    """Refuse a cp_context that is no FLACPContext of contiguous shards of so many tokens."""
    for name in ("group", "cu_seqlens", "pre_num_ranks", "post_num_ranks"):
        if not hasattr(cp_context, name):
            raise TypeError(
                "cp_context must be a FLACPContext, got "
                f"{type(cp_context).__name__}: call fla.ops.cp.build_cp_context, or "
                "`kda_ops.distributed` with group= and the global cu_seqlens."
            )
    if getattr(cp_context, "layout", "contiguous") != "contiguous":
        raise ValueError(
            f"cp_context must have the layout 'contiguous', got {cp_context.layout!r}: call "
            "build_cp_context without layout."
        )
    if cp_context.cu_seqlens is None:
        raise ValueError(
            "cp_context must have cu_seqlens, got None: build it with build_cp_context."
        )
    host = getattr(cp_context, "cu_seqlens_cpu", None)
    if host is not None and not torch.compiler.is_compiling() and int(host[-1]) != tokens:
        raise ValueError(
            f"cp_context must describe the {tokens} tokens of this shard, T of q, got cu_seqlens "
            f"that end at {int(host[-1])}: call build_cp_context for each batch."
        )
    for name in ("pre_num_ranks", "post_num_ranks"):
        _ranks(cp_context, name)


def shard_of(cp_context: Any, q: Tensor) -> tuple[ContextPlan, Tensor]:
    """Return the plan of equal shards, and the global offsets on this rank [sequences + 2]."""
    T, local = q.shape[1], cp_context.cu_seqlens
    plan = equal_shards(T, cp_context.group, q.device)
    before = _ranks(cp_context, "pre_num_ranks")
    behind = _ranks(cp_context, "post_num_ranks")
    start = plan.rank * T
    offsets = torch.where(local <= 0, start - before * T, local + start)
    offsets = torch.where(local >= T, start + (1 + behind) * T, offsets).to(local.dtype)
    return plan, torch.cat([offsets.new_zeros(1), offsets])


def _ranks(cp_context: Any, name: str) -> int | Tensor:
    """Return a count of ranks, on the device if the context has it there.

    A captured CUDA graph reads the count on the device anew at each replay.
    """
    on_device = getattr(cp_context, name + "_dev", None)
    count = getattr(cp_context, name) if on_device is None else on_device
    if count is None:
        raise ValueError(f"cp_context must have {name}, got None: call build_cp_context.")
    return count
