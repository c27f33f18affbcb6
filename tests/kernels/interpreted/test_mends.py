"""What mends the interpreter for these tests changes no bit of what it computes."""

import os

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" or os.environ.get("KDA_OPS_CPU") != "triton":
    pytest.skip(
        "needs a process of its own: TRITON_INTERPRET=1 KDA_OPS_CPU=triton", allow_module_level=True
    )

import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import ReduceOps, TensorHandle, interpreter_builder

from tests.support.interpreter import by_elements, by_slices


@triton.jit
def mix(a, b, x, y):
    return a * 0.5 + x, tl.maximum(b, y) - a


@triton.jit
def reduce_two(x, y, out, x_numel, SHAPE: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    o = tl.arange(0, SHAPE[0])
    if len(SHAPE) == 2:
        o = o[:, None] * SHAPE[1] + tl.arange(0, SHAPE[1])[None, :]
    b_x, b_y = tl.reduce((tl.load(x + o), tl.load(y + o)), AXIS, mix, keep_dims=KEEP)
    if len(SHAPE) == 2 and not KEEP:
        b_x, b_y = tl.expand_dims(b_x, AXIS), tl.expand_dims(b_y, AXIS)
    tl.store(out + o, b_x + tl.zeros(SHAPE, b_x.dtype))
    tl.store(out + x_numel + o, b_y + tl.zeros(SHAPE, b_y.dtype))


@pytest.mark.bits
@pytest.mark.parametrize("keep", (False, True))
@pytest.mark.parametrize("shape, axis", (((8, 4), 0), ((8, 4), 1), ((8,), 0)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_slices_reduce_as_elements_do(monkeypatch, dtype, shape, axis, keep):
    gen, found = torch.Generator().manual_seed(0), []
    x, y = (torch.randn(shape, generator=gen).to(dtype) for _ in range(2))
    assert ReduceOps.generic_reduce is by_slices
    for way in (by_slices, by_elements):
        monkeypatch.setattr(ReduceOps, "generic_reduce", way)
        found.append(torch.empty(2, *shape, dtype=dtype))
        reduce_two[(1,)](x, y, found[-1], x.numel(), shape, axis, keep)
    assert torch.equal(*found)
    assert all(row.unique().numel() == x.numel() // shape[axis] for row in found[0])


def test_a_condition_for_all_of_a_tile_is_one():
    """It is the mask of a load or a store, for which Triton 3.9 takes no numbers."""
    for value in (True, False):
        # as a comparison leaves it
        found = interpreter_builder.create_splat(
            tl.block_type(tl.int1, [4]), TensorHandle(np.array([value]), tl.int32)
        )
        assert (
            found.dtype == tl.int1
            and found.data.dtype == np.bool_
            and found.data.tolist() == [value] * 4
        )
    found = interpreter_builder.create_splat(
        tl.block_type(tl.int32, [4]), TensorHandle(np.array([7], dtype=np.int32), tl.int32)
    )
    assert (
        found.dtype == tl.int32 and found.data.dtype == np.int32 and found.data.tolist() == [7] * 4
    )


@triton.jit
def twice(x):
    return tl.sum(x, 0) * 2


@triton.jit
def sum_twice(x, out):
    b_x = tl.load(x + tl.arange(0, 4))
    tl.store(out, twice(b_x) + twice(b_x) + twice(b_x))


def test_the_language_is_not_replaced_at_every_call_and_is_restored_at_the_end(monkeypatch):
    """Once for the kernel, once for what Triton's own functions see; not for each of six calls."""
    patch, seen, original = interpreter._patch_builtin, [], tl.load
    monkeypatch.setattr(
        interpreter, "_patch_builtin", lambda pkg, *args: (seen.append(pkg), patch(pkg, *args))
    )
    out = torch.zeros(1)
    for _ in range(2):
        seen.clear()
        sum_twice[(2,)](torch.arange(4.0), out)
        assert 1 <= seen.count(tl) <= 2
        assert tl.load is original and out.item() == 36
