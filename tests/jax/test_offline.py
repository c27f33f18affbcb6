"""The kernels compile for TPUs that are not there, and fit; needs libtpu, which CI has not."""

import pytest

pytest.importorskip("jax")

from kda_ops.jax import offline
from tests.support.fresh import python

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not offline.is_available(), reason="needs libtpu"),
]

MEGA, MIB = 10**6, 2**20
SHAPES = {
    "packed, grouped": dict(T=1024, H=4, HV=16, N=5),
    "odd widths": dict(T=1000, H=2, HV=6, K=96, V=200, N=3, l2norm=True),
    "widest": dict(T=1024, H=4, HV=4, K=256, V=256, l2norm=True, activate_gate=True),
    "wide values": dict(T=1024, H=2, HV=2, K=256, V=512),
}


def compiled(topology, variant, dtype, **shape):
    script = f"""
        import jax, jax.numpy as jnp
        jax.config.update("jax_platforms", "cpu")
        from kda_ops.jax.offline import Shape, compile_for
        for c in compile_for({topology!r}, jnp.{dtype}, Shape({variant!r}, **{shape})).values():
            print(*c.vmem, c.moved, c.temporaries)
    """
    lines = python(script, timeout=900.0).stdout.splitlines()
    return [list(map(int, line.split())) for line in lines[-2:]]


@pytest.mark.parametrize("topology", offline.TOPOLOGIES)
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_a_long_sequence_of_32_heads_fits(variant, dtype, topology):
    (vmem, _, temporaries), (*both, _, all_temporaries) = compiled(topology, variant, dtype)
    assert len(both) == 2 and max(vmem, *both) < 16 * MIB
    # inference keeps no states; training keeps them, and o, whose cotangent alone is used
    size = 2 if dtype == "bfloat16" else 4
    states, o = 32 * 8192 // 64 * 128 * 128 * size, 8192 * 32 * 128 * size
    assert temporaries <= 10 * MEGA
    assert all_temporaries <= states + o + 10 * MEGA <= 472 * MEGA


@pytest.mark.parametrize("topology", offline.TOPOLOGIES)
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("shape", SHAPES)
def test_every_form_compiles(shape, variant, dtype, topology):
    forward, training = compiled(topology, variant, dtype, **SHAPES[shape])
    assert len(forward) == 3 and len(training) == 4
    assert max(forward[0], *training[:2]) < 16 * MIB
