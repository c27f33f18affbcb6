"""Compute gates: `log_decay` makes log decays of logits, `through_gate` is its derivative, and
`load_rate` and `load_bias` load the parameters.

They serve all kernels with a gate, those in Gluon too, and nothing else asks which kind of gate a
call has. A new kind needs its formula in `log_decay` and its derivative in `through_gate`.
"""

import triton
import triton.language as tl

from kda_ops import gates
from kda_ops.backends.triton.device.tile import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)
GIVEN, SOFTPLUS = tl.constexpr(gates.GIVEN), tl.constexpr(gates.SOFTPLUS)
BOUNDED = tl.constexpr(gates.BOUNDED)
# exp(A_log) is clamped: at most, so that products with logits up to 2^27 are finite, and at least
# (`log_decay`), so that products with infinite logits are not NaN
LEAST_RATE, GREATEST_RATE = tl.constexpr(2.0**-126), tl.constexpr(2.0**100)
# A logit without a decay, for every kind of gate. The walks write it where no token is, because a
# mask of the decay takes registers that they lack (184 B of stack with Triton 3.9).
NO_TOKEN = tl.constexpr(-float("inf"))
# The largest finite number, about: infinities become it where they would meet a zero.
HUGE = tl.constexpr(3e38)
# A decay of 2^-126 or less is 0 in fp32, or subnormal and flushed to 0.
UNDERFLOW = tl.constexpr(126.0)


@triton.jit
def fast_log2(x):
    """Return log2 x to an absolute 2^-22 near one, in one instruction; `tl.log2` takes twenty."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )


@triton.jit
def fast_reciprocal(x):
    """Return 1 / x of a normal number to one unit in the last place, in one instruction; a division
    takes seven.
    """
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )


@triton.jit
def softplus(x):
    """Return log(1 + exp x) to a relative rounding: log1p(e) = log(1 + e) e / ((1 + e) - 1)."""
    e = tl.exp(-tl.abs(x))
    one = 1.0 + e
    return tl.maximum(x, 0.0) + tl.where(
        one == 1.0, e, tl.log(one) * (e / tl.where(one == 1.0, 1.0, one - 1.0))
    )


@triton.jit
def log2_softplus(x, FAST: tl.constexpr = False):
    """Return log2(1 + exp x) to an absolute rounding, which is all that a decay needs. FAST as in
    `log_decay`.
    """
    x = x * LOG2E
    one = 1.0 + tl.exp2(-tl.abs(x))
    return tl.maximum(x, 0.0) + (fast_log2(one) if FAST else tl.log2(one))


@triton.jit
def sigmoid(x, FAST: tl.constexpr = False):
    """Return 1 / (1 + exp -x). FAST as in `log_decay`."""
    one = 1.0 + tl.exp2(x * -LOG2E)
    return fast_reciprocal(one) if FAST else 1.0 / one


@triton.jit
def load_rate(gate, i_h):
    """Return exp(A_log) of one head, at most GREATEST_RATE; 1 without it."""
    rate = 1.0
    if gate.A_log is not None:
        rate = tl.exp(tl.load(gate.A_log + i_h).to(tl.float32))
        rate = tl.minimum(rate, GREATEST_RATE, tl.PropagateNan.ALL)
    return rate


@triton.jit
def load_bias(gate, i_h, o_d=None, D: tl.constexpr = 1):
    """Return dt_bias [HV, D] of one head at o_d, in fp32; zeros without it. If o_d is None, dt_bias
    is [HV], and the result a number.
    """
    if o_d is None:
        b_bias = 0.0
        if gate.dt_bias is not None:
            b_bias = tl.load(gate.dt_bias + i_h).to(tl.float32)
        return b_bias
    else:
        b_bias = (o_d * 0).to(tl.float32)  # in Gluon too, where `zeros` needs a layout
        if gate.dt_bias is not None:
            b_bias = tl.load(gate.dt_bias + i_h * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
        return b_bias


@triton.jit
def log_decay(
    g,
    bias,
    rate,
    gate,
    here,
    UNIT: tl.constexpr = LOG2E,
    FAST: tl.constexpr = False,
    EXACT: tl.constexpr = False,
):
    """Return the log decay, times UNIT: in base 2, or natural for a UNIT of 1.

    `here` says which entries are tokens; None: all. Where no token is, g must be 0, and the log
    decay is 0. It is also exactly 0 for a logit of NO_TOKEN.

    FAST is for 16 bit operands, which do not see the last two bits of an approximate instruction.
    EXACT rounds softplus relatively. Otherwise its rounding is absolute, and a large rate amplifies
    it: fp32 states, decayed token by token, see that.
    """
    rate = tl.maximum(rate, LEAST_RATE, tl.PropagateNan.ALL)
    if gate.kind == GIVEN:
        return g * UNIT
    elif gate.kind == BOUNDED:
        slope, bound = rate * -LOG2E, gate.bound * UNIT
        if INTERPRETED:  # where a number of a structure is no tensor
            bound = tl.full((), bound, tl.float32)
        one = 1.0 + tl.exp2(g * slope + bias * slope)
        if here is not None:  # a bound per row is masked, instead of each entry
            bound = tl.where(here, bound, 0.0)
        return bound * fast_reciprocal(one) if FAST else bound / one
    else:
        tl.static_assert(gate.kind == SOFTPLUS)
        if EXACT:
            y = -rate * (UNIT * softplus(g + bias))
        elif FAST:
            x = g * LOG2E + bias * LOG2E
            y = tl.maximum(x, 0.0) + fast_log2(1.0 + tl.exp2(-tl.abs(x)))
            y = (rate * -(UNIT / LOG2E)) * y
        else:
            y = (rate * -(UNIT / LOG2E)) * log2_softplus(g + bias)
        return y if here is None else tl.where(here, y, 0.0)


@triton.jit
def through_gate(b_dg, b_x, rate, gate, FAST: tl.constexpr = False, EXACT: tl.constexpr = False):
    """Return (the gradient of the logits, its share of dA_log) from dg and x = g + dt_bias::

        bounded   dx = dg rate bound s (1 - s),  s = sigmoid(rate x);   dA_log = dx x
        softplus  dx = -dg rate sigmoid(x);      dA_log = -dg rate softplus(x)

    The caller sums the share over tokens and channels. FAST as in `log_decay`. EXACT is for a dg
    that is no sum over a chunk: softplus is rounded relatively, and a decay of 0 has a gradient.
    Both results are 0 for a logit of minus infinity or NaN. So they are for one of infinity, unless
    a rate near 0 keeps the bounded gate from its bound.
    """
    if INTERPRETED:  # whose maximum of NaN is NaN
        b_x = tl.where(b_x == b_x, b_x, -HUGE)
    b_x = tl.maximum(b_x, -HUGE)
    if gate.kind == BOUNDED:
        # A saturated sigmoid has slope 0, and 0 times infinity would be NaN.
        b_x = tl.minimum(b_x, HUGE)
        b_s = sigmoid(rate * b_x, FAST)
        b_dx = b_dg * (b_s * (1.0 - b_s) * rate * gate.bound)
        return b_dx, b_dx * b_x
    else:
        tl.static_assert(gate.kind == SOFTPLUS)
        if EXACT:
            b_log, UNIT, LIMIT = softplus(b_x), 1.0, float("inf")
        else:
            # Where the decay is 0, dg is only the rounding of its sums, and dA_log would multiply
            # that by a large log.
            b_log, UNIT, LIMIT = log2_softplus(b_x, FAST), 1.0 / LOG2E, UNDERFLOW
        b_dg = tl.where(rate * b_log < LIMIT, b_dg * -rate, 0.0)
        return b_dg * sigmoid(b_x, FAST), b_dg * (tl.minimum(b_log, HUGE) * UNIT)
