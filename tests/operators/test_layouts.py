"""The layout of a state is two strides: [K, V] and [V, K] are the same call for every operator."""

import pytest
from hypothesis import example, given

from tests.support.calls import forward, run
from tests.support.cases import PACKED, Case, cases, replace
from tests.support.closeness import assert_all_identical, assert_identical
from tests.support.pools import Pool, pools
from tests.support.target import TARGET

INSIDE = dict(gate="softplus", beta="sigmoid", l2norm=True)
ACTIVATED = Case(lengths=PACKED, tail=3, H=1, HV=2, K=16, V=40, **INSIDE)


def _swapped(case):
    """Return the same call in the other layout: states and their gradients transposed."""
    other = replace(case, transposed=not case.transposed)
    inputs = case.inputs(TARGET.device)
    if inputs["initial_state"] is not None:
        inputs["initial_state"] = inputs["initial_state"].transpose(-1, -2).contiguous()
    do, dfinal_state = case.cotangents(TARGET.device)
    return other, inputs, (do, dfinal_state.transpose(-1, -2).contiguous())


def _swap_back(results):
    return {
        n: x.transpose(-1, -2) if n in ("final_state", "dinitial_state") else x
        for n, x in results.items()
    }


@pytest.mark.bits
@pytest.mark.quick
@pytest.mark.parametrize("op", ("chunk", "recurrent"))
@given(case=cases(K=24, V=40))
@example(case=ACTIVATED)
@example(case=replace(ACTIVATED, variant="gdn"))
# K == V: no shape gives a mistake away
@example(case=Case(B=2, T=65, K=16, V=16, strides="heads_first"))
def test_both_state_layouts_give_the_same_bits_in_output_state_and_every_gradient(op, case):
    other, inputs, cotangents = _swapped(case)
    assert_all_identical(run(case, op), _swap_back(run(other, op, inputs, cotangents=cotangents)))


@pytest.mark.bits
@pytest.mark.parametrize("op", ("chunk", "recurrent"))
@given(case=cases(state=True, final=True, strides="contiguous"))
def test_a_transposed_view_is_the_other_layout(op, case):
    inputs = case.inputs(TARGET.device)
    inputs["initial_state"] = (
        inputs["initial_state"].transpose(-1, -2).contiguous().transpose(-1, -2)
    )
    assert_all_identical(forward(case, op), forward(case, op, inputs))


@pytest.mark.bits
@given(pool=pools())
@example(pool=Pool(Case(T=3, B=2, K=16, V=16), op="recurrent_"))
def test_pools_of_both_layouts_hold_the_same_bits(pool):
    other = replace(pool, case=replace(pool.case, transposed=not pool.case.transposed))
    o, state = pool.run()
    o_other, state_other = other.run(state=pool.state().transpose(-1, -2).contiguous())
    assert_identical(o, o_other, "o")
    assert_identical(state, state_other.transpose(-1, -2), "state")


@pytest.mark.bits
@given(pool=pools())
def test_a_pool_may_be_a_transposed_view(pool):
    o, state = pool.run()
    o_view, state_view = pool.run(
        state=pool.state().transpose(-1, -2).contiguous().transpose(-1, -2)
    )
    assert_identical(o, o_view, "o")
    assert_identical(state, state_view, "state")
