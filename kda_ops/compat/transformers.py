"""These operators under the models of an installed transformers: Kimi-Linear, Qwen3-Next, Qwen3.5
and their kin.

``enable()`` puts ``kda::chunk`` and ``kda::recurrent`` (``gdn::`` likewise) where a model calls its
delta rule, ``disable()`` takes them out again::

    import kda_ops.compat.transformers

    kda_ops.compat.transformers.enable()        # from here on, for models built before and after
    kda_ops.compat.transformers.disable()       # every function is again the one it was

    with kda_ops.compat.transformers.enable():  # or for a while
        model.generate(...)

Models look these functions up in their module when they are called, so what was built or compiled
before follows (compiled code compiles once more). Everything else of a model (projections,
convolution, norms, caches, masks) stays transformers' own. Results are those of transformers' own
PyTorch path up to rounding; eager, ``torch.compile(fullgraph=True)``, padding, caches and
``generate`` included.

**Packed sequences**: pass ``cu_seq_lens_q`` ``[N + 1]`` (int32 or int64), as
``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` makes it, ``position_ids`` that start
again with each sequence, and ``use_cache=False`` (a cache is refused). Then the convolution in
front of the delta rule keeps sequences apart too: while enabled, and for packed rows alone, it is a
sum of shifted products that stop at the first token of a sequence. transformers itself refuses
packed rows, or mixes their sequences there, unless other packages are installed.

Needs transformers 5.16 or later (Kimi-Linear: 5.17); earlier ones bind the functions when a model
is built.

Example:
    >>> import torch
    >>> from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
    >>> import kda_ops.compat.transformers
    >>> config = Qwen3NextConfig(
    ...     vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...     layer_types=["linear_attention", "full_attention"],
    ...     num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=2,
    ...     linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    ...     num_experts=2, num_experts_per_tok=1,
    ...     moe_intermediate_size=16, shared_expert_intermediate_size=16)
    >>> model, ids = Qwen3NextForCausalLM(config).eval(), torch.arange(70)[None]
    >>> with torch.inference_mode(), kda_ops.compat.transformers.enable():
    ...     logits = model(ids).logits
    >>> logits.shape
    torch.Size([1, 70, 99])
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_ops import functional
from kda_ops.nn.packing import Packing

__all__ = ["MODELS", "Enabled", "disable", "enable"]
__doctest_requires__ = ("transformers",)

MODELS = ("kimi_linear", "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
"""The models whose modules `enable` looks for; those that the installed transformers lacks are
passed over.
"""

_NAMES = [f"transformers.models.{model}.modeling_{model}" for model in MODELS]
# the attribute by which a function of ours is known, and which holds what it stands for
_OURS = "__kda_ops_original__"


def _delta_rule(op: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """What stands for a delta rule of transformers, by its keywords: one definition for chunk and
    recurrent, KDA and GDN.
    """

    def replacement(original: Callable) -> Callable:
        @functools.wraps(original, updated=())
        def delta_rule(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            chunk_size: int = 64,
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            cu_seqlens: Tensor | None = None,
            cu_seq_lens_q: Tensor | None = None,
            seq_idx: Tensor | None = None,
            **kwargs: object,
        ) -> tuple[Tensor, Tensor | None]:
            if cu_seqlens is None:
                cu_seqlens = cu_seq_lens_q  # models that hand on what they got
            if cu_seqlens is None and seq_idx is not None:
                raise ValueError(
                    "seq_idx alone does not say how many sequences there are: pass cu_seq_lens_q "
                    "too."
                )
            # with a cache, the other layers of the model no longer tell the sequences apart
            if cu_seqlens is not None and output_final_state:
                raise ValueError(
                    "packed rows fill no cache: pass use_cache=False, or set "
                    "model.config.use_cache = False."
                )
            if initial_state is not None:
                initial_state = initial_state.to(torch.promote_types(query.dtype, torch.float32))
            return op(
                query,
                key,
                value,
                g,
                beta,
                initial_state=initial_state,
                cu_seqlens=cu_seqlens,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )

        return delta_rule

    return replacement


def _convolution(original: Callable) -> Callable:
    """The causal convolution ``[B, D, T]`` of transformers, but for packed rows, whose sequences it
    keeps apart.
    """

    @functools.wraps(original, updated=())
    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        *args: object,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        if cu_seq_lens_q is None:
            return original(hidden_states, weight, bias, activation, *args, **kwargs)
        from transformers.activations import ACT2FN

        x, T = hidden_states, hidden_states.shape[-1]
        position = Packing(cu_seq_lens_q, T).position
        wide = torch.promote_types(x.dtype, torch.float32)  # as a convolution accumulates
        taps = weight.to(wide).unbind(-1)
        y = x * taps[-1][:, None]
        for back, tap in enumerate(reversed(taps[:-1]), 1):
            y = y + torch.where(position >= back, F.pad(x, (back, 0))[..., :T], 0.0) * tap[:, None]
        if bias is not None:
            y = y + bias[:, None]
        return (y if activation is None else ACT2FN[activation](y)).to(x.dtype)

    return causal_conv1d_fn


_REPLACEMENTS: dict[str, Callable[[Callable], Callable]] = {
    "chunk_kimi_delta_attention": _delta_rule(functional.chunk_kda),
    "recurrent_kimi_delta_attention": _delta_rule(functional.recurrent_kda),
    "torch_chunk_gated_delta_rule": _delta_rule(functional.chunk_gdn),
    "torch_recurrent_gated_delta_rule": _delta_rule(functional.recurrent_gdn),
    "causal_conv1d_fn": _convolution,
}


def _modules() -> list[Any]:
    """The modelling modules that are there."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "kda_ops.compat.transformers needs transformers 5.16 or later: pip install "
            "transformers.",
            name="transformers",
        ) from None
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 16):
        raise RuntimeError(
            "kda_ops.compat.transformers needs transformers 5.16 or later, got "
            f"{transformers.__version__}, which binds the functions when a model is built: "
            "upgrade transformers."
        )
    return [
        importlib.import_module(name)
        for name in _NAMES
        if importlib.util.find_spec(name.rpartition(".")[0])
    ]


class Enabled:
    """What one call to `enable` put in; leaving its context takes that out, where it still is."""

    def __init__(self, put: list[tuple[Any, str, Callable]]):
        self.put = put

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *exception: object) -> None:
        _take_out(self.put)


def _take_out(places: list[tuple[Any, str, Callable]]) -> None:
    for module, name, ours in places:
        if getattr(module, name) is ours:
            setattr(module, name, getattr(ours, _OURS))


def enable() -> Enabled:
    """Put our operators under the models; calling it twice changes nothing more. The result is a
    context manager that takes out what this call put in.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        RuntimeError: the installed transformers is too old.
    """
    put = []
    for module in _modules():
        for name, replacement in _REPLACEMENTS.items():
            original = getattr(module, name, None)
            if original is not None and not hasattr(original, _OURS):
                ours = replacement(original)
                setattr(ours, _OURS, original)
                setattr(module, name, ours)
                put.append((module, name, ours))
    return Enabled(put)


def disable() -> None:
    """Take our operators out of the models: every function is the one that `enable` found."""
    loaded = [sys.modules[name] for name in _NAMES if name in sys.modules]
    there = [
        (module, name, getattr(module, name))
        for module in loaded
        for name in _REPLACEMENTS
        if hasattr(module, name)
    ]
    _take_out([place for place in there if hasattr(place[-1], _OURS)])
