"""The helpers that judge results: they accept what is right and refuse what is not."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kda_ops.problem import Problem
from tests.support.calls import run, run_stages
from tests.support.cases import Case, cases
from tests.support.closeness import (
    DRAWS,
    assert_all_close,
    assert_all_identical,
    assert_close,
    assert_identical,
    assert_meets_budget,
    drawn,
    excess,
    oracle,
    twin,
    vanished,
)
from tests.support.shards import cut_twin

CASE = Case(B=2, T=65, H=1, HV=2, K=16, V=24, gate="softplus", beta="sigmoid", l2norm=True)
NAMES = tuple("o final_state dq dk dv dg dbeta dA_log ddt_bias dinitial_state".split())


def judged(name, change, case=CASE):
    """Judge the twin's own results with one tensor changed."""
    got = twin(case)
    got[name] = change(got[name].clone())
    assert_all_close(got, oracle(case), lambda draw: twin(case, draw=draw))


@pytest.mark.quick
def test_the_twin_meets_its_own_budget():
    judged("o", lambda x: x)


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_is_never_close(name):
    def poke(x):
        x.view(-1)[x.numel() // 2] = torch.nan
        return x

    with pytest.raises(AssertionError, match=f"^{name} is off"):
        judged(name, poke)


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_entry_is_not_close(name):
    def poke(x):
        x.view(-1)[x.numel() // 2] += 1e-3 * x.abs().max()
        return x

    with pytest.raises(AssertionError, match=f"^{name} is off"):
        judged(name, poke)


@pytest.mark.parametrize("name", NAMES)
def test_many_slightly_wrong_entries_are_not_close(name):
    with pytest.raises(AssertionError, match=f"^{name} is off"):
        judged(name, lambda x: x * 1.0005)


@pytest.mark.parametrize("name", ("dq", "dk", "dv", "dg", "dinitial_state"))
def test_a_vanished_row_of_a_gradient_is_seen_even_where_it_is_small(name):
    """A row far below the largest entry passes the budget and is still missed when it is zero."""
    ref = oracle(CASE)[name].clone()
    row = ref.flatten(0, -2)
    row[1:] *= 1e-12
    x, other = ref.float(), ref.float()
    x.flatten(0, -2)[3] = 0.0
    assert all(e <= 1.0 for e in excess(x, ref, other).values())
    assert vanished(x, ref, other) == 1
    with pytest.raises(AssertionError, match="1 rows vanish"):
        assert_close(name, x, ref, other)
    assert_close(name, other, ref, other)


def test_a_row_that_only_cancelling_sums_leave_may_vanish():
    """One draw may repeat the oracle's error by luck. A row that all draws hold must not vanish."""
    ref = torch.ones(4, 3, dtype=torch.float64)
    ref[2] = 1e-16
    x = ref.clone()
    x[2] = 0.0
    draws = [ref.clone() for _ in range(DRAWS)]
    for i, draw in enumerate(draws):
        draw[2] *= (-1) ** i
    assert vanished(x, ref, draws[0]) == 1
    assert_all_close({"dg": x}, {"dg": ref}, lambda draw: {"dg": draws[draw]})
    with pytest.raises(AssertionError, match="1 rows vanish"):
        assert_all_close({"dg": x}, {"dg": ref}, lambda draw: {"dg": ref})


def test_a_row_that_vanishes_in_the_definition_may_vanish():
    ref = torch.zeros(4, 3, dtype=torch.float64)
    assert vanished(ref.float(), ref, ref.float()) == 0
    assert_close("dq", ref.float(), ref, ref.float())


def test_noise_where_the_definition_is_exactly_zero_is_not_close():
    ref = torch.zeros(4, 3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="o is off"):
        assert_close("o", ref.float() + 1e-12, ref, ref.float())


def test_shape_dtype_and_names_must_agree():
    ref = torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="shape"):
        assert_close("o", ref.float()[:3], ref, ref.float())
    with pytest.raises(AssertionError, match="is torch.float64"):
        assert_close("o", ref, ref, ref.float())
    with pytest.raises(AssertionError):
        assert_all_close(
            {"o": ref.float()},
            {"o": ref, "dq": ref},
            lambda draw: {"o": ref.float(), "dq": ref.float()},
        )


def test_an_oracle_that_is_not_finite_is_no_oracle():
    ref = torch.full((2, 2), torch.inf, dtype=torch.float64)
    with pytest.raises(AssertionError, match="no test"):
        assert_close("o", ref.float(), ref, ref.float())


def test_an_empty_tensor_is_close():
    empty = torch.empty(0, 3, dtype=torch.float64)
    assert_close("dq", empty.float(), empty, empty.float())


def test_16_bit_inputs_get_the_budget_of_their_rounding_and_no_more():
    case = replace(CASE, dtype=torch.bfloat16)
    ref, coarse = oracle(case)["o"], twin(case)["o"]
    assert_close("o", ref.bfloat16(), ref, coarse)
    with pytest.raises(AssertionError):
        assert_close("o", (ref * 1.02).bfloat16(), ref, coarse)


def test_identical_means_every_bit():
    x = torch.tensor([1.0, 0.0])
    assert_identical(x, x.clone())
    with pytest.raises(AssertionError):
        assert_identical(x, torch.tensor([1.0, -0.0]))
    with pytest.raises(AssertionError):
        assert_identical(x, torch.nextafter(x, x + 1))
    with pytest.raises(AssertionError):
        assert_identical(x, x.double())
    with pytest.raises(AssertionError):
        assert_all_identical({"o": x}, {"o": x, "dq": x})


@pytest.mark.parametrize("op", ("chunk", "recurrent"))
@example(case=Case(B=2, T=129, K=24, dtype=torch.float64, gate="forget"), draw=2)
@given(case=cases(), draw=st.integers(1, DRAWS - 1))
def test_every_draw_of_the_twin_is_the_same_function(op, case, draw):
    """What permuting channels undoes is undone: in float64, where a rounding is 10^-16 of the terms
    of a sum, however many of them cancel.
    """
    case = replace(case, dtype=torch.float64)
    first, second = twin(case, op), twin(case, op, draw=draw)
    assert first.keys() == second.keys()
    for name, x in first.items():
        top = max(1.0, x.abs().max().item()) if x.numel() else 1.0
        torch.testing.assert_close(second[name], x, rtol=0.0, atol=1e-10 * top)


def test_16_bit_draws_are_as_exact_as_the_first_and_have_errors_of_their_own(variant):
    """All draws share what the rounding of the inputs leaves them; were they one draw, a lucky twin
    would stay the only one.
    """
    ratios, apart = [], []
    for seed in range(8):
        units = [drawn(i, torch.float32, torch.float16) for i in range(3)]
        case = replace(CASE, variant=variant, dtype=torch.float16, seed=seed, T=37, B=1)
        inputs, ref = case.inputs(), oracle(case)["dbeta"]
        problem = Problem.parse(case.rank, *inputs.values(), **case.flags())
        first, *others = (
            run_stages(unit, problem, case.cotangents())["dbeta"].double() - ref for unit in units
        )
        ratios += [(x.norm() / first.norm()).log() for x in others]
        apart += [(x - first).norm() / first.norm() for x in others]
    # The mean of 16 logarithms has a standard error of 0.10 here: 0.22 is two of them. Errors that
    # share nothing are sqrt(2) apart.
    assert torch.stack(ratios).mean().abs() < 0.22 and torch.stack(apart).min() > 0.5


def test_another_grid_keeps_what_16_bits_hold_and_rounds_once():
    draw = drawn(1, torch.float32, torch.float16)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rounded = draw._round(x)
    assert_identical(draw._round(x.half().float()), x.half().float())
    torch.testing.assert_close(draw._round(rounded), rounded, rtol=3e-7, atol=0.0)
    assert 0 < (rounded - x).abs().max()
    assert ((rounded - x).abs() <= 2.0**-11 * x.abs() + 1e-7).all()
    assert not torch.equal(rounded, x.half().float())


def test_a_right_kernel_passes_and_a_wrong_one_fails_end_to_end():
    got = assert_meets_budget(CASE)
    wrong = run(CASE, scale=1.001 * CASE.K**-0.5)
    with pytest.raises(AssertionError):
        assert_meets_budget(CASE, got=wrong)
    assert got.keys() == wrong.keys() == set(NAMES)


@pytest.mark.parametrize("lengths", [None, (65, 0, 20, 50)])
def test_a_twin_that_is_cut_at_chunks_is_the_twin(lengths):
    """Where a cut is a seam of chunks already, nothing may change."""
    case = Case(T=150, H=1, HV=2, lengths=lengths, gate="softplus", dtype=torch.float32)
    whole, cut = twin(case), cut_twin(case, (0, 65 if lengths else 64, case.rows), torch.float32)
    assert whole.keys() == cut.keys()
    for name, x in whole.items():
        torch.testing.assert_close(cut[name], x, rtol=1e-5, atol=1e-5)
    assert_all_close(cut, oracle(case), lambda draw: twin(case, draw=draw))
