"""The worst points of the map of strong decays in bf16 (`tests.support.decays`), as CPU tests."""

import pytest
import torch

import kda_ops
from tests.support.cases import FAR, Case, replace
from tests.support.closeness import assert_meets_budget
from tests.support.decays import Decays, failures
from tests.support.folding import Captured, inputs

BLOCKS = ("8 rows of 16 with 1",)


@pytest.mark.parametrize(
    "case",
    (
        Decays(T=80, laws=("1000 m^4", "-1000 with 0.9", *BLOCKS)),
        Decays(T=80, keys="correlated", laws=("8 rows of 16 with 0.5",)),
        Decays(T=80, gate="softplus", disable_recompute=True, laws=BLOCKS),
        Decays(T=80, safe=True, laws=("uniform 5",)),
    ),
    ids=str,
)
def test_the_worst_decays_meet_their_budget(case):
    """o, the final state and every gradient."""
    assert not failures(case)


@pytest.mark.parametrize("gate", ("none", "zero"))
@pytest.mark.parametrize("K", (16, 128))
@pytest.mark.parametrize("name", FAR)
def test_a_call_without_a_decay_has_the_range_of_a_decay_of_zero(name, K, gate):
    case = Case(dtype=torch.bfloat16, HV=1, T=130, K=K, V=16, gate=gate, state=False)
    assert_meets_budget(replace(case, **FAR[name]))


@pytest.mark.parametrize("rounded", (False, True))
def test_neither_a_fold_nor_a_proof_limits_queries(rounded):
    """With a bound of -5, queries of this size would overflow."""

    def attend(q, k, v, g, *_):
        decay = -5.0 * g.float().sigmoid()
        decay = decay.bfloat16() if rounded else decay
        return kda_ops.chunk_kda(2e5 * q, k, v, decay, None)[0]

    x = inputs(dtype=torch.bfloat16, grad=False)
    got, want = Captured().compile(attend)(*x.values()), attend(*x.values())
    assert want.isfinite().all() and torch.equal(got, want)
