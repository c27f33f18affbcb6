"""Calls on a pool of states: decode and prefill in place read and write the slots they are given,
and nothing else.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kda_ops import checks, dispatch, problem
from kda_ops.problem import CHUNK
from tests.support.calls import overload
from tests.support.cases import Case, alone, take
from tests.support.closeness import assert_identical
from tests.support.forks import (
    Fork,
    assert_fork,
    assert_null_slots,
    broken,
    by_backend,
    by_operator,
    forks,
)
from tests.support.pools import OUTS, Pool, assert_out, assert_source, pool_arguments, pools, same
from tests.support.splits import Split, assert_split, splits
from tests.support.target import TARGET


def states_along(pool, n):
    """o of sequence n, and the function that gives its state after its first t tokens, from the
    functional operator of the same kind.
    """
    case, inputs = pool.case, pool.case.inputs(TARGET.device)
    mine, (_, a, b) = alone(case, inputs, n), case.spans[n]
    initial = pool.initial(n).to(case.state_dtype)
    op = "chunk" if pool.op == "chunk_" else "recurrent"
    flags = replace(case, final=True).flags(op)

    def run(end):
        x = take(mine, 0, end) | {"initial_state": initial}
        with torch.no_grad():
            return overload(case.variant, op)(*x.values(), **flags)

    return run(b - a)[0], lambda t: run(t)[1][0]


@pytest.mark.quick
@given(pool=pools())
@example(
    pool=Pool(
        Case(lengths=(3, 0, 2, 1), tail=2, H=1, HV=2),
        "recurrent_",
        True,
        (False, False, True, False),
        columns=5,
        accepted=True,
    )
)
@example(
    pool=Pool(
        Case("gdn", lengths=(65, 0, 130, 64), tail=2),
        "chunk_",
        True,
        (False, True, False, False),
        snapshots=2,
    )
)
@example(
    pool=Pool(Case("kda", lengths=(130, 70), H=1, HV=1), "chunk_", True, (True, False), snapshots=2)
)
@example(
    pool=Pool(Case("kda", lengths=(130, 70), H=1, HV=1), dead=(True, False), snapshots=2, null=0)
)
@example(pool=Pool(Case("gdn", B=3, T=2), "recurrent_", dead=(False, True), columns=2, null=3))
@example(pool=Pool(Case("kda", lengths=(130, 64), tail=2, H=1, HV=1), snapshots=2, final=False))
@example(pool=Pool(Case("gdn", B=2, T=65, H=1, HV=1), indexed=False, final=False))
@example(
    pool=Pool(
        Case("gdn", lengths=(0, 70, 130, 9, 64), tail=2, H=1, HV=1),
        dead=(False, False, False, True),
        snapshots=2,
        fresh=(True, False, True, True),
    )
)
@example(pool=Pool(Case("kda", B=2, T=65, H=1, HV=1), indexed=False, fresh=(False, True)))
@example(pool=Pool(Case("kda", B=2, T=3), "recurrent_", dead=(True, True)))
@example(pool=Pool(Case("gdn", B=2, T=3), dead=(True, True)))
def test_a_call_on_a_pool_is_the_functional_call_on_its_slots(pool):
    before = pool.state()
    o, after = pool.run()
    indices, _, snapshots = pool.indices()
    written = torch.zeros(pool.slots, dtype=torch.bool)
    case, state_dtype = pool.case, pool.dtype or pool.case.state_dtype
    for n, (row, a, b) in enumerate(case.spans):
        got = o[row, a:b]
        if pool.is_dead(n):
            assert not got.any(), f"sequence {n} has no slot but an output"
            continue
        want, state_after = states_along(pool, n)
        same(got, want[0], f"o of sequence {n}", case.dtype)
        if indices is not None and indices.dim() == 2:
            for t in range(b - a):
                slot = int(indices[n, t])
                written[slot] = True
                same(
                    after[slot],
                    state_after(t + 1),
                    f"state after token {t} of sequence {n}",
                    state_dtype,
                )
        else:
            slot = n if indices is None else int(indices[n])
            if pool.final:
                written[slot] = True
                same(after[slot], state_after(b - a), f"state of sequence {n}", state_dtype)
        if snapshots is not None:
            for j, slot in enumerate(snapshots[n].tolist()):
                length = (j + 1) * pool.every * CHUNK
                if slot > pool.null and length <= b - a:
                    written[slot] = True
                    same(
                        after[slot],
                        state_after(length),
                        f"snapshot {j} of sequence {n}",
                        state_dtype,
                    )
    end = sum(case.lengths) if case.lengths is not None else case.T
    assert not o[:, end:].any(), "tokens past the last sequence have an output"
    assert_identical(after[~written], before[~written], "slots that no live token names")


@pytest.mark.bits
@given(pool=pools())
def test_what_lies_in_a_dead_or_spare_slot_is_never_read(pool):
    state = pool.state()
    read = {
        int(s)
        for n, s in enumerate(pool.start())
        if not (pool.is_dead(n) or pool.is_fresh(n)) and s > pool.null
    }
    for slot in set(range(pool.slots)) - read:
        state[slot] = torch.nan
    o, _ = pool.run(state=state)
    want, _ = pool.run()
    assert_identical(o, want, "o")


@pytest.mark.bits
@pytest.mark.quick
@given(pool=pools(op="chunk_"))
@example(pool=Pool(Case(lengths=(70, 0, 3), H=1, HV=1), fresh=(True, True), snapshots=1, null=0))
def test_a_sequence_that_begins_anew_has_the_bits_of_a_zeroed_slot(pool):
    o, after = pool.run()
    zeroed = pool.state()
    for n, slot in enumerate(pool.start()):
        if pool.is_fresh(n) and not pool.is_dead(n):
            zeroed[slot] = 0
    want, state = replace(pool, fresh=()).run(state=zeroed)
    assert_identical(o, want, "o")
    assert_identical(after, state, "the pool")


@pytest.mark.bits
@pytest.mark.quick
@given(pool=pools(), layout=st.sampled_from(OUTS))
@example(pool=Pool(Case(lengths=(65, 0, 2), tail=3), dead=(False, False, True)), layout="columns")
@example(pool=Pool(Case("gdn", B=2, T=3), "recurrent_", indexed=False), layout="heads first")
def test_out_takes_what_the_call_would_return(pool, layout):
    assert_out(pool, layout)


@pytest.mark.bits
@pytest.mark.quick
@given(pool=pools(op="recurrent_"))
@example(pool=Pool(Case(lengths=(2, 0, 3), tail=1), "recurrent_", dead=(True, False), columns=3))
@example(pool=Pool(Case("gdn", B=3, T=1), "recurrent_", dead=(False, True), null=1))
@example(pool=Pool(Case(B=2, T=1, transposed=True), "recurrent_", indexed=False))
def test_a_second_pool_to_start_from_is_only_read(pool):
    assert_source(pool)


@pytest.mark.skipif(TARGET.device.type != "cpu", reason="the definition runs on a CPU")
@pytest.mark.parametrize("form", (dict(columns=2), dict(columns=0), dict(indexed=False)), ids=str)
def test_a_second_pool_is_that_of_the_definition(variant, form):
    """Sequence 1 has no slot to write, sequence 2 none to read; the others read the same slot."""
    pool = Pool(Case(variant, B=4, T=2), "recurrent_", dead=(False, True), **form)
    source, found = torch.randn(5, *pool.state().shape[1:]), []
    for name in ("reference", dispatch.backend_name(TARGET.device)):
        state = pool.state()
        args = [*pool.arguments(state), source, torch.tensor([4, 4, -1, 4])]
        found.append((by_backend(dispatch.load(name))(variant, args, pool.flags()), state))
    for what, want, got in zip(("o", "the pool"), *found):
        same(got, want, what, got.dtype)


@pytest.mark.bits
@given(pool=pools(), seed=st.integers(0, 99))
def test_where_the_slots_lie_does_not_matter(pool, seed):
    if not pool.indexed:
        return
    null = torch.arange(pool.null + 1)
    order = torch.randperm(pool.slots - len(null), generator=torch.Generator().manual_seed(seed))
    order = torch.cat([null, order + len(null)])
    where = order.argsort()
    o, after = pool.run()
    indices, _, snapshots = pool.indices()

    def move(slots):
        if slots is None:
            return None
        moved = where[slots.long().clamp(min=0)].to(slots.dtype)
        return torch.where(slots > pool.null, moved, slots).to(TARGET.device)

    moved, state = pool.run(
        pool.state()[order.to(TARGET.device)],
        state_indices=move(indices),
        snapshot_indices=move(snapshots),
    )
    assert_identical(o, moved, "o")
    assert_identical(after, state[where.to(TARGET.device)], "the pool")


@pytest.mark.bits
def test_a_negative_column_silences_one_token_and_keeps_the_rest(variant):
    case = Case(variant, T=3, state=False, final=False)
    pool = Pool(case, "recurrent_", columns=3)
    indices = pool.indices()[0].to(TARGET.device)
    o, after = pool.run()
    holed = indices.clone()
    holed[0, 1] = -1
    o_holed, after_holed = pool.run(state_indices=holed)
    assert not o_holed[:, 1].any()
    assert_identical(o_holed[:, [0, 2]], o[:, [0, 2]], "o")
    assert_identical(
        after_holed[indices[0, 1]], pool.state()[indices[0, 1]], "the slot that was not named"
    )
    for column in (0, 2):
        assert_identical(after_holed[indices[0, column]], after[indices[0, column]], "a named slot")


@pytest.mark.bits
@pytest.mark.parametrize("packed", (False, True))
def test_padding_may_have_any_accepted_count(variant, packed, monkeypatch):
    """Counts of padding, rows whose slots are all negative, are ignored.

    A live row whose count is outside [1, S] has no slot to start from: its slots stay unchanged.
    """
    case = Case(variant, H=1, HV=1, **(dict(lengths=(1, 2, 1, 2)) if packed else dict(B=4, T=2)))
    pool = Pool(case, "recurrent_", True, (False, True, False, True), columns=2)
    monkeypatch.setattr(problem, "check_accepted", lambda *_: None)  # as on a GPU
    indices = pool.indices()[0].to(TARGET.device)
    for wrong in (-3, 0, 3, 9, 2**32 + 1, -(2**63)):
        o, after = pool.run(
            num_accepted_tokens=torch.tensor([2, wrong, 1, wrong], device=TARGET.device)
        )
        want, state = pool.run(num_accepted_tokens=torch.tensor([2, 1, 1, 1], device=TARGET.device))
        assert_identical(o, want, "o")
        assert_identical(after, state, "the pool")
        o, after = pool.run(
            num_accepted_tokens=torch.tensor([wrong, 1, 1, 1], device=TARGET.device)
        )
        assert_identical(
            after[indices[0]],
            pool.state()[indices[0]],
            "the slots of a sequence that starts nowhere",
        )


@pytest.mark.bits
def test_a_token_without_a_column_gives_zero_and_writes_nothing(variant, monkeypatch):
    case = Case(variant, lengths=(4, 1), H=1, HV=1)
    long = Pool(case, "recurrent_", columns=4)
    indices = long.indices()[0].to(TARGET.device)
    o, _ = long.run()
    monkeypatch.setattr(problem, "check_columns", lambda *_: None)  # as on a GPU
    o_cut, after = long.run(state_indices=indices[:, :2])
    assert not o_cut[:, 2:4].any()
    assert_identical(o_cut[:, [0, 1, 4]], o[:, [0, 1, 4]], "o")
    assert_identical(
        after[indices[0, 2:]], long.state()[indices[0, 2:]], "slots of tokens that are nowhere"
    )


SAMPLES = Fork(((2, 0), (3, 0), (4, 0)), (1, 1, 1), (2, 2, 2), 5)  # three, of one prompt
# two branches of two draft tokens, and a row without tokens, which may name any slots
TREE = Fork(((2, 3, 0), (4, 5, 0), (0, 6, 1)), (2, 2, 0), (3, 3, 1), 7, packed=True)


@pytest.mark.quick
@given(fork=forks())
@example(fork=SAMPLES)
@example(fork=TREE)
@example(fork=replace(SAMPLES, variant="gdn", transposed=True, wide=True))
@example(fork=replace(SAMPLES, accepted=None))  # each reads and writes its own column 0
@example(fork=Fork(((1, 1, 0), (-1, 2, 0)), (2, 2), (3, 3), 3))  # the last token wins
def test_sequences_that_share_a_slot_compute_what_each_computes_alone(fork):
    assert fork.legal
    kernels = dispatch.backend_name(TARGET.device) == "triton"
    assert_fork(fork, TARGET.device, bits=kernels)


@pytest.mark.bits
@pytest.mark.quick
@given(fork=forks(), null=st.sampled_from((0, 3)))
@example(fork=SAMPLES, null=0)
@example(fork=Fork(((2, -1, 3), (-1, -2, 0), (4, -1, 5)), (3, 1, 3), None, 6), null=0)
def test_every_slot_up_to_null_slot_counts_as_a_negative_one(fork, null):
    assert_null_slots(fork, null, TARGET.device)


@given(fork=forks())
@example(fork=SAMPLES)
@example(fork=TREE)
def test_the_definition_has_forks_too(fork):
    assert_fork(fork, torch.device("cpu"), False, by_backend(dispatch.load("reference")))


@pytest.mark.quick
@given(fork=broken())
@example(fork=replace(SAMPLES, table=((2, 0), (3, 0), (2, 0))))  # two write slot 2
@example(fork=replace(SAMPLES, table=((2, 0), (0, 0), (3, 0))))  # one writes what two read
@example(fork=replace(SAMPLES, table=((2, 0), (3, 2), (4, 0))))  # one reads what one writes
@example(fork=replace(SAMPLES, table=((2, 0), (3, 0), (5, 0))))  # the pool has no slot 5
@example(fork=replace(SAMPLES, accepted=None, table=((2, 0), (2, 0), (4, 0))))
def test_a_written_slot_belongs_to_one_sequence(fork):
    """Other tables are refused before anything is written; on a device, if values are checked."""
    assert not fork.legal
    before, flags = fork.state(TARGET.device), fork.case.flags("recurrent_")
    x = fork.arguments(before)
    with (
        patch.object(checks, "CHECK_VALUES", True),
        pytest.raises(ValueError, match="^state_indices must (not let|be below the number of)"),
    ):
        by_operator(fork.variant, list(x.values()), flags)
    assert_identical(x["state"], before, "the pool")


@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
def test_a_pool_of_size_zero_accepts_only_padding(variant, op):
    case = Case(variant, B=2, T=2, H=1, HV=1)
    pool = torch.zeros(0, 1, case.K, case.V, device=TARGET.device)
    slots = torch.tensor([-1, -2], device=TARGET.device)
    o = overload(variant, op)(*pool_arguments(case.inputs(TARGET.device), pool, slots, None))
    assert not o.any()


@given(
    split=splits(
        tuple(d for d in TARGET.dtypes if d is not torch.float64),
        (torch.float32, torch.bfloat16),
        H=1,
        HV=2,
        K=16,
        V=24,
    )
)
@example(
    split=Split(
        Case(B=3, T=129, K=16, V=24, state=False, final=False),
        (("chunk_", 117), *[("recurrent_", 1)] * 12),
        torch.bfloat16,
    )
)
def test_prefill_then_decode_is_one_prefill(split):
    assert_split(split, TARGET.device)


@pytest.mark.bits
@pytest.mark.parametrize("op", ("recurrent_", "chunk_"))
def test_a_pool_may_have_any_strides_and_keeps_what_lies_between(variant, op):
    pool = Pool(Case(variant, B=2, T=3, H=1, HV=2), op)
    o, after = pool.run()
    around = torch.full((pool.slots, 2, 3, *pool.state().shape[2:]), 7.0, device=TARGET.device)
    around[:, :, 1] = pool.state()
    o_view, _ = pool.run(state=around[:, :, 1])
    assert_identical(o, o_view, "o")
    assert_identical(after, around[:, :, 1].contiguous(), "the pool")
    assert bool((around[:, :, (0, 2)] == 7.0).all()), "something was written between the states"


@pytest.mark.quick
def test_a_call_that_only_reads_its_slots_lets_sequences_share_one(variant):
    case = Case(variant, lengths=(64, 64), state=False, final=False)
    pool = Pool(case, snapshots=1, final=False)
    flags = dict(state_indices=torch.tensor([1, 1]), snapshot_indices=torch.tensor([[2], [0]]))
    o, after = pool.run(**flags)
    copied = pool.state()
    copied[0] = copied[1]
    want, moved = pool.run(copied, **flags | {"state_indices": torch.tensor([1, 0])})
    assert_identical(o, want, "o")
    assert_identical(after, moved, "the pool")
    state = pool.state()
    for slots, into, message in (
        ([0, 1], [[2], [2]], "^snapshot_indices must name distinct slots"),
        ([0, 1], [[1], [2]], "^snapshot_indices must not name the slot of another sequence, got "
                             "slot 1 for sequence 0"),
        ([1, 1], [[1], [2]], "^snapshot_indices must not name the slot of another sequence"),
        ([0, 99], [[1], [2]], "^state_indices must be below the number of slots"),
    ):  # fmt: skip
        flags = dict(state_indices=torch.tensor(slots), snapshot_indices=torch.tensor(into))
        with pytest.raises(ValueError, match=message):
            pool.run(state, **flags)
    assert_identical(state, pool.state(), "the pool")
