"""KDA's backward as a walk, on the emulator of Gluon: its errors, its bits, and what it needs."""

import importlib.util
import os
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs triton, without its interpreter", allow_module_level=True)

from kda_ops.backends.triton.stages import walk_back
from tests.kernels.test_walk_training import CASES, GIVEN, RAW
from tests.support import closeness
from tests.support.calls import Results
from tests.support.cases import EDGES, Case
from tests.support.closeness import assert_all_close, assert_all_identical, oracle, twin
from tests.support.emulated import source_of, without_each
from tests.support.forgetting import LIMITS, definition
from tests.support.gates import assert_defined, gated, hidden
from tests.support.target import Target
from tests.support.walk_back import trained_back

BF16 = torch.bfloat16
PER_TOKEN = ("q", "k", "v", "g", "beta")
pytestmark = pytest.mark.skipif(walk_back.KERNEL is None, reason="this triton has no known Gluon")
BACK = {n: case for n, case in CASES.items() if n != "no sequences"} | {
    "logits of the gate in bf16": replace(RAW, narrow=True, T=70),
    "negative eigenvalues": replace(RAW, beta="neg_eigval", T=40),
    "no final state": replace(RAW, state=False, final=False, T=64),
}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Let twins round as the kernels do, and fill what torch.empty gives with NaN."""
    monkeypatch.setattr(closeness, "TARGET", Target(torch.device("cuda"), (BF16,), slow=False))
    closeness._twin.cache_clear()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    closeness._twin.cache_clear()


@pytest.mark.parametrize("name", BACK)
def test_every_gradient_meets_the_error_budget(name):
    case, got = BACK[name], trained_back(BACK[name])
    need = tuple(n[1:] for n in got)
    want = oracle(case, need)
    if "dbeta" in got:  # of a small beta: see tests/gpu/test_walk_back.py
        got["dbeta"] = torch.where(got["dbeta"].isnan(), want["dbeta"], got["dbeta"]).to(
            got["dbeta"].dtype
        )

    def gradients(found: Results) -> Results:
        return {n: found[n] for n in got}

    assert_all_close(got, gradients(want), lambda i: gradients(twin(case, need=need, draw=i)))


@pytest.mark.parametrize("T", (1, 20, 70))
def test_rows_past_the_end_do_not_decay(T):
    case = gated("kda", "bounded", BF16, T=T, HV=1, K=128, V=128)
    assert_defined(case, hidden(case), got=trained_back(case, hidden(case)))


@pytest.mark.bits
@pytest.mark.parametrize("name", ("strong decays", "packed, raw", "grouped"))
def test_no_order_of_the_partitions_changes_a_bit(name):
    want = trained_back(BACK[name])
    for seed in range(1, 4):
        assert_all_identical(trained_back(BACK[name], seed=seed), want)


@pytest.mark.bits
def test_tokens_of_no_sequence_change_no_bit_and_get_zeros():
    case = BACK["packed, raw"]
    want, inputs, (do, dfinal) = trained_back(case), case.inputs(), case.cotangents()
    end = sum(case.lengths)
    for x in (do, *(inputs[n] for n in PER_TOKEN)):
        x[:, end:] = torch.nan
    assert_all_identical(trained_back(case, inputs, (do, dfinal)), want)
    assert not any(want["d" + n][:, end:].any() for n in PER_TOKEN)


# calls with several blocks, last rows, tokens of no sequence, and given beta that are small
LONG = {
    form: replace(case, lengths=(135, 5), tail=1, HV=1, H=1)
    for form, case in (("given", replace(GIVEN, beta=EDGES)), ("raw", RAW))
}
# What may be taken out without an effect, and why.
ALWAYS_NEEDLESS = {
    "reverse_walk_kda: barrier()": "`warp_specialize` begins with a barrier of all warps",
    "prepare: barrier()": "without it, Triton places its own between a store and a load",
    "carry: wait_products(2, deps=(dS,))": "it waits for nothing, and only tells ptxas so",
}
NORM = "only a norm has it"
NEEDLESS = {
    "given": ALWAYS_NEEDLESS
    | {
        "carry: on.done.wait(n - 1)": NORM,
        "walk: on.half.wait(n)": NORM,
        "walk: fence_async_shared() #2": NORM,
        "walk: barrier() #3": NORM,
        "walk: on.dots.arrive(n)": NORM,
        "walk: on.dots.wait(n)": NORM,
        "through_norm: wait_products(0, deps=(dot,))": NORM,
    },
    "raw": ALWAYS_NEEDLESS | {"prepare: on.dv.wait(n)": "only a given beta is small"},
}
CHANGED = {} if walk_back.KERNEL is None else without_each(source_of(walk_back))


@lru_cache
def unchanged(case: Case) -> Results:
    return trained_back(case)


@pytest.mark.bits
@pytest.mark.parametrize("form", LONG)
@pytest.mark.parametrize("change", CHANGED)
def test_the_walk_needs_everything_that_orders_it(change, form):
    """Or the tables above say why not."""
    case, source = LONG[form], {"reverse_walk_kda": CHANGED[change]}
    if change in NEEDLESS[form]:
        for seed in range(2):
            assert_all_identical(trained_back(case, seed=seed, changed=source), unchanged(case))
    else:
        with pytest.raises(AssertionError):
            assert_all_identical(trained_back(case, changed=source), unchanged(case))


def test_the_changes_above_are_those_of_the_kernel():
    assert len(CHANGED) > 40 and all(x.keys() <= CHANGED.keys() for x in NEEDLESS.values())


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
