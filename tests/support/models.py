"""Build tiny transformers models, and compute their logits, loss, gradients and tokens."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda_ops.compat import transformers as compat

VOCABULARY = 61
TOLERANCE = 3e-4  # relative to the largest entry of a tensor, float32 on every device
_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
_EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
_GDN = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
)
_LATENT = dict(  # attention on latent keys and values, and layers with and without experts
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
    mlp_layer_types=["dense", "sparse", "dense"],
    **_EXPERTS,
)
_GROUPS = dict(qk_rope_head_dim=8, num_local_experts=4, n_group=1, topk_group=1)
_SHARED_EXPERT = dict(
    head_dim=16, num_experts=4, shared_expert_intermediate_size=16, **_GDN, **_EXPERTS
)
_VISION = dict(
    depth=1,
    hidden_size=16,
    num_heads=2,
    patch_size=4,
    out_hidden_size=32,
    intermediate_size=16,
    projection_intermediate_size=16,
)
_ALL = {  # model -> (its configuration and class in transformers, arguments)
    "kimi_linear": (
        "KimiLinear",
        dict(
            linear_head_dim=16,
            linear_num_heads=2,
            q_lora_rank=None,
            n_shared_experts=1,
            **_LATENT,
            **_GROUPS,
        ),
    ),
    "qwen3_next": (
        "Qwen3Next",
        dict(decoder_sparse_step=2, mlp_only_layers=[0, 2], **_SHARED_EXPERT),
    ),
    "qwen3_5": ("Qwen3_5", dict(head_dim=16, **_GDN)),
    "qwen3_5_moe": ("Qwen3_5Moe", _SHARED_EXPERT),
    "olmo_hybrid": ("OlmoHybrid", _GDN | dict(linear_num_value_heads=2)),
    "glm5_next": (
        "Glm5Next",
        dict(
            linear_head_dim=16,
            linear_num_heads=2,
            q_lora_rank=16,
            n_routed_experts=4,
            n_shared_experts=1,
            index_topk=128,
            index_head_dim=16,
            index_n_heads=2,
            index_kpool=4,
            hc_mult=2,
            hc_sinkhorn_iters=3,
            **_LATENT,
        ),
    ),
    "bailing_hybrid": ("BailingHybrid", dict(head_dim=16, num_mtp_layers=0, **_LATENT, **_GROUPS)),
    "qwen4_exp": (
        "Qwen4Exp",
        dict(
            hc_count=2,
            hc_lowrank=8,
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_budget=128,
            indexer_compress_ratio=4,
            ple_layer_ids=[1],
            ple_embed_dim=32,
            ngram_vocab_size_base=101,
            heads_per_ngram=2,
            split_ngram_parts=1,
            eos_token_id=3,
            **_SHARED_EXPERT,
        ),
    ),
    "lara_mini": ("LaraMini", dict(sliding_window=16, **_SHARED_EXPERT)),
}
CONFIGS = {
    name: arguments
    for name, arguments in _ALL.items()
    if importlib.util.find_spec(f"transformers.models.{name}")
}
KDA = tuple(n for n in CONFIGS if n in ("kimi_linear", "glm5_next", "bailing_hybrid"))
# models that also see: their text models have configurations of their own
_TEXT = ("qwen3_5", "qwen3_5_moe", "qwen4_exp")


def model(
    name: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **changed: object,
) -> nn.Module:
    """Build a tiny causal language model with reproducible random weights."""
    import transformers

    stem, arguments = CONFIGS[name]
    words, kind = _COMMON | arguments | changed, "ForCausalLM"
    if name == "glm5_next":  # has no class for text alone
        words = dict(text_config=words, vision_config=_VISION)
        kind = "ForConditionalGeneration"
    config = getattr(transformers, stem + ("TextConfig" if name in _TEXT else "Config"))(**words)
    torch.manual_seed(0)
    net = getattr(transformers, stem + kind)(config).to(device, dtype).eval()
    if _EXPERTS.keys() <= arguments.keys():
        # the default of transformers 5.17 cannot be traced in one graph with its backward
        net.set_experts_implementation("batched_mm")
    return net


def modules() -> list:
    """Return the modelling modules that `enable` changes."""
    return [
        importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in CONFIGS
    ]


def bindings() -> dict[tuple[str, str], object]:
    """Return the object of every name in every modelling module, and the forward of its norms."""
    found = {(m.__name__, n): x for m in modules() for n, x in vars(m).items()}
    norms = {place: x for place, x in found.items() if place[1].endswith("RMSNormGated")}
    return found | {(f"{m}.{n}", "forward"): x.forward for (m, n), x in norms.items()}


@contextmanager
def torch_path() -> Iterator[None]:
    """Make transformers call its PyTorch functions, even if other packages are installed."""
    put = []
    for module in modules():
        for name in compat._REPLACEMENTS:
            if hasattr(module, name):
                put.append((module, name, getattr(module, name)))
                setattr(module, name, inspect.unwrap(getattr(module, name)))
    try:
        yield
    finally:
        for module, name, function in put:
            setattr(module, name, function)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Return random tokens without padding."""
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Return a batch of prompts of these lengths, padded on the left."""
    T = max(lengths)
    mask = torch.tensor([[int(t >= T - n) for t in range(T)] for n in lengths])
    return {"input_ids": tokens(len(lengths), T) * mask, "attention_mask": mask}


def packed(ids: list[Tensor], dtype: torch.dtype = torch.int32) -> dict[str, Tensor | bool]:
    """Pack the sequences into one row, as a padding-free collator does."""
    cu_seqlens = torch.tensor([0, *accumulate(x.shape[0] for x in ids)], dtype=dtype)
    longest = max(x.shape[0] for x in ids)
    return {
        "input_ids": torch.cat(ids)[None],
        "position_ids": torch.cat([torch.arange(x.shape[0]) for x in ids])[None],
        "use_cache": False,
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def loss(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token over pairs of unpadded tokens."""
    use = (mask[:, 1:] * mask[:, :-1]).bool()
    return F.cross_entropy(logits[:, :-1][use].float(), ids[:, 1:][use])


def step(
    net: nn.Module, inputs: dict, mask: Tensor, call: Callable | None = None
) -> dict[str, Tensor]:
    """Return logits at unpadded tokens, loss and the gradient of every parameter."""
    net.zero_grad(set_to_none=True)
    logits = (net if call is None else call)(**inputs).logits
    out = loss(logits, inputs["input_ids"], mask)
    out.backward()
    grads = {"d " + n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()[mask.bool()], "loss": out.detach(), **grads}


def to(inputs: dict, device: torch.device | str) -> dict:
    """Move the tensors of `inputs` to a device."""
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in inputs.items()}


def assert_generates_the_same(
    name: str, lengths: tuple[int, ...], device: torch.device | str = "cpu"
) -> None:
    """Compare greedy tokens and logits of left-padded prompts with and without our operators."""
    net, x = model(name, device), to(left_padded(lengths), device)
    words = dict(
        max_new_tokens=24, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    with torch_path():
        want = net.generate(**x, **words)
    with compat.enable():
        got = net.generate(**x, **words)
    assert torch.equal(got.sequences, want.sequences)
    assert_same({"logits": torch.stack(got.logits)}, {"logits": torch.stack(want.logits)})


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tighter: float = 1.0) -> None:
    """Fail unless every tensor is within `TOLERANCE`; name the tensors that are not."""
    assert got.keys() == want.keys()
    off = {
        n: (
            (got[n].double() - x.double()).abs().max() / x.double().abs().max().clamp(min=1e-30)
        ).item()
        for n, x in want.items()
    }
    wrong = [f"{n} by {x:.2e}" for n, x in off.items() if not x <= tighter * TOLERANCE]
    others = [x for x in off.values() if x <= tighter * TOLERANCE]
    assert not wrong, (
        f"off, in parts of the largest entry, {len(wrong)} of {len(off)}: {', '.join(wrong)}; the "
        f"median of the others {median(others or [0.0]):.2e}, "
        f"products in fp32 {torch.get_float32_matmul_precision()}"
    )
