"""Call the convolution and the gated norm by the functions of ``fla.modules``.

::

    from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update          # before
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from kda_ops.compat.fla_modules import (                                           # after
        causal_conv1d, causal_conv1d_update, rms_norm_gated)

Names, order and defaults match FLA 0.6.0. Intended differences:

- An unknown keyword is an error; FLA drops it.
- ``backend``, ``cu_seqlens_cpu`` and ``chunk_indices`` are accepted and ignored.
- A convolution without a ``weight`` or with a ``cp_context`` raises an error. In place of
  ``cp_context``, pass the tail of `kda_ops.distributed.exchange_tail` to `kda_ops.short_conv`.
- A norm with ``bias``, ``residual`` or ``prenorm`` raises an error.
- A convolution rounds its output before it adds the ``residual``.

Example:
    >>> import torch
    >>> from kda_ops.compat.fla_modules import causal_conv1d, causal_conv1d_update
    >>> x, weight = torch.randn(2, 100, 8), torch.randn(8, 4)
    >>> y, state = causal_conv1d(x, weight, activation="silu", output_final_state=True)
    >>> y, state = causal_conv1d_update(x[:, :1], state, weight=weight, activation="silu")
    >>> y.shape, state.shape
    (torch.Size([2, 1, 8]), torch.Size([2, 8, 4]))
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.arguments import all_dense, check_types
from kda_ops.checks import check_float, check_no_overlap, check_on_device, shape_error
from kda_ops.compat.fla_calls import refuse_unknown
from kda_ops.convolution import Convolution
from kda_ops.layer_functional import gated_rms_norm, short_conv, short_conv_

__all__ = ["causal_conv1d", "causal_conv1d_update", "rms_norm_gated"]


@check_types
@all_dense
def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    **unknown: object,
) -> tuple[Tensor, Tensor | None]:
    """Convolve along time, by FLA's signature; differentiable.

    Equation and errors: `kda_ops.short_conv`.

    Args:
        x: ``[B, T, D]``, or ``[B, T, ...]`` with D channels in the last axes.
        residual: of x's shape, added to the output.
        initial_state: ``[N, D, W]``, the last W inputs, oldest first. No tap reads the first.

    Returns:
        The output in x's shape, and the final state ``[N, D, W]`` or None.
    """
    refuse_unknown("causal_conv1d", unknown)
    x, weight = _given("x", x), _given("weight", weight)
    if cp_context is not None:
        raise ValueError(
            "cp_context must be None: pass the tail of kda_ops.distributed.exchange_tail to "
            "kda_ops.short_conv as initial_tail."
        )
    rows = x.flatten(2) if x.dim() > 3 else x
    p = Convolution(rows, weight, bias, None, cu_seqlens, activation=activation)
    _check_state("initial_state", initial_state, (p.N, p.D, p.W), x)
    _check_residual(residual, x)
    tail = None if initial_state is None else initial_state[..., 1:].mT
    y, final = short_conv(
        rows,
        weight,
        bias,
        tail,
        cu_seqlens,
        activation=activation,
        output_final_tail=output_final_state,
    )
    y = y.view(x.shape) if residual is None else y.view(x.shape) + residual
    if final is None:
        return y, None
    return y, torch.cat([_oldest(p, initial_state)[..., None], final.mT], -1)


def _oldest(p: Convolution, state: Tensor | None) -> Tensor:
    """Return the first column of the final state [N, D]: the input W tokens before the end.

    No tap reads it, so it cannot come from the operator: a NaN there would reach y.
    """
    x, W = p.x, p.W
    if p.cu_seqlens is None:
        if p.T >= W:
            return x[:, p.T - W]
        return x.new_zeros(p.N, p.D) if state is None else state[..., p.T].to(x.dtype)
    length, old = p.cu_seqlens.diff().long(), x.new_zeros(p.N, p.D)
    if state is not None:
        column = length.clamp(max=W - 1)[:, None, None].expand(-1, p.D, 1)
        old = state.gather(2, column)[..., 0].to(x.dtype)
    if p.T == 0:
        return old
    new = x[0, (p.cu_seqlens[1:] - W).clamp(min=0)]
    return torch.where((length >= W)[:, None], new, old)


@check_types
@all_dense
def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve one token of each sequence on a cache, in place, by FLA's signature; inference only.

    Equation and errors: `kda_ops.short_conv_`.

    Args:
        x: ``[N, D]``, ``[1, N, D]`` or ``[N, 1, D]``.
        cache: ``[N, D, W]``, the last W inputs, oldest first; updated in place. No tap reads the
            first.
        residual: of x's shape, added to the output.

    Returns:
        The output in x's shape, and the cache.
    """
    x, cache, weight = _given("x", x), _given("cache", cache), _given("weight", weight)
    N, D = (cache.shape[0], weight.shape[0]) if cache.dim() and weight.dim() else (0, 0)
    if x.shape not in ((N, D), (1, N, D), (N, 1, D)):
        raise ValueError(
            "x must hold one token of each sequence, [N, D], [1, N, D] or [N, 1, D] with "
            f"N = {N} (cache) and D = {D} (weight), got {list(x.shape)}."
        )
    tokens = x.reshape(N, 1, D)
    p = Convolution(tokens, weight, bias, activation=activation)
    _check_state("cache", cache, (p.N, p.D, p.W), x)
    check_no_overlap("cache", cache)
    _check_residual(residual, x)
    # no tap reads the first column of the cache
    oldest = cache[..., 1].clone() if p.W > 1 else tokens[:, 0]
    y = short_conv_(tokens, weight, bias, cache[..., 1:].mT, activation=activation).view(x.shape)
    cache[..., 0].copy_(oldest)
    return y if residual is None else y + residual, cache


@check_types
@all_dense
def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Normalise the last axis, scale it and gate it, by FLA's signature; differentiable.

    Equation and errors: `kda_ops.gated_rms_norm`.

    Args:
        weight: ``[V]``. None: ones.
    """
    x = _given("x", x)
    for name, given in (("bias", bias is not None), ("residual", residual is not None)):
        if given:
            raise ValueError(f"{name} must be None, got a tensor: add it outside.")
    if prenorm:
        raise ValueError("prenorm must be False: rms_norm_gated takes and returns no residual.")
    if weight is None:
        weight = torch.ones(x.shape[-1:], dtype=x.dtype, device=x.device)
    return gated_rms_norm(x, weight, g, eps=eps, activation=activation)


def _given(name: str, x: Tensor | None) -> Tensor:
    if x is None:
        raise TypeError(f"{name} must be a tensor, got None.")
    return x


def _check_state(name: str, state: Tensor | None, want: tuple[int, ...], x: Tensor) -> None:
    if state is not None:
        if state.shape != want:
            shape_error(name, "[N, D, W]", want, state)
        check_float(name, state, x.device, "x")


def _check_residual(residual: Tensor | None, x: Tensor) -> None:
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"residual must have the shape of x, {list(x.shape)}, got {list(residual.shape)}."
        )
    if residual is not None:
        check_on_device("residual", residual, x.device, "x")
