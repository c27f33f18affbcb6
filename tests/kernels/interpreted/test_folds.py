"""Sums of products along rows, folded first: `tile.fold_products`."""

import pytest
import torch
import triton
import triton.language as tl

from kda_ops.backends.triton.device.tile import fold_products


@triton.jit
def fold(x, y, out, ROWS: tl.constexpr, WIDTH: tl.constexpr, RIGHT_FIRST: tl.constexpr):
    o = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    b_out = fold_products(tl.load(x + o), tl.load(y + o), None, RIGHT_FIRST)
    tl.store(out + tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :], b_out)


@pytest.mark.parametrize("width", (8, 16, 128))
@pytest.mark.parametrize("right_first", (False, True))
def test_columns_8_apart_add_up(width, right_first):
    # small integers: exact in any order
    x, y = (torch.randint(-8, 9, (64, width)).float() for _ in range(2))
    out = torch.full((64, 8), float("nan"))
    fold[(1,)](x, y, out, 64, width, right_first)
    assert torch.equal(out, (x * y).reshape(64, -1, 8).sum(1))


@pytest.mark.parametrize("right_first", (False, True))
def test_the_side_decides_what_rounding_drops(right_first):
    x = torch.zeros(64, 32)
    x[:, 0:8], x[:, 8:16], x[:, 16:24] = 2.0**24, 1.0, -(2.0**24)
    out = torch.full((64, 8), float("nan"))
    fold[(1,)](x, torch.ones_like(x), out, 64, 32, right_first)
    assert (out == (1.0 if right_first else 0.0)).all()
