"""Mend Triton's interpreter for the tests.

It calls an unknown reduction once per element, and loses the type of a condition. Most of its time
is spent on work that these tests do not need. It replaces the functions of the language again at
each call of a device function, and derives the type and the shape of each value anew. It computes
sums, differences and products of integers twice, to find an overflow. `bfloat16` teaches it bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.core import constexpr, dtype, tensor
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

from tests.support import bfloat16

by_elements, as_numbers = ReduceOps.generic_reduce, InterpreterBuilder.create_splat
patch_again = interpreter._patch_lang
unwrap_any, numpy_type = tl.core._unwrap_if_constexpr, interpreter._get_np_dtype
form_block, form_tensor = tl.block_type.__init__, tensor.__init__
broadcast_any, equal_any = TritonSemantic.broadcast_impl_value, dtype.__eq__
agree_any = TritonSemantic.binary_op_type_checking_impl
_patched: set[ModuleType] = set()  # what launches have replaced
_blocks: dict[tuple, dict[str, Any]] = {}  # the attributes of each block type
_tensors: dict[str, tuple] = {}  # shape and number of elements by type
_shapes: dict[tuple, tuple] = {}  # the same by sizes, so that types of one shape share it
_numpy: dict[str, np.dtype] = {}
_common: dict[tuple, tuple] = {}  # types of an operator's result by those of its operands
# what an operand of a type may meet, tensors and numbers, so that the result has this type in numpy
OPERANDS: dict[str, tuple[tuple[str, ...], type]] = {
    "fp32": (("fp32",), float),
    "int32": (("int32",), int),
    "int64": (("int64", "int32"), int),
    "int1": (("int1",), bool),
}
FLOAT, INTEGERS = ("fp32",), ("int32", "int64")


def towards_zero(x: Any, y: Any) -> Any:
    """Return x // y as a GPU rounds it."""
    return (x - np.fmod(x, y)) // y


ELEMENTWISE: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "add": (np.add, FLOAT + INTEGERS),
    "sub": (np.subtract, FLOAT + INTEGERS),
    "mul": (np.multiply, FLOAT + INTEGERS),
    "truediv": (np.divide, FLOAT),
    "floordiv": (towards_zero, INTEGERS),
    "mod": (np.fmod, INTEGERS),
    "lshift": (np.left_shift, INTEGERS),
    "rshift": (np.right_shift, INTEGERS),
    "and": (np.bitwise_and, ("int1", *INTEGERS)),
    "or": (np.bitwise_or, ("int1", *INTEGERS)),
    "lt": (np.less, FLOAT + INTEGERS),
    "le": (np.less_equal, FLOAT + INTEGERS),
    "gt": (np.greater, FLOAT + INTEGERS),
    "ge": (np.greater_equal, FLOAT + INTEGERS),
    "eq": (np.equal, FLOAT + INTEGERS),
    "ne": (np.not_equal, FLOAT + INTEGERS),
}


def by_slices(self: ReduceOps, input: tuple[tensor, ...]) -> list[tensor]:
    """Replace `ReduceOps.generic_reduce`: reduce whole slices along the axis.

    The function, the operands and their order are the same, so the bits are too.
    """
    given, axis = self.unravel(input, self.axis)
    slices = [np.moveaxis(x.handle.data, axis, 0) for x in given]
    found = [x[0] for x in slices]
    for i in range(1, len(slices[0])):
        operands = [
            self.to_tensor(x, y.dtype) for x, y in zip((*found, *(s[i] for s in slices)), given * 2)
        ]
        combined = self.combine_fn.fn(*operands)
        combined = combined if isinstance(combined, tuple) else (combined,)
        found = [x.handle.data.astype(y.dtype).reshape(y.shape) for x, y in zip(combined, found)]
    if self.keep_dims:
        found = [
            np.expand_dims(x, axis if self.axis is not None else tuple(range(len(input[0].shape))))
            for x in found
        ]
    return [self.to_tensor(x, y.dtype) for x, y in zip(found, given)]


def as_they_are(self: InterpreterBuilder, type: tl.block_type, x: TensorHandle) -> TensorHandle:
    """Replace `InterpreterBuilder.create_splat`: a splat condition stays boolean.

    The original gives it the type of the compared values, and Triton 3.9 accepts only boolean
    masks.
    """
    return as_numbers(self, type, TensorHandle(x.data, tl.int1) if x.data.dtype == np.bool_ else x)


@cache
def languages_of(fn: Callable) -> set[ModuleType]:
    """Return which modules of the language a function sees."""
    return {x for x in fn.__globals__.values() if x is tl or x is tl.core}


def patch_once(fn: Callable) -> interpreter._LangPatchScope:
    """Replace `_patch_lang`: what a launch has replaced stays so in this process."""
    if not languages_of(fn) <= _patched:
        patch_again(fn)  # without its scope nothing is restored
        _patched.update(languages_of(fn))
    return interpreter._LangPatchScope()


def unwrap(x: Any) -> Any:
    """Replace `_unwrap_if_constexpr`: skip the search for types that hold no constexpr."""
    kind = type(x)
    if kind is constexpr:
        return x.value
    return x if kind in (int, dtype, tl.block_type, tensor) else unwrap_any(x)


def share_block_type(self: tl.block_type, element_ty: dtype, shape: Sequence) -> None:
    """Replace `block_type.__init__`: equal types share what was derived for the first."""
    sizes = tuple([x.value if type(x) is constexpr else x for x in shape])
    key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
    if key not in _blocks or not all(type(x) is int for x in sizes):
        form_block(self, element_ty, shape)
        _blocks[key] = dict(self.__dict__)
    self.__dict__.update(_blocks[key])


def share_shape(self: tensor, handle: TensorHandle, type: dtype) -> None:
    """Replace `tensor.__init__`: tensors of one shape share it."""
    name = type.name
    if name not in _tensors:
        form_tensor(self, handle, type)
        sizes = tuple(x.value for x in self.shape)
        _tensors[name] = _shapes.setdefault(sizes, (self.shape, self.numel))
    self.shape, self.numel = _tensors[name]
    self.handle, self.type, self.dtype = handle, type, type.scalar


def cached_numpy_type(x: dtype) -> np.dtype:
    """Replace `_get_np_dtype`: cache the result by the type's name."""
    name = x.scalar.name
    if name not in _numpy:
        _numpy[name] = numpy_type(x)
    return _numpy[name]


def broadcast(self: TritonSemantic, x: tensor, y: tensor) -> tuple[tensor, tensor]:
    """Replace `TritonSemantic.broadcast_impl_value`: operands of another shape become views."""
    if x.shape is y.shape:
        return x, y
    shape = np.broadcast(x.handle.data, y.handle.data).shape
    return spread(x, shape), spread(y, shape)


def spread(x: tensor, shape: tuple[int, ...]) -> tensor:
    """Return x as a block of this shape."""
    data = x.handle.data
    if data.shape == shape and x.shape:
        return x
    kind = tl.int1 if data.dtype == np.bool_ else x.handle.dtype
    return tensor(
        TensorHandle(np.broadcast_to(data, shape), kind), tl.block_type(x.dtype, [*shape])
    )


def agree(self: TritonSemantic, x: Any, y: Any, *rest, **options) -> tuple[tensor, tensor]:
    """Replace `binary_op_type_checking_impl`: fp32 or int32 with its like needs no promotion."""
    if type(x) is tensor and x.dtype in (tl.float32, tl.int32):
        if type(y) is (float if x.dtype is tl.float32 else int) and abs(y) < 2**31:
            return broadcast(self, x, self.scalar_constant(y, x.dtype))
        if type(y) is tensor and x.dtype is y.dtype:
            return broadcast(self, x, y)
    return agree_any(self, x, y, *rest, **options)


def equal(self: dtype, other: Any) -> bool:
    """Replace `dtype.__eq__`: most comparisons are of a type with itself."""
    return self is other or equal_any(self, other)


def call_at_once(obj: object, name: str, member: Callable, builder, scope) -> None:
    """Replace `_patch_attr`: pass keyword arguments on without copying them."""
    semantic = TritonSemantic(builder)

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    known = ELEMENTWISE.get(name.strip("_")) or ELEMENTWISE.get(name.strip("_").removeprefix("r"))
    if obj is tensor and known and name.startswith("__"):
        call = elementwise(call, *known, turned=name.strip("_") not in ELEMENTWISE)
    if obj is tensor and name == "__getitem__":
        call = indexed(call)
    scope.set_attr(obj, name, call)


def elementwise(
    general: Callable, function: Callable, kinds: tuple[str, ...], turned: bool
) -> Callable:
    """Return an operator that calls numpy for a tensor with its like or with a number.

    numpy broadcasts as Triton does.
    """
    known = {name: OPERANDS[name] for name in kinds}
    compares, adds = function(1, 2).dtype == np.bool_, function is np.add

    def call(x: tensor, y: Any, **options) -> tensor:
        kind, shape, y = x.dtype, x.shape, y.value if type(y) is constexpr else y
        moves = adds and kind.is_ptr()
        like, number = known.get("int64" if moves else kind.name, ((), None))
        if type(y) is tensor and y.dtype.name in like:
            other, shape, name = y.handle.data, shape or y.shape, y.type.name
        elif type(y) is number and abs(y) < 2**31:
            other, name = y, None
        else:
            return general(x, y, **options)
        if moves:
            step = max(1, kind.element_ty.primitive_bitwidth // 8)
            data = x.handle.data + (np.asarray(other, np.int64) * step).astype(np.uint64)
            block = tl.block_type(kind, [*data.shape]) if shape else kind
            return tensor(TensorHandle(data, kind), block)
        data = function(other, x.handle.data) if turned else function(x.handle.data, other)
        key = compares, x.type.name, name
        if key not in _common:
            scalar = tl.int1 if compares else kind
            _common[key] = scalar, tl.block_type(scalar, [*data.shape]) if shape else scalar
        scalar, block = _common[key]
        return tensor(TensorHandle(data, scalar), block)

    return call


def indexed(general: Callable) -> Callable:
    """Return `tensor.__getitem__` that lets numpy add the axes of `x[:, None]`."""

    def call(x: tensor, at: Any, **options) -> tensor:
        if not (x.shape and type(at) is tuple and all(i is None or i == slice(None) for i in at)):
            return general(x, at, **options)
        data = x.handle.data[at]
        block = tl.block_type(x.dtype, [*data.shape])
        return tensor(TensorHandle(data, x.handle.dtype), block)

    return call


def mend() -> None:
    """Reduce by slices, splat conditions as conditions, compute in bf16 as a GPU does."""
    tl.core._unwrap_if_constexpr, interpreter._get_np_dtype = unwrap, cached_numpy_type
    tl.block_type.__init__, tensor.__init__ = share_block_type, share_shape
    TritonSemantic.broadcast_impl_value, dtype.__eq__ = broadcast, equal
    TritonSemantic.binary_op_type_checking_impl = agree
    interpreter._patch_attr = call_at_once
    ReduceOps.generic_reduce, InterpreterBuilder.create_splat = by_slices, as_they_are
    interpreter._patch_lang = patch_once
    # the one test whose strides could overflow looks at what is written
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    bfloat16.teach()
