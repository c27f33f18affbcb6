"""Apply norm, gate and sigmoid to q, k, g and beta, forward and backward, for the CPU backends.

Tests check each pair against autograd in float64 (tests/operators/test_activations.py).
Shapes are per token: ``[B, T, heads, width]``.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_ops.gates import BOUNDED, SOFTPLUS, Gate
from kda_ops.problem import Problem

EPS = 1e-6  # inside the square root of the l2 norm
CACHE_LINE = 64  # bytes, at a multiple of which torch allocates on a CPU


# On a CPU, torch's softplus and sigmoid round strided elements and a tensor's last elements
# differently. A token's bits would then depend on its place.


def _sigmoid(x: Tensor) -> Tensor:
    return F.logsigmoid(x).exp() if x.is_cpu else x.sigmoid()


def _softplus(x: Tensor) -> Tensor:
    return -F.logsigmoid(-x)


def activate(x: Tensor, silu: bool) -> Tensor:
    """Return silu(x) or sigmoid(x)."""
    return x * _sigmoid(x) if silu else _sigmoid(x)


def slope(x: Tensor, silu: bool) -> Tensor:
    """Return the derivative of `activate`."""
    s = _sigmoid(x)
    return s * (1.0 + x * (1.0 - s)) if silu else s * (1.0 - s)


def strength(logits: Tensor, neg_eigval: bool) -> Tensor:
    """Return beta: sigmoid(logits), or 2 sigmoid(logits) with `neg_eigval`."""
    return _sigmoid(logits) * (2.0 if neg_eigval else 1.0)


def strength_backward(dbeta: Tensor, beta: Tensor, neg_eigval: bool) -> Tensor:
    """Return the gradient of beta's logits."""
    return dbeta * beta * (1.0 - beta / (2.0 if neg_eigval else 1.0))


def l2norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x / sqrt(sum x^2 + eps) over the last dimension, and 1 / sqrt(...) ``[.., 1]``."""
    rstd = (x.square().sum(-1, keepdim=True) + EPS).rsqrt()
    return x * rstd, rstd


def l2norm_backward(dy: Tensor, y: Tensor, rstd: Tensor) -> Tensor:
    """Return dx = rstd (dy - y sum(y dy))."""
    return rstd * (dy - y * (y * dy).sum(-1, keepdim=True))


def _gate_argument(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, rank: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return exp(A_log) ``[HV]`` or ``[HV, 1]``, and x = g + dt_bias, in `dtype`."""
    HV = g.shape[2]
    A = torch.ones(HV, dtype=dtype, device=g.device) if A_log is None else A_log.to(dtype).exp()
    x = g.to(dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(dtype).reshape(x.shape[2:])
    return (A.unsqueeze(-1) if rank else A), x


def _softplus_decay(A: Tensor, x: Tensor, bound: float | None) -> Tensor:
    return -A * _softplus(x)


def _softplus_gradients(
    A: Tensor, x: Tensor, bound: float | None, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    y = -A * _softplus(x)
    return -A * _sigmoid(x) * dy, y * dy, y > -torch.inf  # a decay of -inf has gradient 0


def _bounded_decay(A: Tensor, x: Tensor, bound: float) -> Tensor:
    return bound * _sigmoid(A * x)


def _bounded_gradients(
    A: Tensor, x: Tensor, bound: float, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    s = _sigmoid(A * x)
    dx = bound * s * (1 - s) * A * dy
    return dx, dx * x, s * (1 - s) > 0  # a saturated sigmoid has slope 0, even if A overflows


# By kind, of A = exp(A_log) and x = g + dt_bias: the log decay, and the gradients of x and of A_log
# per token, with the entries where they are not 0.
FORMULAS: dict[str, tuple[Callable, Callable]] = {
    SOFTPLUS: (_softplus_decay, _softplus_gradients),
    BOUNDED: (_bounded_decay, _bounded_gradients),
}


def gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, which: Gate, rank: int) -> Tensor:
    """Return the log decay of logits g, float32, or float64 for float64 logits."""
    A, x = _gate_argument(g, A_log, dt_bias, rank, torch.promote_types(g.dtype, torch.float32))
    return FORMULAS[which.kind][0](A, x, which.bound)


def gate_backward(
    dy: Tensor,
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    which: Gate,
    rank: int,
    invariant: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of `gate` for g, A_log and dt_bias, each in its input's dtype.

    The gradients of A_log and dt_bias are summed over tokens in at least float32, rounded once. The
    order of the sum over tokens may depend on the shape of g, but not with `invariant`.
    """
    A, x = _gate_argument(g, A_log, dt_bias, rank, torch.promote_types(g.dtype, torch.float32))
    dy = dy.to(x.dtype)
    dx, per_log, counts = FORMULAS[which.kind][1](A, x, which.bound, dy)
    # Mask out what 0 * inf would make NaN. Padding, where dy is 0, may hold anything.
    counts &= dy != 0
    dx, per_log = torch.where(counts, dx, 0.0), torch.where(counts, per_log, 0.0)
    dA_log = ddt_bias = None
    if A_log is not None and invariant:
        dA_log = _sum_in_pairs(per_log.sum(-1) if rank else per_log).to(A_log.dtype)
    elif A_log is not None:
        dA_log = per_log.sum((0, 1, 3) if rank else (0, 1)).to(A_log.dtype)
    if dt_bias is not None:
        total = _sum_in_pairs(dx) if invariant else dx.sum((0, 1))
        ddt_bias = total.reshape(dt_bias.shape).to(dt_bias.dtype)
    return dx.to(g.dtype), dA_log, ddt_bias


def _sum_in_pairs(x: Tensor) -> Tensor:
    """Sum x [B, T, ...] over its tokens, each entry in an order that follows from B T alone."""
    x = x.flatten(0, 1)
    while len(x) > 1:
        half = (len(x) + 1) // 2
        first, rest = x[:half].clone(), x[half:]
        first[: len(rest)] += rest
        x = first
    return x.sum(0)


def contiguous_call(p: Problem) -> Problem:
    """Return a call whose inputs are contiguous and begin on cache lines.

    The bits of a sum, and of a BLAS product, may depend on strides and addresses. Stages copy
    states before they compute with them.
    """
    p = copy(p)
    p.q, p.k, p.v = (_contiguous(x) for x in (p.q, p.k, p.v))
    p.g, p.beta, p.A_log, p.dt_bias = (
        None if x is None else _contiguous(x) for x in (p.g, p.beta, p.A_log, p.dt_bias)
    )
    return p


def contiguous_gradients(
    p: Problem, do: Tensor | None, dfinal_state: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of o and of the final state likewise."""
    return None if do is None else _contiguous(do), dfinal_state


def _contiguous(x: Tensor) -> Tensor:
    if x.is_contiguous() and x.data_ptr() % CACHE_LINE == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class Activated:
    """The activated inputs of the recurrence, in one dtype.

    q and k ``[B, T, H, K]`` are normalised, v is ``[B, T, HV, V]``, g ``[B, T, HV, D]`` (zero if
    absent), beta ``[B, T, HV]`` (one if absent). D is K for a decay of rank 1, and 1 for rank 0.
    The scale is not applied.
    """

    def __init__(self, p: Problem, dtype: torch.dtype):
        self.q, self.k, self.v = p.q.to(dtype), p.k.to(dtype), p.v.to(dtype)
        self.q_rstd: Tensor | None = None
        self.k_rstd: Tensor | None = None
        if p.l2norm:
            self.q, self.q_rstd = l2norm(self.q)
            self.k, self.k_rstd = l2norm(self.k)
        if p.g is None:
            g = self.v.new_zeros((p.B, p.T, p.HV))
        else:
            self.logits = p.g.to(torch.promote_types(p.g.dtype, dtype))
            g = (
                gate(self.logits, p.A_log, p.dt_bias, p.gate, p.rank).to(dtype)
                if p.gate.inside
                else p.g.to(dtype)
            )
        self.g = g if p.rank and p.g is not None else g.unsqueeze(-1)
        if p.beta is None:
            self.beta = self.v.new_ones((p.B, p.T, p.HV))
        elif p.sigmoid_beta:
            self.beta = strength(p.beta.to(dtype), p.neg_eigval)
        else:
            self.beta = p.beta.to(dtype)

    def gradients(
        self,
        p: Problem,
        dq: Tensor | None,
        dk: Tensor | None,
        dg: Tensor | None,
        dbeta: Tensor | None,
    ):
        """Return (dq, dk, dg, dbeta, dA_log, ddt_bias) of the inputs.

        The arguments are the gradients of the activated tensors, in their shapes.
        """
        if self.q_rstd is not None and self.k_rstd is not None:
            dq = None if dq is None else l2norm_backward(dq, self.q, self.q_rstd)
            dk = None if dk is None else l2norm_backward(dk, self.k, self.k_rstd)
        dA_log = ddt_bias = None
        if dg is not None:
            dg = dg if p.rank else dg.squeeze(-1)
            if p.gate.inside:
                dg, dA_log, ddt_bias = gate_backward(
                    dg, self.logits, p.A_log, p.dt_bias, p.gate, p.rank, p.invariant
                )
        if dbeta is not None and p.sigmoid_beta:
            dbeta = strength_backward(dbeta, self.beta, p.neg_eigval)
        if p.cu_seqlens is not None:
            for d in (dq, dk, dg, dbeta):
                if d is not None:
                    # tokens after the last sequence may hold anything, NaN included
                    d[:, int(p.cu_seqlens[-1]) :] = 0.0
        return dq, dk, dg, dbeta, dA_log, ddt_bias
