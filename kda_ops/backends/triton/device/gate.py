"""Compute gates, from raw logits to the log decay: device functions of all kernels with a gate."""

import triton
import triton.language as tl

from kda_ops.backends.triton.device.tile import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)
# Limits of exp(A_log): a rate of zero or infinity would give NaN for a logit of minus infinity.
LEAST_RATE, GREATEST_RATE = tl.constexpr(1e-30), tl.constexpr(1e30)
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
    `log2_decay`.
    """
    x = x * LOG2E
    one = 1.0 + tl.exp2(-tl.abs(x))
    return tl.maximum(x, 0.0) + (fast_log2(one) if FAST else tl.log2(one))


@triton.jit
def sigmoid(x, FAST: tl.constexpr = False):
    """Return 1 / (1 + exp -x). FAST as in `log2_decay`."""
    one = 1.0 + tl.exp2(x * -LOG2E)
    return fast_reciprocal(one) if FAST else 1.0 / one


@triton.jit
def log2_decay(
    g,
    bias,
    rate,
    lower_bound,
    ACTIVATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    FAST: tl.constexpr = False,
    EXACT: tl.constexpr = False,
):
    """Return the log decay in base 2, from raw logits if ACTIVATE: -rate softplus(g + bias), or
    lower_bound sigmoid(rate (g + bias)).

    FAST is for 16 bit operands, which do not see the last two bits of an approximate instruction.
    EXACT rounds softplus relatively. Otherwise its rounding is absolute, and a large rate amplifies
    it: fp32 states, decayed token by token, see that.
    """
    if not ACTIVATE:
        return g * LOG2E
    elif BOUNDED:
        slope = rate * -LOG2E
        one = 1.0 + tl.exp2(g * slope + bias * slope)
        return (lower_bound * LOG2E) * fast_reciprocal(one) if FAST else (lower_bound * LOG2E) / one
    elif EXACT:
        return -rate * (LOG2E * softplus(g + bias))
    elif FAST:
        x = g * LOG2E + bias * LOG2E
        return -rate * (tl.maximum(x, 0.0) + fast_log2(1.0 + tl.exp2(-tl.abs(x))))
    else:
        return -rate * log2_softplus(g + bias)


@triton.jit
def load_rate(A_log, i_h):
    """Return exp(A_log) of one head; 1 without it."""
    rate = 1.0
    if A_log is not None:
        rate = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    return rate


@triton.jit
def load_bias(dt_bias, i_h, o_d, D: tl.constexpr):
    """Return dt_bias [HV, D] of one head at o_d, in fp32; zeros without it."""
    b_bias = tl.zeros(o_d.shape, tl.float32)
    if dt_bias is not None:
        b_bias = tl.load(dt_bias + i_h * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    return b_bias


@triton.jit
def through_gate(b_dg, b_x, rate, lower_bound, BOUNDED: tl.constexpr, FAST: tl.constexpr = False):
    """Return (the gradient of the logits, its share of dA_log) from dg and x = g + dt_bias::

        bounded   dx = dg rate lower_bound s (1 - s),  s = sigmoid(rate x);   dA_log = dx x
        softplus  dx = -dg rate sigmoid(x);            dA_log = -dg rate softplus(x)

    The caller sums the share over tokens and channels. FAST as in `log2_decay`.
    """
    if BOUNDED:
        # A saturated sigmoid has slope 0, and 0 times infinity would be NaN. exp(A_log) may have
        # overflowed, and a logit may be infinite.
        rate, b_x = tl.minimum(rate, HUGE), tl.minimum(tl.maximum(b_x, -HUGE), HUGE)
        b_s = sigmoid(rate * b_x, FAST)
        b_dx = b_dg * (b_s * (1.0 - b_s) * rate * lower_bound)
        return b_dx, b_dx * b_x
    else:
        b_log = log2_softplus(b_x, FAST)
        # Where the decay is 0, dg is only the rounding of its sums, and dA_log would multiply that
        # by a large log.
        b_dg = tl.where(rate * b_log < UNDERFLOW, b_dg * -rate, 0.0)
        return b_dg * sigmoid(b_x, FAST), b_dg * (tl.minimum(b_log, HUGE) * (1.0 / LOG2E))
