"""What KDA's walk keeps in training, and the states made again of it, on Hopper."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kda_ops.backends.triton import BACKEND as TRITON
from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.stages import walk
from kda_ops.problem import Problem
from tests.support.calls import run
from tests.support.cases import Case, replace
from tests.support.closeness import assert_all_identical
from tests.support.plans import forget_plans
from tests.support.walk_training import assert_kept, kept_blocks

CUDA = torch.device("cuda")
if walk.STATES is None or not tuning.is_hopper(CUDA):
    pytest.skip("needs Hopper, and a Triton whose Gluon is known", allow_module_level=True)

LAYER = Case(
    dtype=torch.bfloat16,
    K=128,
    V=128,
    B=2,
    T=200,
    H=2,
    HV=2,
    gate="bounded",
    l2norm=True,
    beta="sigmoid",
)
GIVEN = replace(
    LAYER, gate="strong", beta="given", l2norm=False, safe_gate=True, safe_beta=True, safe_keys=True
)
PACKED = replace(LAYER, B=1, lengths=(0, 65, 1, 128, 37, 0, 31, 64), tail=70, H=1, HV=1)
CASES = {
    "raw": LAYER,
    "raw, whole chunks": replace(LAYER, T=256, state=False),
    "raw, transposed": replace(LAYER, transposed=True),
    "raw, grouped": replace(LAYER, H=1, HV=3),
    "raw, packed": PACKED,
    "given, strong": GIVEN,
    "given, weak": replace(GIVEN, gate="weak"),
    "given, packed": replace(GIVEN, B=1, lengths=(33, 65, 0, 130), tail=5),
    "no beta": replace(LAYER, beta="none"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_is_near_the_definition_and_runs_give_the_same_bits(name):
    case = CASES[name]
    p = Problem.parse(1, *case.inputs(CUDA).values(), **case.flags())
    first, blocks = None, kept_blocks(p)
    chunks, numbers = sorted({c for c, _ in blocks}), [b for _, b in blocks]
    torch.use_deterministic_algorithms(True)  # new tensors have NaN
    try:
        for _ in range(5):
            o, final_state = p.new_output(), p.new_final_state()
            AP = walk.walk_training(p, o, final_state)
            S, u = walk.states(p, AP)
            got = {"AP": AP[chunks], "states": S[numbers], "u": u[numbers], "o": o}
            got |= {"final_state": final_state} if case.final else {}
            if first is None:
                first = got
                assert_kept(p, AP, S, u)
            assert_all_identical(got, first)
        o, final_state = p.new_output(), p.new_final_state()
        walk.walk(p, o, final_state)
        assert_all_identical({"o": o}, {"o": first["o"]})
    finally:
        torch.use_deterministic_algorithms(False)


STEPS = {"raw": LAYER, "raw, packed": PACKED, "given, strong": GIVEN}


def step(case: Case, inputs=None) -> dict:
    """Return the outputs and gradients of a training step."""
    return run(case, inputs=case.inputs(CUDA) if inputs is None else inputs)


@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_has_the_same_bits_for_any_strides_and_either_policy(name, force):
    """Also by a plan, with other tensors and lengths than those that it was made with."""
    force(walk=True)
    forget_plans()
    for strides in ("contiguous", "fused", "heads_first", "every_second"):
        for T in (200, 65, 256):
            case = replace(STEPS[name], strides=strides, T=T, seed=T)
            inputs = case.inputs(CUDA)
            dense = {n: x if x is None else x.contiguous() for n, x in inputs.items()}
            want = step(case, dense)
            for keep in (False, True):
                assert_all_identical(step(replace(case, disable_recompute=keep), inputs), want)
    plans = [str(plan) for some in TRITON.plans.values() for plan in some]
    assert all("walk_kda[" in plan or "states_kda[" in plan for plan in plans)
    assert any("Copy(" in plan for plan in plans)
    forget_plans()


def test_a_gradient_of_o_may_be_expanded(force):
    force(walk=True)
    x = LAYER.inputs(CUDA)
    do, dfinal = LAYER.cotangents(CUDA)
    ones = torch.ones((), dtype=do.dtype, device=CUDA).expand(do.shape)
    got = run(LAYER, inputs=x, cotangents=(ones, dfinal))
    assert_all_identical(got, run(LAYER, inputs=x, cotangents=(ones.contiguous(), dfinal)))
