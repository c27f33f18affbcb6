"""GDN's backward as one walk, on Hopper: against float64, and against the kernels it replaces."""

import pytest
import torch

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.stages import reverse_walk
from tests.support.calls import run
from tests.support.cases import EDGES, Case, replace
from tests.support.closeness import assert_all_identical, assert_identical, assert_meets_budget
from tests.support.plans import forget_plans, last_plan

CUDA = torch.device("cuda")
if reverse_walk.KERNEL is None or not tuning.is_hopper(CUDA):
    pytest.skip("needs Hopper, and a Triton whose Gluon is known", allow_module_level=True)

BF16, FP16 = torch.bfloat16, torch.float16
PER_TOKEN = ("q", "k", "v", "g", "beta")
# a chunk and 8 rows of the last one
SIZES = dict(dtype=BF16, K=128, V=128, B=2, T=200, H=2, HV=2)
LAYER = Case("gdn", gate="softplus", beta="sigmoid", l2norm=True, **SIZES)
PACKED = replace(LAYER, lengths=(0, 65, 1, 128, 37, 0), tail=70, H=1, HV=1)
GIVEN = replace(LAYER, gate="weak", beta="given", l2norm=False)
CUT = replace(PACKED, lengths=(0, 200, 1, 64, 330, 0))
RUNS = {"runs": 1, "runs, grouped": 2, "runs, given": 1, "runs, given, grouped": 3}  # chunks
CASES = {
    "no tails": replace(LAYER, T=256),
    "tails": LAYER,
    "one token": replace(LAYER, T=1),
    "bounded": replace(PACKED, gate="bounded"),
    "given": GIVEN,
    "given, packed": replace(
        GIVEN, gate="strong", lengths=(63, 65, 0, 130), tail=5, H=1, HV=1, final=False
    ),
    "promised": replace(GIVEN, beta=EDGES, keys="repeated", safe_beta=True, safe_keys=True),
    "no gate, no beta": replace(LAYER, gate="none", beta="none"),
    "negative eigenvalues": replace(LAYER, beta="neg_eigval", transposed=True),
    "fp16": replace(LAYER, dtype=FP16),
    "grouped": replace(LAYER, H=1, transposed=True),
    "grouped, given": replace(GIVEN, H=1, gate="reset", keys="correlated"),
    "grouped, fp16, packed": replace(PACKED, dtype=FP16, HV=2),
    "forget": replace(LAYER, gate="forget", keys="repeated", state=False, final=False),
    "everything kept": replace(LAYER, disable_recompute=True),
    "runs": CUT,
    "runs, grouped": replace(CUT, HV=2, dtype=FP16, final=False),
    "runs, given": replace(GIVEN, T=512),
    "runs, given, grouped": replace(GIVEN, T=330, H=1, transposed=True, state=False),
}


@pytest.fixture(autouse=True)
def walk(force, poisoned_scratch):
    """Walk for any number of heads."""
    force(walk=True)


def has_walked() -> bool:
    """Return whether the plan that was made last walks."""
    return "reverse_walk_gdn" in last_plan()


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_meets_its_budget(name, force):
    case = CASES[name]
    force(run=RUNS.get(name))
    forget_plans()
    got = run(case)
    assert has_walked() and ("join_runs" in last_plan()) == (name in RUNS)
    assert_meets_budget(case, got=got)


@pytest.mark.parametrize("name", ("tails", "bounded", "given", "grouped", *RUNS))
def test_repeated_calls_give_the_same_bits(name, force):
    case = CASES[name]
    force(run=RUNS.get(name))
    want = run(case)
    for _ in range(5):
        assert_all_identical(want, run(case))


def test_a_sequence_of_one_run_has_the_bits_of_a_whole_one(force):
    found = []
    for chunks in (2, 0):
        force(run=chunks)
        forget_plans()
        found.append(run(CUT))
    got, want = found
    bos = 0
    for n, length in enumerate(CUT.lengths):
        here, bos = slice(bos, bos + length), bos + length
        if length <= 128:
            for name in PER_TOKEN:
                assert_identical(got["d" + name][:, here], want["d" + name][:, here], name)
            assert_identical(got["dinitial_state"][n], want["dinitial_state"][n], str(n))


@pytest.mark.parametrize("case", (LAYER, replace(PACKED, HV=2)), ids=("dense", "packed"))
def test_a_walk_of_runs_follows_a_scan_of_whole_sequences(case, force):
    """Use so few multiprocessors that runs of 16 chunks fill them, and sequences whose average
    length is above that of a run.
    """
    case = replace(case, B=1, T=2100, lengths=case.lengths and (1, 2100))
    force(processors=11)
    forget_plans()
    got = run(case)
    assert has_walked() and "join_runs" in last_plan()
    assert not tuning.has_runs(case.HV, case.V, CUDA)
    assert_meets_budget(case, got=got)


@pytest.mark.parametrize("case", (LAYER, replace(PACKED, HV=2)), ids=("dense", "packed"))
def test_a_scan_beside_the_maps_of_a_walk_changes_no_bit(case, force):
    case = replace(case, B=1, T=2100, lengths=case.lengths and (1, 2100))
    inputs, cotangents = case.inputs(CUDA), case.cotangents(CUDA)
    force(processors=11, leaves_room=False)
    want = run(case, inputs=inputs, cotangents=cotangents)
    force(leaves_room=True)
    forget_plans()
    for _ in range(5):  # the first makes the plan
        got = run(case, inputs=inputs, cotangents=cotangents)
        assert_all_identical(got, want)
    assert has_walked() and "Wait(" in last_plan()


def test_a_small_strength_has_a_gradient(force):
    """The walk divides sums by beta, so a beta of 0 counts as 2^-64 there."""
    SMALL = reverse_walk.SMALL.value
    values = (0.0, 1e-12, SMALL / 2, SMALL)
    inputs, cotangents = GIVEN.inputs(CUDA), GIVEN.cotangents(CUDA)
    beta = inputs["beta"] = inputs["beta"].clone()
    for i, value in enumerate(values):
        beta[:, i::7] = value
    forget_plans()
    found = run(GIVEN, inputs=inputs, cotangents=cotangents)
    assert has_walked() and not found["dv"][beta == 0.0].any()
    got = found["dbeta"]
    force(walk=False)
    want = run(GIVEN, inputs=inputs, cotangents=cotangents)["dbeta"]
    for value in values:
        rows = beta == torch.tensor(value, dtype=beta.dtype)
        assert rows.any() and (got - want)[rows].abs().max() < 1e-2 * want[rows].abs().max()


def test_what_follows_the_sequences_changes_no_bit_and_gets_zeros():
    case = PACKED
    inputs, (do, dfinal) = case.inputs(CUDA), case.cotangents(CUDA)
    want = run(case, inputs=inputs, cotangents=(do, dfinal))
    end = sum(case.lengths)
    for x in (do, *(inputs[n] for n in PER_TOKEN)):
        x[:, end:] = torch.nan
    got = run(case, inputs=inputs, cotangents=(do, dfinal))
    for name in want:
        if name.removeprefix("d") in PER_TOKEN:
            assert_identical(got[name][:, :end], want[name][:, :end], name)
            assert not got[name][:, end:].any()
        elif name != "o":
            assert_identical(got[name], want[name], name)


@pytest.mark.parametrize(
    "more", ((), ("g",), ("beta", "dt_bias"), ("initial_state",)), ids=" ".join
)
def test_gradients_do_not_depend_on_which_are_asked_for(more):
    want = run(LAYER)
    forget_plans()
    got = run(LAYER, need=("q", "k", "v", *more))
    assert has_walked()
    for name, x in got.items():
        assert_identical(x, want[name], name)


@pytest.mark.parametrize("case", (LAYER, PACKED), ids=("dense", "packed"))
def test_a_plan_serves_other_sizes(case):
    """The tensor descriptors are made anew for each call."""
    other = replace(case, T=330, B=2) if case.lengths is None else replace(case, tail=9)
    forget_plans()
    run(case)
    planned = run(other)
    forget_plans()
    assert_all_identical(run(other), planned)


def test_a_graph_replays_the_walk():
    inputs, cotangents = LAYER.inputs(CUDA), LAYER.cotangents(CUDA)
    want = run(LAYER, inputs=inputs, cotangents=cotangents)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        got = run(LAYER, inputs=inputs, cotangents=cotangents)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert_all_identical(want, got)


def test_the_rule_walks_from_48_programs_on(force):
    force(walk=None)
    for heads, T, walked in ((16, 70, False), (32, 70, True), (12, 1100, True), (12, 1024, False)):
        case = replace(LAYER, H=heads, HV=heads, T=T)
        forget_plans()
        run(case)
        assert has_walked() == walked
