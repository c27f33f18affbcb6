"""Activate what a call gives per token: its flags, its gate, beta, and decays of whole columns."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kda_ops import gates
from kda_ops.backends.triton.device.gate import LOG2E, load_bias, load_rate, log_decay, sigmoid
from kda_ops.backends.triton.device.operands import Gate
from kda_ops.backends.triton.device.tile import CHUNK, dense, load_column
from kda_ops.problem import Problem

# Least log decay of a token in base 2, where decays are summed: 2^-160 is zero as a factor in fp32,
# and sums over a chunk stay finite.
LEAST_DECAY = tl.constexpr(-160.0)
# Least normal number of fp32, rounded up: below it 1 / x may be infinite.
LEAST_NORMAL = tl.constexpr(1.2e-38)


class Flags(NamedTuple):
    """The flags of a call, as constants of a kernel: `flags_of` makes them.

    A kernel passes them on as they are. Assigned to a variable, they would become values that are
    known only when the kernel runs.
    """

    L2NORM: Any
    SIGMOID: Any  # of beta
    NEG_EIGVAL: Any  # beta goes up to 2


def flags_of(p: Problem) -> Flags:
    """Return the flags of a call."""
    return Flags(*map(tl.constexpr, (p.l2norm, p.sigmoid_beta, p.neg_eigval)))


def make_gate(A_log: Tensor | None, dt_bias: Tensor | None, which: gates.Gate) -> Gate:
    """Return a gate for kernels. A promised bound of given decays is none of its numbers."""
    bound = which.bound if which.kind == gates.BOUNDED else None
    return Gate(dense(A_log), dense(dt_bias), bound or 0.0, tl.constexpr(which.kind))


def gate_of(p: Problem) -> Gate:
    """Return the gate of a call."""
    return make_gate(p.A_log, p.dt_bias, p.gate)


@triton.jit
def decay_of(b_log):
    """Return 2^b_log for a log decay, to half a unit in the last place near one.

    The instruction ex2 errs by up to two units, with one sign for alike arguments. A state that
    forgets little takes that error again at every token, so there the series of exp replaces ex2.
    """
    y = b_log * (1.0 / LOG2E)
    series = 1.0 + y * 0.2 * (1.0 + y * (1.0 / 6.0))
    series = y * (1.0 + y * 0.5 * (1.0 + y * (1.0 / 3.0) * (1.0 + y * 0.25 * series)))
    return tl.where(b_log > -0.25, 1.0 + series, tl.exp2(b_log))


@triton.jit
def reciprocal(x):
    """Return 1 / x, or 0 where x is no normal number."""
    return tl.where(tl.abs(x) > LEAST_NORMAL, 1.0 / x, 0.0)


@triton.jit
def strength(beta, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr):
    """Return beta, or sigmoid(beta), or 2 sigmoid(beta)."""
    if SIGMOID:
        beta = sigmoid(beta)
        if NEG_EIGVAL:
            beta = 2.0 * beta
    return beta


@triton.jit
def decay_column(g, gate, i_b, i_h, first, n_rows):
    """Return the log decay of 64 tokens of one head in base 2, [64] fp32, at least LEAST_DECAY; 0
    for rows that are no tokens.
    """
    o_r = tl.arange(0, CHUNK)
    if g.pointer is None:
        return tl.zeros((CHUNK,), tl.float32)
    else:
        b_g = load_column(g.pointer, g.strides, i_b, i_h, first, n_rows, o_r)
        bias, rate = load_bias(gate, i_h), load_rate(gate, i_h)
        b_g = log_decay(b_g, bias, rate, gate, None)
        b_g = tl.maximum(b_g, LEAST_DECAY, tl.PropagateNan.ALL)
        return tl.where(o_r < n_rows, b_g, 0.0)


@triton.jit
def strength_column(beta, i_b, i_h, first, n_rows, flags, ROWS: tl.constexpr = CHUNK):
    """Return beta of the tokens of one head, [ROWS] fp32. Rows that are no tokens have zero keys
    and values, whatever this says.
    """
    if beta.pointer is None:
        return tl.full((ROWS,), 1.0, tl.float32)
    else:
        o_r = tl.arange(0, ROWS)
        b_beta = load_column(beta.pointer, beta.strides, i_b, i_h, first, n_rows, o_r)
        return strength(b_beta, flags.SIGMOID, flags.NEG_EIGVAL)


@triton.jit
def tokens_at(x, i_h, o_r, T, o_k):
    """Return pointers to rows o_r of all B * T tokens of one head of a [B, T, HV, K] tensor."""
    p_x = (
        x.pointer
        + ((o_r // T) * x.strides[0] + (o_r % T) * x.strides[1] + i_h.to(tl.int64) * x.strides[2])[
            :, None
        ]
    )
    return p_x + (o_k.to(tl.int64) * x.strides[3])[None, :]
