"""Agree on a call: which ranks take part, which tokens each holds, whether their calls match."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kda_ops import checks
from kda_ops.arguments import is_dense
from kda_ops.distributed import collectives
from kda_ops.private import backend_of

Contract = dict[str, object]
Parsed = TypeVar("Parsed")


@dataclass(frozen=True, eq=False)
class ContextPlan:
    """The shards of one batch, agreed on by all ranks of a group.

    Made by `plan_context` and passed as ``group``. `lengths` are the tokens of each rank's shard;
    `device_lengths` repeats them on the batch's device. In compiled code `lengths` is None, and
    `device_lengths` is None unless the call needs it.
    """

    name: str
    rank: int
    size: int
    lengths: tuple[int, ...] | None
    device_lengths: Tensor | None  # [size] int64

    def local(self, cu_seqlens: Tensor) -> Tensor:
        """Convert global offsets ``[N + 1]`` to offsets into this rank's shard."""
        assert self.device_lengths is not None  # a plan for packed sequences has lengths
        return local_offsets(cu_seqlens, self.device_lengths, self.rank)


def process_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of a ProcessGroup or DeviceMesh."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be one dimension of a DeviceMesh, got a mesh of {group.ndim} "
                "dimensions: name one, for example mesh['cp']."
            )
        return group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "group must contain the calling rank, got GroupMember.NON_GROUP_MEMBER: call only on "
            "ranks of the group."
        )
    raise TypeError(
        "group must be a ProcessGroup, a DeviceMesh of one dimension or a ContextPlan, got "
        f"{type(group).__name__}: "
        "for all ranks pass torch.distributed.group.WORLD."
    )


def plan_context(
    length: int, group: dist.ProcessGroup | DeviceMesh, *, device: torch.device | str | None = None
) -> ContextPlan:
    """Plan the shards of one batch, so that its calls exchange and synchronise nothing.

    Every rank of the group calls this, outside compiled code, and passes the plan as ``group`` to
    `chunk_kda`, `chunk_gdn` and `exchange_tail`. A call with a plan is not compared with the other
    ranks' calls: to find what differs, pass the group itself.

    Args:
        length: tokens of this rank's shard, T of its tensors; 0 is an empty shard.
        group: a ProcessGroup, or a DeviceMesh of one dimension. Its ranks hold consecutive shards
            in the order of their group ranks.
        device: where the tensors of the calls live; by default the group's.

    Returns:
        A `ContextPlan` for calls on shards of these lengths. Make a new one for each batch.

    Raises:
        ValueError, TypeError: length, group or device is not valid.
        RuntimeError: some rank did not take part within the group's timeout.

    Example:
        >>> import torch.distributed as dist, kda_ops.distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> kda_ops.distributed.plan_context(100, dist.group.WORLD).lengths
        (100,)
        >>> dist.destroy_process_group()

    Source: the shards of `kda_ops.distributed.chunk`.
    """
    pg = process_group(group)
    right = hasattr(length, "__index__") and operator.index(length) >= 0
    device = _group_device(pg) if device is None else torch.device(device)
    check_device(device, pg, "plan_context")
    mine = operator.index(length) if right else -1  # the others do not wait for this rank
    lengths = tuple(row[0] for row in _exchange([mine], device, pg, "plan_context"))
    if not right:
        raise ValueError(
            "length must be the tokens of this rank's shard, an integer of at least 0, got "
            f"{length}."
        )
    if min(lengths) < 0:
        raise ValueError(f"plan_context: rank {lengths.index(-1)} of the group refused its length.")
    return _plan(pg, lengths, device)


def equal_shards(
    length: int, group: dist.ProcessGroup | DeviceMesh, device: torch.device
) -> ContextPlan:
    """Return the plan of shards that all have `length` tokens; exchange and compare nothing."""
    pg = process_group(group)
    size = pg.size()
    lengths = None if torch.compiler.is_compiling() else (length,) * size
    on_device = torch.full((size,), length, dtype=torch.int64, device=device)
    return ContextPlan(pg.group_name, pg.rank(), size, lengths, on_device)


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the shards' offsets on the global token axis, [size + 1] from lengths [size]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def local_offsets(cu_seqlens: Tensor, lengths: Tensor, rank: int) -> Tensor:
    """Return the N sequences' offsets in a rank's shard, [N + 1]; sequences elsewhere are empty."""
    offsets = offsets_of(lengths)
    return (
        torch.minimum(torch.maximum(cu_seqlens, offsets[rank]), offsets[rank + 1]) - offsets[rank]
    ).to(cu_seqlens.dtype)


def place_of(x: object) -> tuple[int, torch.device | None]:
    """Return the tokens of a shard [B, T, ...] and its device; 0 and None if it is no tensor.

    `agree` takes both before it checks x, so that a rank whose x is wrong takes part too.
    """
    if not isinstance(x, Tensor) or not is_dense(x):
        return 0, None
    return x.shape[1] if x.dim() > 1 else 0, x.device


def agree(
    group: dist.ProcessGroup | DeviceMesh | ContextPlan,
    length: int,
    device: torch.device | None,
    cu_seqlens: Tensor | None,
    caller: str,
    parse: Callable[[], Parsed],
    contract: Callable[[Parsed], Contract],
    *,
    lengths_needed: bool = True,
) -> tuple[ContextPlan, Parsed]:
    """Check that all ranks make the same call; return its plan and this rank's `parse` result.

    An eager call without a plan is compared with the other ranks' calls: every rank returns, or
    every rank raises. If `parse` raises on one rank, the others are told and do not wait for it.
    A call with a plan, or in compiled code, is checked only on this rank.

    Args:
        group: the public function's argument.
        length, device: of the call's tensors (`place_of`).
        cu_seqlens: global offsets, or None.
        caller: the public function, named in errors.
        parse: raises if the call is wrong on this rank.
        contract: returns what all ranks must agree on.
        lengths_needed: whether compiled code must exchange lengths.
    """
    if isinstance(group, ContextPlan):
        parsed = parse()
        assert device is not None  # otherwise `parse` raises
        if not torch.compiler.is_compiling():
            _check_plan(group, length, device, caller)
            if checks.CHECK_VALUES and cu_seqlens is not None:
                _check_offsets(cu_seqlens.tolist(), caller)
                _check_last_offset(cu_seqlens, group.lengths, caller)
        return group, parsed
    pg = process_group(group)
    # a graph cannot raise, so it exchanges lengths but compares no contracts
    if torch.compiler.is_compiling():
        parsed, name, rank, size = parse(), pg.group_name, pg.rank(), pg.size()
        assert device is not None
        return ContextPlan(
            name,
            rank,
            size,
            None,
            collectives.gather_lengths(length, device, size, name) if lengths_needed else None,
        ), parsed
    refusal, terms = None, Contract()
    device = device or _group_device(pg)
    try:
        check_device(device, pg, caller)
        parsed = parse()
        terms = contract(parsed)
        _check_offsets(terms.get("cu_seqlens"), caller)
    except (ValueError, TypeError) as error:
        refusal, terms = error, {"refusal": str(error)}
    digest = hashlib.blake2b(repr(terms).encode(), digest_size=7).digest()
    rows = _exchange([length, int.from_bytes(digest, "little")], device, pg, caller)
    if any(row[1] != rows[0][1] for row in rows) or refusal is not None:
        contracts: list[Contract] = [{} for _ in rows]
        dist.all_gather_object(contracts, terms, group=pg)
        raise refusal if refusal is not None else ValueError(_disagreement(contracts, caller))
    lengths = tuple(row[0] for row in rows)
    _check_last_offset(cu_seqlens, lengths, caller)
    return _plan(pg, lengths, device), parsed


def check_device(device: torch.device, pg: dist.ProcessGroup, caller: str) -> None:
    """Raise if the group's backend cannot gather tensors of this device.

    Gloo lists CUDA among its devices but reads device addresses on the host.
    """
    if not _serves(pg, device.type):
        backends = dist.get_backend_config(pg)
        raise ValueError(
            f"{caller}: group must have a backend for {device.type} tensors, got {backends}: "
            "create one with such a backend, for example nccl for cuda."
        )


def _serves(pg: dist.ProcessGroup, kind: str) -> bool:
    """Return whether the group gathers tensors of this device type."""
    try:
        backend = backend_of(pg, kind)
    except RuntimeError:
        return False
    return kind == "cpu" or backend != "gloo"


def _check_plan(plan: ContextPlan, length: int, device: torch.device, caller: str) -> None:
    if plan.lengths is not None and plan.lengths[plan.rank] != length:
        raise ValueError(
            f"{caller}: the shard must have the {plan.lengths[plan.rank]} tokens of this rank's "
            f"plan, got T = {length}: call plan_context for each batch."
        )
    if plan.device_lengths is not None and plan.device_lengths.device.type != device.type:
        raise ValueError(
            f"{caller}: tensors must be on the plan's device {plan.device_lengths.device}, got "
            f"{device}: pass plan_context(..., device=...)."
        )


def _check_offsets(offsets: Any, caller: str) -> None:
    """Raise for invalid offsets before any rank waits for this one."""
    if offsets is not None and (offsets[0] != 0 or sorted(offsets) != offsets):
        raise ValueError(
            f"{caller}: cu_seqlens must be offsets over the tokens of all ranks, start at 0 and "
            f"never decrease, got {offsets}."
        )


def _check_last_offset(
    cu_seqlens: Tensor | None, lengths: tuple[int, ...] | None, caller: str
) -> None:
    """Raise for offsets that end after the last shard, for example those of another batch."""
    if lengths is not None and cu_seqlens is not None and int(cu_seqlens[-1]) > sum(lengths):
        raise ValueError(
            f"{caller}: cu_seqlens must end at or before {sum(lengths)}, the tokens of all ranks "
            f"({' + '.join(map(str, lengths))}), got {int(cu_seqlens[-1])}."
        )


def _disagreement(contracts: list[Contract], caller: str) -> str:
    for rank, contract in enumerate(contracts):
        if "refusal" in contract:
            return f"{caller}: rank {rank} of the group refused its call: {contract['refusal']}"
    names = [
        n for n in contracts[0] if any(repr(c.get(n)) != repr(contracts[0][n]) for c in contracts)
    ]
    differences = "; ".join(
        f"{n} is " + ", ".join(f"{c.get(n)} on rank {rank}" for rank, c in enumerate(contracts))
        for n in names
    )
    return (
        f"{caller}: every rank of the group must make the same call on its shard, but "
        f"{differences}."
    )


def _group_device(pg: dist.ProcessGroup) -> torch.device:
    """Return the device that a group most likely serves."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available() and _serves(pg, "cuda")
        else torch.device("cpu")
    )


def _plan(pg: dist.ProcessGroup, lengths: tuple[int, ...], device: torch.device) -> ContextPlan:
    with torch.inference_mode(False):  # so that training can use a plan made in inference mode
        device_lengths = torch.tensor(lengths, dtype=torch.int64, device=device)
    return ContextPlan(pg.group_name, pg.rank(), pg.size(), lengths, device_lengths)


def _exchange(
    numbers: list[int], device: torch.device, pg: dist.ProcessGroup, caller: str
) -> list[list[int]]:
    """Gather the numbers of every rank on the host.

    They travel through `device` if the group serves it, otherwise through a device that it serves.
    """
    mine = torch.tensor(
        numbers, dtype=torch.int64, device=device if _serves(pg, device.type) else _group_device(pg)
    )
    try:
        return (
            collectives.wait(collectives.start_all_gather(mine, pg.size(), pg.group_name))
            .view(-1, len(numbers))
            .tolist()
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"{caller}: rank {pg.rank()} timed out waiting for the other {pg.size() - 1} ranks of "
            f"group {pg.group_name!r}: all must make the call with the same group ({error})."
        ) from error
