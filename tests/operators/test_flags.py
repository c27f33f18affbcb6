"""A flag moves work into the operator, or promises something about it; it never changes what is
computed.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given

from kda_ops import functional
from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS
from tests.support.calls import as_leaves, overload, run, with_gradients
from tests.support.cases import BOUND, PACKED, Case, cases, replace
from tests.support.closeness import assert_all_identical, assert_meets_budget
from tests.support.target import TARGET

OPS = ("chunk", "recurrent")
# outside, an activated tensor of 16 bits would be rounded once more
WIDE = {"dtype": torch.float32, "narrow": False}


def activated_outside(case, inputs):
    """Compute norm, gate and sigmoid by torch before the operator."""
    x = dict(inputs)
    if case.l2norm:
        x["q"], x["k"] = (
            t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (x["q"], x["k"])
        )
    if case.gate in ("softplus", "bounded"):
        A = 1.0 if x["A_log"] is None else x["A_log"].exp().reshape(-1, *[1] * case.rank)
        z = x["g"] + x["dt_bias"].reshape(x["g"].shape[2:])
        x["g"] = -A * F.softplus(z) if case.gate == "softplus" else BOUND * torch.sigmoid(A * z)
    if case.beta in ("sigmoid", "neg_eigval"):
        x["beta"] = torch.sigmoid(x["beta"]) * (2.0 if case.beta == "neg_eigval" else 1.0)
    flags = {
        n: v
        for n, v in case.flags().items()
        if n in ("transpose_state_layout", "scale", "output_final_state")
    }
    return x | {"A_log": None, "dt_bias": None}, flags


@pytest.mark.parametrize("op", OPS)
@given(case=cases(**WIDE, safe_gate=False))
@example(
    case=Case("kda", lengths=PACKED, gate="softplus", beta="neg_eigval", l2norm=True, H=1, HV=2)
)
@example(
    case=Case("gdn", lengths=PACKED, gate="bounded", beta="sigmoid", l2norm=True, H=1, HV=2, seed=3)
)
def test_norm_gate_and_sigmoid_inside_equal_the_same_outside(op, case):
    inputs = case.inputs(TARGET.device)
    leaves = as_leaves(inputs)
    x, flags = activated_outside(case, inputs | leaves)
    o, final_state = overload(case.variant, op)(*x.values(), **flags)
    outs = {"o": o} | ({"final_state": final_state} if case.final else {})
    got = with_gradients(outs, leaves, case.cotangents(TARGET.device))
    assert_meets_budget(case, op, got)


@pytest.mark.parametrize("gate", ("weak", "strong", "bounded", "none"))
@given(case=cases(strides="contiguous", lengths=None, T=129))
def test_safe_gate_changes_no_more_than_rounding(gate, case):
    for safe in (False, True):
        assert_meets_budget(replace(case, gate=gate, safe_gate=safe))


@pytest.mark.parametrize("beta", ("given", "none", "sigmoid"))
@given(case=cases(strides="contiguous", lengths=None, T=129))
def test_promises_of_beta_and_keys_change_no_more_than_rounding(beta, case):
    for safe in (False, True):
        assert_meets_budget(replace(case, beta=beta, safe_beta=safe, safe_keys=safe))


@pytest.mark.parametrize(
    "beta, flags, bounded",
    [
        ("given", "", False),
        ("given", "safe_beta", False),
        ("given", "safe_keys", False),
        ("given", "l2norm", False),
        ("given", "safe_beta safe_keys", True),
        ("given", "safe_beta l2norm", True),
        ("none", "", False),
        ("none", "safe_beta", False),
        ("none", "safe_keys", True),
        ("none", "l2norm", True),
        ("sigmoid", "", False),
        ("sigmoid", "safe_keys", True),
        ("sigmoid", "l2norm", True),
        ("neg_eigval", "l2norm", False),
        ("neg_eigval", "safe_beta safe_keys l2norm", False),
    ],
)
def test_which_flags_bound_the_inverse(beta, flags, bounded):
    case = Case(beta=beta, **{flag: True for flag in flags.split()})
    p = Problem.parse(case.rank, *case.inputs().values(), **case.flags())
    assert p.bounded_inverse is bounded


@pytest.mark.bits
@pytest.mark.quick
@given(case=cases(disable_recompute=False))
def test_disable_recompute_changes_no_bit(case):
    assert_all_identical(run(case), run(case, disable_recompute=True))


@pytest.mark.parametrize("op", OPS)
@given(case=cases(dtype=torch.float32, H=2, HV=6))
def test_grouped_value_heads_are_expanded_key_heads_with_summed_gradients(op, case):
    inputs = case.inputs(TARGET.device)
    leaves = as_leaves(inputs)
    x = inputs | leaves | {n: leaves[n].repeat_interleave(3, 2) for n in ("q", "k")}
    o, final_state = overload(case.variant, op)(*x.values(), **case.flags(op))
    outs = {"o": o} | ({"final_state": final_state} if case.final else {})
    got = with_gradients(outs, leaves, case.cotangents(TARGET.device))
    assert_meets_budget(case, op, got)


@pytest.mark.bits
@pytest.mark.quick
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("variant", ("kda", "gdn"))
def test_the_scale_is_one_over_the_square_root_of_the_key_width_by_default(variant, op):
    case = Case(variant, T=65)
    assert_all_identical(run(case, op), run(case, op, scale=case.K**-0.5))


@pytest.mark.bits
@given(case=cases(gate="bounded"))
def test_the_bounded_gate_can_do_without_a_log(case):
    inputs = case.inputs(TARGET.device)
    zero = inputs | {"A_log": torch.zeros(case.HV, device=TARGET.device)}
    need = tuple(n for n in GRADIENTS if n != "A_log")
    assert_all_identical(
        run(case, "chunk", inputs | {"A_log": None}, need), run(case, "chunk", zero, need)
    )


@pytest.mark.bits
@pytest.mark.quick
def test_dt_bias_may_be_flat():
    case = Case(gate="softplus", T=65)
    inputs = case.inputs(TARGET.device)
    flat = inputs | {"dt_bias": inputs["dt_bias"].flatten()}
    a, b = run(case, inputs=inputs), run(case, inputs=flat)
    assert b["ddt_bias"].shape == (case.HV * case.K,)
    assert_all_identical(a | {"ddt_bias": a["ddt_bias"].flatten()}, b)


def flags_passed(module, name, monkeypatch) -> tuple[dict, dict]:
    """Call `module.name` with every flag away from its default; return them, and what is passed."""
    seen: dict[str, object] = {}

    def operator(*args, **flags):
        seen.update(flags)
        return (None, None) if name.endswith(("kda", "gdn")) else None

    function = getattr(module, name)
    keywords = {
        n: p.default
        for n, p in inspect.signature(function).parameters.items()
        if p.kind is p.KEYWORD_ONLY and n != "group"
    }
    flags = {n: not x if isinstance(x, bool) else 0.5 for n, x in keywords.items()}
    flags |= {"snapshot_every": 3} if "snapshot_every" in flags else {}
    if module is functional:
        op, _, variant = name.rstrip("_").partition("_")
        end = "_" if name.endswith("_") else ""
        monkeypatch.setattr(functional, f"_{variant}_{op}{end}".upper(), operator)
        function(*[None] * 5, *[None] * (end == "_"), **flags)
    else:
        monkeypatch.setattr(module.chunk, "run", lambda *args: operator(**args[-1]))
        function(*[None] * 5, group=None, **flags)
    return flags, seen


@pytest.mark.quick
@pytest.mark.parametrize(
    "name",
    [f"{op}_{variant}{end}" for op in OPS for variant in ("kda", "gdn") for end in ("", "_")],
)
def test_every_flag_reaches_the_operator(name, monkeypatch):
    given, seen = flags_passed(functional, name, monkeypatch)
    assert given == seen


@pytest.mark.parametrize("name", ("chunk_kda", "chunk_gdn"))
def test_every_flag_reaches_the_ranks(name, monkeypatch):
    module = pytest.importorskip("kda_ops.distributed.functional")
    given, seen = flags_passed(module, name, monkeypatch)
    assert given == seen
