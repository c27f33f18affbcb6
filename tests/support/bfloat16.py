"""Teach Triton's interpreter bf16, so that the CPU suite runs the bf16 path of the kernels.

The interpreter stores bf16 as uint16. It multiplies and adds those integers, and truncates where a
GPU rounds to nearest even (triton issue 11584). `teach` replaces what touches bf16, and every
product:

- an operand is widened to fp32 by its bits, and a result is rounded to nearest even;
- `tl.dot` of any float multiplies and sums in fp32, in one order on every processor (`product`);
- `tl.dot` of fp32 with "bf16x3" is three products of bf16 parts;
- `tl.exp2` flushes denormal results to zero, as ``ex2.approx.ftz.f32`` does.

Selection, loads, stores and layout operations move bits and need no change. Tensor cores accept
denormal operands of bf16, and so does this. It does not model the truncation inside their sums, the
approximate logarithm and reciprocal, or fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

TINY = np.float32(2.0**-126)  # the least normal number of fp32 and of bf16
WIDE = (tl.bfloat16, tl.float32)
FLOATS = (np.float16, np.float32)
STEP = 16  # products that one instruction of a tensor core sums


def widen(bits: np.ndarray) -> np.ndarray:
    """Return the fp32 numbers of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(x: np.ndarray) -> np.ndarray:
    """Return the bf16 bits of fp32 numbers, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).reshape(np.shape(x))
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16
    return np.where(np.isnan(x), (bits >> 16) | np.uint32(0x40), rounded).astype(np.uint16)


def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return x @ y in fp32: sums of `STEP` products, each from first to last, added in order.

    So rows and columns keep their bits in a wider tile and on another processor, which BLAS does
    not promise. einsum keeps that order for contiguous tiles of several columns.
    """
    x, y = (np.ascontiguousarray(z, np.float32) for z in (x, y))
    total = 0.0
    for k in range(0, x.shape[-1], STEP):
        total += np.einsum(
            "...ik,...kj->...ij", x[..., k : k + STEP], y[..., k : k + STEP, :], optimize=False
        )
    return total


def threefold(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return x @ y of fp32 as "bf16x3" computes it: all products of bf16 parts but the smallest."""
    x_high, y_high = widen(narrow(x)), widen(narrow(y))
    x_low, y_low = widen(narrow(x - x_high)), widen(narrow(y - y_high))
    return product(x_high, y_high) + (product(x_high, y_low) + product(x_low, y_high))


def _is_bf16(x: TensorHandle) -> bool:
    return x.dtype.scalar == tl.bfloat16


def _elementwise(original: Callable) -> Callable:
    """Wrap a method of the builder that applies a numpy function to the data of tensors."""

    def apply(self: InterpreterBuilder, *args) -> TensorHandle:
        *tensors, function = args
        if function is np.where or not any(map(_is_bf16, tensors)):
            return original(self, *args)
        found = function(*(widen(x.data) if _is_bf16(x) else x.data for x in tensors))
        if found.dtype == np.bool_:
            return TensorHandle(found, tl.int1)
        return TensorHandle(narrow(found), tl.bfloat16)

    return apply


def _cast(original: Callable) -> Callable:
    def cast(self: InterpreterBuilder, x: TensorHandle, target: tl.dtype) -> TensorHandle:
        to = target.scalar
        if tl.bfloat16 not in (x.dtype.scalar, to) or x.dtype.scalar == to:
            return original(self, x, target)
        if to == tl.bfloat16:
            return TensorHandle(narrow(x.data.astype(np.float32)), to)
        return TensorHandle(widen(x.data).astype(_get_np_dtype(to)), to)

    return cast


def _round(original: Callable) -> Callable:
    """Wrap a cast that names its rounding; towards zero the original truncates bf16 rightly."""

    def cast(self, x: TensorHandle, target: tl.dtype, rounding: ir.ROUNDING_MODE) -> TensorHandle:
        if {x.dtype.scalar, target.scalar} == set(WIDE) and rounding != ir.ROUNDING_MODE.RTZ:
            return self.cast_impl(x, target)
        return original(self, x, target, rounding)

    return cast


def _dot(original: Callable) -> Callable:
    def dot(self, a, b, d, precision, imprecise) -> TensorHandle:
        x, y, multiply = a.data, b.data, product
        if _is_bf16(a):
            x, y = widen(x), widen(y)
        elif x.dtype not in FLOATS:
            return original(self, a, b, d, precision, imprecise)
        elif precision == ir.INPUT_PRECISION.BF16x3 and x.dtype == np.float32:
            multiply = threefold
        return TensorHandle(multiply(x, y) + d.data, d.dtype.scalar)

    return dot


def _fma(original: Callable) -> Callable:
    def fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if not _is_bf16(z):
            return original(self, x, y, z)
        product = widen(x.data).astype(np.float64) * widen(y.data)
        return TensorHandle(narrow((product + widen(z.data)).astype(np.float32)), tl.bfloat16)

    return fma


def _exp2(original: Callable) -> Callable:
    def exp2(self, x: TensorHandle) -> TensorHandle:
        if x.data.dtype != np.float32:
            return original(self, x)
        found = np.exp2(x.data)
        return TensorHandle(np.where(found < TINY, np.float32(0), found), x.dtype.scalar)

    return exp2


def _constant(self: InterpreterBuilder, value: float) -> TensorHandle:
    return TensorHandle(narrow(np.array([value], np.float32)), tl.bfloat16)


CHANGES: dict[str, Callable] = {
    "binary_op": _elementwise,
    "unary_op": _elementwise,
    "ternary_op": _elementwise,
    "cast_impl": _cast,
    "create_fp_to_fp": _round,
    "create_dot": _dot,
    "create_fma": _fma,
    "create_exp2": _exp2,
}
ORIGINALS = {name: getattr(InterpreterBuilder, name) for name in CHANGES}


def teach() -> None:
    """Patch the interpreter of this process, and let `inverse.product` name "bf16x3" to it."""
    from triton.runtime.interpreter import interpreter_builder

    from kda_ops.backends.triton.device import inverse

    for name, change in CHANGES.items():
        setattr(InterpreterBuilder, name, change(ORIGINALS[name]))
    InterpreterBuilder.get_bf16 = _constant
    known = interpreter_builder.options.allowed_dot_input_precisions
    names = tuple(dict.fromkeys((*known, "bf16x3")))
    interpreter_builder.options = replace(
        interpreter_builder.options, allowed_dot_input_precisions=names
    )
    inverse.INTERPRETED = tl.constexpr(False)
