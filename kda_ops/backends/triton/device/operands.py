"""Group the arguments of kernels: a tensor with its strides, the gate, parts of a tile.

A tile is what `prepare` computes of one chunk and value head (`kda_ops.stages.Tile`). A kernel
takes each structure as one argument and passes it on whole. Triton hands over the fields one by
one, in the order below, so a structure costs nothing. An absent tensor is None, and a test with
`is not None` is decided at compile time.

Triton compiles a kernel again where an integer inside a tuple is 1 or a multiple of 16. So integers
that depend on B, T or N are arguments of their own, named in `do_not_specialize`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton.plans.launch import strides_of
from kda_ops.backends.triton.private import INTERPRET

# On the host a field is a tensor or an integer; in a kernel, a pointer or a number of Triton.
Pointer = Any


class Strided(NamedTuple):
    """A tensor of the caller: its pointer, and its strides in elements, one per axis."""

    pointer: Pointer
    strides: tuple[int, ...]


class Gate(NamedTuple):
    """What turns logits into log decays, by the formulas of `device/gate.py`.

    A kernel passes it on as it is, because `kind` would not stay a constant in a variable.
    """

    A_log: Pointer  # [HV]
    dt_bias: Pointer  # [HV, K], or [HV] for GDN
    bound: Any  # the least log decay, if the gate has one
    kind: Any  # GIVEN, SOFTPLUS or BOUNDED of `device/gate.py`, a constant of the kernel


class States(NamedTuple):
    """The states that a call reads and writes; each of them may be absent."""

    initial: Strided  # [N, HV, K, V], or a pool
    final: Strided  # likewise
    slots: Pointer  # [N], where pools have the states of the sequences
    into: Strided  # [N, columns], the slots of snapshots


class TileKDA(NamedTuple):
    """The tiles of all chunks, for the scans of KDA; in q's dtype unless said.

    The equations are those of `prepare_kda.prepare_kda`.
    """

    A: Pointer  # [NT, HV, 64, 64]
    P: Pointer  # [NT, HV, 64, 64]
    w: Pointer  # [NT, HV, 64, K]
    qg: Pointer  # [NT, HV, 64, K]
    kg: Pointer  # [NT, HV, 64, K]
    factors: Pointer  # [NT, HV, 3, 64] fp32
    gamma: Pointer  # [NT, HV, K] fp32


class TileGDN(NamedTuple):
    """The tiles of all chunks, for the scans of GDN, which read q, k and v too.

    In q's dtype unless said. The equations are those of `prepare_gdn.prepare_gdn`.
    """

    A: Pointer  # [NT, HV, 64, 64]
    P: Pointer  # [NT, HV, 64, 64]
    factors: Pointer  # [NT, HV, 7, 64] fp32
    gamma: Pointer  # [NT, HV, 1] fp32


def constant(x: int) -> tl.constexpr:
    """Return a number that kernels know when they are compiled.

    Under the interpreter it stays a plain number, because a constexpr plus a tensor would give a
    constexpr there.
    """
    return x if INTERPRET else tl.constexpr(x)  # type: ignore[return-value]


# The vectors of a tile's `factors`: 64 numbers in fp32, one per row (token) of the chunk. G is the
# sum of the log decays g from the start of the chunk up to a row, with its own. n_q and n_k are the
# inverse norms of q and k, 1 without l2norm.
#
#     Factors of GDN, r_0 to r_6                    Factors of KDA
#     FROM_START_K   n_k exp G                      BETA_KDA   beta
#     TO_END_K       n_k exp(sum of g after it)     NORM_Q_KDA   n_q, if backward reads it
#     BETA           beta                           NORM_K_KDA   n_k, likewise
#     FROM_START_Q   scale n_q exp G
#     NORM_K         n_k
#     NORM_Q         n_q
#     LOG_DECAY      G in base 2; for fp32 operands g in base 2 (`decay.pair_decay`)
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

# What GDN's reverse walk leaves of a chunk at the start of the chunk's P, which has been read by
# then, for `finish_walk` and for itself: numbers in fp32, one per row unless said.
SUM_DG = constant(0)  # dG
SUM_STRENGTH = constant(64)  # sum_v dv v_new
SUM_LATE = constant(128)  # sum_k k r_1 (v_new dS^T), over each half of K: [64, 2]
SUM_STATE = constant(256)  # sum_k S dS: [V]
SUM_PART = constant(384)  # sum_k k part, if beta is given
SUM_OWN = constant(448)  # sum_v do v_new, for the walk
SUMS = constant(64 * 64 // 2)  # from one chunk to the next


@overload
def strided(x: Tensor) -> Strided: ...
@overload
def strided(x: Tensor | None) -> Strided: ...
def strided(x: Tensor | None) -> Strided:
    """Return a tensor with its strides; both are None if the tensor is absent."""
    return Strided(x, strides_of(x))  # type: ignore[arg-type]
