"""jit, grad, vmap, checkpoint and shard_map compose with the kernels; what cannot is refused."""

import functools

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from kda_ops.jax import chunk_gdn, chunk_kda, kernels
from kda_ops.jax.plan import BlockPlan
from tests.support.arrays import QUICK, arrays, errors, to_torch
from tests.support.cases import Case, replace

CASE = Case(T=66, H=1, HV=1, K=8, V=8, gate="softplus", l2norm=True)
LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
OPERATORS = {"kda": chunk_kda, "gdn": chunk_gdn}


def inputs(variant="kda", **more):
    case = replace(CASE, variant=variant, **more)
    return {n: x for n, x in arrays(case).items() if x is not None}


def outputs(variant, x):
    flags = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, output_final_state=True)
    return OPERATORS[variant](**x, **flags)


def loss(variant, x):
    o, state = outputs(variant, x)
    return (o**2).sum() + (state**3).sum()


def jitted(f):
    return jax.jit(f, compiler_options=QUICK)


@functools.lru_cache
def gradients(variant):
    return jitted(jax.grad(functools.partial(loss, variant)))


def close(a, b, at_most=4e-6):  # programs differ in the order of their sums
    a, b = ({n: to_torch(x) for n, x in tree.items()} for tree in (a, b))
    off = errors(a, {n: x.double() for n, x in b.items()})
    assert max(off.values()) <= at_most, off


@pytest.mark.nightly
def test_grad_is_the_slope_of_the_function(variant):
    x = inputs(variant)
    d = gradients(variant)(x)
    f = jitted(functools.partial(loss, variant))
    rng = np.random.default_rng(0)
    for name in ("v", "initial_state", "beta"):
        step = jnp.asarray(rng.standard_normal(x[name].shape), jnp.float32) * 2e-3
        rise = f(x | {name: x[name] + step}) - f(x | {name: x[name] - step})
        assert np.isclose(rise / 2, jnp.vdot(d[name], step), rtol=2e-2, atol=1e-3), name


def test_jit_gives_what_an_eager_call_gives_and_traces_once():
    traced = []

    def f(x):
        traced.append(None)
        return outputs("gdn", x)

    once = jitted(f)
    o, state = once(inputs("gdn"))
    once(inputs("gdn", seed=4))
    assert len(traced) == 1
    eager_o, eager_state = outputs("gdn", inputs("gdn"))
    close(dict(o=o, state=state), dict(o=eager_o, state=eager_state))


def test_offsets_may_change_inside_one_program():
    x = inputs("gdn", lengths=(60, 6), tail=4)
    f = jitted(functools.partial(outputs, "gdn"))
    for offsets in ([0, 60, 66], [0, 1, 70], [0, 0, 65], [0, 0, 0]):
        o, state = f(x | {"cu_seqlens": jnp.array(offsets, jnp.int32)})
        for n, (a, b) in enumerate(zip(offsets, offsets[1:])):
            if b == a:
                assert (state[n] == x["initial_state"][n]).all()
        assert not o[:, offsets[-1] :].any() and (o[:, : offsets[-1]] != 0).all()
    assert f._cache_size() == 1


@pytest.mark.parametrize("variant", ("kda", pytest.param("gdn", marks=pytest.mark.nightly)))
def test_vmap_maps_calls(variant):
    many = [inputs(variant, seed=seed) for seed in (0, 2)]
    stacked = {n: jnp.stack([x[n] for x in many]) for n in LEAVES}
    found = jitted(jax.vmap(jax.grad(functools.partial(loss, variant))))(stacked)
    for i, x in enumerate(many):
        close({n: d[i] for n, d in found.items()}, gradients(variant)(x))


@pytest.mark.nightly
def test_vmap_maps_offsets():
    x = inputs("gdn", lengths=(60, 6))
    f = jitted(jax.vmap(lambda c: outputs("gdn", x | {"cu_seqlens": c})))
    every = jnp.array([[0, 60, 66], [0, 3, 66]], jnp.int32)
    for offsets, o, state in zip(every, *f(every)):
        want = jitted(functools.partial(outputs, "gdn"))(x | {"cu_seqlens": offsets})
        close(dict(o=o, state=state), dict(zip(("o", "state"), want)))


def test_checkpoint_recomputes_the_same_gradients():
    f = jax.checkpoint(functools.partial(loss, "kda"))
    close(jitted(jax.grad(f))(inputs()), gradients("kda")(inputs()))


@pytest.mark.nightly
def test_shard_map_spreads_heads(variant):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices; JAX was started with one")
    x = inputs(variant, H=2, HV=2)
    mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
    axes = dict(q=2, k=2, v=2, g=2, beta=2, A_log=0, dt_bias=0, initial_state=1)
    specs = {n: PartitionSpec(*[None] * axes[n], "heads") for n in LEAVES}
    if x["dt_bias"].ndim == 1 and variant == "kda":
        x["dt_bias"] = x["dt_bias"].reshape(2, -1)
    spread = jax.shard_map(
        jax.grad(functools.partial(loss, variant)),
        mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False,
    )  # fmt: skip
    close(jitted(spread)(x), gradients(variant)(x))


def test_forward_mode_is_refused(variant):
    x = inputs(variant)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(functools.partial(loss, variant), (x,), (x,))


@pytest.mark.parametrize("outer", (jax.grad, jax.jacfwd))
def test_second_derivatives_are_refused(outer):
    def slope(v):
        return jax.grad(lambda v: loss("gdn", inputs("gdn") | {"v": v}))(v).sum()

    with pytest.raises(NotImplementedError, match="no second derivatives: .* recurrent_kda"):
        outer(slope)(inputs("gdn")["v"])


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
def test_backward_keeps_the_inputs_and_a_state_per_chunk(variant, dtype):
    x = {n: d.astype(dtype) if n in ("q", "k", "v") else d for n, d in inputs(variant).items()}
    _, pull = jax.eval_shape(lambda x: jax.vjp(functools.partial(outputs, variant), x), x)
    kept = sorted((d.shape, d.dtype.name) for d in jax.tree.leaves(pull))
    states = ((1, 1, 2, 128, 128), jnp.dtype(dtype).name)
    assert kept == sorted([(d.shape, d.dtype.name) for d in x.values()] + [states])


def test_products_of_the_inverse_keep_16_bits():
    plan = BlockPlan(1, 1, 1, 1, 1, 128, 128, 1, 1.0, False, "bfloat16", "float32", False, True)
    a, b = np.random.default_rng(0).standard_normal((2, 2, 64, 64)).astype(np.float32)
    dot, exact = kernels._Dot(plan), a.astype(np.float64) @ b.astype(np.float64)
    once, fine = dot(kernels._NN, a, b), dot.fine(kernels._NN, a, b)
    assert np.abs(fine - exact).max() < 2**-15 * np.abs(exact).max()
    assert np.abs(once - exact).max() > 2**-11 * np.abs(exact).max()


@pytest.mark.parametrize("heads", ((1, 1), (2, 6), (1, 8), (3, 3), (4, 16)))
@pytest.mark.parametrize("width", (128, 256, 512))
def test_heads_of_a_program_share_a_key_head_or_none(heads, width):
    H, HV = heads
    for operand in ("bfloat16", "float32"):
        plan = BlockPlan(1, 1, 1, H, HV, 128, width, 1, 1.0, False, operand, "float32", False, True)
        assert HV % plan.heads == 0
        assert plan.key_heads % H == 0
        if plan.shared:
            assert (HV // H) % plan.heads == 0
