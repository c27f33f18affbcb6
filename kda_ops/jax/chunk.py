"""The chunk form as one differentiable function of JAX.

Kept for backward: the inputs, and the state that enters each chunk, in the dtype of dot operands.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kda_ops.gates import Gate
from kda_ops.jax import activations, kernels
from kda_ops.jax.plan import BlockPlan
from kda_ops.jax.rows import Rows
from kda_ops.problem import Problem


class Inputs(NamedTuple):
    """The differentiable inputs of a call."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    A_log: Any
    dt_bias: Any
    state: Any


@dataclass(frozen=True)
class JaxCall:
    """The static half of a call: the kernels' plan, the caller's widths, what is activated."""

    plan: BlockPlan
    T: int
    K: int
    V: int
    rank: int
    gate: Gate
    sigmoid_beta: bool
    neg_eigval: bool
    transposed: bool

    @classmethod
    def of(cls, p: Problem, dtype, sums, interpret) -> JaxCall:
        """Return the call that `p` describes; dot operands have `dtype`, sums `sums`."""
        return cls(
            BlockPlan.of(p, dtype, sums, interpret),
            p.T,
            p.K,
            p.V,
            p.rank,
            p.gate,
            p.sigmoid_beta,
            p.neg_eigval,
            p.transposed,
        )

    def activated(self, rows: Rows, g, beta, A_log, dt_bias):
        """Return the log decay and the write strength of every token; 0 where no sequence is."""
        sums, shape = jnp.dtype(self.plan.sums), (self.plan.B, self.T, self.plan.HV)
        if self.plan.packed:  # tokens of no sequence may hold anything, NaN too
            live = rows.live[None, :, None]
            if g is not None:
                g = jnp.where(live[..., None] if g.ndim == 4 else live, g, 0)
            if beta is not None:
                beta = jnp.where(live, beta, 0)
        if g is None:
            g = jnp.zeros(shape, sums)
        elif self.gate.inside:
            g = activations.gate(self.gate, self.rank, g, A_log, dt_bias)
        if beta is None:
            beta = jnp.ones(shape, sums)
        elif self.sigmoid_beta:
            beta = activations.strength(beta.astype(sums), self.neg_eigval)
        return g, beta

    def arranged(self, rows: Rows, x: Inputs, g, beta):
        """q, k, v, g and beta as the kernels take them."""
        plan, dtype = self.plan, jnp.dtype(self.plan.operand)

        def loadable(x):  # float16 and float64 are not for a TPU
            return x if x.dtype in (jnp.float32, jnp.bfloat16) else x.astype(plan.sums)

        return (
            rows.split(x.q.astype(dtype), plan.K),
            rows.split(x.k.astype(dtype), plan.K),
            rows.split(x.v.astype(dtype), plan.V),
            rows.split(loadable(g), plan.K) if plan.rank else rows.split_row(loadable(g)),
            rows.split_row(loadable(beta)),
        )

    def to_kernel(self, state):
        """Return a state in the caller's layout as [N, HV, V', K']."""
        plan = self.plan
        if state is None:
            return jnp.zeros(plan.shape("state"), plan.sums)
        state = state if self.transposed else state.swapaxes(2, 3)
        return jnp.pad(state, ((0, 0), (0, 0), (0, plan.V - self.V), (0, plan.K - self.K)))

    def from_kernel(self, state):
        """Undo `to_kernel`."""
        state = state[:, :, : self.V, : self.K]
        return state if self.transposed else state.swapaxes(2, 3)


def _once(function):
    """Refuse to differentiate what a first derivative runs: the kernels have no second one."""
    function = jax.custom_jvp(function, nondiff_argnums=(0,))

    @function.defjvp
    def refuse(call, primals, tangents):
        raise NotImplementedError(
            "chunk_kda and chunk_gdn have no second derivatives: differentiate once, or use "
            "recurrent_kda or recurrent_gdn."
        )

    return function


def _run(call: JaxCall, x: Inputs, cu_seqlens, keep: bool):
    rows = Rows(call.plan, call.T, cu_seqlens)
    g, beta = call.activated(rows, x.g, x.beta, x.A_log, x.dt_bias)
    s0 = call.to_kernel(x.state)
    q, k, v, g, beta = call.arranged(rows, x, g, beta)
    found = kernels.forward(call.plan, rows.table, q, k, v, g, beta, s0, keep)
    o = rows.join(found["o"], call.plan.V)[..., : call.V].astype(x.v.dtype)
    final_state = call.from_kernel(rows.passed(found["sT"], s0))
    return (o, final_state), found.get("entering")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunk(call: JaxCall, x: Inputs, cu_seqlens):
    """o [B, T, HV, V] and the final states, in the caller's layout."""
    return _run(call, x, cu_seqlens, keep=False)[0]


@_once
def _kept(call: JaxCall, x: Inputs, cu_seqlens):
    return _run(call, x, cu_seqlens, keep=True)


def _chunk_forward(call: JaxCall, x: Inputs, cu_seqlens):
    out, entering = _kept(call, x, cu_seqlens)
    return out, (x, cu_seqlens, entering)


@_once
def _gradients(call: JaxCall, x: Inputs, cu_seqlens, entering, do, dfinal_state) -> Inputs:
    plan = call.plan
    rows = Rows(plan, call.T, cu_seqlens)
    (g, beta), activation = jax.vjp(
        functools.partial(call.activated, rows), x.g, x.beta, x.A_log, x.dt_bias
    )
    q, k, v, k_g, k_beta = call.arranged(rows, x, g, beta)
    do = rows.split(do.astype(plan.operand), plan.V)
    dsT = call.to_kernel(dfinal_state)
    d = kernels.backward(plan, rows.table, q, k, v, k_g, k_beta, do, dsT, entering)

    def per_key_head(y, like):
        y = rows.join(y, plan.K)[..., : call.K]
        y = y.reshape(*y.shape[:2], plan.H, -1, call.K)
        return (y[:, :, :, 0] if y.shape[3] == 1 else y.sum(3)).astype(like.dtype)

    dg = rows.join(d["dg"], plan.K)[..., : call.K] if plan.rank else rows.join_row(d["dg"])
    dg, dbeta, dA_log, ddt_bias = activation(
        (dg.astype(g.dtype), rows.join_row(d["dbeta"]).astype(beta.dtype))
    )
    return Inputs(
        per_key_head(d["dq"], x.q),
        per_key_head(d["dk"], x.k),
        rows.join(d["dv"], plan.V)[..., : call.V].astype(x.v.dtype),
        dg,
        dbeta,
        dA_log,
        ddt_bias,
        None if x.state is None else call.from_kernel(rows.passed(d["ds0"], dsT)),
    )


def _chunk_backward(call: JaxCall, kept, cotangents):
    x, cu_seqlens, entering = kept
    return _gradients(call, x, cu_seqlens, entering, *cotangents), None


chunk.defvjp(_chunk_forward, _chunk_backward)
