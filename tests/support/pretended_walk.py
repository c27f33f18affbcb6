"""The walk back of KDA's gradients, without its kernel: what is around it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

import triton
import triton.language as tl

from kda_ops.backends.triton import BACKEND
from kda_ops.backends.triton.plans.descriptors import fit_call, fit_state, fit_tokens, is_copied
from kda_ops.backends.triton.plans.launch import launch, new, shape_of, strides_of
from kda_ops.backends.triton.stages import walk
from kda_ops.stages import GRADIENTS, Gradients


@triton.jit
def read_rows(do, do_s, B):
    """Read the first row of each batch row; tests launch it, nothing runs it."""
    tl.load(do + tl.program_id(0) * do_s[0] + B)


def _walk_back(p, A, do, dfinal_state, need) -> Gradients:
    """Make the states again, read do, and allocate the gradients."""
    p, do, dfinal_state = fit_call(p), fit_tokens(p, do), fit_state(dfinal_state)
    walk.states(p, A)
    assert all(is_copied(p, x) for x in (p.q, p.k, p.v, p.g, do))
    launch(read_rows, p.B, do.device, do=do, do_s=strides_of(do), B=p.B, num_warps=4)
    return Gradients(
        **{
            n: new(x, f"d{n}", shape_of(x))
            for n, x in zip(GRADIENTS, p.differentiable())
            if x is not None and n in need
        }
    )


def walks_back() -> AbstractContextManager:
    """Return a context in which this takes the place of the walk back."""
    return mock.patch.object(type(BACKEND), "walk_back", staticmethod(_walk_back))
