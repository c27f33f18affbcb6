"""Sequences cut into runs: the laws of every call hold, wherever the kernels run and however short
the runs are.

Needs the kernels: TRITON_INTERPRET=1 KDA_OPS_CPU=triton, or KDA_OPS_TEST_DEVICE=cuda.
"""

import pytest
import torch

from kda_ops import dispatch
from tests.support.target import TARGET

if dispatch.backend_name(TARGET.device) != "triton":
    pytest.skip(
        "needs a process of its own: TRITON_INTERPRET=1 KDA_OPS_CPU=triton, or "
        "KDA_OPS_TEST_DEVICE=cuda",
        allow_module_level=True,
    )

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.stages import reverse_scan
from kda_ops.backends.triton.stages.runs import Runs
from kda_ops.problem import CHUNK, Problem
from kda_ops.sequences import count_chunks
from kda_ops.stages import GRADIENTS
from tests.operators import test_layouts, test_pools, test_sequences
from tests.support.calls import forward, overload, run
from tests.support.cases import TOKENS, Case, replace, take
from tests.support.closeness import (
    assert_all_close,
    assert_all_identical,
    assert_identical,
    assert_meets_budget,
    oracle,
)
from tests.support.plans import forget_plans
from tests.support.pools import Pool
from tests.support.shards import PARAMETERS, cut_twin
from tests.support.stage import Stages, assert_stage

TRITON = dispatch.load("triton")
LOW = torch.bfloat16 if torch.bfloat16 in TARGET.dtypes else torch.float16
RUNS = dict(lengths=(0, 200, 1, 129), tail=70)  # no run, four, one, three
LONG = Case(H=1, HV=1, K=16, V=24, dtype=LOW, gate="zero", beta="sigmoid", l2norm=True, **RUNS)
CORRELATED = dict(keys="correlated", dtype=torch.float32)
VARIANTS = ("kda", "gdn")


@pytest.fixture(autouse=True)
def one_chunk_per_run(force):
    force(run=1)


def law(test, **given):
    """Run a test of another file on a case of this one."""
    test.hypothesis.inner_test(**given)


@pytest.mark.once
@pytest.mark.parametrize(
    "case",
    [
        replace(LONG, transposed=True, dtype=torch.float32),
        replace(LONG, state=False, gate="forget", V=40, strides="fused", tail=0),
        replace(LONG, lengths=None, T=200, B=2, HV=2, gate="reset", **CORRELATED),
    ],
    ids=str,
)
def test_forward_and_backward_meet_their_budget(variant, case):
    assert_meets_budget(replace(case, variant=variant))


@pytest.mark.parametrize("chunks", (2, 3))
def test_any_run_length_meets_the_budget(chunks, force):
    force(run=chunks)
    assert_meets_budget(replace(LONG, variant=VARIANTS[chunks % 2], lengths=(0, 400, 1, 128)))


@pytest.mark.parametrize("do, dfinal", ((True, False), (False, True)))
def test_the_reverse_scan_meets_its_budget(variant, do, dfinal):
    assert_stage(
        "reverse_scan",
        Stages.build(replace(LONG, variant=variant), do, dfinal),
        TRITON,
        TARGET.device,
    )


def test_what_enters_a_run_of_the_walk_is_the_gradient_of_the_state_that_leaves_it():
    """In runs of another length than those of the scans, and for an empty sequence."""
    case = replace(LONG, variant="gdn", lengths=(0, 400, 1, 129), transposed=True)
    inputs, (do, dfinal) = case.inputs(TARGET.device), case.cotangents(TARGET.device)
    p = Problem.parse(0, *inputs.values(), **case.flags())
    tile, runs = TRITON.prepare(p, norms=True), Runs(p, 2)
    found = reverse_scan.enter_runs(p, tile, runs, do, p.as_kv(dfinal)).cpu()
    dstates = TRITON.reverse_scan(p, tile, do, dfinal, frozenset()).dstates.cpu()
    bos = 0
    for n, length in enumerate(case.lengths):
        run, chunk, count = bos // 128 + n, bos // 64 + n, -(-length // 64)
        assert_identical(found[run + max(0, count - 1) // 2], p.as_kv(dfinal)[n].cpu(), str(n))
        for i in range(0, count - 2, 2):
            want = dstates[chunk + i + 1].float()
            assert (found[run + i // 2] - want).abs().max() < 2e-2 * want.abs().max()
        bos += length


@pytest.mark.bits
def test_what_is_kept_is_what_backward_would_compute_again(variant):
    assert_all_identical(
        run(replace(LONG, variant=variant)),
        run(replace(LONG, variant=variant, disable_recompute=True)),
    )


@pytest.mark.bits
def test_wide_programs_of_runs_and_maps_change_no_bit(variant, force):
    case = replace(LONG, variant=variant, K=128, V=128, lengths=(0, 130, 1), tail=0)
    found, columns = [], []
    for there in (1, 10**6):  # multiprocessors
        forget_plans()
        force(processors=there)
        p = Problem.parse(case.rank, *case.inputs(TARGET.device).values(), **case.flags())
        names = [f"{n}_{variant}{part}" for n in ("scan", "reverse_scan") for part in ("", "_maps")]
        columns.append([tuning.choose(name, p, tuning.Columns).block_v for name in names])
        found.append(run(case))
    forget_plans()
    assert all(wide > narrow for wide, narrow in zip(*columns))
    assert_all_identical(*found)


def test_split_products_leave_fewer_chunks_to_the_time_of_the_scan(force):
    """The journal has the numbers, "Two costs for GDN's chunks"."""
    force(run=None, processors=132)
    x = torch.empty(1, 8192, 96, 128, dtype=torch.bfloat16, device="meta")

    def ahead(**flags):
        p = Problem.parse(0, x, x, x, x[..., 0].float(), x[..., 0], **flags)
        return tuning.ahead(p)

    inside = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    bounded = ahead(safe_beta=True, safe_keys=True)
    assert 0 < bounded < ahead() < 8192 // CHUNK
    assert ahead(**inside) == bounded and ahead(**inside, allow_neg_eigval=True) == ahead()


@pytest.mark.bits
def test_the_bits_of_a_sequence_are_its_own(variant):
    """Other packed sequences, and later tokens, change no bit."""
    case = replace(LONG, variant=variant)
    law(test_sequences.test_packed_sequences_are_separate_sequences, op="chunk", case=case)
    later, whole = test_sequences.test_later_tokens_change_no_earlier_bit, dict(lengths=None, T=200)
    for seen in (65, 150):
        law(later, op="chunk", case=replace(case, **whole), seen=seen)
    inputs = replace(case, lengths=(200,), tail=0).inputs(TARGET.device)
    o = forward(replace(case, lengths=(200,), tail=0), inputs=inputs)["o"]
    for seen in (193, 128, 64):
        x = take(inputs, 0, seen) | {"cu_seqlens": None}
        part = forward(replace(case, lengths=None, T=seen), inputs=x)["o"]
        assert_identical(part, o[:, :seen], f"first {seen}")


@pytest.mark.bits
def test_both_state_layouts_give_the_same_bits(variant):
    same = (
        test_layouts.test_both_state_layouts_give_the_same_bits_in_output_state_and_every_gradient
    )
    law(same, op="chunk", case=replace(LONG, variant=variant, lengths=(0, 150)))


@pytest.mark.once
@pytest.mark.parametrize(
    "indexed, null, final",
    ((False, -1, True), (True, -1, True), (True, 1, True), (True, -1, False)),
)
def test_a_pool_is_read_before_it_is_written(variant, indexed, null, final):
    """The slot that a sequence starts from is the one where it ends, and snapshots lie in any
    run.
    """
    case = replace(LONG, variant=variant, state=False, final=False, dtype=torch.float32)
    dead = (False, False, True, False) if indexed else ()
    fresh = (True, null >= 0, True, null < 0)
    law(
        test_pools.test_a_call_on_a_pool_is_the_functional_call_on_its_slots,
        pool=Pool(
            *(case, "chunk_", indexed, dead),
            **dict(snapshots=3 * indexed, null=null, fresh=fresh, final=final),
        ),
    )


@pytest.mark.parametrize("lengths", (None, (), (0, 300, 0), (63, 1)), ids=str)
@pytest.mark.parametrize("chunks", (0, 1, 2))
def test_only_what_can_have_a_second_run_is_cut(lengths, chunks, force):
    force(run=chunks)
    case, tokens = replace(LONG, lengths=lengths, T=129, tail=0, state=False), 64 * chunks
    p = Problem.parse(case.rank, *case.inputs().values(), **case.flags())
    runs = Runs(p)
    assert runs.length == (chunks if case.rows > tokens else 0)
    assert not runs.length or runs.new_maps().shape == (
        count_chunks(p, tokens) + (lengths is not None),
        p.HV,
        p.K,
        p.V + p.K,
    )


def test_a_width_whose_maps_the_join_cannot_hold_is_not_cut():
    case = Case(K=200, T=300)
    assert Runs(Problem.parse(1, *case.inputs().values(), **case.flags())).length == 0


def in_halves(case, cuts):
    """Return what ranks would that hold the tokens between cuts, by their maps alone."""
    op = {n: overload(case.variant, f"chunk_{n}") for n in ("map", "join", "map_bwd", "join_bwd")}
    known = [a.name for a in op["map"]._schema.arguments]
    flags = {n: f for n, f in case.flags().items() if n in known}
    inputs, (do, dstate), V = case.inputs(TARGET.device), case.cotangents(TARGET.device), case.V
    state, shards, parts = inputs["initial_state"], [], []
    for a, b in zip(cuts, cuts[1:]):
        *x, _, offsets = take(inputs, a, b).values()
        offsets = None if offsets is None else offsets.clamp(a, b) - a
        whole, runs, *tile, AP = op["map"](*x, offsets, **flags)
        o, final_state, starts = op["join"](
            *x, state, offsets, runs, *tile, output_final_state=True, **flags
        )
        A = AP if AP.dim() > 1 else tile[0] if case.dtype is not torch.float32 else None
        shards.append((x, offsets, state, starts, A, do[:, a:b], o))
        state = whole[..., V:] @ state + whole[..., :V]
    for x, offsets, start, starts, A, d, o in reversed(shards):
        left, runs, *tile = op["map_bwd"](*x, offsets, d, dstate, A, **flags)
        tile[0] = A if tile[0].dim() == 1 else tile[0]
        grads = op["join_bwd"](
            d, dstate, runs, starts, *tile, *x, start, offsets, need=255, **flags
        )
        given = zip(GRADIENTS, (*x, start), grads)
        parts.insert(0, {"o": o} | {f"d{n}": y for n, t, y in given if t is not None})
        dstate = left
    found = {n: torch.cat([part[n] for part in parts], 1) for n in parts[0] if n[1:] in TOKENS}
    found |= {n: sum(part[n] for part in parts) for n in PARAMETERS if n in parts[0]}
    o = torch.cat([part["o"] for part in parts], 1)
    ends = {"final_state": final_state, "dinitial_state": parts[0]["dinitial_state"]}
    return {"o": o} | found | ends


@pytest.mark.once
@pytest.mark.parametrize(
    "case, cuts",
    [
        (LONG, (0, 70, 70, 265, 400)),  # the third begins within a sequence, the second is empty
        (replace(LONG, lengths=None, T=200, tail=0, B=2, HV=2, **CORRELATED), (0, 130, 150, 200)),
        (replace(LONG, lengths=None, T=70, tail=0, K=136, V=16, gate="weak"), (0, 66, 70)),
    ],
    ids=("packed", "rows", "too wide for the join"),
)
def test_shards_in_two_halves_meet_the_budget(variant, case, cuts):
    case = replace(case, variant=variant)
    assert_all_close(
        in_halves(case, cuts), oracle(case), lambda draw: cut_twin(case, cuts, case.dtype, draw)
    )
