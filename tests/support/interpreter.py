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
patch_again, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
unwrap_any, numpy_type = tl.core._unwrap_if_constexpr, interpreter._get_np_dtype
form_block, form_tensor = tl.block_type.__init__, tensor.__init__
broadcast_any, equal_any = TritonSemantic.broadcast_impl_value, dtype.__eq__
agree_any = TritonSemantic.binary_op_type_checking_impl
_patched: set[ModuleType] | None = None  # what the launch under way has replaced
_blocks: dict[tuple, dict[str, Any]] = {}  # the attributes of each block type
_tensors: dict[str, tuple] = {}  # shape and number of elements by type
_shapes: dict[tuple, tuple] = {}  # the same by sizes, so that types of one shape share it
_numpy: dict[str, np.dtype] = {}


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


def launch_once(self: interpreter.GridExecutor, *args, **options) -> None:
    """Replace `GridExecutor.__call__`: note what a launch has replaced, until its end."""
    global _patched
    _patched = set()
    try:
        launch(self, *args, **options)
    finally:
        _patched = None


@cache
def languages_of(fn: Callable) -> set[ModuleType]:
    """Return which modules of the language a function sees."""
    return {x for x in fn.__globals__.values() if x is tl or x is tl.core}


def patch_once(fn: Callable) -> interpreter._LangPatchScope:
    """Replace `_patch_lang`: what the launch under way has replaced stays so until its end."""
    languages = languages_of(fn)
    if _patched is not None and languages and languages <= _patched:
        return interpreter._LangPatchScope()
    scope = patch_again(fn)
    if _patched is not None:
        _patched.update(languages)
    return scope


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
    """Replace `TritonSemantic.broadcast_impl_value`: operands that share their shape stay."""
    return (x, y) if x.shape is y.shape else broadcast_any(self, x, y)


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

    scope.set_attr(obj, name, call)


def mend() -> None:
    """Reduce by slices, splat conditions as conditions, compute in bf16 as a GPU does."""
    tl.core._unwrap_if_constexpr, interpreter._get_np_dtype = unwrap, cached_numpy_type
    tl.block_type.__init__, tensor.__init__ = share_block_type, share_shape
    TritonSemantic.broadcast_impl_value, dtype.__eq__ = broadcast, equal
    TritonSemantic.binary_op_type_checking_impl = agree
    interpreter._patch_attr = call_at_once
    ReduceOps.generic_reduce, InterpreterBuilder.create_splat = by_slices, as_they_are
    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_once
    # the one test whose strides could overflow looks at what is written
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    bfloat16.teach()
