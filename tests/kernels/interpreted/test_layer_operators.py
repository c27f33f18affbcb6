"""The kernels of the short convolution and the gated norm obey the laws of the operators."""

import pytest
import torch

from kda_ops import dispatch
from tests.operators.test_layer_operators import (  # noqa: F401  (they run here too)
    test_a_call_on_a_pool_touches_the_slots_it_names_and_nothing_else,
    test_a_gradient_of_the_final_tail_alone_is_enough,
    test_a_nan_of_a_sequence_reaches_no_other_sequence,
    test_a_sequence_has_the_same_bits_alone_and_packed,
    test_a_sequence_that_begins_anew_has_the_bits_of_a_zeroed_tail,
    test_any_subset_of_gradients_is_the_same,
    test_every_slot_up_to_null_slot_counts_as_a_negative_one,
    test_gradients_per_sample_are_those_of_each_sample,
    test_kept_rows_of_a_pool_keep_its_dtype,
    test_no_tokens_no_channels_and_no_sequences_are_calls,
    test_results_and_gradients_meet_the_error_budget,
    test_splitting_a_sequence_does_not_change_it,
    test_tokens_of_no_sequence_reach_no_gradient,
)
from tests.support.closeness import assert_all_identical
from tests.support.layer_operators import Conv, NormCase, assert_meets_budget, replace, run
from tests.support.target import TARGET

TRITON = dispatch.load("triton")
SIZES = {
    "dense": [Conv(B=B, T=T, D=8) for B, T in ((2, 9), (1, 70), (2, 70), (5, 9))],
    "packed": [Conv(lengths=n, behind=2, D=8) for n in ((3, 0, 70), (5, 6, 9), (1, 2, 3, 4))],
    "norm": [NormCase(B=B, T=T, G=2, silu=True) for B, T in ((2, 3), (1, 40), (3, 40))],
}


@pytest.mark.once
@pytest.mark.bits
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("strides", ("", "fused"))
def test_a_call_by_a_plan_of_other_sizes_gives_the_bits_of_the_stages(strides, sizes):
    TRITON.forget()
    cases, want = [replace(case, strides=strides) for case in SIZES[sizes]], {}
    for case in (*cases, *cases):
        torch.use_deterministic_algorithms(True)  # fresh memory holds NaN
        try:
            got = run(case, TARGET.device)
        finally:
            torch.use_deterministic_algorithms(False)
        if case not in want:
            saved, TRITON.plans = TRITON.plans, {}
            want[case] = run(case, TARGET.device)
            TRITON.plans = saved
        assert_all_identical(got, want[case])
    assert sum(map(len, TRITON.plans.values())) < 2 * len(cases)  # some serve several sizes


def test_more_taps_than_a_run_has_tokens():
    """A run of backward has 64 tokens, and finishes rows of its own alone."""
    case = Conv(B=2, T=70, D=3, W=67, dtype=torch.float32)
    assert_meets_budget(case, TARGET.device)
