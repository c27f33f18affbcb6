"""Define the short causal convolution of q, k and v."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kda_ops.layer_functional import short_conv, short_conv_
from kda_ops.nn.checks import (
    check_buffer,
    check_dense,
    check_dtype,
    check_flag,
    check_float,
    check_size,
    check_tensor,
    check_writable,
)
from kda_ops.nn.local import local


class ShortConvolution(nn.Module):
    """Apply a short causal convolution to each channel, then SiLU.

    ``y_t = silu(bias + sum_i weight[:, 0, i] * x_{t - size + 1 + i})``. The inputs
    before x are those of `tail` or `initial_tail`, or zero. The operator is `kda_ops.short_conv`.

    Args:
        channels: D.
        size: taps per channel.
        bias: add a bias per channel.
        device, dtype: of the parameters.

    Parameters: `weight` ``[D, 1, size]`` and `bias` ``[D]``, named, shaped and initialised as in
    `torch.nn.Conv1d` with ``groups=D``.

    Raises:
        ValueError: `channels` or `size` is below 1.
        TypeError: `channels` or `size` is not a whole number, or `dtype` has 8 bits or is not a
            float.

    Example:
        >>> import torch, kda_ops.nn
        >>> conv = kda_ops.nn.ShortConvolution(8, 4)
        >>> conv(torch.randn(2, 100, 8)).shape
        torch.Size([2, 100, 8])

    Source: Gated Delta Networks, arXiv:2412.06464 (short convolutions on q, k and v).
    """

    def __init__(
        self, channels: int, size: int = 4, bias: bool = False, *, device=None, dtype=None
    ):
        super().__init__()
        check_size("channels", channels)
        check_size("size", size)
        check_flag("bias", bias)
        check_dtype("dtype", dtype)
        self.channels, self.size = channels, size
        self.weight = nn.Parameter(torch.empty(channels, 1, size, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias from ``U(-1, 1) / sqrt(size)``."""
        bound = self.size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        """Return the sizes that `print` shows."""
        return f"{self.channels}, size={self.size}, bias={self.bias is not None}"

    def forward(
        self,
        x: Tensor,
        tail: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        initial_tail: Tensor | None = None,
        checked: bool = False,
    ) -> Tensor:
        """Convolve x along time.

        Args:
            x: ``[B, T, D]``, or ``[1, T, D]`` with `cu_seqlens`; fp16 to fp64, on the device of the
                weight.
            tail: ``[N, W - 1, D]`` with W = `size`, the inputs before x, oldest first; inference
                only, because it is updated in place.
            cu_seqlens: ``[N + 1]``, int32 or int64: offsets of packed sequences.
            initial_tail: as `tail`, but read only and differentiable.
            checked: the caller has checked that the tail may be written.

        Returns:
            ``[B, T, D]`` in x's dtype.

        Raises:
            ValueError: x has another number of channels, a tail has another shape, or both tails
                are given.
            TypeError: x or a tail is not a float, or is on another device than the weight.
            RuntimeError: `tail` is given and a gradient is wanted, or it was made under
                ``torch.inference_mode()`` and is used outside. This is said before other faults
                of a tail.
        """
        weight, bias = local(self.weight), local(self.bias)
        check_tensor("x", x)
        check_dense("x", x)
        if x.dim() != 3 or x.shape[-1] != weight.shape[0]:
            raise ValueError(
                f"x must have shape [B, T, D] = [B, T, {weight.shape[0]}], got {list(x.shape)}."
            )
        check_float("x", x, weight.device, "weight")
        weight = weight.squeeze(1)
        if tail is None:
            y, _ = short_conv(x, weight, bias, initial_tail, cu_seqlens, activation="silu")
            return y
        if initial_tail is not None:
            raise ValueError("tail and initial_tail both define the inputs before x: pass one.")
        if not checked:
            check_tensor("tail", tail)
            check_buffer("tail", tail)
            check_writable("tail", tail)
        return short_conv_(x, weight, bias, tail, None, cu_seqlens, activation="silu")
