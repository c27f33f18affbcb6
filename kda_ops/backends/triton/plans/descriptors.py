"""Describe tensors for TMA, which copies tiles of them to and from shared memory in Gluon kernels.

Nothing here needs a Triton that has Gluon, until a descriptor is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kda_ops import problem
from kda_ops.backends.triton.plans.launch import strides_of
from kda_ops.backends.triton.private import INTERPRET
from kda_ops.problem import Problem

WIDTH = 128  # of K and V, of every tile
LENGTH = problem.CHUNK


def has_gluon() -> bool:
    """Return whether Gluon kernels can be compiled: not interpreted, and by a known Triton."""
    if INTERPRET:
        return False
    try:
        from kda_ops.backends.triton.device import gluon_names  # noqa: F401 (knows the versions)
    except ImportError:
        return False
    return True


def is_copied(p: Problem, x: Tensor) -> bool:
    """Return whether TMA can copy rows of a [B, T, X, 128] tensor from where they are.

    That needs rows of whole tokens, one after another, at multiples of 16 bytes.
    """
    batch, token, head, channel = strides_of(x)
    few = 16 // x.element_size()
    return bool(
        channel == 1
        and token % few == 0
        and head % few == 0
        and x.data_ptr() % 16 == 0
        and token >= (x.shape[2] - 1) * head + x.shape[3]
        and (batch == p.T * token or p.B == 1)
    )


def is_near(strides: Sequence[int]) -> bool:
    """Return whether offsets of 32 bits reach the whole state of a head."""
    return WIDTH * (strides[2] + strides[3]) < 2**31


def tokens(p: Problem, x: Tensor, rows: int = LENGTH, width: int = WIDTH):
    """Return the descriptor of a [B, T, X, 128] tensor: rows are tokens.

    A block has the channels of one head, or `width` of them.
    """
    _, token, head, _ = strides_of(x)
    columns = (x.shape[2] - 1) * head + x.shape[3]
    return copied(x, (p.B * p.T, columns), (token, 1), (rows, width))


def copied(x: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]):
    """Return the descriptor of a tensor, seen with this shape, in blocks for products."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, [*shape], [*strides], [*block], _layout(tuple(block), x.dtype))


@lru_cache(None)
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    if len(block) == 1:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    names = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for([*block], names[dtype])
