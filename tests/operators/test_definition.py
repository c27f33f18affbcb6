"""Every operator is the token recurrence, to within the budget of `tests.support.closeness`,
forward and backward.
"""

import pytest
import torch
from hypothesis import example, given

from tests.support.cases import GATES, KEYS, PACKED, STRIDES, Case, cases, replace
from tests.support.closeness import assert_meets_budget
from tests.support.target import TARGET

INSIDE = dict(gate="softplus", beta="neg_eigval", l2norm=True)
LAYOUT = dict(lengths=PACKED, tail=3, strides="fused", transposed=True)
EVERY_OPTION = Case(H=2, HV=4, **LAYOUT, **INSIDE)


@pytest.mark.parametrize("op", ("chunk", "recurrent"))
@given(case=cases())
@example(case=EVERY_OPTION)
@example(case=replace(EVERY_OPTION, variant="gdn"))
def test_operators_match_the_recurrence(op, case):
    assert_meets_budget(case, op)


@pytest.mark.parametrize("dtype", TARGET.dtypes, ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_every_gate_meets_the_same_budget(variant, gate, dtype):
    assert_meets_budget(Case(variant, T=129, gate=gate, dtype=dtype, K=24, V=16))


@pytest.mark.quick
@pytest.mark.parametrize("beta", ("none", "neg_eigval"))
@pytest.mark.parametrize("keys", KEYS)
def test_hard_keys_meet_the_budget(variant, keys, beta):
    assert_meets_budget(
        Case(variant, T=129, keys=keys, beta=beta, gate="none", dtype=TARGET.dtypes[0])
    )


@pytest.mark.quick
@pytest.mark.parametrize("strides", STRIDES)
def test_strides_do_not_matter(variant, strides):
    assert_meets_budget(
        Case(variant, B=2, T=65, H=2, HV=4, strides=strides, dtype=TARGET.dtypes[0])
    )


def test_keys_may_be_256_wide(variant):
    assert_meets_budget(
        Case(variant, T=65, HV=1, K=256, V=5, gate="softplus", l2norm=True, dtype=TARGET.dtypes[0])
    )


@pytest.mark.parametrize("K,V", ((1, 3), (3, 1), (7, 40), (33, 20)))
def test_widths_need_be_neither_equal_nor_powers_of_two(variant, K, V):
    assert_meets_budget(Case(variant, T=65, K=K, V=V, dtype=TARGET.dtypes[0]))


def test_results_keep_the_dtype_of_their_inputs():
    for dtype in TARGET.dtypes:
        got = assert_meets_budget(Case(T=37, dtype=dtype, narrow=True))
        assert got["o"].dtype is got["dq"].dtype is got["dg"].dtype is dtype
        assert got["final_state"].dtype is (
            torch.float64 if dtype is torch.float64 else torch.float32
        )
