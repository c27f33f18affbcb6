"""Run the linear attention of transformers models on these operators.

Covers the models in `MODELS`: Kimi-Linear, GLM-5.3-Flash and Ling-3.0-Flash with KDA; Qwen3-Next,
Qwen3.5, Qwen4-Exp, OLMo-hybrid and LaraMini with GDN. ``enable()`` replaces the delta rule, the
convolution before it and the gated norm after it; ``disable()`` restores them::

    import kda_ops.compat.transformers

    kda_ops.compat.transformers.enable()        # affects existing and new models
    kda_ops.compat.transformers.disable()       # restores every function

    with kda_ops.compat.transformers.enable():  # restores on exit
        model.generate(...)

Models look these functions up at every call, so existing models follow and compiled models
recompile once. The rest of a model is unchanged: projections, other norms, caches, masks. If a
gradient is wanted on a cache, transformers' own convolution runs there. Results match the PyTorch
path of transformers up to rounding. This includes ``torch.compile(fullgraph=True)``, padding,
caches and ``generate``.

**Packed sequences**: pass ``cu_seq_lens_q`` ``[N + 1]`` (int32 or int64), and ``position_ids`` that
start again with each sequence. ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` makes
both. Pass no ``attention_mask``, and ``use_cache=False``: a cache is refused. Nothing reports other
mistakes. With ``position_ids`` alone the linear layers mix the sequences. Without them, or with a
mask of ones, the full-attention layers do. The convolution in front of the delta rule keeps packed
sequences apart too. Unless other packages are installed, the convolution of transformers refuses
packed rows, or mixes their sequences.

Needs transformers 5.16 or later (Kimi-Linear: 5.17); earlier versions bind the functions when a
model is built.

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
from torch import Tensor

from kda_ops import functional, norm
from kda_ops.compat.delta_rule import delta_rule
from kda_ops.convolution import ACTIVATIONS
from kda_ops.layer_functional import gated_rms_norm, short_conv, short_conv_

__all__ = ["MODELS", "Enabled", "disable", "enable"]
__doctest_requires__ = ("transformers",)

MODELS = (
    "kimi_linear",
    "glm5_next",
    "bailing_hybrid",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
    "olmo_hybrid",
    "lara_mini",
)
"""The models that `enable` patches; models that the installed transformers lacks are skipped."""

_NAMES = [f"transformers.models.{model}.modeling_{model}" for model in MODELS]
# models whose other layers mix packed sequences, whatever the caller passes
_MIXING = {
    "glm5_next": "its indexed attention reads no position_ids",
    "qwen4_exp": "its per-layer embeddings know no sequences",
}
# models whose beta is a sigmoid; olmo_hybrid may double it, lara_mini is not checked
_SIGMOIDS = frozenset(
    {
        "kimi_linear",
        "glm5_next",
        "bailing_hybrid",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen4_exp",
    }
)
# marks a replacement and holds the original function
_OURS = "__kda_ops_original__"


def _delta_rule(op: Callable[..., Any], promises: bool = False) -> Callable[[Callable], Callable]:
    """Return a decorator that replaces a delta rule of transformers by `op`.

    One definition serves chunk and recurrent, KDA and GDN. `promises` says that `op` takes
    ``safe_beta``.
    """

    def replacement(original: Callable) -> Callable:
        model = original.__module__.rpartition(".")[2].removeprefix("modeling_")
        proven = promises and model in _SIGMOIDS
        run = functools.partial(op, safe_beta=True) if proven else op

        @functools.wraps(original, updated=())
        def ours(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            chunk_size: int = 64,
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor | None]:
            packed = kwargs.get("cu_seqlens") is not None or kwargs.get("cu_seq_lens_q") is not None
            if packed and model in _MIXING:
                raise ValueError(
                    f"cu_seq_lens_q must be None for {model}, whose other layers mix packed "
                    f"sequences ({_MIXING[model]}): pad the sequences instead."
                )
            return delta_rule(
                run,
                query,
                key,
                value,
                g,
                beta,
                initial_state,
                output_final_state,
                use_qk_l2norm_in_kernel,
                **kwargs,
            )

        return ours

    return replacement


def _convolution(original: Callable) -> Callable:
    """Return transformers' causal convolution ``[B, D, T]``, extended to packed sequences."""

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
        inside = activation if activation in ACTIVATIONS else None
        y, _ = short_conv(
            hidden_states.mT, weight, bias, cu_seqlens=cu_seq_lens_q, activation=inside
        )
        if inside != activation:
            from transformers.activations import ACT2FN

            y = ACT2FN[activation](y)
        return y.mT

    return causal_conv1d_fn


def _update(original: Callable) -> Callable:
    """Return the replacement of transformers' convolution on a cache.

    It calls the original where a gradient is wanted, because ours writes the cache in place.
    """

    @functools.wraps(original, updated=())
    def causal_conv1d_update(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        tensors = (hidden_states, conv_state, weight, bias)
        recorded = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in tensors
        )
        before = conv_state.shape[-1] - (weight.shape[-1] - 1)  # columns that no tap reaches
        if recorded or activation not in ACTIVATIONS or before < 0:
            return original(hidden_states, conv_state, weight, bias, activation)
        T = hidden_states.shape[-1]
        joined = torch.cat([conv_state, hidden_states.to(conv_state.dtype)], -1) if before else None
        tail = conv_state.mT[:, before:]
        y = short_conv_(hidden_states.mT, weight, bias, tail, activation=activation).mT
        if joined is not None:
            conv_state[..., :before].copy_(joined[..., T : T + before])
        return y

    return causal_conv1d_update


def _gated_norm(original: Callable) -> Callable:
    """Return the replacement of a gated norm's forward.

    It calls the original for activations that `kda_ops.gated_rms_norm` lacks.
    """

    @functools.wraps(original, updated=())
    def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is None or self.activation not in norm.ACTIVATIONS:
            return original(self, hidden_states, gate)
        eps, activation = self.variance_epsilon, self.activation
        return gated_rms_norm(hidden_states, self.weight, gate, eps=eps, activation=activation)

    return forward


_REPLACEMENTS: dict[str, Callable[[Callable], Callable]] = {
    "chunk_kimi_delta_attention": _delta_rule(functional.chunk_kda, promises=True),
    "recurrent_kimi_delta_attention": _delta_rule(functional.recurrent_kda),
    "torch_chunk_gated_delta_rule": _delta_rule(functional.chunk_gdn, promises=True),
    "torch_recurrent_gated_delta_rule": _delta_rule(functional.recurrent_gdn),
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": _update,
}


def _places(module: Any) -> list[tuple[Any, str, Callable[[Callable], Callable]]]:
    """List what is replaced in a module: the owner, the name, and what makes the replacement."""
    found = [(module, name, make) for name, make in _REPLACEMENTS.items() if hasattr(module, name)]
    norms = [x for n, x in vars(module).items() if n.endswith("RMSNormGated")]
    return [*found, *((norm_class, "forward", _gated_norm) for norm_class in norms)]


def _modules() -> list[Any]:
    """Import and return the modelling modules of the installed transformers."""
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
            f"{transformers.__version__}: upgrade transformers."
        )
    return [
        importlib.import_module(name)
        for name in _NAMES
        if importlib.util.find_spec(name.rpartition(".")[0])
    ]


class Enabled:
    """The functions that one call to `enable` replaced; leaving its context restores them."""

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
    """Replace the delta rule, convolution and gated norm of every installed model in `MODELS`.

    A second call has no effect.

    Returns:
        A context manager; on exit it restores the functions that this call replaced.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        RuntimeError: the installed transformers is too old.
    """
    put = []
    for module in _modules():
        for owner, name, replacement in _places(module):
            original = getattr(owner, name)
            if not hasattr(original, _OURS):
                ours = replacement(original)
                setattr(ours, _OURS, original)
                setattr(owner, name, ours)
                put.append((owner, name, ours))
    return Enabled(put)


def disable() -> None:
    """Restore every function that `enable` replaced."""
    loaded = [sys.modules[name] for name in _NAMES if name in sys.modules]
    places = [
        (owner, name, getattr(owner, name))
        for module in loaded
        for owner, name, _ in _places(module)
    ]
    _take_out([place for place in places if hasattr(place[-1], _OURS)])
