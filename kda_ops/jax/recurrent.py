"""The definition as a scan over tokens, on every platform; JAX differentiates it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from kda_ops.jax import activations
from kda_ops.problem import Problem


def _activated(p: Problem, inputs: tuple, dtype):
    """Return the inputs in `dtype`, q scaled, heads repeated, g [.., K] or [.., 1]."""
    q, k, v, g, beta, A_log, dt_bias = inputs
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    if p.l2norm:
        q, k = activations.l2norm(q)[0], activations.l2norm(k)[0]
    q, k = (jnp.repeat(x, p.HV // p.H, axis=2) for x in (q * p.scale, k))
    if g is None:
        g = jnp.zeros((p.B, p.T, p.HV), dtype)
    elif p.gate.inside:
        g = activations.gate(p.gate, p.rank, g, A_log, dt_bias)
    g = g.astype(dtype)
    if beta is None:
        beta = jnp.ones((p.B, p.T, p.HV), dtype)
    else:
        beta = beta.astype(dtype)
        beta = activations.strength(beta, p.neg_eigval) if p.sigmoid_beta else beta
    return q, k, v, g if g.ndim == 4 else g[..., None], beta


def _step(S, q, k, v, g, beta):
    """One token: S [.., K, V], q, k [.., K], v [.., V], g [.., D], beta [..]."""
    S = jnp.exp(g)[..., None] * S
    u = beta[..., None] * (v - jnp.sum(k[..., None] * S, -2))
    S = S + k[..., None] * u[..., None, :]
    return S, jnp.sum(q[..., None] * S, -2)


def recurrent(p: Problem, inputs: tuple, state, cu_seqlens, dtype):
    """o [B, T, HV, V] and the final states [N, HV, K, V], computed in `dtype`.

    `inputs` are q, k, v, g, beta, A_log and dt_bias.
    """
    *per_token, A_log, dt_bias = inputs
    out = per_token[2].dtype
    if cu_seqlens is not None:
        offsets = cu_seqlens.astype(jnp.int32)
        t = jnp.arange(p.T, dtype=jnp.int32)
        live = t < offsets[-1]
        # tokens of no sequence may hold anything, NaN too
        per_token = [
            None if x is None else jnp.where(live.reshape(1, -1, *[1] * (x.ndim - 2)), x, 0)
            for x in per_token
        ]
    x = _activated(p, (*per_token, A_log, dt_bias), dtype)
    if state is None:
        state = jnp.zeros((p.N, p.HV, p.K, p.V), dtype)
    if cu_seqlens is None:
        state, o = lax.scan(
            lambda S, x: _step(S, *x), state, tuple(jnp.moveaxis(y, 1, 0) for y in x)
        )
        return jnp.moveaxis(o, 0, 1).astype(out), state
    sequence = jnp.clip(jnp.searchsorted(offsets[1:], t, side="right"), 0, p.N - 1)

    def token(finals, x):
        n, is_live, *x = x
        S, o = _step(finals[n], *x)
        return finals.at[n].set(jnp.where(is_live, S, finals[n])), jnp.where(is_live, o, 0.0)

    state, o = lax.scan(token, state, (sequence, live, *(y[0] for y in x)))
    return o[None].astype(out), state
