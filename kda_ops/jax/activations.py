"""What is applied to q, k, g and beta before the recurrence, in JAX.

The formulas and their guards are those of `kda_ops.backends.activations`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kda_ops.backends.activations import EPS
from kda_ops.gates import BOUNDED, SOFTPLUS, Gate


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


def _softplus_decay(A, x, bound):
    return -A * jax.nn.softplus(x)


def _softplus_gradients(A, x, bound, dy):
    y = -A * jax.nn.softplus(x)
    return -A * jax.nn.sigmoid(x) * dy, y * dy, y > -jnp.inf


def _bounded_decay(A, x, bound):
    return bound * jax.nn.sigmoid(A * x)


def _bounded_gradients(A, x, bound, dy):
    slope = jax.nn.sigmoid(A * x) * jax.nn.sigmoid(-A * x)
    dx = bound * slope * A * dy
    return dx, dx * x, slope > 0


FORMULAS = {  # as in `kda_ops.backends.activations`
    SOFTPLUS: (_softplus_decay, _softplus_gradients),
    BOUNDED: (_bounded_decay, _bounded_gradients),
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gate(which: Gate, rank: int, g, A_log, dt_bias):
    """Return the log decay of logits g, float32, or float64 for float64 logits."""
    A, x = _argument(g, A_log, dt_bias, rank)
    return FORMULAS[which.kind][0](A, x, which.bound)


def _gate_forward(which, rank, g, A_log, dt_bias):
    return gate(which, rank, g, A_log, dt_bias), (g, A_log, dt_bias)


def _gate_backward(which, rank, kept, dy):
    g, A_log, dt_bias = kept
    A, x = _argument(g, A_log, dt_bias, rank)
    dx, per_log, counts = FORMULAS[which.kind][1](A, x, which.bound, dy)
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
