"""Heads that forget almost everything, under the interpreter: dg and the gate's gradients."""

import pytest
import torch

from tests.support.calls import run
from tests.support.forgetting import definition, failures, forgetting

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.once
@pytest.mark.parametrize("inside", (False, True), ids=("given", "inside"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_head_that_forgets_has_its_own_gradient(variant, dtype, inside):
    case, inputs = forgetting(variant, dtype, inside, l2norm=inside)
    assert not failures(case, inputs, run(case, inputs=inputs), definition(case, inputs))


@pytest.mark.parametrize("group", (1, 2))
def test_slices_of_channels_and_grouped_heads_do_too(group):
    case, inputs = forgetting("gdn", torch.float32, True, l2norm=True, K=70, V=70, H=8 // group)
    assert not failures(case, inputs, run(case, inputs=inputs), definition(case, inputs))
