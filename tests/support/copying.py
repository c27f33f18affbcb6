"""A pass of two small kernels whose arguments are named tuples and tensor descriptors."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kda_ops.backends.triton.plans.launch import launch, new, recorded, strides_of, values
from kda_ops.backends.triton.plans.plan import Plan
from kda_ops.backends.triton.plans.recording import Recording

ROWS, WIDTH = 16, 32


class Rows(NamedTuple):
    """A tensor of rows as a kernel takes it."""

    pointer: Tensor
    strides: tuple[int, int]


@triton.jit
def double(x, y, rows, W: tl.constexpr, R: tl.constexpr):
    o_r, o_w = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, W)
    mask = (o_r < rows)[:, None] & (o_w < W)[None, :]
    p_x = x.pointer + o_r[:, None] * x.strides[0] + o_w[None, :] * x.strides[1]
    p_y = y[0] + o_r[:, None] * y[1][0] + o_w[None, :] * y[1][1]
    tl.store(p_y, 2 * tl.load(p_x, mask=mask), mask=mask)


@triton.jit
def add_one(x, y, rows, W: tl.constexpr, R: tl.constexpr):
    begin = tl.program_id(0) * R
    o_r, o_w = begin + tl.arange(0, R), tl.arange(0, W)
    mask = (o_r < rows)[:, None] & (o_w < W)[None, :]
    tl.store(y + o_r[:, None] * W + o_w[None, :], x.load([begin, 0]) + 1, mask=mask)


def run(x: Tensor) -> Tensor:
    """Return 2 x + 1, by way of a scratch tensor."""
    rows = x.shape[0]
    t, y = (new(x, name, (rows, WIDTH)) for name in ("t", "y"))
    programs, sizes = triton.cdiv(rows, ROWS), (WIDTH, ROWS)
    launch(double, programs, x.device, Rows(x, strides_of(x)), (t, strides_of(t)), rows, *sizes)
    there = TensorDescriptor(t, [*t.shape], [*strides_of(t)], [ROWS, WIDTH])
    launch(add_one, programs, x.device, there, y, rows, *sizes)
    return y


def record(x: Tensor) -> Plan:
    """Run on rows whose strides are numbers of the call, and keep the plan."""
    kept = Recording({"T": x.shape[0], "x_0": x.stride(0), "x_1": x.stride(1)})
    strides = kept.sizes["x_0"], kept.sizes["x_1"]
    with recorded(kept):
        y = run(kept.take("x", x, (kept.sizes["T"], WIDTH), strides))
    assert torch.equal(values(y), 2 * x + 1)
    return Plan(kept, [y], x.device)


def check(device: str) -> None:
    """Run the plan on other rows: more, with other strides, elsewhere in memory."""
    wide = torch.arange(100 * 64, dtype=torch.float32, device=device).view(100, 64)
    plan = record(wide[:40, :WIDTH])
    assert [b.name for b in plan.scratch] == ["t"] and len(plan.made) == 3
    for x in (wide[:40, :WIDTH], wide[1:90, 16 : 16 + WIDTH], wide.view(50, 128)[::2, :WIDTH]):
        bound = plan.bind((x.shape[0], *x.stride()))
        assert bound is not None
        (y,) = plan.run([x], [x.data_ptr()], bound)
        assert torch.equal(y, 2 * x + 1)
    assert plan.bind((40, 63, 1)) is None  # 16 does not divide this stride
