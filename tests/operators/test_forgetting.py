"""Heads that forget almost everything, on the CPU: the native backend and the twin."""

import pytest
import torch

from kda_ops.backends.native import BACKEND
from kda_ops.problem import Problem
from tests.support.calls import run_stages
from tests.support.forgetting import LIMITS, definition, errors, failures, forgetting, twin


@pytest.mark.parametrize("inside", (False, True), ids=("given", "inside"))
def test_a_head_that_forgets_has_its_own_gradient(variant, inside):
    case, inputs = forgetting(variant, torch.float32, inside, l2norm=inside)
    p = Problem.parse(case.rank, *inputs.values(), **case.flags())
    want = definition(case, inputs)
    assert not failures(case, inputs, run_stages(BACKEND, p, case.cotangents()), want)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_twin_leaves_no_room_for_rounding_in_the_place_of_dg(variant, dtype):
    case, inputs = forgetting(variant, dtype, False)
    found = errors(case, inputs, twin(case, inputs), definition(case, inputs))
    assert max(found.values()) < LIMITS[dtype], found
