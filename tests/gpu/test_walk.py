"""KDA's forward as one walk, on Hopper: against float64, and its promises of bits."""

import pytest
import torch

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.stages import walk
from tests.gpu.test_forward import forward, twin
from tests.support.calls import overload
from tests.support.cases import EDGES, Case, replace
from tests.support.closeness import assert_all_close, assert_all_identical, assert_identical, oracle
from tests.support.plans import forget_plans, last_plan

CUDA = torch.device("cuda")
if walk.KERNEL is None or not tuning.is_hopper(CUDA):
    pytest.skip("needs Hopper, and a Triton whose Gluon is known", allow_module_level=True)

BF16 = torch.bfloat16
PER_TOKEN = ("q", "k", "v", "g", "beta")
# three chunks and 8 rows of the last one
SIZES = dict(dtype=BF16, K=128, V=128, B=2, T=200, H=2, HV=2)
LAYER = Case(gate="bounded", beta="sigmoid", l2norm=True, **SIZES)
PACKED = replace(LAYER, B=1, lengths=(0, 65, 1, 128, 37, 0, 31, 63, 64), tail=70, H=1, HV=1)
PROMISED = replace(
    LAYER, gate="strong", beta="given", l2norm=False, safe_gate=True, safe_beta=True, safe_keys=True
)
CASES = {
    "no tails": replace(LAYER, T=256),
    "tails": LAYER,
    "one token": replace(LAYER, T=1),
    "packed": PACKED,
    "packed, transposed": replace(PACKED, transposed=True),
    "given": PROMISED,
    "given, weak": replace(PROMISED, gate="weak"),
    "given, correlated keys": replace(PROMISED, keys="correlated"),
    "given, repeated keys": replace(PROMISED, beta=EDGES, keys="repeated"),
    "given, packed": replace(PROMISED, B=1, lengths=(63, 65, 0, 130), tail=5, final=False),
    "given, norm": replace(PROMISED, l2norm=True, narrow=True),
    "no beta": replace(LAYER, beta="none"),
    "no promise": replace(PROMISED, safe_beta=False, safe_keys=False, k_length=1.4),
    "negative eigenvalues": replace(LAYER, beta="neg_eigval"),
    "no state": replace(LAYER, state=False, scale=0.3),
    "grouped": replace(LAYER, H=1, HV=3, transposed=True),
    "long queries": replace(PROMISED, q_length=6e4),
}
# decays without a bound, which walk only where tests force it
SOFTPLUS = replace(LAYER, gate="softplus")
FREE = replace(PROMISED, safe_gate=False)
UNBOUNDED = {
    "softplus": SOFTPLUS,
    "softplus, packed": replace(PACKED, gate="softplus"),
    "no promise": replace(FREE, safe_beta=False, safe_keys=False),
    "no promise, weak": replace(FREE, gate="weak", narrow=True),
    "no promise, blocks": replace(FREE, gate="blocks", B=1, lengths=(63, 65, 0, 130), tail=5),
    "no promise, forget": replace(FREE, gate="forget", final=False),
    "no promise, to -30": replace(FREE, gate="steep"),
}


@pytest.fixture(autouse=True)
def walks(force, poisoned_scratch):
    """Walk for any number of heads."""
    force(walk=True)


def has_walked() -> bool:
    """Return whether the plan that was made last walks."""
    return any(f"{name}[" in last_plan() for name in ("walk_kda", "scan_walk"))


@pytest.mark.parametrize("name", CASES | UNBOUNDED)
def test_outputs_meet_their_budgets_and_runs_give_the_same_bits(name):
    case = (CASES | UNBOUNDED)[name]
    inputs = case.inputs(CUDA)
    got = forward(case, inputs)
    assert has_walked()
    assert_all_close(got, oracle(case, ()), lambda draw: twin(case, draw))
    for _ in range(5):
        assert_all_identical(forward(case, inputs), got)


@pytest.mark.parametrize("strides", ("fused", "heads_first", "every_second"))
def test_strides_that_cannot_be_copied_take_the_other_kernels(strides):
    case = replace(LAYER, strides=strides)
    got = forward(case)
    assert not has_walked()
    assert_all_close(got, oracle(case, ()), lambda draw: twin(case, draw))


@pytest.mark.parametrize("case", (LAYER, PROMISED), ids=("raw", "given"))
def test_a_sequence_depends_on_nothing_around_it(case):
    """Its bits are those of the sequence alone, of a longer one, and beside NaNs."""
    case = replace(case, B=1, lengths=(100, 200, 65), tail=30, state=False, final=True)
    x = case.inputs(CUDA)
    whole = forward(case, x)
    alone = {n: y[:, 100:300] if n in PER_TOKEN and y is not None else y for n, y in x.items()}
    alone["cu_seqlens"] = None
    one = replace(case, lengths=None, T=200, tail=0)
    want = forward(one, alone)
    assert_identical(whole["o"][:, 100:300], want["o"], "o")
    assert_identical(whole["final_state"][1], want["final_state"][0], "final_state")
    for y in (x[n] for n in PER_TOKEN):
        y[:, :100], y[:, 300:] = torch.nan, torch.nan
    beside = forward(case, x)
    assert_identical(beside["o"][:, 100:300], want["o"], "o beside NaNs")
    assert not beside["o"][:, 365:].any()
    prefix = {n: y[:, :131] if n in PER_TOKEN and y is not None else y for n, y in alone.items()}
    got = forward(replace(one, T=131), prefix)["o"]
    assert_identical(got, want["o"][:, :131], "o of a prefix")


@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("shares", (0, 2))
@pytest.mark.parametrize("null", (-1, 1))
def test_a_pool_gets_states_and_snapshots(dtype, transposed, shares, null, force):
    force(shares=shares)
    case = replace(LAYER, B=1, lengths=(70, 200, 64, 130), tail=3, H=2, HV=4, transposed=transposed)
    x = case.inputs(CUDA)
    pool = torch.randn(10 + null, 4, 128, 128, device=CUDA).to(dtype)
    slots = torch.tensor([3, -1, 0, 8], device=CUDA) + null + 1  # -1 becomes `null`
    resumed = None if null < 0 else torch.tensor([False, False, True, False], device=CUDA)
    if resumed is not None:
        pool[slots[[0, 3]]] = torch.nan
    into = torch.tensor([[1, 2, 4], [5, 6, 7], [2, -1, -1], [-1, 6, 7]], device=CUDA) + null + 1
    flags = case.flags("chunk_") | ({"null_slot": null} if null >= 0 else {})

    def prefill(walked):
        got = pool.clone()
        with torch.inference_mode(), tuning.force(walk=walked):
            o = overload("kda", "chunk_")(
                *(x[n] for n in PER_TOKEN),
                *(got, slots, into, x["A_log"], x["dt_bias"], x["cu_seqlens"], resumed),
                **flags,
            )
        assert has_walked() == walked
        return o, got

    (o, got), (want_o, want) = prefill(True), prefill(False)
    assert not o[:, 70:270].any() and not o[:, 464:].any()
    for slot in (*range(null + 1), *(null + 1 + s for s in (4, 5, 7))):
        assert_identical(got[slot], pool[slot], f"slot {slot}")
    for a, b in ((o, want_o), (got, want)):
        assert (a.double() - b.double()).norm() < 1e-2 * b.double().norm()


@pytest.mark.parametrize("case", (LAYER, PACKED), ids=("dense", "packed"))
def test_a_plan_serves_other_sizes(case):
    """The tensor descriptors are made anew for each call."""
    other = replace(case, T=330, B=3) if case.lengths is None else replace(case, tail=9)
    inputs = other.inputs(CUDA)
    forward(case)
    planned = forward(other, inputs)
    forget_plans()
    assert_all_identical(forward(other, inputs), planned)


def test_a_graph_replays_the_walk():
    inputs = PACKED.inputs(CUDA)
    want = forward(PACKED, inputs)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        got = forward(PACKED, inputs)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert_all_identical(want, got)


@pytest.mark.parametrize("B", (1, 3))
def test_the_rule_walks_where_sequences_stay_whole_for_any_batch(B, force):
    force(walk=None)
    least = tuning.processors(CUDA) // 6 + 1
    for heads, walked in ((least - 1, False), (least, True)):
        forget_plans()
        forward(replace(LAYER, B=B, H=heads, HV=heads, T=70))
        assert has_walked() == walked


@pytest.mark.parametrize(
    "name, shares",
    [*((name, n) for name in CASES for n in (2, 3)), *((name, 4) for name in UNBOUNDED)],
)
def test_two_kernels_give_the_bits_of_one(name, shares, force):
    case = (CASES | UNBOUNDED)[name]
    inputs = case.inputs(CUDA)
    want = forward(case, inputs)
    assert "walk_kda[" in last_plan()
    force(shares=shares)
    for _ in range(5):
        assert_all_identical(forward(case, inputs), want)
    assert "prepare_walk[" in last_plan() and "scan_walk[" in last_plan()


@pytest.mark.parametrize("case", (LAYER, PROMISED), ids=("raw", "given"))
def test_scans_wait_for_every_tile_on_a_busy_device(case, force):
    """Another stream takes multiprocessors away, so that `prepare_walk` begins late."""
    force(walk=None)
    case = replace(case, B=1, T=3000, H=32, HV=32)
    inputs = case.inputs(CUDA)
    got = forward(case, inputs)
    assert "scan_walk[" in last_plan()
    force(shares=0)
    want = forward(case, inputs)
    assert "walk_kda[" in last_plan()
    assert_all_identical(got, want)
    force(shares=None)
    busy, other = torch.randn(8192, 8192, device=CUDA, dtype=BF16), torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(other):
            busy @ busy
        assert_all_identical(forward(case, inputs), want)
    torch.cuda.synchronize()


def test_a_graph_replays_both_kernels(force):
    force(shares=2)
    test_a_graph_replays_the_walk()
    assert "scan_walk[" in last_plan()
