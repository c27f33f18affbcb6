"""The short causal convolution in front of q, k and v."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda_ops.nn.local import local
from kda_ops.nn.packing import Packing


class ShortConvolution(nn.Module):
    """Convolve each channel with its last inputs, then SiLU.

    ``y_t = silu(bias + sum_i weight[:, 0, i] * x_{t - size + 1 + i})``, inputs before the first being those of `tail`, or zero. A sum of shifted products, so
    that a compiler makes one kernel of it.

    Args:
        channels: D.
        size: taps per channel.
        bias: add one number per channel.

    Parameters: `weight` ``[D, 1, size]`` and `bias` ``[D]``, as `torch.nn.Conv1d` with ``groups=D`` has them, and initialised like that.

    Example:
        >>> import torch, kda_ops.nn
        >>> conv = kda_ops.nn.ShortConvolution(8, 4)
        >>> conv(torch.randn(2, 100, 8)).shape
        torch.Size([2, 100, 8])

    Source: Gated Delta Networks, arXiv:2412.06464 (short convolutions on q, k and v).
    """

    def __init__(self, channels: int, size: int = 4, bias: bool = False, *, device=None, dtype=None):
        super().__init__()
        if size < 1:
            raise ValueError(f"size must be at least 1 tap, got {size}.")
        self.channels, self.size = channels, size
        self.weight = nn.Parameter(torch.empty(channels, 1, size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias from ``U(-1, 1) / sqrt(size)``."""
        bound = self.size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        """Sizes, as `print` shows them."""
        return f"{self.channels}, size={self.size}, bias={self.bias is not None}"

    def forward(self, x: Tensor, tail: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        """Convolve x ``[B, T, D]``, or ``[1, T, D]`` with `packing`; `tail` ``[N, size - 1, D]`` holds what came before, and is brought up to date in place."""
        taps = self._taps(x, tail) if packing is None else self._packed_taps(x, tail, packing)
        weight, bias = local(self.weight)[:, 0].unbind(-1), local(self.bias)
        y = taps[0] * weight[0]
        for tap, w in zip(taps[1:], weight[1:]):
            y = y + tap * w
        if bias is not None:
            y = y + bias
        return F.silu(y).to(x.dtype)

    def _taps(self, x: Tensor, tail: Tensor | None) -> list[Tensor]:
        """The inputs each tap multiplies, oldest first: `size` tensors [B, T, D]."""
        T, past = x.shape[1], self.size - 1
        if tail is None:
            rows = F.pad(x, (0, 0, past, 0))
        else:
            rows = torch.cat([tail.to(x.dtype), x], 1)  # [B, size - 1 + T, D]
            tail.copy_(rows[:, T:])
        return [rows[:, i : i + T] for i in range(self.size)]

    def _packed_taps(self, x: Tensor, tail: Tensor | None, packing: Packing) -> list[Tensor]:
        T, past, n, t = x.shape[1], self.size - 1, packing.sequence, packing.position
        taps = []
        for back in range(past, 0, -1):
            earlier = F.pad(x, (0, 0, back, 0))[:, :T]
            before = 0.0 if tail is None else tail[n, (past + t - back).clamp(max=past - 1)].to(x.dtype)
            taps.append(torch.where((t >= back)[:, None], earlier, before))
        if tail is not None and past:
            # Row j of a new tail is token `length - past + j` of its sequence; those below 0 are still in the old tail.
            N = tail.shape[0]
            row = torch.arange(past, device=x.device)
            token = packing.length[:, None] - past + row  # [N, past]
            old = torch.arange(N, device=x.device)[:, None] * past + past + token
            rows = torch.cat([tail.flatten(0, 1).to(x.dtype), x[0]])
            tail.copy_(rows[torch.where(token < 0, old, N * past + packing.start[:, None] + token)])
        return [*taps, x]
