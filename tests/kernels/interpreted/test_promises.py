"""The promises `safe_beta` and `safe_keys` under the interpreter: they choose the inverse in fp16,
and results stay within their budget up to the edges of what is promised.
"""

import pytest
import torch

from kda_ops import dispatch
from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.stages.gradient_small import SMALL
from kda_ops.backends.triton.stages.reverse_scan import reads_few, reads_z
from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS
from tests.support.calls import run
from tests.support.cases import AXES, EDGES, PACKED, Case, double, replace
from tests.support.closeness import assert_meets_budget

TRITON, REFERENCE = dispatch.load("triton"), dispatch.load("reference")
BF16, HALF = torch.bfloat16, torch.float16
SAFE = dict(safe_beta=True, safe_keys=True)
SMALL_CASE = Case(dtype=BF16, H=1, HV=1, K=16, V=16, T=70, beta=EDGES, state=False, **SAFE)


@pytest.mark.parametrize("beta", (EDGES, "none", "given"))
@pytest.mark.parametrize("keys", (AXES, "repeated", "correlated"))
@pytest.mark.parametrize("dtype", (BF16, HALF))
@pytest.mark.parametrize("variant, gate", (("kda", "zero"), ("kda", "strong"), ("gdn", "zero")))
def test_errors_at_the_edges_of_the_promises(variant, gate, dtype, keys, beta):
    case = replace(SMALL_CASE, variant=variant, gate=gate, dtype=dtype, keys=keys, beta=beta)
    assert_meets_budget(replace(case, safe_gate=gate == "strong"))


@pytest.mark.parametrize(
    "case",
    (
        replace(SMALL_CASE, gate="weak", keys="repeated", lengths=PACKED, tail=3, K=24, V=40),
        replace(SMALL_CASE, gate="blocks", keys="repeated", HV=2, state=True, transposed=True),
        replace(SMALL_CASE, gate="softplus", keys="repeated", safe_keys=False, l2norm=True),
        replace(SMALL_CASE, gate="weak", keys="repeated", disable_recompute=True, K=70, V=33),
        replace(SMALL_CASE, variant="gdn", gate="softplus", keys="repeated", H=1, HV=2, state=True),
        replace(SMALL_CASE, variant="gdn", gate="weak", keys=AXES, lengths=PACKED, tail=3, K=24),
    ),
    ids=str,
)
def test_promises_keep_the_budget_on_every_path(case):
    assert_meets_budget(case)


@pytest.mark.parametrize("keys", (AXES, "repeated", "correlated", "random"))
@pytest.mark.parametrize("beta", (EDGES, "none", "given"))
def test_the_inverse_of_promised_inputs_is_made_in_fp16(variant, beta, keys):
    """With fp16 operands the inverse errs by 9.3e-4 at most, before A is rounded to bf16."""
    case = replace(SMALL_CASE, variant=variant, beta=beta, keys=keys, gate="weak")
    inputs = case.inputs()
    exact = Problem.parse(case.rank, *double(inputs).values(), **case.flags())
    ref = REFERENCE.prepare(exact).A
    single, threefold = (
        TRITON.prepare(Problem.parse(case.rank, *inputs.values(), **x.flags())).A
        for x in (case, replace(case, safe_beta=False, safe_keys=False))
    )
    # no entry exceeds 1; scores are products of keys that KDA rounds with their decay
    rounding = 2.0**-9 + (2.0**-8 if variant == "kda" else 0.0)
    assert (single.double() - ref).abs().max().item() <= 9.3e-4 + rounding
    if keys in ("repeated", "correlated"):
        assert not torch.equal(single, threefold), "the promises have no effect"


def test_fp16_inputs_take_one_product_only_with_norm_and_sigmoid_inside():
    """With one product and a beta of 0 and 1, the state's error is 1.08 times its budget."""
    given = replace(SMALL_CASE, dtype=HALF, l2norm=True)
    for case, precision in (
        (given, "bf16x3"),
        (replace(given, beta="none"), "bf16x3"),
        (replace(given, beta="sigmoid"), "fp16"),
        (replace(given, dtype=BF16), "fp16"),
        (replace(given, dtype=torch.float32), "tf32x3"),
    ):
        p = Problem.parse(case.rank, *case.inputs().values(), **case.flags())
        assert tuning.inverse_precision(p) == precision


@pytest.mark.parametrize("l2norm", (False, True))
@pytest.mark.parametrize("need", (("beta",), GRADIENTS))
def test_a_small_strength_has_a_gradient(need, l2norm):
    """`gradient_small` computes dbeta where beta is too small to divide by."""
    values = (0.0, 1e-12, SMALL.value / 2, SMALL.value)
    case = replace(SMALL_CASE, l2norm=l2norm, lengths=(0, 65, 1, 37), tail=3, beta="given")
    inputs = case.inputs()
    for i, value in enumerate(values):
        inputs["beta"][:, i::7] = value
    got, want = (run(replace(case, safe_beta=x), inputs=inputs, need=need) for x in (True, False))
    beta, end = inputs["beta"], sum(case.lengths)
    for value in values:
        rows = beta == torch.tensor(value, dtype=beta.dtype)
        rows[:, end:] = False
        off = (got["dbeta"] - want["dbeta"])[rows].abs().max()
        assert off < 1e-2 * want["dbeta"][rows].abs().max()
    assert not got["dbeta"][:, end:].any()
    if "v" in need:
        assert not got["dv"][beta == 0.0].any()


def test_dv_is_read_in_place_of_z_where_beta_is_promised():
    for case, few in (
        (SMALL_CASE, True),
        (replace(SMALL_CASE, safe_beta=False), False),
        (replace(SMALL_CASE, beta="sigmoid"), False),
        (replace(SMALL_CASE, beta="none"), False),
        (replace(SMALL_CASE, dtype=HALF), False),
        (replace(SMALL_CASE, variant="gdn"), False),
    ):
        p = Problem.parse(case.rank, *case.inputs().values(), **case.flags())
        assert reads_few(p) is few and not (few and reads_z(p))
