"""Compute the gated norm and its gradients in plain torch, for the CPU backends.

The equations are those of `kda_ops.stages.Backend.gated_norm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.backends.activations import activate, slope


def _parts(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
    """Return x over its norm, 1 / norm, weight [H, V] and the activated gate, all wide."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, H, G = x.to(wide), x.shape[2], weight.shape[0]
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    per_head = weight.to(wide).repeat_interleave(H // max(G, 1), 0)
    return x * rstd, rstd, per_head, 1.0 if gate is None else activate(gate.to(wide), silu)


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, silu: bool) -> Tensor:
    """Return y; see `kda_ops.stages.Backend.gated_norm`."""
    unit, _, per_head, a = _parts(x, weight, gate, eps, silu)
    return (unit * per_head * a).to(x.dtype)


def gated_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, silu: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients; see `kda_ops.stages.Backend.gated_norm_backward`."""
    unit, rstd, per_head, a = _parts(x, weight, gate, eps, silu)
    dy = dy.to(unit.dtype)
    scaled = dy * a  # the gradient of the norm times weight
    dunit = scaled * per_head
    dx = rstd * (dunit - unit * (dunit * unit).mean(-1, keepdim=True))
    dgate = None
    if gate is not None:
        dgate = dy * unit * per_head * slope(gate.to(unit.dtype), silu)
        dgate = dgate.to(gate.dtype)
    G = weight.shape[0]
    each = (scaled * unit).sum((0, 1)).unflatten(0, (G, -1)) if G else weight.new_zeros(0, 1, 1)
    return dx.to(x.dtype), each.sum(1).to(weight.dtype).reshape(weight.shape), dgate
