"""What is applied to q, k, g and beta before the recurrence, in JAX.

The formulas and their guards are those of `kda_ops.backends.activations`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kda_ops.backends.activations import EPS


def l2norm(x):
    """x / sqrt(sum x^2 + eps) over the last dimension, and the factor 1 / sqrt(...)."""
    rstd = jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EPS)
    return x * rstd, rstd


def l2norm_backward(dy, y, rstd):
    """dx = rstd (dy - y sum(y dy))."""
    return rstd * (dy - y * jnp.sum(y * dy, -1, keepdims=True))


def strength(logits, neg_eigval: bool):
    """sigmoid(logits), or 2 sigmoid(logits)."""
    return jax.nn.sigmoid(logits) * (2.0 if neg_eigval else 1.0)


def _argument(g, A_log, dt_bias, rank):
    """exp(A_log) as [HV] or [HV, 1], and x = g + dt_bias, in at least float32."""
    dtype = jnp.promote_types(g.dtype, jnp.float32)
    A = jnp.ones(g.shape[2], dtype) if A_log is None else jnp.exp(A_log.astype(dtype))
    x = g.astype(dtype)
    if dt_bias is not None:
        x = x + dt_bias.astype(dtype).reshape(x.shape[2:])
    return (A[:, None] if rank else A), x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gate(lower_bound: float | None, rank: int, g, A_log, dt_bias):
    """Return the log decay: -exp(A_log) softplus(g + dt_bias), or, with a bound, lower_bound
    sigmoid(exp(A_log) (g + dt_bias)).

    float32, or float64 for float64 logits.
    """
    A, x = _argument(g, A_log, dt_bias, rank)
    if lower_bound is None:
        return -A * jax.nn.softplus(x)
    return lower_bound * jax.nn.sigmoid(A * x)


def _gate_forward(lower_bound, rank, g, A_log, dt_bias):
    return gate(lower_bound, rank, g, A_log, dt_bias), (g, A_log, dt_bias)


def _gate_backward(lower_bound, rank, kept, dy):
    g, A_log, dt_bias = kept
    A, x = _argument(g, A_log, dt_bias, rank)
    if lower_bound is None:
        y = -A * jax.nn.softplus(x)
        dx, per_log, counts = -A * jax.nn.sigmoid(x) * dy, y * dy, y > -jnp.inf
    else:
        slope = jax.nn.sigmoid(A * x) * jax.nn.sigmoid(-A * x)
        dx = lower_bound * slope * A * dy
        per_log, counts = dx * x, slope > 0
    # Select, for 0 * inf is NaN: a saturated sigmoid, a decay of -inf, a token of no sequence.
    counts &= dy != 0
    dx, per_log = jnp.where(counts, dx, 0.0), jnp.where(counts, per_log, 0.0)
    tokens = (0, 1)
    dA_log = ddt_bias = None
    if A_log is not None:
        dA_log = per_log.sum(tokens + (3,) if rank else tokens).astype(A_log.dtype)
    if dt_bias is not None:
        ddt_bias = dx.sum(tokens).reshape(dt_bias.shape).astype(dt_bias.dtype)
    return dx.astype(g.dtype), dA_log, ddt_bias


gate.defvjp(_gate_forward, _gate_backward)
