"""Who takes part in a call, which tokens each rank holds, and whether all ranks mean the same call."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kda_ops.distributed import collectives

Contract = dict[str, object]


@dataclass(frozen=True, eq=False)
class ContextPlan:
    """The shards of one batch, agreed upon by all ranks of a group; made by `plan_context` and passed as ``group``.

    `lengths` are the tokens of each rank's shard, once as numbers and once on the batch's device.
    """

    name: str
    rank: int
    size: int
    lengths: tuple[int, ...]
    device_lengths: Tensor  # [size] int64

    def local(self, cu_seqlens: Tensor) -> Tensor:
        """Global offsets ``[N + 1]`` as those of this rank's own tokens: what is per sequence but local, a layer's packing, takes these."""
        return local_offsets(cu_seqlens, self.device_lengths, self.rank)


@dataclass(frozen=True, eq=False)
class Context:
    """A group as the collectives see it, and the tokens of its shards, [size] int64, where somebody needs them."""

    name: str
    rank: int
    size: int
    lengths: Tensor | None = None


def process_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """The process group that a caller means."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be one dimension of a DeviceMesh, got a mesh of {group.ndim} dimensions: pass one by name, as in mesh['cp'].")
        return group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must contain the calling rank; on this rank torch.distributed.new_group returned no member of it.")
    raise TypeError(
        f"group must be a ProcessGroup, a DeviceMesh of one dimension or a ContextPlan, got {type(group).__name__}: "
        "for all ranks pass torch.distributed.group.WORLD."
    )


def plan_context(length: int, group: dist.ProcessGroup | DeviceMesh, *, device: torch.device | str | None = None) -> ContextPlan:
    """Agree once per batch on the shards, so that the calls of all its layers need no exchange and no host synchronisation.

    Every rank of the group calls this, outside compiled code, and passes the plan as ``group`` to `chunk_kda`, `chunk_gdn` and `exchange_tail`. A call
    with a plan is not checked against the other ranks' calls; use the plain group once to be told what differs.

    Args:
        length: tokens of this rank's shard, T of its tensors; 0 is an empty shard.
        group: a ProcessGroup, or a DeviceMesh of one dimension. Its ranks hold consecutive shards in the order of their group ranks.
        device: where the tensors of the calls live; by default the group's.

    Raises:
        ValueError, TypeError: length or group means nothing.
        RuntimeError: some rank did not take part within the group's timeout.

    Example:
        >>> import torch.distributed as dist, kda_ops.distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> kda_ops.distributed.plan_context(100, dist.group.WORLD).lengths
        (100,)
        >>> dist.destroy_process_group()

    Source: the shards of `kda_ops.distributed.chunk`.
    """
    if length < 0:
        raise ValueError(f"length must be the tokens of this rank's shard, at least 0, got {length}.")
    pg = process_group(group)
    device = _group_device(pg) if device is None else torch.device(device)
    lengths = tuple(int(row[0]) for row in _exchange([length], device, pg, "plan_context"))
    return ContextPlan(pg.group_name, pg.rank(), pg.size(), lengths, torch.tensor(lengths, dtype=torch.int64, device=device))


def offsets_of(lengths: Tensor) -> Tensor:
    """Where each shard begins on the global token axis, and where the last one ends: [size + 1] from [size]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def local_offsets(cu_seqlens: Tensor, lengths: Tensor, rank: int) -> Tensor:
    """Where the N sequences lie in a rank's shard, [N + 1]: those elsewhere are empty."""
    offsets = offsets_of(lengths)
    return (torch.minimum(torch.maximum(cu_seqlens, offsets[rank]), offsets[rank + 1]) - offsets[rank]).to(cu_seqlens.dtype)


def agree(length: int, contract: Contract, refusal: Exception | None, device: torch.device, pg: dist.ProcessGroup, caller: str) -> tuple[int, ...]:
    """Exchange lengths and contracts: every rank returns all lengths, or every rank raises.

    `refusal` is what this rank found wrong with its own call; the others are told, so that none waits for it.
    """
    if refusal is not None:
        contract = {"refusal": str(refusal)}
    digest = hashlib.blake2b(repr(contract).encode(), digest_size=7).digest()
    rows = _exchange([length, int.from_bytes(digest, "little")], device, pg, caller)
    if any(row[1] != rows[0][1] for row in rows) or refusal is not None:
        contracts: list[Contract] = [{} for _ in rows]
        dist.all_gather_object(contracts, contract, group=pg)
        raise refusal if refusal is not None else ValueError(_disagreement(contracts, caller))
    return tuple(row[0] for row in rows)


def check_last_offset(cu_seqlens: Tensor | None, lengths: tuple[int, ...], caller: str) -> None:
    """Refuse offsets that end behind the last shard, as a rank's own offsets or those of a longer batch do."""
    if cu_seqlens is not None and int(cu_seqlens[-1]) > sum(lengths):
        raise ValueError(
            f"{caller}: cu_seqlens are offsets on the global token axis and must end at or before {sum(lengths)}, the tokens of all ranks "
            f"({' + '.join(map(str, lengths))}), got {int(cu_seqlens[-1])}."
        )


def _disagreement(contracts: list[Contract], caller: str) -> str:
    for rank, contract in enumerate(contracts):
        if "refusal" in contract:
            return f"{caller}: rank {rank} of the group refused its call: {contract['refusal']}"
    names = [n for n in contracts[0] if any(c.get(n) != contracts[0][n] for c in contracts)]
    differences = "; ".join(f"{n} is " + ", ".join(f"{c.get(n)} on rank {rank}" for rank, c in enumerate(contracts)) for n in names)
    return f"{caller}: every rank of the group must make the same call on its shard, but {differences}."


def _group_device(pg: dist.ProcessGroup) -> torch.device:
    """The device that a group most likely serves."""
    types = {device.type for device in pg._device_types}
    return torch.device("cuda", torch.cuda.current_device()) if "cuda" in types and torch.cuda.is_available() else torch.device("cpu")


def _exchange(numbers: list[int], device: torch.device, pg: dist.ProcessGroup, caller: str) -> list[list[int]]:
    """The numbers of every rank, on the host."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    try:
        return collectives.wait(collectives.start_all_gather(mine, pg.size(), pg.group_name)).view(-1, len(numbers)).tolist()
    except RuntimeError as error:
        raise RuntimeError(
            f"{caller}: rank {pg.rank()} waited in vain for the other {pg.size() - 1} ranks of group {pg.group_name!r}: every rank of it must make the call, "
            f"with the same group, within the group's timeout ({error})."
        ) from error
