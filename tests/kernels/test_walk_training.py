"""KDA's training as walks, on the emulator of Gluon: what it keeps, the states made again of that,
and the gradients.
"""

from copy import copy
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
import torch

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.keeps import KEEPS
from kda_ops.backends.triton.plans.descriptors import fit_state, is_copied
from kda_ops.backends.triton.stages import walk
from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS
from tests.kernels import test_walk
from tests.kernels.test_walk import BF16, GIVEN, PER_TOKEN, RAW
from tests.support.calls import Results
from tests.support.cases import Case, take
from tests.support.closeness import (
    assert_all_identical,
    assert_identical,
    assert_meets_budget,
    oracle,
)
from tests.support.emulated import emulated
from tests.support.forgetting import LIMITS, definition
from tests.support.gates import assert_defined, gated, hidden
from tests.support.target import GPU
from tests.support.walk_back import trained_back
from tests.support.walk_training import assert_kept, kept_blocks

pytestmark = pytest.mark.usefixtures("poisoned_scratch")
NAMES = (
    *("weak decays", "strong decays", "no decay", "raw", "batch, raw", "no beta"),
    *("raw gate, given norm and beta", "given gate, norm and sigmoid inside", "g and beta in bf16"),
    *("packed, raw", "grouped", "no sequences", "a state with heads first"),
    "equal keys, beta 0 or 1, no decay",
)
CASES = {name: test_walk.CASES[name] for name in NAMES}
CASES["packed"] = replace(test_walk.PACKED, HV=1)
# a step walks back if it has sequences
BACK = {n: case for n, case in CASES.items() if n != "no sequences"} | {
    "logits of the gate in bf16": replace(RAW, narrow=True, T=70),
    "negative eigenvalues": replace(RAW, beta="neg_eigval", T=40),
    "no final state": replace(RAW, state=False, final=False, T=64),
}


def problem(case: Case) -> Problem:
    return Problem.parse(1, *case.inputs().values(), **case.flags())


def trained(case: Case, seed: int = 0, changed=None, change=None):
    """Return o, the final state, A' and P, states and u of a call; sources may be changed.

    States and u are made again if forward has not kept them.
    """
    p = problem(case) if change is None else change(problem(case))
    o, final_state = p.new_output(), p.new_final_state()
    with torch.no_grad(), emulated(walk, seed=seed, changed=changed):
        kept = walk.walk_training(p, o, final_state)
        S, u = kept.states, kept.v_new
        if not p.disable_recompute:
            S, u = walk.states(p, kept.A)
    return p, {"o": o, "final_state": final_state, "AP": kept.A, "states": S, "u": u}


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_and_made_again_is_near_the_definition(name):
    p, got = trained(CASES[name])
    assert_kept(p, got["AP"], got["states"], got["u"], rms=1.1)


@pytest.mark.parametrize("name", ("weak decays", "grouped"))
def test_states_made_again_are_those_of_forward(name):
    """So a training step may be cut."""
    case = replace(CASES[name], B=1, T=136)
    first = Problem.parse(1, *take(case.inputs(), 0, 128).values(), **case.flags())
    _, whole = trained(case)
    _, piece = trained(case, change=lambda _: first)
    assert_identical(whole["states"][4].mT, piece["final_state"][0].bfloat16())


@pytest.mark.bits
@pytest.mark.parametrize("shares", (0, 2))
@pytest.mark.parametrize("name", CASES)
def test_kept_states_are_those_made_again(name, shares, force):
    """Other places are unset in both, which is NaN here."""
    force(shares=shares)
    case = CASES[name]
    _, want = trained(case)
    for seed in range(1 + (name in ("strong decays", "packed, raw"))):
        _, got = trained(replace(case, disable_recompute=True), seed)
        assert got["states"] is not None and got["u"] is not None
        assert_all_identical(got, want)


@pytest.mark.bits
@pytest.mark.parametrize("name", ("strong decays", "raw", "packed, raw"))
def test_outputs_of_training_are_those_of_inference_in_every_order(name, force):
    case = CASES[name]
    p, want = trained(case)
    o, final_state = p.new_output(), p.new_final_state()
    with torch.no_grad(), emulated(walk):
        walk.walk(p, o, final_state)
    assert_all_identical(
        {"o": o, "final_state": final_state}, {n: want[n] for n in ("o", "final_state")}
    )
    blocks = kept_blocks(p)
    for seed in (1, 2):
        _, got = trained(case, seed)
        assert_all_identical(defined(got, blocks), defined(want, blocks))
    force(shares=2)  # one kernel prepares, another scans
    _, got = trained(case)
    assert_all_identical(defined(got, blocks), defined(want, blocks))


def dense(p: Problem) -> Problem:
    """Return the same call on contiguous tensors."""
    p = copy(p)
    for name in ("q", "k", "v", "g", "beta", "state"):
        x = getattr(p, name)
        setattr(p, name, None if x is None else x.contiguous())
    return p


@pytest.mark.once
@pytest.mark.bits
@pytest.mark.parametrize("strides", ("heads_first", "fused", "every_second"))
@pytest.mark.parametrize("name", ("strong decays", "batch, raw", "packed"))
def test_no_strides_change_a_bit(name, strides):
    case = replace(CASES[name], strides=strides, H=2, HV=4, T=65)
    assert any(not is_copied(problem(case), x) for x in (problem(case).q, problem(case).g))
    blocks = kept_blocks(problem(case))
    got, want = (defined(trained(case, change=f)[1], blocks) for f in (None, dense))
    assert_all_identical(got, want)


@pytest.mark.quick
def test_a_state_out_of_reach_is_copied():
    far = torch.empty(1, device="meta").as_strided((1, 64, 128, 128), (0, 0, 2**30, 1))
    assert fit_state(far).is_contiguous() and fit_state(far).shape == far.shape
    near, absent = far.contiguous(), far.new_empty(0)
    assert fit_state(near) is near and fit_state(absent) is absent and fit_state(None) is None


def defined(x: dict, blocks) -> dict:
    """Return what a call has written: chunks without a token stay as they were."""
    chunks = [c for c, _ in blocks]
    numbers = [b for _, b in blocks]
    return {
        "o": x["o"],
        "AP": x["AP"][sorted({*chunks})],
        "states": x["states"][numbers],
        "u": x["u"][numbers],
    }


@cache
def gradients(name: str) -> Results:
    """Return the gradients of a case in the usual order of partitions."""
    return trained_back(BACK[name])


@pytest.mark.xdist_group("gradients of the walk")
@pytest.mark.parametrize("name", BACK)
def test_every_gradient_meets_the_error_budget(name):
    case, got = BACK[name], dict(gradients(name))
    if "dbeta" in got:  # of a small beta: see tests/gpu/test_walk_training.py
        want = oracle(case, ("beta",))["dbeta"]
        got["dbeta"] = got["dbeta"].where(~got["dbeta"].isnan(), want.to(got["dbeta"].dtype))
    assert_meets_budget(case, got=got, only=got, target=GPU)


@pytest.mark.parametrize("T", (1, 20, 70))
def test_rows_past_the_end_do_not_decay(T):
    case = gated("kda", "bounded", BF16, T=T, HV=1, K=128, V=128)
    assert_defined(case, hidden(case), got=trained_back(case, hidden(case)))


@pytest.mark.xdist_group("gradients of the walk")
@pytest.mark.bits
@pytest.mark.parametrize("name", ("strong decays", "packed, raw", "grouped"))
def test_no_order_of_the_partitions_changes_a_bit_of_a_gradient(name):
    want = gradients(name)
    for seed in (1, 2):
        assert_all_identical(trained_back(BACK[name], seed=seed), want)


@pytest.mark.xdist_group("gradients of the walk")
@pytest.mark.bits
def test_tokens_of_no_sequence_change_no_bit_and_get_zeros():
    case = BACK["packed, raw"]
    want, inputs, (do, dfinal) = gradients("packed, raw"), case.inputs(), case.cotangents()
    end = sum(case.lengths)
    for x in (do, *(inputs[n] for n in PER_TOKEN)):
        x[:, end:] = torch.nan
    assert_all_identical(trained_back(case, inputs, (do, dfinal)), want)
    assert not any(want["d" + n][:, end:].any() for n in PER_TOKEN)


def test_dg_of_each_head_is_near_the_definition_at_every_decay_that_walks():
    """Each head is judged by its own largest dg, as `tests.support.forgetting` does."""
    strengths = torch.tensor((0.3, 1.0, 3.0, 4.5))
    case = replace(GIVEN, T=70, H=4, HV=4)
    inputs, spread = case.inputs(), torch.Generator().manual_seed(5)
    g = 0.9 + 0.2 * torch.rand(inputs["g"].shape, generator=spread)
    inputs["g"] = -g * strengths[:, None]
    got, want = trained_back(case, inputs)["dg"].double(), definition(case, inputs)["dg"]
    size = want.abs().amax((0, 1, 3))
    assert ((got - want).abs().amax((0, 1, 3)) <= LIMITS[BF16] * size).all()


@pytest.mark.quick
def test_training_asks_only_for_what_forward_and_backward_both_know(force):
    force(processors=132)

    def asks(B, T, HV):
        beta = torch.empty(B, T, HV, dtype=BF16, device="meta")
        wide = [beta.new_empty(B, HV, T, 128).transpose(1, 2) for _ in range(4)]
        flags = dict(safe_gate=True, safe_beta=True, safe_keys=True)
        return KEEPS.trains(Problem.parse(1, *wide, beta, None, None, None, None, **flags))

    assert asks(1, 256, 23) and asks(3, 0, 23) and not asks(2, 256, 22)
    force(architecture=8)
    assert not asks(1, 256, 64)


@pytest.mark.quick
@pytest.mark.parametrize(
    "B, HV, walks", ((1, 52, False), (1, 53, True), (2, 26, False), (3, 22, False))
)
def test_backward_walks_with_enough_sequences_and_heads(B, HV, walks, force):
    force(processors=132)
    x = torch.empty(B, 256, HV, 128, dtype=BF16, device="meta")
    flags = dict(safe_gate=True, safe_beta=True, safe_keys=True)
    p = Problem.parse(1, x, x, x, x, None, None, None, None, None, **flags)
    assert tuning.walks_back(p, frozenset(GRADIENTS)) == (walks and walk.KERNEL is not None)


@pytest.mark.quick
@pytest.mark.parametrize("sigmoid", (False, True))
def test_backward_walks_for_gradients_that_need_gradient_keys(sigmoid, force):
    force(processors=132)
    x = torch.empty(1, 256, 64, 128, dtype=BF16, device="meta")
    flags = dict(safe_gate=True, use_beta_sigmoid_in_kernel=sigmoid)
    p = Problem.parse(1, x, x, x, x, x[..., 0], None, None, None, None, **flags)
    for count in range(len(GRADIENTS) + 1):
        for names in combinations(GRADIENTS, count):
            need = frozenset(names)
            keys = need & {"q", "k", "g", "A_log", "dt_bias"} or "beta" in need and not sigmoid
            assert tuning.walks_back(p, need) == bool(keys and walk.KERNEL), names
