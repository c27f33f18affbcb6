"""Provide the convolution and the gated norm of a layer as Python functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kda_ops.arguments import calls, check_rows, check_types
from kda_ops.checks import shape_error

_GATED_RMS_NORM = torch.ops.kda.gated_rms_norm.default


@calls(torch.ops.kda.short_conv.default, asked="output_final_tail")
def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_tail: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    activation: str | None = None,
    output_final_tail: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Convolve each channel along time with a few taps, causally; differentiable.

    For each sequence and channel, with ``x_t`` of ``initial_tail`` (or zero) for ``t < 0``::

        z_t = bias + sum_i weight[:, i] * x_{t - W + 1 + i}
        y_t = silu(z_t)                                       # z_t without an activation

    Sums are fp32 (fp64 for fp64 inputs). B is the batch, T the tokens, D the channels, W the taps.
    N is the number of sequences: B, or the number that ``cu_seqlens`` names.

    Args:
        x: ``[B, T, D]``, fp16, bf16 or fp32 (fp64 on CPU), any strides. Fastest with contiguous
            channels.
        weight: ``[D, W]``, fp16 to fp64, any W from 1; ``weight[:, 0]`` of a `torch.nn.Conv1d`.
        bias: ``[D]``, fp16 to fp64. None: 0.
        initial_tail: ``[N, W - 1, D]``, fp16 to fp64, any strides: the inputs before x, oldest
            first. None: zero.
        cu_seqlens: ``[N + 1]``, int32 or int64: offsets of packed sequences, as for `chunk_kda`.
        activation: ``"silu"``, also called ``"swish"``, or None.
        output_final_tail: return the last inputs too.

    Returns:
        y ``[B, T, D]`` in x's dtype, and the last W - 1 inputs ``[N, W - 1, D]`` in x's dtype, or
        None if not requested.

    Raises:
        ValueError: shapes disagree, or there is no such activation.
        TypeError: dtypes or devices disagree.

    Example:
        >>> import torch, kda_ops
        >>> x, weight = torch.randn(2, 100, 8), torch.randn(8, 4)
        >>> y, tail = kda_ops.short_conv(x, weight, activation="silu", output_final_tail=True)
        >>> y.shape, tail.shape
        (torch.Size([2, 100, 8]), torch.Size([2, 3, 8]))

    Source: Gated Delta Networks, arXiv:2412.06464 (short convolutions on q, k and v).
    """


@calls(torch.ops.kda.short_conv_.default)
def short_conv_(
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
) -> Tensor:
    """Convolve each channel along time on a pool of tails, in place; inference only.

    The equation is that of `short_conv`. Each sequence begins with the inputs of its slot, and its
    last W - 1 inputs are written there, in the pool's dtype. If a call has fewer tokens, the other
    rows move up unchanged, also in a pool that is wider than x.

    Args:
        x, weight, bias, cu_seqlens, activation: as for `short_conv`.
        tail: ``[slots, W - 1, D]``, fp16 to fp64, any strides without overlap: the pool.
        tail_indices: ``[N]``, int32 or int64: the slot of each sequence, read and written; slots of
            0 or above must be distinct. A negative slot reads and writes nothing, and its
            sequence's output is zero. None: sequence n has slot n.
        has_initial_state: ``[N]``, bool. Where it is false, inputs before the sequence are zero,
            whatever its slot holds. None: every sequence begins with the inputs of its slot.
        null_slot: slots up to this one count as negative slots; needs ``tail_indices``. -1: none.

    Returns:
        y ``[B, T, D]`` in x's dtype.

    Raises:
        ValueError: shapes disagree, a slot is wrong (on a CPU, or with KDA_OPS_CHECK=1), or there
            is no such activation.
        TypeError: dtypes or devices disagree.
        RuntimeError: a gradient is wanted, or the pool was made under ``torch.inference_mode()``
            and is used outside.

    Example:
        >>> import torch, kda_ops
        >>> pool = torch.zeros(8, 3, 6)
        >>> y = kda_ops.short_conv_(
        ...     torch.randn(2, 1, 6), torch.randn(6, 4), None, pool, torch.tensor([5, -1]))
        >>> [slot for slot in range(8) if pool[slot].any()]
        [5]

    Source: Gated Delta Networks, arXiv:2412.06464 (short convolutions on q, k and v).
    """


@check_types
def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None = None,
    *,
    eps: float = 1e-5,
    activation: str = "sigmoid",
) -> Tensor:
    """Normalise the last axis to a root mean square of 1, scale it, and gate it; differentiable.

    ``y = x / sqrt(mean(x^2) + eps) * weight * activation(gate)``, computed in fp32 (fp64 for fp64).

    Args:
        x: ``[..., V]``, fp16, bf16 or fp32 (fp64 on CPU), any strides. Fastest with a contiguous
            last dimension.
        weight: ``[V]``, fp16 to fp64; or ``[G, V]`` for x ``[..., H, V]``, with H a multiple of G:
            head h reads row ``h // (H // G)``.
        gate: logits of x's shape, fp16 to fp64, any strides. None: no gate.
        eps: added to the mean square, above 0.
        activation: of the gate, ``"sigmoid"``, or ``"silu"``, also called ``"swish"``.

    Returns:
        y, of x's shape and dtype.

    Raises:
        ValueError: shapes disagree, eps is not finite and above 0, or there is no such activation.
        TypeError: dtypes or devices disagree.

    Example:
        >>> import torch, kda_ops
        >>> o, gate = (torch.randn(2, 100, 4, 32) for _ in range(2))
        >>> kda_ops.gated_rms_norm(o, torch.ones(32), gate).shape
        torch.Size([2, 100, 4, 32])

    Source: Kimi Linear technical report, arXiv:2510.26692 (output gate).
    """
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor is None:
            raise TypeError(f"{name} must be a tensor, got None.")
        check_rows(name, tensor)
    check_rows("gate", gate)
    shape = x.shape
    if not shape:
        raise ValueError("x must have shape [..., V], got [].")
    if weight.dim() == 1 and weight.shape != shape[-1:]:
        shape_error("weight", "[V]", (shape[-1],), weight)
    if gate is not None and gate.shape != shape:
        shape_error("gate", "[..., V]", tuple(shape), gate, " (as x has)")
    if x.dim() != 4:
        rows = _as_heads(shape, weight.dim() == 1)
        x, gate = x.reshape(rows), None if gate is None else gate.reshape(rows)
    if weight.dim() == 1:
        weight = weight[None]
    y = _GATED_RMS_NORM(x, weight, gate, eps=eps, activation=activation)
    return y if y.shape == shape else y.view(shape)


def _as_heads(shape: torch.Size, one_row: bool) -> tuple[int, ...]:
    """Return the shape ``[B, T, H, V]`` of rows ``[..., V]`` with fewer or more axes.

    Up to three axes, rows that share one row of weight are tokens of one head: kernels take many
    tokens of a head at a time, and graphs need not know how many there are.
    """
    *outer, V = shape
    if not outer or (one_row and len(outer) < 3):
        outer = [*outer, 1]  # a graph of torch 2.11 has a tuple, which cannot be appended to
    *tokens, H = outer
    return (*tokens, H, V) if len(tokens) == 2 else (1, math.prod(tokens), H, V)
