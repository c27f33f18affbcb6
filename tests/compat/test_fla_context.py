"""Calls with FLA's context of a sharded call equal the call on one process.

Contexts come from FLA where it is installed, otherwise from its rules written out here.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

import kda_ops
from kda_ops.compat import fla, fla_backend
from kda_ops.compat.fla_context import check_context, shard_of
from kda_ops.problem import CHUNK
from tests.compat.test_fla import fla_flags, outputs_and_gradients
from tests.support.cases import TOKENS, Case
from tests.support.context import assert_equal, gradients, leaves_of, whole
from tests.support.ranks import device

NAMES = {"kda": "chunk_kda", "gdn": "chunk_gated_delta_rule"}


@dataclasses.dataclass
class Context:
    """The fields of FLA's FLACPContext that a call reads."""

    group: object
    cu_seqlens: torch.Tensor | None
    cu_seqlens_cpu: torch.Tensor | None
    pre_num_ranks: int
    post_num_ranks: int
    layout: str = "contiguous"
    pre_num_ranks_dev: torch.Tensor | None = None
    post_num_ranks_dev: torch.Tensor | None = None


def by_the_rules(offsets: list[int], rank: int, size: int, group: object = None) -> Context:
    """Build a context as FLA documents it: equal shards, local offsets, counts of ranks."""
    T = offsets[-1] // size
    start, stop = rank * T, (rank + 1) * T
    spans = [(a, b) for a, b in zip(offsets, offsets[1:]) if a < b and a < stop and start < b]
    local = torch.tensor([0, *(min(b, stop) - start for _, b in spans)], dtype=torch.int32)
    return Context(
        group, local, local.clone(), rank - spans[0][0] // T, (spans[-1][1] - 1) // T - rank
    )


def context_of(case: Case, size: int, group: object) -> object:
    """Build this rank's context, by FLA where it is installed."""
    offsets = torch.tensor([0, *accumulate(case.lengths)], device=device())
    try:
        from fla.ops.cp import build_cp_context
    except ImportError:
        return by_the_rules(offsets.tolist(), dist.get_rank(group), size, group)
    return build_cp_context(offsets, group)


def cut(case: Case, size: int) -> tuple[int, ...]:
    """Return the bounds of FLA's shards."""
    return tuple(case.rows // size * rank for rank in range(size + 1))


def words_of(case: Case) -> dict:
    """Return a case's flags by FLA's names."""
    return fla_flags(case, "chunk" if case.variant == "kda" else "recurrent")


def sharded(groups, size: int, case: Case, padded: bool = False):
    """Run one training step on a shard, with FLA's arguments."""
    group, cuts = groups[size], cut(case, size)
    rank, context = dist.get_rank(group), context_of(case, size, group)
    if padded:  # as a CUDA graph has it: more offsets, and counts on the device
        context.cu_seqlens = torch.cat([context.cu_seqlens, context.cu_seqlens[-1:].expand(3)])
        for side in ("pre", "post"):
            count = torch.tensor(getattr(context, f"{side}_num_ranks"), device=device())
            setattr(context, f"{side}_num_ranks_dev", count.int())
            setattr(context, f"{side}_num_ranks", 77)  # a replayed graph ignores the host's
    x = leaves_of(case, rank, cuts)
    call = {n: t for n, t in x.items() if n not in ("cu_seqlens", "initial_state")}
    o, state = getattr(fla, NAMES[case.variant])(**call, **words_of(case), cp_context=context)
    assert state is None
    return gradients(case, rank, size, cuts, x, o, None)


def alone(case: Case):
    """Run the same training step on one process."""
    operator = getattr(kda_ops, f"chunk_{case.variant}")
    flags = case.flags("chunk" if case.variant == "kda" else "recurrent")
    return outputs_and_gradients(case, lambda x: operator(**x, **flags))


DRAWN = dict(state=False, final=False, dtype=torch.float64, H=1, HV=2)
LENGTHS = {
    2: [(24,), (5, 19), (12, 12), (1, 22, 1), (70, 2), (130, 6)],
    3: [(5, 7), (12,), (8, 4), (4, 4, 4), (100, 1, 40)],
}


@pytest.mark.quick
@pytest.mark.parametrize(
    "offsets, rank, size, local, counts, want",
    [
        ([0, 5, 12], 1, 3, [0, 1, 4], (1, 1), [0, 0, 5, 12]),  # FLA's own example
        ([0, 5, 12], 0, 3, [0, 4], (0, 1), [0, 0, 8]),
        ([0, 5, 12], 2, 3, [0, 4], (1, 0), [0, 4, 12]),
        ([0, 6, 6, 12], 1, 2, [0, 6], (0, 0), [0, 6, 12]),
    ],
)
def test_local_offsets_become_global_ones(offsets, rank, size, local, counts, want):
    context = by_the_rules(offsets, rank, size, FakeGroup(rank, size))
    assert context.cu_seqlens.tolist() == local
    assert (context.pre_num_ranks, context.post_num_ranks) == counts
    q = torch.zeros(1, offsets[-1] // size, 1, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kda_ops.distributed.plan.process_group", lambda group: group)
        plan, got = shard_of(context, q)
    assert got.tolist() == want and got.dtype is torch.int32
    assert plan.lengths == (q.shape[1],) * size == tuple(plan.device_lengths.tolist())


class FakeGroup:
    """A group of `size` ranks that exchanges nothing."""

    group_name = "fake"

    def __init__(self, rank: int, size: int):
        self.rank, self.size = lambda: rank, lambda: size


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    "size, lengths", [(size, each) for size in LENGTHS for each in LENGTHS[size]], ids=str
)
def test_a_sharded_call_equals_the_whole_one(ranks, variant, size, lengths):
    case = Case(variant, lengths=lengths, gate="softplus", beta="sigmoid", l2norm=True, **DRAWN)
    assert_equal(whole(ranks.run(size, sharded, size, case)), alone(case))


@pytest.mark.xdist_group("ranks")
def test_counts_on_the_device_and_padded_offsets_are_used(ranks, variant):
    case = Case(variant, lengths=(3, 62, 65), **DRAWN)
    assert_equal(whole(ranks.run(2, sharded, 2, case, True)), alone(case))


def compiled(groups, size: int, case: Case):
    torch._dynamo.reset()
    context = context_of(case, size, groups[size])
    a, b = cut(case, size)[dist.get_rank(groups[size]) :][:2]
    x = {n: t[:, a:b] for n, t in case.inputs(device()).items() if n in ("q", "k", "v", "g")}
    x["beta"] = case.inputs(device())["beta"][:, a:b]

    def call(**x):
        return fla.chunk_kda(**x, cp_context=context)[0]

    got = torch.compile(call, fullgraph=True, backend="aot_eager")(**x)
    return (got - call(**x)).abs().max().item()


@pytest.mark.xdist_group("ranks")
def test_one_graph(ranks):
    case = Case(lengths=(5, 19), **DRAWN)
    assert max(ranks.run(2, compiled, 2, case)) == 0.0


def dispatched(groups, size: int, case: Case):
    """Make the call through FLA's dispatcher."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    fla_backend.enable()
    group, cuts = groups[size], cut(case, size)
    rank, context = dist.get_rank(group), context_of(case, size, group)
    x = leaves_of(case, rank, cuts)
    call = {n: t for n, t in x.items() if n not in ("cu_seqlens", "initial_state")}
    call["dt_bias"] = x["dt_bias"].flatten()  # FLA's backward returns its gradient so
    function = {"kda": chunk_kda, "gdn": chunk_gated_delta_rule}[case.variant]
    o, _ = function(**call, **words_of(case), cp_context=context)
    return gradients(case, rank, size, cuts, x, o, None)


@pytest.mark.xdist_group("ranks")
def test_flas_dispatcher_takes_a_context(ranks, variant):
    pytest.importorskip("fla.backends")
    case = Case(variant, lengths=(3, 62, 65), gate="softplus", beta="sigmoid", l2norm=True, **DRAWN)
    assert_equal(whole(ranks.run(2, dispatched, 2, case)), alone(case))


@pytest.mark.bits
def test_a_context_without_a_group_is_a_packed_call():
    case = Case(lengths=(3, 70), **DRAWN)
    x = case.inputs()
    context = by_the_rules([0, 3, 73], 0, 1)
    got, _ = fla.chunk_kda(**x | {"cu_seqlens": None}, cp_context=context)
    assert torch.equal(got, fla.chunk_kda(**x)[0])


@pytest.mark.parametrize(
    "change, call, message",
    [
        (dict(layout="zigzag"), {}, "must have the layout 'contiguous', got 'zigzag'"),
        (dict(cu_seqlens=None), {}, "cp_context must have cu_seqlens"),
        ({}, dict(initial_state=torch.zeros(1, 1, 16, 24)), "not be given with cp_context, as in"),
        ({}, dict(output_final_state=True), "must not be given with cp_context"),
        (
            {},
            dict(return_intermediate_states=True),
            "return_intermediate_states must be False with",
        ),
    ],
    ids=str,
)
def test_refusals_say_what_to_do(change, call, message):
    x = {n: t for n, t in Case(T=CHUNK, H=1, HV=1).inputs().items() if n in TOKENS}
    context = dataclasses.replace(by_the_rules([0, CHUNK], 0, 1), **change)
    with torch.inference_mode(), pytest.raises(ValueError, match=message):
        fla.chunk_kda(**x, **call, cp_context=context)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(cu_seqlens_cpu=torch.tensor([0, 7])), "must describe the 64 tokens of this shard"),
        (dict(pre_num_ranks=None), "cp_context must have pre_num_ranks, got None"),
    ],
    ids=str,
)
def test_a_context_of_another_shard_is_refused(change, message):
    context = by_the_rules([0, 2 * CHUNK], 1, 2, FakeGroup(1, 2))
    context = dataclasses.replace(context, **change)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=message):
        patch.setattr("kda_ops.distributed.plan.process_group", lambda group: group)
        check_context(context, CHUNK)
        shard_of(context, torch.zeros(1, CHUNK, 1, 4))
