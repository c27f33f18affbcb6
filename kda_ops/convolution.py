"""The passes of the short causal convolution, and the validation of its calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_ops.checks import (
    can_read,
    check_float,
    check_index,
    check_no_overlap,
    check_null_slot,
    check_offsets,
    check_resumed,
    check_slots,
    refuse_float64_on_cuda,
    shape_error,
    without_null,
)
from kda_ops.exported import count_results, is_any_size
from kda_ops.stages import CONVOLVED, Backend, Pass, new_like

ACTIVATIONS = (None, "silu", "swish")  # "swish" is another name of "silu"


class Convolution:
    """The sizes, tensors and flags of one call: B, T, N as in `Problem`, D channels, W taps.

    `tail` ``[N, W - 1, D]`` is what comes before each sequence, oldest first, or None for zeros; in
    place it is a pool ``[slots, W - 1, D]``. `sum_dtype` is the dtype of sums.
    """

    __slots__ = (
        *("x", "weight", "bias", "tail", "tail_indices", "cu_seqlens"),
        *("B", "T", "N", "D", "W", "silu", "output_final_tail", "sum_dtype", "null_slot"),
        "has_initial_state",
    )

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        initial_tail: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        activation: str | None = None,
        output_final_tail: bool = False,
    ):
        if x is None or weight is None:
            raise TypeError(f"{'x' if x is None else 'weight'} must be a tensor, got None.")
        if x.dim() != 3:
            raise ValueError(f"x must have shape [B, T, D], got {list(x.shape)}.")
        B, T, D = x.shape
        device = x.device
        check_float("x", x, device, "x")
        refuse_float64_on_cuda("x", x)
        if weight.dim() != 2 or weight.shape[0] != D or weight.shape[1] == 0:
            hint = ""
            if weight.shape[:1] == (D,) and weight.dim() == 3:
                hint = ": pass weight[:, 0] of a torch.nn.Conv1d"
            raise ValueError(
                f"weight must have shape [D, W] = [{D}, W] with at least one tap, got "
                f"{list(weight.shape)}{hint}."
            )
        check_float("weight", weight, device, "x")
        if bias is not None:
            if bias.shape != (D,):
                shape_error("bias", "[D]", (D,), bias)
            check_float("bias", bias, device, "x")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}.")
        self.N = B
        if cu_seqlens is not None:
            check_offsets(cu_seqlens, B, T, device, "x")
            cu_seqlens = cu_seqlens.contiguous()  # kernels read it with stride 1
            self.N = cu_seqlens.shape[0] - 1
        self.x, self.weight, self.bias, self.cu_seqlens = x, weight, bias, cu_seqlens
        self.B, self.T, self.D, self.W = B, T, D, weight.shape[1]
        self.silu, self.output_final_tail = activation is not None, output_final_tail
        self.sum_dtype = torch.promote_types(x.dtype, torch.float32)
        self.tail: Tensor | None = None
        self.tail_indices: Tensor | None = None
        self.null_slot = -1
        self.has_initial_state: Tensor | None = None
        if initial_tail is not None:
            self._take_tail("initial_tail", "N", self.N, initial_tail)

    @classmethod
    def on_pool(
        cls,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tail: Tensor,
        tail_indices: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        has_initial_state: Tensor | None = None,
        *,
        activation: str | None = None,
        null_slot: int = -1,
    ) -> Convolution:
        """Validate a call that reads and writes tails in the slots of a pool."""
        c = cls(x, weight, bias, None, cu_seqlens, activation=activation)
        if tail is None:
            raise TypeError(
                "tail must be a tensor, the pool of tails that is read and written in place, got "
                "None."
            )
        if tail.dim() != 3:
            raise ValueError(f"tail must have shape [slots, W - 1, D], got {list(tail.shape)}.")
        check_no_overlap("tail", tail)
        check_null_slot(null_slot, tail_indices, "tail_indices")
        c.null_slot = null_slot
        if has_initial_state is not None:
            check_resumed(has_initial_state, c.N, x.device, "x")
            c.has_initial_state = has_initial_state.contiguous()
        if tail_indices is None:
            c._take_tail("tail", "N", c.N, tail)
            return c
        c._take_tail("tail", "slots", tail.shape[0], tail)
        if tail_indices.dim() != 1 or tail_indices.shape[0] != c.N:
            shape_error("tail_indices", "[N]", (c.N,), tail_indices)
        check_index("tail_indices", tail_indices, x.device, "x")
        if can_read(tail_indices):
            check_slots(c.slots(tail_indices), tail.shape[0], "tail_indices")
        c.tail_indices = tail_indices
        return c

    def _take_tail(self, name: str, letter: str, count: int, tail: Tensor) -> None:
        if is_any_size(tail.shape[0] if tail.dim() else 0):
            count = tail.shape[0]  # checked when the exported program runs
        want = (count, self.W - 1, self.D)
        if tail.shape != want:
            hint = ""
            if tail.shape == (count, self.D, self.W - 1):
                hint = ": pass its transpose, tail.mT; any strides are accepted"
            shape_error(name, f"[{letter}, W - 1, D]", want, tail, hint)
        check_float(name, tail, self.x.device, "x")
        self.tail = tail

    def slots(self, table: Tensor) -> Tensor:
        """Return a table of slots with -1 for every slot that is nobody's."""
        return without_null(table, self.null_slot)

    def new_output(self) -> Tensor:
        """Allocate y [B, T, D] in x's dtype, contiguous."""
        return torch.empty_like(self.x, memory_format=torch.contiguous_format)

    def new_final_tail(self) -> Tensor:
        """Allocate the final tail [N, W - 1, D] in x's dtype; empty if it is not asked for."""
        if not self.output_final_tail:
            return self.x.new_empty((0,))
        N = count_results(self.N, self.cu_seqlens, self.tail)
        return self.x.new_empty((N, self.W - 1, self.D))

    def differentiable(self) -> tuple[Tensor | None, ...]:
        """Return the inputs that have gradients, in the order of `stages.CONVOLVED`."""
        return self.x, self.weight, self.bias, self.tail


class Convolve(Pass):
    """The convolution of whole sequences: y and the final tail."""

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        self.p = Convolution(**self.named(args), **flags)

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Allocate y and the final tail."""
        return self.p.new_output(), self.p.new_final_tail()

    def run(self, b: Backend) -> tuple[Tensor, Tensor]:
        """Return y and the final tail, which is empty if it is not asked for."""
        y, final_tail = b.short_conv(self.p)
        return y, self.p.new_final_tail() if final_tail is None else final_tail


class ConvolveBackward(Pass):
    """Gradients of the inputs, from those of y and of the final tail (None: zero).

    Bit i of the flag `need` asks for the gradient of ``stages.CONVOLVED[i]``.
    """

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        flags = dict(flags)
        need = flags.pop("need")
        self.need = frozenset(n for i, n in enumerate(CONVOLVED) if need >> i & 1)
        given = self.named(args)
        self.dy, dfinal_tail = given.pop("dy"), given.pop("dfinal_tail")
        p = self.p = Convolution(**given, **flags)
        # an absent one may be an empty tensor of one dimension
        absent = dfinal_tail is None or dfinal_tail.dim() == 1
        self.dfinal_tail = None if absent else dfinal_tail
        for name, letters, x, want in (
            ("dy", "[B, T, D]", self.dy, (p.B, p.T, p.D)),
            ("dfinal_tail", "[N, W - 1, D]", self.dfinal_tail, (p.N, p.W - 1, p.D)),
        ):
            if x is not None and x.shape != want:
                shape_error(name, letters, want, x)

    def outputs(self) -> tuple[Tensor | None, ...]:
        """Allocate the gradients, None where not asked for."""
        inputs = zip(CONVOLVED, self.p.differentiable())
        return tuple(new_like(x) if n in self.need else None for n, x in inputs)

    def run(self, b: Backend) -> tuple[Tensor | None, ...]:
        """Return the gradients, None where not asked for."""
        return b.short_conv_backward(self.p, self.dy, self.dfinal_tail, self.need)


class ConvolveInPlace(Pass):
    """The convolution on a pool: tails are read from its slots and written there."""

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        self.p = Convolution.on_pool(**self.named(args), **flags)

    def outputs(self) -> tuple[Tensor]:
        """Allocate y."""
        return (self.p.new_output(),)

    def run(self, b: Backend) -> tuple[Tensor]:
        """Return y."""
        return (b.short_conv_in_place(self.p),)
