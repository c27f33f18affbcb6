"""What mends the interpreter for these tests changes no bit of what it computes."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import ReduceOps

from tests.support import interpreter
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


def test_types_that_are_shared_are_those_that_are_derived():
    scalars = (tl.float32, tl.int1, tl.bfloat16)
    pointers = [tl.pointer_type(t, space) for t in scalars for space in (1, 3)]
    pointers += [tl.pointer_type(tl.float32, 1, const=True)]
    for _ in range(2):  # the second time all are known
        for element in (*scalars, *pointers):
            for shape in ([16], [1, 16], [16, 1], [tl.constexpr(16)]):
                derived = object.__new__(tl.block_type)
                interpreter.form_block(derived, element, shape)
                assert vars(tl.block_type(element, shape)) == vars(derived)
            got, want = map(interpreter.cached_numpy_type, (element, tl.block_type(element, [8])))
            assert got == want == interpreter.numpy_type(element)
    for x in (3, tl.constexpr(3), [tl.constexpr(3), 4], (tl.constexpr(None),), tl.float32, None):
        assert interpreter.unwrap(x) == interpreter.unwrap_any(x)


@pytest.mark.bits
def test_what_is_derived_anew_gives_the_same_bits(monkeypatch):
    x, y = (torch.randn(8, 4, generator=torch.Generator().manual_seed(n)) for n in range(2))
    found = []
    for derive in (False, True):
        if derive:
            monkeypatch.setattr(tl.block_type, "__init__", interpreter.form_block)
            monkeypatch.setattr(tl.tensor, "__init__", interpreter.form_tensor)
            monkeypatch.setattr(tl.dtype, "__eq__", interpreter.equal_any)
            monkeypatch.setattr(
                interpreter.TritonSemantic, "broadcast_impl_value", interpreter.broadcast_any
            )
        found.append(torch.empty(2, 8, 4))
        reduce_two[(1,)](x, y, found[-1], x.numel(), (8, 4), 1, True)
    assert torch.equal(*found)
