"""Layers of the hub kernel: transformers' delta rules on the operators of kda_ops.

The `kernels` package puts the `forward` of these layers into models. Their names and signatures
are those of transformers' functions. They compile with ``fullgraph=True`` and have a backward, the
recurrent ones included.

A packed row needs ``seq_idx`` next to ``cu_seq_lens_q``: the convolution in front of the delta rule
is another kernel, which keeps sequences apart by ``seq_idx`` alone.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from kda_ops import functional
from kda_ops.compat.delta_rule import delta_rule

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
]


def _rule(op, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
    packed = kwargs.get("cu_seqlens") is not None or kwargs.get("cu_seq_lens_q") is not None
    if packed and kwargs.get("seq_idx") is None:
        raise ValueError(
            "seq_idx must be given with cu_seq_lens_q, got None: without it the model's "
            "convolution mixes packed sequences. Let the collator return it, or call "
            "kda_ops.compat.transformers.enable()."
        )
    return delta_rule(op, *args, **kwargs)


def _over_sequences(op) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return a `forward` with the signature of transformers' chunk functions."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and the final state or None."""
        flags = (initial_state, output_final_state, use_qk_l2norm_in_kernel)
        return _rule(op, query, key, value, g, beta, *flags, **kwargs)

    return forward


def _by_tokens(op) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return a `forward` with the signature of transformers' recurrent functions."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and the final state or None."""
        flags = (initial_state, output_final_state, use_qk_l2norm_in_kernel)
        return _rule(op, query, key, value, g, beta, *flags, **kwargs)

    return forward


class chunk_kimi_delta_attention(nn.Module):
    """Kimi Delta Attention over whole sequences: `kda_ops.chunk_kda`."""

    has_backward = True
    can_torch_compile = True
    forward = _over_sequences(functional.chunk_kda)


class recurrent_kimi_delta_attention(nn.Module):
    """Kimi Delta Attention token by token: `kda_ops.recurrent_kda`."""

    has_backward = True
    can_torch_compile = True
    forward = _by_tokens(functional.recurrent_kda)


class chunk_gated_delta_rule(nn.Module):
    """Gated DeltaNet over whole sequences: `kda_ops.chunk_gdn`."""

    has_backward = True
    can_torch_compile = True
    forward = _over_sequences(functional.chunk_gdn)


class recurrent_gated_delta_rule(nn.Module):
    """Gated DeltaNet token by token: `kda_ops.recurrent_gdn`."""

    has_backward = True
    can_torch_compile = True
    forward = _by_tokens(functional.recurrent_gdn)
