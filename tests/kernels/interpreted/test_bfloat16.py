"""The interpreter computes in bf16 as torch does, and nothing else changes."""

from itertools import product as product_of

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from tests.support.bfloat16 import STEP, narrow, product, threefold, widen

BF16 = torch.bfloat16


def patterns() -> torch.Tensor:
    """Build fp32 numbers of any bits: ties and their neighbours, denormals, infinities and NaN."""
    gen = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=gen).int()
    near = torch.tensor([0, 0x7FFF, 0x8000, 0x8001], dtype=torch.int32)
    ties = (torch.arange(2**16).int() << 16)[:, None] + near
    return torch.cat((bits, ties.flatten())).view(torch.float32)


def bits(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy().view(np.uint16)


def from_bits(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.view(np.int16)).view(BF16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether bits are equal; any NaN equals any other."""
    return bool(((a.view(torch.int16) == b.view(torch.int16)) | (a.isnan() & b.isnan())).all())


def test_rounding_is_that_of_torch():
    x = patterns()
    assert same(from_bits(narrow(x.numpy())), x.to(BF16))
    every = np.arange(2**16, dtype=np.uint16)
    assert np.array_equal(widen(every), from_bits(every).float().numpy(), equal_nan=True)
    assert narrow(np.float32(1.0)).shape == ()


@triton.jit
def combine(x, y, out, n, N: tl.constexpr):
    o = tl.arange(0, N)
    m = o < n
    b_x, b_y = tl.load(x + o, mask=m, other=1.0), tl.load(y + o, mask=m, other=1.0)
    tl.store(out + o, b_x + b_y, mask=m)
    tl.store(out + n + o, b_x * b_y, mask=m)
    tl.store(out + 2 * n + o, b_x - b_y, mask=m)
    tl.store(out + 3 * n + o, tl.where(b_x < b_y, b_x, b_y), mask=m)
    tl.store(out + 4 * n + o, tl.fma(b_x, b_y, b_x), mask=m)
    tl.store(out + 5 * n + o, (b_x.to(tl.float32) * 3.0).to(tl.bfloat16), mask=m)
    tl.store(out + 6 * n + o, tl.abs(-b_x) + tl.full((N,), 1.5, tl.bfloat16), mask=m)
    tl.store(out + 7 * n + o, b_x.to(tl.float16).to(tl.bfloat16), mask=m)


def test_arithmetic_rounds_once_and_selection_moves_bits():
    n = 4000
    x, y = (patterns()[i * n : (i + 1) * n].to(BF16) for i in range(2))
    out = torch.empty(8, n, dtype=BF16)
    combine[(1,)](x, y, out, n, triton.next_power_of_2(n))
    fused = (x.double() * y.double() + x.double()).float()
    selected, widened = torch.where(x < y, x, y), x.float() * 3
    want = x + y, x * y, x - y, selected, fused, widened, x.abs() + 1.5, x.half()
    for i, expected in enumerate(want):
        assert same(out[i], expected.to(BF16)), i


@triton.jit
def multiply(x, y, out, N: tl.constexpr, PREC: tl.constexpr):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + o, tl.dot(tl.load(x + o), tl.load(y + o), input_precision=PREC))


def pair(dtype: torch.dtype) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    return [torch.randn(32, 32, generator=gen).to(dtype) for _ in range(2)]


@pytest.mark.bits
@pytest.mark.parametrize(
    "dtype, precision, least, most",
    (
        (BF16, "tf32", 0.0, 1e-6),
        (torch.float16, "tf32", 0.0, 1e-6),
        (torch.float32, "tf32x3", 0.0, 1e-6),
        (torch.float32, "bf16x3", 1e-6, 2e-5),
    ),
)
def test_products(dtype, precision, least, most):
    """Operands of 16 bits multiply exactly; threefold products keep 16 of 24 bits."""
    x, y = pair(dtype)
    out = torch.empty(32, 32)
    multiply[(1,)](x, y, out, 32, precision)
    want = x.double() @ y.double()
    error = ((out - want).norm() / want.norm()).item()
    assert least <= error < most
    by = threefold if precision == "bf16x3" else product
    assert np.array_equal(out.numpy(), by(x.float().numpy(), y.float().numpy()))


@pytest.mark.bits
@pytest.mark.parametrize("K", (1, 16, 33, 128))
def test_a_product_is_summed_in_one_order_whatever_the_shapes(K):
    """So its bits depend on no other row or column, nor on the processor."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((2, 64, 128), np.float32)[..., :K] for _ in range(2))
    want = np.zeros((2, 64, 64), np.float32)
    for first in range(0, K, STEP):
        part = np.zeros_like(want)
        for k in range(first, min(first + STEP, K)):
            part += x[..., k : k + 1] * y[:, None, :, k]
        want += part
    for batch in (slice(0, 2), slice(0, 1), 0):  # in three dimensions and in two
        for rows, columns in product_of((64, 16, 1), (64, 32, 16, 2)):
            found = product(x[batch, ..., :rows, :], y[batch, ..., :columns, :].swapaxes(-1, -2))
            assert np.array_equal(found, want[batch, ..., :rows, :columns])


def test_powers_below_the_normal_numbers_are_zero():
    given = np.array([-125.5, -126.0, -126.01, -140.0, -np.inf, 0.0, np.inf, np.nan], np.float32)
    found = interpreter_builder.create_exp2(TensorHandle(given, tl.float32)).data
    want = np.exp2(given)
    want[2:4] = 0.0
    assert found.dtype == np.float32 and np.array_equal(found, want, equal_nan=True)


def test_other_dtypes_are_left_alone():
    x = TensorHandle(np.array([1.0, 3.0], np.float16), tl.float16)
    found = interpreter_builder.create_fmul(x, x)
    assert found.dtype == tl.float16 and found.data.tolist() == [1.0, 9.0]
    cut = interpreter_builder.create_fp_to_fp(
        TensorHandle(np.array([1 + 2**-8 + 2**-9], np.float32), tl.float32),
        tl.bfloat16,
        ir.ROUNDING_MODE.RTZ,
    )
    assert widen(cut.data).tolist() == [1.0]
