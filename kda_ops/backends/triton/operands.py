"""What kernels take together: a tensor and its strides, the gate's weights, the parts of a tile.

A kernel takes each of these as one argument and passes it on whole. Fields reach the compiled
kernel one by one, in their order here, so a structure costs nothing. A tensor that is absent is
None, and `is not None` is decided at compile time.

Triton specialises every number inside a tuple: 1, and multiples of 16, have code of their own. So
numbers that follow B, T, N or a user's scalar stay outside, in `do_not_specialize`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton.launch import strides_of

# In a kernel a field is a pointer or a number of Triton's, on the host a tensor or an integer.
Pointer = Any


class Strided(NamedTuple):
    """A tensor of the caller: its pointer, and its strides in elements, one per axis."""

    pointer: Pointer
    strides: tuple[int, ...]


class GateWeights(NamedTuple):
    """What turns logits into log decays: A_log [HV], and dt_bias [HV, K], in GDN [HV]."""

    A_log: Pointer
    dt_bias: Pointer


class TileKDA(NamedTuple):
    """The tiles of all chunks as the scans of KDA read them (`prepare_kda` says more)."""

    A: Pointer  # [NT, HV, 64, 64]
    P: Pointer  # [NT, HV, 64, 64]
    w: Pointer  # [NT, HV, 64, K]
    qg: Pointer  # [NT, HV, 64, K]
    kg: Pointer  # [NT, HV, 64, K]
    rows: Pointer  # [NT, HV, 3, 64] fp32
    gamma: Pointer  # [NT, HV, K] fp32


class TileGDN(NamedTuple):
    """The tiles of all chunks that GDN has next to q, k and v (`prepare_gdn`)."""

    A: Pointer  # [NT, HV, 64, 64]
    P: Pointer  # [NT, HV, 64, 64]
    rows: Pointer  # [NT, HV, 7, 64] fp32
    gamma: Pointer  # [NT, HV, 1] fp32


def constant(x: int) -> tl.constexpr:
    """Return a number that kernels know when they are compiled.

    The interpreter takes it as it is: there, a sum of a constexpr and a tensor is a constexpr.
    """
    return x if triton.knobs.runtime.interpret else tl.constexpr(x)  # type: ignore[return-value]


# Vectors of 64 numbers, fp32, next to each tile: one number per row of the chunk. With G the sum of
# log decays from the start of the chunk to a row, and n the inverse norm (1 without l2norm):
#
#     Rows of GDN                                   Rows of KDA
#     FROM_START_K   n_k exp G                      BETA_KDA   beta
#     TO_END_K       n_k exp(sum of g after it)     NORM_Q_KDA   n_q, if backward reads it
#     BETA           beta                           NORM_K_KDA   n_k, likewise
#     FROM_START_Q   scale n_q exp G
#     NORM_K         n_k
#     NORM_Q         n_q
#     LOG_DECAY      G in base 2, or g itself for fp32 operands (`decay.pair_decay`)
FROM_START_K = constant(0)
TO_END_K = constant(1)
BETA = constant(2)
FROM_START_Q = constant(3)
NORM_K = constant(4)
NORM_Q = constant(5)
LOG_DECAY = constant(6)
COUNT_GDN = constant(7)
BETA_KDA = constant(0)
NORM_Q_KDA = constant(1)
NORM_K_KDA = constant(2)
COUNT_KDA = constant(3)


@overload
def strided(x: Tensor) -> Strided: ...
@overload
def strided(x: Tensor | None) -> Strided: ...
def strided(x: Tensor | None) -> Strided:
    """Return a tensor with its strides; of an absent one, both are None."""
    return Strided(x, strides_of(x))  # type: ignore[arg-type]
