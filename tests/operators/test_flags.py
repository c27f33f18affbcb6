"""A flag moves work into the operator, or promises something about it; it never changes what is
computed.
"""

import inspect

import pytest
import torch
from hypothesis import example, given

import kda_ops
from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS
from tests.support.calls import Recorded, as_leaves, operator_of, overload, run, with_gradients
from tests.support.cases import PACKED, Case, cases, replace
from tests.support.closeness import assert_all_identical, assert_meets_budget
from tests.support.gates import KINDS
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
    if case.gate in KINDS:
        A = 1.0 if x["A_log"] is None else x["A_log"].exp().reshape(-1, *[1] * case.rank)
        z = x["g"] + x["dt_bias"].reshape(x["g"].shape[2:])
        x["g"] = KINDS[case.gate](A, z)
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


def every_flag_changed(function) -> dict:
    """Return every flag of a public function, away from its default."""
    keywords = {
        n: p.default
        for n, p in inspect.signature(function).parameters.items()
        if p.kind is p.KEYWORD_ONLY and n not in ("group", "out")
    }
    others = {"snapshot_every": 3, "null_slot": 0, "activation": "silu"}
    return {n: not x if isinstance(x, bool) else others.get(n, 0.5) for n, x in keywords.items()}


class Seen(Recorded):
    """Record the operators that are called, and run none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = [a.name for a in func._schema.arguments]
        self.calls.append((func, dict(zip(names, args)) | (kwargs or {})))
        results = tuple(torch.zeros(1) for _ in func._schema.returns)
        return results if len(results) > 1 else next(iter(results), None)


# the functions without a body of their own
FORWARDED = [n for n in kda_ops.__all__ if n not in ("SAVE_OPS", "cut_length", "gated_rms_norm")]


def results_asked_for(name):
    """Return the flags that ask for a second result; in-place functions return one."""
    names = () if name.endswith("_") else inspect.signature(getattr(kda_ops, name)).parameters
    return [n for n in names if n.startswith("output_final")]


@pytest.mark.quick
@pytest.mark.parametrize("by_name", (False, True))
@pytest.mark.parametrize("name", FORWARDED)
def test_every_argument_reaches_the_operator_of_its_name(name, by_name):
    function = getattr(kda_ops, name)
    flags = every_flag_changed(function)
    tensors = {n: torch.full((1,), i) for i, n in enumerate(inspect.signature(function).parameters)}
    tensors = {n: x for n, x in tensors.items() if n not in (*flags, "out")}
    with torch.inference_mode(), Seen() as seen:
        result = function(**tensors, **flags) if by_name else function(*tensors.values(), **flags)
    [(operator, given)] = seen.calls
    assert operator is operator_of(name)
    assert given.keys() == {*tensors, *flags}
    assert all(given[n] is x for n, x in tensors.items())
    assert {n: given[n] for n in flags} == flags
    assert isinstance(result, tuple) == bool(results_asked_for(name))


@pytest.mark.quick
@pytest.mark.parametrize("name", ("chunk_kda_", "recurrent_kda_", "chunk_gdn_", "recurrent_gdn_"))
def test_out_reaches_the_overload_that_writes_it(name):
    function, out = getattr(kda_ops, name), torch.zeros(1)
    flags = every_flag_changed(function)
    names = [n for n in inspect.signature(function).parameters if n not in (*flags, "out")]
    tensors = {n: torch.zeros(1) for n in names}
    with torch.inference_mode(), Seen() as seen:
        assert function(**tensors, **flags, out=out) is out
    [(operator, given)] = seen.calls
    assert operator is operator_of(name).overloadpacket.out
    assert given["out"] is out and {n: given[n] for n in flags} == flags


@pytest.mark.quick
@pytest.mark.parametrize("name", FORWARDED)
def test_a_second_result_is_none_unless_it_is_asked_for(name):
    function = getattr(kda_ops, name)
    parameters, asked = inspect.signature(function).parameters.values(), results_asked_for(name)
    tensors = [torch.zeros(1) for p in parameters if p.kind is not p.KEYWORD_ONLY]
    with torch.inference_mode(), Seen():
        for flag in asked:
            assert function(*tensors)[1] is function(*tensors, **{flag: False})[1] is None
            assert isinstance(function(*tensors, **{flag: True})[1], torch.Tensor)


@pytest.mark.quick
@pytest.mark.parametrize("name", FORWARDED)
def test_a_call_is_bound_by_python_and_named_in_its_traceback(name):
    function = getattr(kda_ops, name)
    parameters = inspect.signature(function).parameters.values()
    tensors = [None for p in parameters if p.kind is not p.KEYWORD_ONLY]
    first_flag = next(p.default for p in parameters if p.kind is p.KEYWORD_ONLY)
    for args, words, said in (
        ((), {}, "missing [0-9] required positional arguments?"),
        (tensors, {"no_such_flag": True}, "unexpected keyword argument 'no_such_flag'"),
        ((*tensors, first_flag), {}, "takes .* positional arguments"),
    ):
        with pytest.raises(TypeError, match=rf"^{name}\(\) .*{said}") as raised:
            function(*args, **words)
        assert name in [entry.name for entry in raised.traceback]


@pytest.mark.parametrize("name", ("chunk_kda", "chunk_gdn"))
def test_every_flag_reaches_the_ranks(name, monkeypatch):
    module = pytest.importorskip("kda_ops.distributed.functional")
    seen: list[dict] = []
    monkeypatch.setattr(module.chunk, "run", lambda *args: seen.append(args[-1]))
    function = getattr(module, name)
    given = every_flag_changed(function)
    function(*[None] * 5, group=None, **given)
    assert seen == [given]
