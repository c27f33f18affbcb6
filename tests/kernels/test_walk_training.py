"""What KDA's walk keeps in training, and the states made again of it, on the emulator of Gluon."""

import importlib.util
import os
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs triton, without its interpreter", allow_module_level=True)

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.keeps import KEEPS
from kda_ops.backends.triton.plans.descriptors import fit_state, is_copied
from kda_ops.backends.triton.stages import walk
from kda_ops.problem import Problem
from tests.support.cases import EDGES, Case
from tests.support.closeness import assert_all_identical
from tests.support.emulated import emulated, source_of, without_each
from tests.support.walk_training import assert_kept, kept_blocks

BF16, FP32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.skipif(walk.STATES is None, reason="this triton has no known Gluon")
GIVEN = Case(T=97, K=128, V=128, dtype=BF16, gate="weak")
RAW = replace(GIVEN, gate="bounded", beta="sigmoid", l2norm=True, seed=1)
CASES = {
    "weak decays": GIVEN,
    "strong decays": replace(GIVEN, gate="strong", T=130),
    "no decay, no state": replace(GIVEN, gate="zero", state=False, final=False),
    "raw": RAW,
    "raw, batch, transposed": replace(RAW, B=2, T=65, transposed=True),
    "raw gate, given norm and beta": replace(GIVEN, gate="bounded"),
    "given gate, norm and sigmoid inside": replace(RAW, gate="strong"),
    "no beta": replace(GIVEN, beta="none"),
    "g and beta in bf16": replace(GIVEN, narrow=True, gate="strong"),
    "packed": replace(GIVEN, lengths=(0, 1, 31, 32, 33, 63, 64, 65, 37, 131), tail=70, HV=1, H=1),
    "packed, raw": replace(RAW, lengths=(64, 0, 33, 95), tail=3),
    "grouped": replace(RAW, H=2, HV=4, T=70),
    "no sequences": replace(GIVEN, lengths=(), tail=5),
    "heads first": replace(GIVEN, strides="heads_first", T=1),
    "equal keys, beta 0 or 1": replace(GIVEN, keys="repeated", beta=EDGES, gate="zero"),
}


@pytest.fixture(autouse=True)
def nan_in_new_tensors():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def problem(case: Case) -> Problem:
    return Problem.parse(1, *case.inputs().values(), **case.flags())


def trained(
    case: Case, seed: int = 0, forward: str | None = None, again: str | None = None, change=None
):
    """Return o, the final state, A' and P, states and u of a call; sources may be changed."""
    p = problem(case) if change is None else change(problem(case))
    o, final_state = p.new_output(), p.new_final_state()
    changed = {"walk_kda": forward, "states_kda": again}
    with torch.no_grad(), emulated(walk, seed=seed, changed=changed):
        AP = walk.walk_training(p, o, final_state)
        S, u = walk.states(p, AP)
    return p, {"o": o, "final_state": final_state, "AP": AP, "states": S, "u": u}


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_and_made_again_is_near_the_definition(name):
    p, got = trained(CASES[name])
    assert_kept(p, got["AP"], got["states"], got["u"], rms=1.1)


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
    for seed in range(1, 4):
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


@pytest.mark.bits
@pytest.mark.parametrize("strides", ("heads_first", "fused", "every_second"))
@pytest.mark.parametrize("name", ("strong decays", "raw, batch, transposed", "packed"))
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


LONG = {
    form: replace(case, lengths=(300, 5), tail=1, HV=1, H=1)
    for form, case in (("given", GIVEN), ("raw", RAW))
}
CHANGED = (
    {} if walk.STATES is None else without_each(source_of(SimpleNamespace(KERNEL=walk.STATES)))
)
# What may be taken out of `states_kda` without an effect, and why.
NEEDLESS = {
    "states_kda: barrier()": "`warp_specialize` begins with a barrier of all warps",
    "scan: wait_products(1, deps=(S,))": "it waits for nothing, and only tells ptxas so",
}
FORWARD = (
    {}
    if walk.KERNEL is None
    else {n: s for n, s in without_each(source_of(walk)).items() if n.startswith("prepare: tma.")}
)


@pytest.mark.bits
@pytest.mark.parametrize("form", LONG)
@pytest.mark.parametrize("change", CHANGED)
def test_the_states_need_everything_that_orders_them(change, form):
    """Or the table above says why not."""
    case = LONG[form]
    blocks = kept_blocks(problem(case))
    want = defined(trained(case)[1], blocks)
    if change in NEEDLESS:
        for seed in range(3):
            got = trained(case, seed, again=CHANGED[change])[1]
            assert_all_identical(defined(got, blocks), want)
    else:
        with pytest.raises(AssertionError):
            got = trained(case, again=CHANGED[change])[1]
            assert_all_identical(defined(got, blocks), want)


@pytest.mark.bits
@pytest.mark.parametrize("change", FORWARD)
def test_the_kept_tile_needs_its_waits(change):
    with pytest.raises(AssertionError):
        trained(LONG["raw"], forward=FORWARD[change])


def test_the_changes_above_are_those_of_the_kernels():
    assert len(CHANGED) > 20 and len(FORWARD) == 2 and NEEDLESS.keys() <= CHANGED.keys()


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
    assert tuning.walks_back(p) == (walks and walk.KERNEL is not None)
