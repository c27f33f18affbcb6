"""Names, arguments, refusals, recurrences and gates are those of the torch functions."""

import inspect

import pytest
import torch

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import kda_ops
import kda_ops.jax
from kda_ops import checks
from tests.support.arrays import arrays, errors, face, run, to_jax, to_torch
from tests.support.calls import overload
from tests.support.cases import Case
from tests.support.closeness import assert_meets_budget, oracle
from tests.support.fresh import python

B, T, H, HV, K, V = 2, 5, 2, 4, 8, 6
BASE = dict(B=B, T=T, H=H, HV=HV, K=K, V=V)
PACKED = dict(q=(1, 5, 2, 8), k=(1, 5, 2, 8), v=(1, 5, 4, 6), beta=(1, 5, 4), initial_state=None)


def offsets(*values, dtype=torch.int32):
    return dict(cu_seqlens=torch.tensor(values, dtype=dtype))


# what a call changes: arguments by name (a tuple is a shape), and keywords
WRONG = {
    "q of three dimensions": dict(q=(B, T, K)),
    "k of another width": dict(k=(B, T, H, K + 1)),
    "v of other tokens": dict(v=(B, T + 1, HV, V)),
    "heads that do not divide": dict(v=(B, T, 3, V)),
    "K too wide": dict(q=(B, T, H, 300), k=(B, T, H, 300)),
    "no q": dict(q=None),
    "integers": dict(q=torch.zeros(B, T, H, K, dtype=torch.int32)),
    "two dtypes": dict(k=torch.zeros(B, T, H, K, dtype=torch.bfloat16)),
    "g of the other variant": dict(g="other"),
    "beta of another shape": dict(beta=(B, T, H)),
    "state of the other layout": dict(initial_state=(B, HV, V, K)),
    "state in bf16": dict(initial_state=torch.zeros(B, HV, K, V, dtype=torch.bfloat16)),
    "A_log without a gate": dict(A_log=(HV,)),
    "a gate without A_log": dict(use_gate_in_kernel=True),
    "a bound that promises nothing": dict(lower_bound=-5.0),
    "a bound above 0": dict(lower_bound=1.0, safe_gate=True),
    "an eigenvalue without a sigmoid": dict(allow_neg_eigval=True),
    "an infinite scale": dict(scale=float("inf")),
    "a flag in words": dict(output_final_state="yes"),
    "offsets of several rows": offsets(0, 3, 5),
    "offsets in floats": PACKED | dict(g=None, cu_seqlens=torch.tensor([0.0, 5.0])),
    "offsets that decrease": PACKED | dict(g=None) | offsets(0, 4, 2),
    "offsets past the end": PACKED | dict(g=None) | offsets(0, 6),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("op", ("chunk", "recurrent"))
def test_a_wrong_call_is_refused_in_the_same_words(variant, op, wrong):
    case, change = Case(variant, **BASE), dict(WRONG[wrong])
    if change.get("g") == "other":
        change["g"] = (B, T, HV, K) if variant == "gdn" else (B, T, HV)
    inputs = case.inputs() | {
        n: torch.zeros(x) if isinstance(x, tuple) else x for n, x in change.items()
    }
    name = f"{op}_{variant}"
    if op == "recurrent" and "safe_gate" in change:
        pytest.skip("recurrent has no safe_gate")
    with pytest.raises((TypeError, ValueError)) as ours:
        getattr(kda_ops, name)(**inputs)
    given = {n: to_jax(x) if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    with pytest.raises(ours.type) as theirs:
        getattr(kda_ops.jax, name)(**given)
    assert str(theirs.value) == str(ours.value)


def test_an_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="head_first"):
        kda_ops.jax.chunk_kda(**arrays(Case(**BASE)), head_first=True)


@pytest.mark.parametrize(
    "flag, remedy",
    (
        ("scale", "multiply o by it, or name it in static_argnames"),
        ("lower_bound", "name it in static_argnames of jax.jit, or pass a constant"),
        ("use_qk_l2norm_in_kernel", "name it in static_argnames"),
    ),
)
@pytest.mark.parametrize("op", ("chunk", "recurrent"))
def test_a_traced_flag_is_refused_by_name(op, flag, remedy):
    x, call = arrays(Case("kda", **BASE)), getattr(kda_ops.jax, f"{op}_kda")
    words = f"^{flag} must be known when the call is traced, got a traced array: {remedy}"
    with pytest.raises(TypeError, match=words):
        jax.jit(lambda value: call(**x, **{flag: value}))(1.0)


def test_a_traced_bound_of_a_gate_is_refused_by_name():
    with pytest.raises(TypeError, match="^lower_bound must be known when the call is traced"):
        jax.jit(lambda b: kda_ops.jax.gdn_gate(jnp.zeros((1, 1, 2)), None, lower_bound=b))(-5.0)


def test_invariant_bits_are_refused(variant):
    call, x = getattr(kda_ops.jax, f"chunk_{variant}"), arrays(Case(variant, **BASE))
    with pytest.raises(ValueError, match="^invariant must be False in JAX, got True"):
        call(**x, invariant=True)
    jax.eval_shape(lambda: call(**x, invariant=False))


def test_a_torch_tensor_is_refused():
    with pytest.raises(TypeError, match="q must be an array of JAX or NumPy, got torch.Tensor"):
        kda_ops.jax.chunk_kda(**Case(**BASE).inputs())


def test_values_are_checked_where_they_are_known(monkeypatch):
    given = arrays(Case(**BASE))
    given["g"] = given["g"] + 1
    monkeypatch.setattr(checks, "CHECK_VALUES", True)
    with pytest.raises(ValueError, match="g must be at most 0"):
        kda_ops.jax.recurrent_kda(**given)
    jax.jit(kda_ops.jax.recurrent_kda)(**given)  # there they are not known


@pytest.mark.parametrize("name", kda_ops.jax.__all__)
def test_a_function_has_the_arguments_of_its_namesake(name):
    def words(function):
        return [
            (p.name, p.kind, p.default)
            for p in inspect.signature(function).parameters.values()
            if p.name != "interpret"
        ]

    assert words(getattr(kda_ops.jax, name)) == words(getattr(kda_ops, name))
    doc = inspect.getdoc(getattr(kda_ops.jax, name))
    assert ">>> " in doc and "Source:" in doc


RECURRENT = {
    "plain": dict(gate="forget", T=7, B=2),
    "packed": dict(gate="softplus", beta="neg_eigval", lengths=(0, 3, 1, 0), tail=2, H=2, HV=2),
    "bf16": dict(gate="bounded", beta="sigmoid", T=5, dtype=torch.bfloat16, transposed=True),
}


@pytest.mark.once
@pytest.mark.parametrize("form", RECURRENT)
def test_the_recurrence_is_the_definition(variant, form):
    case = Case(variant, l2norm=True, **RECURRENT[form])
    assert_meets_budget(case, "recurrent", run(case, "recurrent"))


def test_the_recurrence_has_second_derivatives():
    x = arrays(Case(T=3, K=4, V=4))

    def f(v):
        return (kda_ops.jax.recurrent_kda(**x | {"v": v})[0] ** 2).sum()

    v = x["v"]
    hessian = jax.jvp(jax.grad(f), (v,), (v,))[1]  # f is quadratic in v and the state
    assert jnp.allclose(
        jax.grad(lambda v: jnp.vdot(jax.grad(f)(v), v))(v), hessian + jax.grad(f)(v), 1e-4
    )


@pytest.mark.parametrize("lower_bound", (None, -5.0))
def test_a_gate_and_its_gradients_are_those_of_torch(variant, lower_bound):
    case = Case(variant, gate="softplus", seed=1)
    inputs = [case.inputs()[n] for n in ("g", "A_log", "dt_bias")]
    inputs[0][0, :3] = torch.tensor([200.0, -200.0, 0.0]).reshape(3, *[1] * (inputs[0].dim() - 2))
    leaves = [x.double().requires_grad_() for x in inputs]
    want = overload(variant, "gate")(*leaves, lower_bound=lower_bound)
    # of one sign, so that the sums over tokens do not cancel
    d = torch.rand(want.shape, generator=torch.Generator().manual_seed(0))
    grads = torch.autograd.grad(want, leaves, d.double())
    gate = getattr(kda_ops.jax, f"{variant}_gate")
    y, pull = jax.vjp(lambda *x: gate(*x, lower_bound=lower_bound), *map(to_jax, inputs))
    names = ("y", "dg", "dA_log", "ddt_bias")
    found = dict(zip(names, map(to_torch, (y, *pull(to_jax(d))))))
    off = errors(found, dict(zip(names, (want.detach(), *grads))))
    assert max(off.values()) < 1e-6, off


def test_a_gate_that_overflows_has_finite_gradients():
    g, A_log = jnp.array([[[[1.0, -1.0]]]]), jnp.array([100.0])
    y, pull = jax.vjp(lambda *x: kda_ops.jax.kda_gate(*x, lower_bound=-5.0), g, A_log)
    assert y.flatten().tolist() == [-5.0, 0.0]
    assert all(bool((d == 0).all()) for d in pull(jnp.ones_like(y)))


@pytest.mark.nightly
def test_float64_is_computed_in_float64(variant):
    script = f"""
        import torch
        from tests.support.arrays import errors, run
        from tests.support.cases import Case
        from tests.support.closeness import oracle
        for op in ("chunk", "recurrent"):
            case = Case("{variant}", dtype=torch.float64, gate="forget", T=66, K=8, V=8)
            got = run(case, op)
            assert got["o"].dtype is got["final_state"].dtype is torch.float64
            print(max(errors(got, oracle(case)).values()) < 1e-13)
    """
    assert python(script, JAX_ENABLE_X64="1").stdout.split() == ["True", "True"]


def test_float16_runs_as_float32():
    case = Case(dtype=torch.float16, T=5, K=8, V=8)
    found, want = run(case), oracle(case)
    assert found["o"].dtype is found["dq"].dtype is torch.float16
    assert max(errors(found, want).values()) < 1e-3


def test_a_call_of_nothing_returns_nothing():
    for case in (Case(T=0, B=2), Case(lengths=(), tail=2), Case(B=0), Case(V=0)):
        o, state = face(case)(**arrays(case), output_final_state=True)
        assert o.shape == (*arrays(case)["v"].shape,) and not o.any()
        assert (state == arrays(case)["initial_state"]).all()
