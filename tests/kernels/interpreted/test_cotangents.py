"""The size that incoming gradients may have: any in bf16 and fp32, a range of it in fp16."""

import pytest
import torch

import kda_ops
from kda_ops.stages import GRADIENTS
from tests.support.calls import Results, run
from tests.support.cases import Case
from tests.support.closeness import assert_all_close, oracle, twin

# Backward rounds gradients of states, values and pairs to the operands' dtype. These sizes of
# typical entries are the ones that README.md and `chunk_kda` name for fp16.
LEAST, MOST = 2.0**-8, 2.0**8
RUNS = {
    torch.float16: (("chunk", LEAST), ("chunk", MOST), ("recurrent", MOST)),
    torch.bfloat16: (("chunk", 2.0**-60), ("recurrent", 2.0**60)),
}


def scaled(case: Case, op: str, scale: float) -> Results:
    """Run a case with its incoming gradients scaled, and take the scale off its gradients."""
    do, dfinal = case.cotangents()
    found = run(case, op, cotangents=(do * scale, dfinal * scale))
    return {n: x / scale if n.startswith("d") else x for n, x in found.items()}


@pytest.mark.parametrize("dtype", RUNS)
def test_gradients_do_not_depend_on_the_scale_of_the_loss(variant, dtype):
    """The budget is that of the loss as it is. `recurrent` differs in its forward alone."""
    case = Case(variant, T=70, K=16, V=24, H=1, HV=1, dtype=dtype, gate="weak")
    for op, scale in RUNS[dtype]:
        got = scaled(case, op, scale)
        assert_all_close(got, oracle(case), lambda draw, op=op: twin(case, op, GRADIENTS, draw))


def test_beyond_its_range_float16_loses_bits_and_then_numbers():
    """As documented: where an edge moves, so must the documentation."""
    case = Case(T=70, K=16, V=24, H=1, HV=1, dtype=torch.float16, gate="weak")
    want = oracle(case)["dinitial_state"]
    small = scaled(case, "chunk", LEAST * 2**-14)["dinitial_state"]
    assert (small - want).norm() > 0.1 * want.norm()
    assert not scaled(case, "chunk", MOST * 2**10)["dinitial_state"].isfinite().all()


@pytest.mark.parametrize("strength", (0.0, 1e-3, 0.5))
def test_a_given_beta_costs_float16_no_range(strength):
    """The scores hold beta times a power of two that makes it less than one."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, 1, 16) for _ in range(3))
    beta = torch.rand(1, 64, 1)
    beta[:, 40:] = strength
    leaves = [x.half() for x in (q, torch.nn.functional.normalize(k, dim=-1), v)]
    leaves += [-0.01 * torch.rand(1, 64, 1), beta]
    leaves = [x.requires_grad_() for x in leaves]
    o, _ = kda_ops.chunk_gdn(*leaves)
    for x in torch.autograd.grad(o, leaves, 4000.0 * torch.randn_like(o)):
        assert x.isfinite().all()
