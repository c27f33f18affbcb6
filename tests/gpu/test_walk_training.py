"""KDA's training as walks forward and back, on Hopper: what is kept, errors, and bits."""

import pytest
import torch

from kda_ops.backends.triton import BACKEND as TRITON
from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.stages import walk, walk_back
from kda_ops.problem import Problem
from tests.gpu.test_walk import CUDA, LAYER, PACKED, PER_TOKEN, UNBOUNDED
from tests.gpu.test_walk import PROMISED as GIVEN
from tests.support.calls import Results, forward, run
from tests.support.cases import EDGES, Case, replace
from tests.support.closeness import assert_all_identical, assert_meets_budget
from tests.support.plans import last_plan
from tests.support.walk_training import assert_kept, kept_blocks

if walk_back.KERNEL is None or not tuning.is_hopper(CUDA):
    pytest.skip("needs Hopper, and a Triton whose Gluon is known", allow_module_level=True)

KEPT = {
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
CASES = KEPT | {
    "one token": replace(LAYER, T=1),
    "logits in bf16": replace(LAYER, narrow=True),
    "given decays in bf16, norm": replace(LAYER, gate="strong", narrow=True, safe_gate=True),
    "beta 0 or 1, repeated keys": replace(GIVEN, beta=EDGES, keys="repeated", gate="weak"),
    "beta 0 or 1, packed": replace(GIVEN, B=1, beta=EDGES, lengths=(33, 65, 0, 130), tail=5),
    "beta 0 or 1, gate inside": replace(GIVEN, beta=EDGES, gate="bounded", safe_gate=False),
    "no promise": replace(GIVEN, safe_beta=False, safe_keys=False, k_length=1.4),
    "negative eigenvalues": replace(LAYER, beta="neg_eigval", transposed=True),
    "no final state": replace(LAYER, final=False, T=129),
    "grouped, given": replace(GIVEN, H=2, HV=4, T=70),
    "many chunks": replace(LAYER, T=1500, B=1),
}


@pytest.fixture(autouse=True)
def walks(force, poisoned_scratch):
    """Walk with few heads too."""
    force(walk=True)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_is_near_the_definition_and_runs_give_the_same_bits(name):
    case = KEPT[name]
    p = Problem.parse(1, *case.inputs(CUDA).values(), **case.flags())
    first, blocks = None, kept_blocks(p)
    chunks, numbers = sorted({c for c, _ in blocks}), [b for _, b in blocks]
    for _ in range(5):
        o, final_state = p.new_output(), p.new_final_state()
        AP = walk.walk_training(p, o, final_state).A
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


@pytest.mark.parametrize("shares", (0, 2, 3))
@pytest.mark.parametrize("name", KEPT)
def test_kept_states_are_those_made_again(name, shares, force):
    """Other places are unset in both, which is NaN here."""
    force(walk=True, shares=shares)
    case = replace(KEPT[name], disable_recompute=True)
    p = Problem.parse(1, *case.inputs(CUDA).values(), **case.flags())
    for _ in range(5):
        kept = walk.walk_training(p, p.new_output(), p.new_final_state())
        S, u = walk.states(p, kept.A)
        assert_all_identical({"states": kept.states, "u": kept.v_new}, {"states": S, "u": u})


def step(case: Case, **options) -> Results:
    """Return the outputs and gradients of a training step, on the CPU."""
    options.setdefault("inputs", case.inputs(CUDA))
    return {n: x.cpu() for n, x in run(case, **options).items()}


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_meets_the_error_budget(name):
    assert_meets_budget(CASES[name], got=step(CASES[name]))


@pytest.mark.parametrize("name", ("softplus", "softplus, packed", "no promise, blocks"))
def test_without_a_bound_training_has_the_bits_of_inference(name):
    """Nothing is kept, so the separate kernels recompute everything in backward."""
    case = UNBOUNDED[name]
    got = step(case)
    assert_meets_budget(case, got=got)
    want = forward(case, inputs=case.inputs(CUDA))
    assert "walk_kda[" in last_plan()
    assert_all_identical({n: got[n] for n in want}, {n: x.cpu() for n, x in want.items()})


@pytest.mark.parametrize("name", ("raw, packed", "given, strong", "many chunks"))
def test_steps_repeat_their_bits(name):
    want = step(CASES[name])
    for _ in range(10):
        assert_all_identical(step(CASES[name]), want)


@pytest.mark.parametrize("case", (LAYER, replace(GIVEN, beta=EDGES)), ids=("raw", "given"))
def test_gradients_of_a_sequence_do_not_depend_on_its_batch(case):
    """But those of A_log and dt_bias, which are sums over the batch."""
    case = replace(case, B=3)
    inputs, (do, dfinal) = case.inputs(CUDA), case.cotangents(CUDA)
    whole = step(case, inputs=inputs, cotangents=(do, dfinal))
    shared = ("A_log", "dt_bias")
    for b in range(3):
        one = {
            n: x if x is None or n in shared else x[b : b + 1].contiguous()
            for n, x in inputs.items()
        }
        alone = step(replace(case, B=1), inputs=one, cotangents=(do[b : b + 1], dfinal[b : b + 1]))
        for n, x in alone.items():
            if n[1:] not in shared:
                assert torch.equal(x, whole[n][b : b + 1]), n


def test_nan_stays_in_its_sequence_and_tokens_of_none_get_zeros():
    want, inputs, (do, dfinal) = step(PACKED), PACKED.inputs(CUDA), PACKED.cotangents(CUDA)
    end = sum(PACKED.lengths)
    bad = slice(65, 66)  # the sequence of one token
    for x in (do, *(inputs[n] for n in PER_TOKEN)):
        x[:, end:] = torch.nan
        x[:, bad] = torch.nan
    got = step(PACKED, inputs=inputs, cotangents=(do, dfinal))
    for n in PER_TOKEN:
        x, y = got["d" + n], want["d" + n]
        assert not x[:, end:].any() and not y[:, end:].any()
        assert x[:, bad].isnan().any()
        assert torch.equal(x[:, :65], y[:, :65]) and torch.equal(x[:, 66:], y[:, 66:]), n


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_that_keeps_states_has_the_same_bits(name):
    case = CASES[name]
    TRITON.forget()
    got = step(replace(case, disable_recompute=True))
    plans = [str(plan) for some in TRITON.plans.values() for plan in some]
    assert not any("states_kda[" in plan for plan in plans)
    assert_all_identical(got, step(case))


@pytest.mark.parametrize("need", (("g",), ("v",), ("beta", "initial_state"), ("A_log", "dt_bias")))
def test_some_gradients_are_those_of_all(need):
    whole = step(LAYER)
    for n, x in step(LAYER, need=need).items():
        assert torch.equal(x, whole[n]), n


STEPS = {"raw": LAYER, "raw, packed": PACKED, "given, strong": GIVEN}


@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_has_the_same_bits_for_any_strides_and_either_policy(name):
    """Also by a plan, with other tensors and lengths than those that it was made with."""
    for strides in ("contiguous", "fused", "heads_first", "every_second"):
        for T in (200, 65, 256):
            case = replace(STEPS[name], strides=strides, T=T, seed=T)
            inputs = case.inputs(CUDA)
            dense = {n: x if x is None else x.contiguous() for n, x in inputs.items()}
            want = step(case, inputs=dense)
            for keep in (False, True):
                assert_all_identical(
                    step(replace(case, disable_recompute=keep), inputs=inputs), want
                )
    plans = [str(plan) for some in TRITON.plans.values() for plan in some]
    assert all("walk_kda[" in plan for plan in plans)  # "reverse_walk_kda[" contains it too
    assert any("Copy(" in plan for plan in plans)


def test_a_gradient_of_o_may_be_expanded():
    x = LAYER.inputs(CUDA)
    do, dfinal = LAYER.cotangents(CUDA)
    ones = torch.ones((), dtype=do.dtype, device=CUDA).expand(do.shape)
    got = run(LAYER, inputs=x, cotangents=(ones, dfinal))
    assert_all_identical(got, run(LAYER, inputs=x, cotangents=(ones.contiguous(), dfinal)))
