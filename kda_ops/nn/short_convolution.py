"""Define the short causal convolution of q, k and v."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda_ops.nn.checks import (
    check_buffer,
    check_dense,
    check_dtype,
    check_flag,
    check_float,
    check_size,
    check_writable,
)
from kda_ops.nn.local import local
from kda_ops.nn.packing import Packing
from kda_ops.registrations.opaque import opaque


class ShortConvolution(nn.Module):
    """Apply a short causal convolution to each channel, then SiLU.

    ``y_t = silu(bias + sum_i weight[:, 0, i] * x_{t - size + 1 + i})``. Inputs before the first are
    those of `tail`, or zero. The sum is written as shifted products, which Inductor fuses into one
    kernel.

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
        packing: Packing | None = None,
        *,
        checked: bool = False,
    ) -> Tensor:
        """Convolve x along time.

        Args:
            x: ``[B, T, D]``, or ``[1, T, D]`` with `packing`; fp16 to fp64, on the device of the
                weight.
            tail: ``[N, size - 1, D]``, the inputs before x, oldest first; updated in place.
            packing: the places of packed tokens.
            checked: the caller has checked that the tail may be written.

        Returns:
            ``[B, T, D]`` in x's dtype.

        Raises:
            ValueError: x has another number of channels, or the tail another shape.
            TypeError: x or the tail is not a float or on another device than the weight.
            RuntimeError: the tail was made under ``torch.inference_mode()`` and is used outside.
        """
        weight, bias = local(self.weight), local(self.bias)
        check_dense("x", x)
        if x.dim() != 3 or x.shape[-1] != weight.shape[0]:
            raise ValueError(
                f"x must have shape [B, T, D] = [B, T, {weight.shape[0]}], got {list(x.shape)}."
            )
        check_float("x", x, weight.device, "weight")
        N = x.shape[0] if packing is None else packing.offsets.shape[0] - 1
        if tail is not None and tail.shape != (N, self.size - 1, x.shape[-1]):
            raise ValueError(
                f"tail must have shape [N, size - 1, D] = {[N, self.size - 1, x.shape[-1]]}, got "
                f"{list(tail.shape)}."
            )
        if tail is not None:
            check_float("tail", tail, x.device, "x")
            if not checked:
                check_buffer("tail", tail)
                check_writable("tail", tail)
        position = None if packing is None else packing.position
        if tail is None and torch.is_grad_enabled():
            return _Convolve.apply(x, weight, bias, position).to(x.dtype)
        if tail is None:
            taps = _taps(x, self.size, position)
        else:
            taps = (
                self._taps_after(x, tail)
                if packing is None
                else self._packed_taps(x, tail, packing)
            )
        return F.silu(_sum(taps, weight[:, 0].unbind(-1), bias)).to(x.dtype)

    def _taps_after(self, x: Tensor, tail: Tensor) -> list[Tensor]:
        T = x.shape[1]
        rows = torch.cat([tail.to(x.dtype), x], 1)  # [B, size - 1 + T, D]
        tail.copy_(rows[:, T:])
        return [rows[:, i : i + T] for i in range(self.size)]

    def _packed_taps(self, x: Tensor, tail: Tensor, packing: Packing) -> list[Tensor]:
        T, past, n, t = x.shape[1], self.size - 1, packing.sequence, packing.position
        taps = []
        for back in range(past, 0, -1):
            earlier = F.pad(x, (0, 0, back, 0))[:, :T]
            before = tail[n, (past + t - back).clamp(max=past - 1)].to(x.dtype)
            taps.append(torch.where((t >= back)[:, None], earlier, before))
        if past:
            # Row j of a new tail is token `length - past + j` of its sequence. Tokens below 0 come
            # from the old tail.
            N, start, length = tail.shape[0], packing.offsets[:-1], packing.offsets.diff()
            row = torch.arange(past, device=x.device)
            token = length[:, None] - past + row  # [N, past]
            old = torch.arange(N, device=x.device)[:, None] * past + past + token
            rows = torch.cat([tail.flatten(0, 1).to(x.dtype), x[0]])
            new = (start[:, None] + token).clamp(max=T - 1)  # the operator refuses offsets past T
            tail.copy_(rows[torch.where(token < 0, old, N * past + new)])
        return [*taps, x]


class _Convolve(torch.autograd.Function):
    """The convolution of whole sequences in training, with its own backward.

    Autograd's backward would compute the gradient of SiLU once per tap and keep SiLU's input in
    fp32.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, position: Tensor | None) -> Tensor:
        """Convolve x ``[B, T, D]`` with weight ``[D, 1, size]``, in the dtype of their product.

        `position` ``[T]`` is that within a packed sequence. Do not end with a cast that does
        nothing: Dynamo of torch 2.11 then drops all gradients.
        """
        return F.silu(_sum(_taps(x, weight.shape[-1], position), _rows(weight), bias))

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
        """Save only the inputs."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    @opaque
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx, dweight and dbias."""
        x, weight, bias, position = ctx.saved_tensors
        rows, taps = _rows(weight), _taps(x, weight.shape[-1], position)
        y = _sum(taps, rows, bias)
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        sigmoid = wide.sigmoid()
        dy = _in_memory((dy * (sigmoid * (1 + wide * (1 - sigmoid)))).to(y.dtype))
        dx = _sum([_later(dy, back, position) for back in range(len(rows))], rows[::-1], None).to(
            x.dtype
        )
        dweight = torch.stack([(dy * tap).sum((0, 1)) for tap in taps], -1)[:, None].to(
            weight.dtype
        )
        dbias = None if bias is None else dy.sum((0, 1)).to(bias.dtype)
        return dx, dweight, dbias, None


def _sum(taps: Sequence[Tensor], weight: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    y = taps[0] * weight[0]
    for tap, w in zip(taps[1:], weight[1:]):
        y = y + tap * w
    return y if bias is None else y + bias


def _taps(x: Tensor, size: int, position: Tensor | None) -> list[Tensor]:
    """Return the inputs that each tap multiplies, oldest first: `size` tensors [B, T, D].

    Inputs before the first token of a sequence are zero. Slice every tap from one padded x, the
    newest too: Inductor saves the padded tensor, so backward keeps one copy instead of two.
    """
    T, padded = x.shape[1], F.pad(x, (0, 0, size - 1, 0))
    taps = [padded[:, i : i + T] for i in range(size)]
    if position is None:
        return taps
    return [
        torch.where((position >= back)[:, None], tap, 0.0)
        for back, tap in zip(range(size - 1, 0, -1), taps)
    ] + taps[-1:]


def _later(dy: Tensor, back: int, position: Tensor | None) -> Tensor:
    """Return for each token what the token `back` later has in dy [B, T, D]: the adjoint of a tap.

    Tokens of other sequences count as zero.
    """
    if position is not None:
        dy = torch.where((position >= back)[:, None], dy, 0.0)
    return F.pad(dy, (0, 0, 0, back))[:, back:]


def _rows(weight: Tensor) -> tuple[Tensor, ...]:
    """Return the weights [D] of each tap, contiguous.

    Kernels can then read them in vectors as wide as those of x.
    """
    return _in_memory(weight[:, 0].t()).unbind(0)


def _in_memory(x: Tensor) -> Tensor:
    """Return x, contiguous and materialised.

    The explicit strides make Inductor write x to memory instead of recomputing it for each reader.
    """
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())
