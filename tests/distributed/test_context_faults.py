"""Ranks that disagree, or make a wrong call: an error on every rank, never a hang."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import kda_ops.distributed as cp
from kda_ops import checks
from kda_ops.nn import KimiDeltaAttention
from tests.support.cases import replace
from tests.support.context import CHUNK, CUTS, EVERYTHING, leaves_of, step

PACKED = replace(EVERYTHING, lengths=(3, 130, 17))
REFUSED = "rank 1 of the group refused its call: "
ODD = {  # what group rank 1 changes, and the message that every rank must raise
    "scale": (lambda x: dict(scale=0.3), "scale is None on rank 0, 0.3 on rank 1"),
    "bound": (lambda x: dict(lower_bound=-4.0), "lower_bound is None on rank 0, -4.0 on rank 1"),
    "V": (
        lambda x: dict(v=x["v"][..., :5], initial_state=x["initial_state"][..., :5]),
        "v is float32 [1, T, 4, 24] on rank 0",
    ),
    "absent": (
        lambda x: dict(initial_state=None),
        "initial_state is float32 [1, 4, 16, 24] on rank 0, None on rank 1",
    ),
    "dtype": (
        lambda x: {n: x[n].bfloat16() for n in "qkv"},
        "q is float32 [1, T, 2, 16] on rank 0, bfloat16",
    ),
    "gradient": (
        lambda x: {n: t.detach() for n, t in x.items() if t is not None},
        "a gradient wanted is True on rank 0, False",
    ),
    "variant": (
        lambda x: dict(variant="gdn", g=x["g"][..., 0], dt_bias=x["dt_bias"].view(4, 16)[:, 0]),
        "operator is kda on rank 0, gdn on rank 1",
    ),
    "local offsets": (
        lambda x: dict(cu_seqlens=torch.tensor([0, 0, 23, 23])),
        "cu_seqlens is [0, 3, 133, 150] on rank 0, [0, 0, 23, 23]",
    ),
    "backwards": (
        lambda x: dict(cu_seqlens=torch.tensor([0, 133, 3, 150])),
        "cu_seqlens must be offsets over the tokens of all ranks, start",
    ),
    "late": (
        lambda x: dict(cu_seqlens=torch.tensor([5, 9, 133, 150])),
        "start at 0 and never decrease, got [5, 9, 133, 150]",
    ),
    "as good as": (
        lambda x: dict(use_qk_l2norm_in_kernel=1),
        "use_qk_l2norm_in_kernel is True on rank 0, 1 on rank 1",
    ),
    "a flag of None": (lambda x: dict(safe_gate=None), "safe_gate must be True or False, got None"),
    "a number with a gradient": (
        lambda x: dict(scale=torch.tensor(0.5, requires_grad=True)),
        "scale must be a number, got a tensor that requires a gradient",
    ),
    "sparse": (
        lambda x: dict(q=x["q"].detach().to_sparse()),
        "q must be a dense tensor, got a tensor of layout",
    ),
    "no tensor": (lambda x: dict(q=None), "q must be a tensor, got None"),
    "a list": (lambda x: dict(q=[1.0]), "q must be a tensor, got list"),
    "refused": (lambda x: dict(beta=x["beta"][:, :-1]), REFUSED + "beta must have shape"),
}


def odd_one_out(groups, size, fault):
    """Let rank 1 pass something else; then make a correct call, so that the group still works."""
    group, rank = groups[size], dist.get_rank(groups[size])
    change, words = ODD[fault]
    case = PACKED if fault in ("local offsets", "backwards", "late") else EVERYTHING
    x = leaves_of(case, rank, CUTS[size])
    given = x | case.flags() | (change(x) if rank == 1 else {})
    try:
        CHUNK[given.pop("variant", case.variant)](**given, group=group)
        raised = None
    except (ValueError, TypeError) as error:
        raised = str(error)
    step(groups, size, EVERYTHING, CUTS[size])
    return raised


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[pytest.mark.quick] if f == "variant" else []) for f in ODD]
)
def test_every_rank_is_told_what_differs(ranks, fault):
    want = ODD[fault][1]
    for rank, message in enumerate(ranks.run(3, odd_one_out, 3, fault)):
        assert (
            message is not None and (want.removeprefix(REFUSED) if rank == 1 else want) in message
        )


def wrong_on_one_rank(groups, size):
    """Make calls that only rank 1 makes wrongly, and return what each raised."""
    group, wrong = groups[size], dist.get_rank(groups[size]) == 1
    x, layer = torch.ones(1, 5, 6), KimiDeltaAttention(6, head_dim=4, num_heads=1)
    found = []
    for call in (
        lambda: cp.exchange_tail([1.0] if wrong else x, 4, group),
        lambda: cp.exchange_tail(x, "4" if wrong else 4, group),
        lambda: cp.plan_context(-1 if wrong else 5, group),
        lambda: cp.plan_context(10.5 if wrong else 5, group),
        lambda: layer([1.0] if wrong else x, group=group),
        lambda: layer(None if wrong else x, group=group),
    ):
        try:
            call()
            found.append(None)
        except (ValueError, TypeError) as error:
            found.append(str(error))
    step(groups, size, EVERYTHING, CUTS[size])
    return found


def test_a_wrong_argument_on_one_rank_is_refused_on_all(ranks):
    words = ["x must be a tensor", "size must be a whole number", "length", "length"]
    words += ["x must be a tensor", "x must be a tensor"]
    for rank, messages in enumerate(ranks.run(3, wrong_on_one_rank, 3)):
        for message, part in zip(messages, words, strict=True):
            assert message is not None and part in message, (rank, message)
            assert ("rank 1 of the group refused" in message) == (rank != 1), (rank, message)


def wrong_arguments(groups, size):
    """Return the messages of calls that are wrong on every rank."""
    group, rank = groups[size], dist.get_rank(groups[size])
    x, packed = leaves_of(EVERYTHING, rank, CUTS[size]), leaves_of(PACKED, rank, CUTS[size])
    fits, offsets = cp.plan_context(x["q"].shape[1], group), torch.tensor([0, 3, 133, 150])
    elsewhere = dataclasses.replace(fits, device_lengths=fits.device_lengths.to("meta"))

    def on(group, **changed):
        return cp.chunk_kda(**x | EVERYTHING.flags() | changed, group=group)

    def cut(offsets, group):
        given = packed | {"cu_seqlens": torch.tensor(offsets)}
        return cp.chunk_kda(**given, **PACKED.flags(), group=group)

    def checked(offsets):
        """Call with a plan under KDA_OPS_CHECK=1."""
        with mock.patch.object(checks, "CHECK_VALUES", True):
            cut(offsets, fits)

    def tail(offsets):
        return cp.exchange_tail(packed["beta"], 2, group, offsets)

    plan = cp.plan_context(5, group)
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), _init_backend=False)
    layer = KimiDeltaAttention(6, head_dim=4, num_heads=1, invariant=True)
    meta = {n: t if t is None or rank else t.to("meta") for n, t in x.items()}
    calls = {
        "invariant": lambda: on(group, invariant=True),
        "invariant layer": lambda: layer(torch.ones(1, 5, 6), group=group),
        "mesh": lambda: on(mesh),
        "none": lambda: on(None),
        "outside": lambda: on(dist.GroupMember.NON_GROUP_MEMBER),
        "plan": lambda: on(plan),
        "too long": lambda: cut([0, 3, 133, 151], group),
        "tail": lambda: cp.exchange_tail(x["beta"], 0, group),
        "planned": lambda: checked([0, 3, 133, 151]),
        "planned backwards": lambda: checked([0, 133, 3, 150]),
        "elsewhere": lambda: on(elsewhere),
        "tail offsets": lambda: tail(offsets - offsets.new_tensor([0, 0, rank, 0])),
        "square offsets": lambda: tail(offsets[None]),
        "offsets": lambda: tail(torch.tensor([0.0, 150.0])),
        "no offsets": lambda: tail(offsets[:0]),
        "half": lambda: cp.plan_context(5.5, group),
        "tails": lambda: cp.exchange_tail(x["beta"].detach(), 2 + rank, group),
        "length": lambda: cp.plan_context(-1, group),
        "device": lambda: cp.plan_context(5, group, device="cuda"),
        "devices": lambda: on(group, **meta),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, TypeError) as error:
            messages[name] = str(error)
    return messages


def test_wrong_arguments_are_named(ranks):
    want = {
        "invariant": "invariant must be False on a group of 3 ranks, got True",
        "invariant layer": "invariant must be False on a group of 3 ranks, got True",
        "mesh": "a mesh of 2 dimensions: name one, for example mesh['cp']",
        "none": "a DeviceMesh of one dimension or a ContextPlan, got NoneType",
        "outside": "group must contain the calling rank",
        "plan": "the shard must have the 5 tokens of this rank's plan, got T = ",
        "too long": "cu_seqlens must end at or before 150, the tokens of all ranks (64 + 23 + 63)",
        "tail": "size must be the convolution's taps, at least 1, got 0",
        "planned": "must end at or before 150, the tokens of all ranks (64 + 23 + 63), got 151",
        "planned backwards": "start at 0 and never decrease, got [0, 133, 3, 150]",
        "elsewhere": "must be on the plan's device meta, got cpu: pass plan_context(..., device=",
        "tail offsets": "cu_seqlens is [0, 3, 133, 150] on rank 0, [0, 3, 132, 150] on rank 1, [0,",
        "square offsets": "cu_seqlens must have shape [N + 1], got [1, 4]",
        "offsets": "cu_seqlens must be int32 or int64, got torch.float32",
        "no offsets": "cu_seqlens must have shape [N + 1], got [0]",
        "half": "length must be the tokens of this rank's shard, an integer of at least 0, got 5.5",
        "tails": "size is 2 on rank 0, 3 on rank 1, 4 on rank 2",
        "length": "the tokens of this rank's shard, an integer of at least 0, got -1",
        "device": "group must have a backend for cuda tensors, got cpu:gloo,cuda:gloo: create one",
        # only rank 0 has meta tensors, but every rank raises
        "devices": "group must have a backend for meta tensors",
    }
    for messages in ranks.run(3, wrong_arguments, 3):
        for name, message in want.items():
            assert message in messages[name]


def test_a_gloo_group_exchanges_on_the_host_even_with_gpus(monkeypatch):
    """Gloo claims to support CUDA, but a GPU's address crashes the process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert cp.plan_context(5, dist.group.WORLD).device_lengths.device.type == "cpu"
    finally:
        dist.destroy_process_group()


def two_groups(groups, size):
    """Call with a group of two on ranks 0 and 1, of four (timeout 2 s) on ranks 2 and 3."""
    rank = dist.get_rank()
    x, cuts = leaves_of(EVERYTHING, rank, CUTS[4]), CUTS[4]
    try:
        cp.chunk_kda(
            **x, **EVERYTHING.flags(), group=groups["lower half" if rank < 2 else "impatient"]
        )
        return None, cuts[rank]
    except RuntimeError as error:
        return str(error), cuts[rank]


def test_a_rank_with_another_group_is_not_waited_for_forever(ranks):
    (first, _), (second, _), (third, _), (fourth, _) = ranks.run(4, two_groups, 4)
    assert first is None and second is None  # the group of two is complete
    for rank, message in ((2, third), (3, fourth)):
        assert message is not None
        assert f"rank {rank} timed out waiting for the other 3 ranks of group" in message
