"""Heads that forget almost everything: dg and the gate's gradients of each head by itself.

4 and 8 heads take `gradient_gdn`, 48 and more the walk on Hopper.
"""

import pytest
import torch

from tests.support import calls
from tests.support.cases import on
from tests.support.forgetting import definition, failures, forgetting

CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDE = dict(K=128, V=128)


def check(variant, dtype, inside, **sizes):
    case, inputs = forgetting(variant, dtype, inside, l2norm=inside, **sizes)
    got = calls.run(case, inputs=on(inputs, CUDA))
    assert got["dg"].is_cuda
    found = failures(case, inputs, got, definition(case, inputs))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("inside", (False, True), ids=("given", "inside"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", ("kda", "gdn"))
def test_a_head_that_forgets_has_its_own_gradient(variant, dtype, inside):
    check(variant, dtype, inside, T=200, **WIDE)


@pytest.mark.parametrize("inside", (False, True), ids=("given", "inside"))
@pytest.mark.parametrize("beta", ("given", "sigmoid"))
@pytest.mark.parametrize("group", (1, 2))
@pytest.mark.parametrize("walk", (False, True), ids=("kernels", "walk"))
def test_both_backwards_of_gdn_hold_it(walk, group, beta, inside, force):
    """The walk with 48 heads, and the kernels that it replaces; the last chunk is not full."""
    force(walk=walk)
    sizes = dict(T=200, H=48 // group, HV=48, beta=beta)
    check("gdn", torch.bfloat16, inside, **sizes, **WIDE)


@pytest.mark.parametrize("beta", ("none", "sigmoid"))
def test_the_walk_in_float16_fades_to_zero(beta):
    check("gdn", torch.float16, True, T=200, H=48, HV=48, beta=beta, **WIDE)
