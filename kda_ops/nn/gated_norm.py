"""Define the gated normalisation of the operator's output."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kda_ops.arguments import check_rows
from kda_ops.layer_functional import gated_rms_norm
from kda_ops.nn.checks import check_dtype, check_eps, check_float, check_size, check_tensor
from kda_ops.nn.local import local
from kda_ops.norm import ACTIVATIONS


class GatedRMSNorm(nn.Module):
    """Normalise the last axis to a root mean square of 1, scale it, and gate it.

    ``y = x / sqrt(mean(x^2) + eps) * weight * activation(gate)``, computed in fp32 (fp64 for fp64).
    The operator is `kda_ops.gated_rms_norm`.

    Args:
        width: length V of the last axis.
        eps: added to the mean square.
        activation: ``"sigmoid"``, or ``"swish"``, also called ``"silu"``.
        device, dtype: of the parameter.

    Parameter: `weight` ``[V]``, initially ones.

    Raises:
        ValueError: `width` is below 1, `activation` is another name, or `eps` is not finite and
            above 0.
        TypeError: `width` is not a whole number, `eps` is not a number, or `dtype` has 8 bits or
            is not a float.

    Example:
        >>> import torch, kda_ops.nn
        >>> norm = kda_ops.nn.GatedRMSNorm(32)
        >>> norm(torch.randn(2, 100, 4, 32), torch.randn(2, 100, 4, 32)).shape
        torch.Size([2, 100, 4, 32])

    Source: Kimi Linear technical report, arXiv:2510.26692 (output gate).
    """

    def __init__(
        self, width: int, eps: float = 1e-5, activation: str = "sigmoid", *, device=None, dtype=None
    ):
        super().__init__()
        check_size("width", width)
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}.")
        check_eps("eps", eps)
        check_dtype("dtype", dtype)
        self.eps, self.activation = eps, activation
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set weight to ones."""
        nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        """Return the sizes that `print` shows."""
        return f"{self.weight.shape[0]}, eps={self.eps}, activation={self.activation!r}"

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise x and gate it.

        Args:
            x: ``[..., V]``, fp16 to fp64, on the device of the weight.
            gate: logits of x's shape, fp16 to fp64. None: no gate.

        Returns:
            ``[..., V]`` in x's dtype.

        Raises:
            ValueError: x has another width than V, or the gate another shape than x.
            TypeError: x or the gate is not a float or on another device than the weight.
        """
        check_tensor("x", x)
        check_rows("x", x)
        if x.dim() < 1 or x.shape[-1] != self.weight.shape[0]:
            raise ValueError(
                f"x must have shape [..., V] = [..., {self.weight.shape[0]}], got {list(x.shape)}."
            )
        check_float("x", x, self.weight.device, "weight")
        if gate is not None:
            check_tensor("gate", gate)
            check_rows("gate", gate)
            if gate.shape != x.shape:
                raise ValueError(
                    f"gate must have the shape of x, {list(x.shape)}, got {list(gate.shape)}."
                )
            check_float("gate", gate, x.device, "x")
        weight = local(self.weight)
        return gated_rms_norm(x, weight, gate, eps=self.eps, activation=self.activation)
