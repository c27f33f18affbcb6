"""The short convolution and the gated norm on a GPU: numbers, bits, pools, CUDA graphs."""

from dataclasses import replace

import pytest
import torch

from tests.support.cases import on
from tests.support.closeness import assert_all_identical, assert_identical
from tests.support.layer_operators import CASES, Conv, NormCase, assert_meets_budget, operator, run

CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE = {
    "a layer's convolution": Conv(B=2, T=1031, D=2048, bias=False, tail=False, final=False),
    "packed": Conv(lengths=(700, 0, 1, 333, 64), behind=5, D=512),
    "columns of a projection": Conv(B=1, T=300, D=256, strides="fused"),
    "channels first": Conv(B=2, T=300, D=256, strides="first", silu=False),
    "odd channels": Conv(B=2, T=130, D=333, W=3),
    "a layer's norm": NormCase(B=2, T=515, H=16, V=128),
    "a wide norm": NormCase(B=2, T=33, H=3, V=1000, silu=True),
}
each = pytest.mark.parametrize("case", (CASES | LARGE).values(), ids=CASES | LARGE)


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_and_gradients_meet_the_error_budget(case, dtype):
    assert_meets_budget(replace(case, dtype=dtype), CUDA)


@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE)
def test_two_runs_give_the_same_bits(case):
    case = replace(case, dtype=torch.bfloat16)
    assert_all_identical(run(case, CUDA), run(case, CUDA))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_and_tokens_give_the_bits_of_the_whole(dtype):
    case = Conv(B=3, T=150, D=256, dtype=dtype)
    x = on(case.inputs(), CUDA)
    want, final = operator(case)(*x.values(), **case.flags())
    pool = torch.zeros(5, 3, 256, dtype=dtype, device=CUDA)
    slots = torch.tensor([4, 0, 2], device=CUDA)
    pool[slots] = x["initial_tail"]
    steps = [
        operator(case, "_")(part, x["weight"], x["bias"], pool, slots, activation="silu")
        for part in x["x"].split((1, 1, 100, 1, 47), 1)
    ]
    assert_identical(torch.cat(steps, 1), want, "y")
    assert_identical(pool[slots], final, "tail")
    assert not pool[[1, 3]].any()


def test_a_packed_pool_gives_the_bits_of_the_functional_operator():
    case = Conv(lengths=(1, 0, 200, 5), D=256, dtype=torch.bfloat16)
    x = on(case.inputs(), CUDA)
    want, final = operator(case)(*x.values(), **case.flags())
    pool = x["initial_tail"].clone()
    y = operator(case, "_")(
        x["x"], x["weight"], x["bias"], pool, None, x["cu_seqlens"], activation="silu"
    )
    assert_identical(y, want, "y")
    assert_identical(pool, final, "tail")


@pytest.mark.parametrize("T", (1, 150))
def test_slots_up_to_null_slot_are_nobodys(T):
    case = Conv(B=4, T=T, D=256, dtype=torch.bfloat16)
    x = on(case.inputs(), CUDA)
    pool = torch.randn(6, 3, 256, device=CUDA).to(case.dtype)
    pool[:2] = torch.nan
    got, want = pool.clone(), pool.clone()

    def step(tails, slots, **flags):
        args = x["x"], x["weight"], x["bias"], tails, torch.tensor(slots, device=CUDA)
        return operator(case, "_")(*args, **flags)

    assert_identical(step(got, [5, 1, 2, 0], null_slot=1), step(want, [5, -1, 2, -1]), "y")
    assert_identical(got[2:], want[2:], "tails")
    assert got[:2].isnan().all()


@pytest.mark.parametrize("T", (1, 2, 150))
@pytest.mark.parametrize("packed", (False, True))
def test_a_sequence_that_begins_anew_has_the_bits_of_a_zeroed_tail(T, packed):
    lengths = (T, 0, 1, 64) if packed else None
    case = Conv(B=4, T=T, lengths=lengths, D=256, dtype=torch.bfloat16)
    x = on(case.inputs(), CUDA)
    nan = torch.randn(6, 3, 256, device=CUDA).to(case.dtype)
    slots = torch.tensor([5, 1, -1, 0], device=CUDA)
    resumed = torch.tensor([False, False, False, True], device=CUDA)
    zero = nan.clone()
    nan[slots[:2]], zero[slots[:2]] = torch.nan, 0

    def step(tails, *more):
        args = x["x"], x["weight"], x["bias"], tails, slots, x["cu_seqlens"], *more
        return operator(case, "_")(*args)

    assert_identical(step(nan, resumed), step(zero), "y")
    assert_identical(nan, zero, "tails")


def test_a_captured_step_follows_its_inputs():
    case = Conv(B=4, T=1, D=256, dtype=torch.bfloat16)
    x = on(case.inputs(), CUDA)
    pool, slots = torch.zeros(4, 3, 256, dtype=case.dtype, device=CUDA), torch.arange(4).to(CUDA)

    def step():
        args = x["x"], x["weight"], x["bias"], pool, slots
        return operator(case, "_")(*args, activation="silu")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    pool.zero_()
    other = pool.clone()
    for _ in range(5):
        x["x"].normal_()
        slots.copy_(slots.flip(0))
        graph.replay()
        args = x["x"], x["weight"], x["bias"], other, slots
        assert_identical(y, operator(case, "_")(*args, activation="silu"), "y")
    assert_identical(pool, other, "tail")
