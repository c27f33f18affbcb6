"""Calls where JAX has 64-bit numbers, in processes of their own: a fault of XLA ends a process."""

import pytest

pytest.importorskip("jax")

from tests.support.fresh import python

TABLES = """
    import jax, jax.numpy as jnp
    jax.config.update("jax_enable_x64", True)
    from kda_ops.jax.plan import BlockPlan
    from kda_ops.jax.rows import Rows

    def plan(NT, N, packed):
        sizes = 1, NT, N, 1, 1, 128, 128, 1
        return BlockPlan(*sizes, 1.0, False, "float32", "float32", packed, True)

    for dtype in (jnp.int32, jnp.int64):  # op by op, which is how XLA meets the constants
        rows = Rows(plan(4, 3, True), 70, jnp.array([0, 65, 65, 66], dtype))
        assert rows.table.tolist() == [0 << 2 | 1, 0 << 2 | 2, 2 << 2 | 3, 2 << 2 | 2]
        assert rows.row.tolist() == [*range(65), 128, *[256] * 4]
        found = rows.table, rows.token, rows.row, rows.lengths
        assert {str(x.dtype) for x in found} == {"int32"}
    assert str(Rows(plan(2, 1, False), 70, None).table.dtype) == "int32"
"""
CALL = """
    import sys, jax
    jax.config.update("jax_enable_x64", True)
    import torch
    from tests.support import calls
    from tests.support.arrays import errors, run
    from tests.support.cases import Case

    case = Case(
        sys.argv[1], lengths=(0, 65, 1), tail=3, H=1, HV=1, K=8, V=8, gate="softplus",
        dtype=getattr(torch, sys.argv[2]),
    )
    off = errors(run(case), calls.run(case))
    assert max(off.values()) < (1e-12 if sys.argv[2] == "float64" else 1e-5), off
"""


def test_the_tables_of_packed_rows_have_32_bits():
    python(TABLES)


@pytest.mark.once
@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_a_packed_call_gives_what_the_torch_operator_gives(variant, dtype):
    python(CALL, variant, dtype)
