"""What mends the interpreter for these tests changes no bit of what it computes."""

from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import ReduceOps, TensorHandle, interpreter_semantic

from tests.support import interpreter
from tests.support.interpreter import ELEMENTWISE, OPERANDS, by_elements, by_slices

KINDS = {"fp32": tl.float32, "int32": tl.int32, "int64": tl.int64, "int1": tl.int1}
NUMBERS = {"fp32": (1.5, -3.0), "int32": (3, -5), "int64": (3, -5), "int1": (True, False)}
SHAPES = ((), (1,), (4,), (8, 4), (8, 1), (1, 4), (2, 8, 4))
MEMBERS = (*(f"__{n}__" for n in ELEMENTWISE), *(f"__r{n}__" for n in ELEMENTWISE), "__getitem__")
GENERAL = {n: vars(tl.tensor)[n] for n in MEMBERS}  # before a launch replaces them


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


def operand(kind: tl.dtype, *shape: int) -> tl.tensor:
    """Return a block of numbers that are not zero, or a scalar."""
    values = np.random.default_rng(len(shape)).integers(1, 6, shape or 1)
    values = values * np.where(values % 2, 1, -1)
    values = values % 4 == 1 if kind == tl.int1 else values
    data = (values * 64).astype(np.uint64) if kind.is_ptr() else values
    handle = TensorHandle(data.astype(interpreter.numpy_type(kind)), kind)
    return tl.tensor(handle, tl.block_type(kind, [*shape]) if shape else kind)


def assert_same(got: tl.tensor, want: tl.tensor) -> None:
    assert (got.type, got.handle.data.dtype) == (want.type, want.handle.data.dtype)
    assert got.handle.data.shape == want.handle.data.shape
    assert np.array_equal(got.handle.data, want.handle.data)


def both(name: str, x: tl.tensor, y) -> tuple[tl.tensor, tl.tensor]:
    """Return what numpy and what Triton's own operator give; numpy must take the call."""

    def refuse(*args, **options):
        raise AssertionError("it is left to the general operator")

    plain = name.strip("_") in ELEMENTWISE
    known = ELEMENTWISE[name.strip("_") if plain else name.strip("_").removeprefix("r")]
    quick = interpreter.elementwise(refuse, *known, turned=not plain)
    return quick(x, y), GENERAL[name](x, y, _semantic=interpreter_semantic)


@pytest.fixture
def launched():
    """Replace the language, as a launch does."""
    reduce_two[(1,)](*torch.ones(2, 4), torch.empty(2, 4), 4, (4,), 0, True)


@pytest.mark.bits
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_operator_by_numpy_gives_what_the_general_one_gives(name, launched):
    assert all(tl.core.is_builtin(member) for member in GENERAL.values())
    for kind in ELEMENTWISE[name][1]:
        for other, (a, b) in product(OPERANDS[kind][0], product(SHAPES, SHAPES)):
            if len({*a[-1:], *b[-1:], 1}) < 3:  # they broadcast
                x, y = operand(KINDS[kind], *a), operand(KINDS[other], *b)
                assert_same(*both(f"__{name}__", x, y))
        for number, shape in product(NUMBERS[kind], SHAPES):
            if not (name.endswith("shift") and number < 0):
                x, given = operand(KINDS[kind], *shape), tl.constexpr(number)
                assert_same(*both(f"__{name}__", x, number))
                assert_same(*both(f"__{name}__", x, given))
                if not name.endswith("shift") and name not in ("lt", "le", "gt", "ge", "eq", "ne"):
                    assert_same(*both(f"__r{name}__", x, number))


@pytest.mark.bits
def test_pointers_and_new_axes_by_numpy_are_those_of_the_general_operators(launched):
    for element, (a, b) in product((tl.float16, tl.int64, tl.int1), product(SHAPES, SHAPES)):
        if len({*a[-1:], *b[-1:], 1}) < 3:
            x = operand(tl.pointer_type(element), *a)
            for kind in (tl.int32, tl.int64):
                assert_same(*both("__add__", x, operand(kind, *b)))
            assert_same(*both("__add__", x, -7))
    for at in ((slice(None), None), (None, slice(None)), (None, slice(None), None)):
        x = operand(tl.float32, 4)
        want = GENERAL["__getitem__"](x, at, _semantic=interpreter_semantic)
        assert_same(x[at], want)
