"""The Pallas kernels, in interpret mode, against the float64 definition and the torch operators."""

import pytest
import torch
from hypothesis import example, given, settings

pytest.importorskip("jax")

import kda_ops.jax
from tests.support import closeness
from tests.support.arrays import arrays, errors, run, to_torch
from tests.support.cases import BETAS, GATES, KEYS, Case, cases
from tests.support.closeness import assert_meets_budget, oracle
from tests.support.target import GPU

EXACT = 2e-6  # of the largest entry of a tensor, in fp32
PARAMETERS = ("dA_log", "ddt_bias")

# two chunks and a ragged one, grouped heads; cases that differ in values only compile once
PLAIN = dict(T=131, H=1, HV=2, K=16, V=24)
VALUES = {
    "mild": dict(gate="weak"),
    "to -30": dict(gate="steep"),
    "reset": dict(gate="reset"),
    "forget": dict(gate="forget"),
    "rows of 8": dict(gate="blocks"),
    "keys alike": dict(gate="zero", keys="correlated"),
}
PACKED = dict(lengths=(0, 65, 1, 0, 64, 37, 0), tail=3, H=2, HV=4, K=24, V=16, l2norm=True)
FORMS = {
    "no gate, no beta": dict(gate="none", beta="none", keys="repeated", B=2, T=65, HV=1),
    "packed": dict(gate="softplus", beta="neg_eigval", transposed=True, **PACKED),
    "packed, bounded": dict(gate="bounded", beta="sigmoid", seed=1, **PACKED),
    "wide, scaled": dict(T=64, K=130, V=140, HV=1, scale=0.3, state=False, final=False),
}


def need(got):
    return tuple(n[1:] for n in got if n.startswith("d"))


def cancelling(case):
    """Name the gradients whose terms cancel, so that their largest entry is no measure.

    Those of gate parameters are sums over all tokens. The gradient of a decay of rank 0 is a sum
    over channels. If all keys are equal and beta is 1, a token replaces the state along the key.
    What decayed along it then has no effect, and the terms along it cancel.
    """
    overwritten = not case.rank and case.keys == "repeated" and case.beta == "none"
    return (*PARAMETERS, "dg") if overwritten else PARAMETERS


def assert_exact(case, got=None):
    """Hold a run against the definition within EXACT, and what cancels against the budget."""
    got = run(case) if got is None else got
    cancel = [n for n in cancelling(case) if n in got]
    off = errors(got, oracle(case, need(got)))
    off = {n: e for n, e in off.items() if not e <= EXACT and n not in cancel}
    assert not off, f"{off} of the largest entry"
    if cancel:
        in_budget(case, got, cancel)


@pytest.mark.xdist_group("compiled once in fp32")
@pytest.mark.parametrize("values", VALUES)
def test_outputs_and_gradients_are_those_of_the_definition(variant, values):
    assert_exact(Case(variant, **PLAIN, **VALUES[values]))


@pytest.mark.once
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_call_gives_what_the_definition_gives(variant, form):
    case = Case(variant, **FORMS[form])
    got = run(case)
    assert_exact(case, got)
    in_budget(case, got)
    if form == "packed":
        # the gradients of gate parameters do not gather the errors of tokens; they would, up to
        # 1e-5, if the suffix sum contained what a row adds to the state
        off = errors(got, oracle(case, need(got)))
        assert max(off[n] for n in PARAMETERS) <= EXACT, off


@pytest.mark.parametrize("variant", ("kda", pytest.param("gdn", marks=pytest.mark.nightly)))
def test_a_product_with_a_later_key_that_overflows_reaches_no_earlier_token(variant):
    x = arrays(Case(variant, T=61, H=1, HV=1, K=16, V=16, gate="weak", dtype=torch.float32))
    x["q"] = x["q"].at[:, 5].multiply(1e20)
    large, face = x["k"].at[:, 60].multiply(1e20), getattr(kda_ops.jax, f"chunk_{variant}")
    want, got = (to_torch(face(**(x | {"k": k}))[0]) for k in (x["k"], large))
    closeness.assert_identical(got[:, :60], want[:, :60], "o")


def in_budget(case, got=None, names=None):
    """Hold a run, or its tensors in `names`, against the budget: the kernels round operands."""
    got = run(case) if got is None else got
    assert_meets_budget(case, got=got, only=names, target=GPU)


@pytest.mark.xdist_group("compiled once in bf16")
@pytest.mark.parametrize("variant", ("kda", pytest.param("gdn", marks=pytest.mark.nightly)))
@pytest.mark.parametrize("values", VALUES)
def test_bf16_stays_within_the_budget(variant, values):
    in_budget(Case(variant, dtype=torch.bfloat16, **PLAIN, **VALUES[values]))


@pytest.mark.nightly
@settings(max_examples=100)
@given(cases(dtype=torch.float32))
@example(Case("gdn", H=0, HV=0, T=3))
@example(Case("kda", lengths=(0, 0), tail=2))
def test_any_call_stays_within_the_budget(case):
    in_budget(case)


@pytest.mark.nightly
@settings(max_examples=60)
@given(cases(dtype=torch.bfloat16))
def test_any_call_in_bf16_stays_within_the_budget(case):
    in_budget(case)


@pytest.mark.nightly
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("keys", KEYS)
def test_every_gate_and_kind_of_keys_gives_what_the_definition_gives(variant, keys, gate):
    beta = BETAS[(GATES.index(gate) + KEYS.index(keys)) % len(BETAS)]
    assert_exact(Case(variant, gate=gate, keys=keys, beta=beta, l2norm=True, **PLAIN))


@pytest.mark.nightly
def test_the_interpreter_of_a_tpus_memory_agrees(variant):
    from jax.experimental.pallas import tpu as pltpu

    case = Case(variant, lengths=(0, 65, 0, 3), H=1, HV=2, K=16, V=24, gate="forget")
    assert_exact(case, run(case, interpret=pltpu.InterpretParams()))
