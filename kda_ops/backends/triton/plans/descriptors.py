"""Describe tensors for TMA, which copies tiles of them to and from shared memory in Gluon kernels.

Nothing here needs a Triton that has Gluon, until a descriptor is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cache, lru_cache
from typing import Any, overload

import torch
from torch import Tensor

from kda_ops import problem
from kda_ops.backends.triton.plans.launch import copy_of, new, strides_of
from kda_ops.backends.triton.private import INTERPRET
from kda_ops.problem import Problem

WIDTH = 128  # of K and V, of every tile
LENGTH = problem.CHUNK


@cache
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


def fit_tokens(p: Problem, x: Tensor) -> Tensor:
    """Return a [B, T, X, 128] tensor, or a copy if TMA cannot copy its rows from where they are."""
    return x if is_copied(p, x) else copy_of(x)


@overload
def fit_state(x: Tensor) -> Tensor: ...
@overload
def fit_state(x: None) -> None: ...
def fit_state(x: Tensor | None) -> Tensor | None:
    """Return a state, or a copy if offsets inside a head exceed 32 bits; as it is without axes."""
    return x if x is None or x.dim() == 1 or is_near(strides_of(x)) else copy_of(x)


def uniform(p: Problem, x: Tensor) -> Tensor:
    """Return an input, or a copy unless kernels are compiled for it as for any other of its width.

    So it is contiguous, or a row begins at a multiple of 16 elements, and TMA can copy it. Its
    address is a multiple of 16 bytes.
    """
    if x.data_ptr() % 16 == 0:
        if x.is_contiguous():
            return x
        if x.dim() == 4 and x.shape[3] % 16 == 0 and is_copied(p, x):
            if all(stride % 16 == 0 for stride in strides_of(x)[:3]):
                return x
    return copy_of(x)


def uniform_call(p: Problem) -> Problem:
    """Return a call with such copies of its inputs.

    Triton chooses layouts, and so the order of sums, by what divides addresses and strides
    (`launch.uniform`). States are operands of products alone, whose layouts do not depend on that.
    """
    p = copy(p)
    p.q, p.k, p.v = uniform(p, p.q), uniform(p, p.k), uniform(p, p.v)
    p.g, p.beta, p.A_log, p.dt_bias = (
        None if x is None else uniform(p, x) for x in (p.g, p.beta, p.A_log, p.dt_bias)
    )
    return p


def uniform_gradients(
    p: Problem, do: Tensor | None, dfinal_state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of o and of the final state likewise; an absent one of o is zeros."""
    do = new(p.v, "do_zero", p.v.shape, zero=True) if do is None else uniform(p, do)
    return do, fit_state(dfinal_state)


def fit_call(p: Problem) -> Problem:
    """Return a call with such copies of q, k, v, g and the initial state.

    Training copies rather than choose other kernels, because strides and addresses may differ
    between forward and backward.
    """
    p = copy(p)
    p.q, p.k, p.v = fit_tokens(p, p.q), fit_tokens(p, p.k), fit_tokens(p, p.v)
    p.g = None if p.g is None else fit_tokens(p, p.g)
    p.state = fit_state(p.state)
    return p


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
