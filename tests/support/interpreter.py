"""Mend Triton's interpreter for the tests.

It calls an unknown reduction once per element, and loses the type of a condition. Half of its time
goes to work that is not needed here. It replaces the functions of the language again at each call
of a device function. It computes sums, differences and products of integers twice, to find an
overflow. `bfloat16` teaches it bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import numpy as np
import triton.language as tl
from triton.language.core import tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

from tests.support import bfloat16

by_elements, as_numbers = ReduceOps.generic_reduce, InterpreterBuilder.create_splat
patch_again, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
_patched: set[ModuleType] | None = None  # what the launch under way has replaced


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


def patch_once(fn: Callable) -> interpreter._LangPatchScope:
    """Replace `_patch_lang`: what the launch under way has replaced stays so until its end."""
    languages = {x for x in fn.__globals__.values() if x is tl or x is tl.core}
    if _patched is not None and languages and languages <= _patched:
        return interpreter._LangPatchScope()
    scope = patch_again(fn)
    if _patched is not None:
        _patched.update(languages)
    return scope


def mend() -> None:
    """Reduce by slices, splat conditions as conditions, compute in bf16 as a GPU does, be quick."""
    ReduceOps.generic_reduce, InterpreterBuilder.create_splat = by_slices, as_they_are
    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_once
    # the one test whose strides could overflow looks at what is written
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    bfloat16.teach()
