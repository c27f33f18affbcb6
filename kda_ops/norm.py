"""The passes of the gated norm, and the validation of its calls."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from kda_ops.checks import check_float, refuse_float64_on_cuda, shape_error
from kda_ops.stages import Backend, Pass, new_like

ACTIVATIONS = ("sigmoid", "silu", "swish")  # "swish" is another name of "silu"


class NormPass(Pass):
    """The gated norm: each row over its root mean square, times weight and activated gate."""

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        given = self.given = self.named(args)
        self.x, self.weight, self.gate = given["x"], given["weight"], given.get("gate")
        self.eps, activation = flags.get("eps", 1e-5), flags.get("activation", "sigmoid")
        self.silu = activation != "sigmoid"
        check_norm(self.x, self.weight, self.gate, self.eps, activation)

    def outputs(self) -> tuple[Tensor | None, ...]:
        """Allocate y."""
        return (new_like(self.x),)

    def run(self, b: Backend) -> tuple[Tensor | None, ...]:
        """Return y."""
        return (b.gated_norm(self.x, self.weight, self.gate, self.eps, self.silu),)


class NormBackwardPass(NormPass):
    """Gradients of x, weight and gate."""

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        super().__init__(rank, args, flags)
        self.dy = self.given["dy"]
        if self.dy is None or self.dy.shape != self.x.shape:
            shape_error("dy", "[B, T, H, V]", tuple(self.x.shape), self.dy, " (as x has)")

    def outputs(self) -> tuple[Tensor | None, ...]:
        """Allocate the gradients, None of an absent gate."""
        return tuple(map(new_like, (self.x, self.weight, self.gate)))

    def run(self, b: Backend) -> tuple[Tensor | None, ...]:
        """Return the gradients, None of an absent gate."""
        return b.gated_norm_backward(self.dy, self.x, self.weight, self.gate, self.eps, self.silu)


def check_norm(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, activation: str) -> None:
    """Validate a call of the operator: x and gate [B, T, H, V], weight [G, V]; G divides H."""
    if x is None or weight is None:
        raise TypeError(f"{'x' if x is None else 'weight'} must be a tensor, got None.")
    if x.dim() != 4:
        raise ValueError(f"x must have 4 dimensions [B, T, H, V], got shape {list(x.shape)}.")
    H, V = x.shape[2], x.shape[3]
    if weight.dim() != 2 or weight.shape[1] != V:
        raise ValueError(
            f"weight must have shape [G, V] = [G, {V}], got {list(weight.shape)}: each of its rows "
            "serves H / G heads."
        )
    G = weight.shape[0]
    if H % G if G else H:
        raise ValueError(
            "H must be a multiple of G: head h reads row h // (H // G) of weight; got H = "
            f"{H} (x) and G = {G} (weight)."
        )
    if gate is not None and gate.shape != x.shape:
        shape_error("gate", "[B, T, H, V]", tuple(x.shape), gate, " (as x has)")
    for name, tensor in (("x", x), ("weight", weight), ("gate", gate)):
        if tensor is not None:
            check_float(name, tensor, x.device, "x")
    refuse_float64_on_cuda("x", x)
    if not 0.0 < eps < math.inf:
        raise ValueError(f"eps must be a finite number above 0, got {eps}.")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}.")
