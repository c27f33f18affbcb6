"""The sides of a row: our operators and the peers, as functions from a case to a call.

What a peer does not do inside its kernels runs in plain torch within its time. What it cannot do at
all raises `Unsupported`, which skips the row.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kda_ops
from benchmarks.cases import INPUTS, OURS, Case, flags

Inputs = dict[str, Tensor]
Forward = Callable[[Inputs], Tensor]
Step = Callable[[Tensor], tuple[Tensor, Tensor]]


class Unsupported(Exception):
    """This side cannot run this case; the message says why."""


def our_forward(case: Case, like: Callable | None = None, cu_seqlens=None) -> Forward:
    """Return the call of our chunk operator, or one like it, which gives o [B, T, HV, V]."""
    chunk: Callable = like or {"kda": kda_ops.chunk_kda, "gdn": kda_ops.chunk_gdn}[case.op]
    words = flags(case) | ({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens})
    return lambda x: chunk(*map(x.get, INPUTS), **words)[0]


def our_step(case: Case, x: Inputs, like: Callable | None = None) -> Step:
    """Return the decode call of these inputs: from a pool to o [B, 1, HV, V] and the pool.

    Our operator, or one like it, writes the pool in place. What a server has at hand is made here,
    not in the call.
    """
    step: Callable = like or {"kda": kda_ops.recurrent_kda_, "gdn": kda_ops.recurrent_gdn_}[case.op]
    words = flags(case) | dict(transpose_state_layout=case.layout == "vk")
    q, k, v, g, beta, A_log, dt_bias = (x.get(n) for n in INPUTS)
    slots = torch.arange(case.sizes["B"], device=case.device, dtype=torch.int32)
    return lambda pool: (step(q, k, v, g, beta, pool, slots, None, A_log, dt_bias, **words), pool)


def activated(case: Case, x: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v, g, beta after norm, gate and sigmoid in plain torch."""
    q, k, v, g, beta = (x[n] for n in INPUTS[:5])
    if not case.inside:
        return q, k, v, g, beta
    rate, logits = x["A_log"].exp(), g.float() + x["dt_bias"]
    rate = rate[:, None] if case.op == "kda" else rate
    bound = case.lower_bound
    decay = -rate * F.softplus(logits) if bound is None else bound * torch.sigmoid(rate * logits)
    norms = ((t.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    q, k = ((t.float() * norm).to(t.dtype) for t, norm in zip((q, k), norms))
    return q, k, v, decay, torch.sigmoid(beta)


def fla_flags(case: Case, x: Inputs) -> dict:
    """Return FLA's keyword arguments."""
    words = {n: flag for n, flag in flags(case).items() if flag is not None and n not in OURS}
    if case.inside:
        words |= dict(A_log=x["A_log"], dt_bias=x["dt_bias"].flatten())
    return words | ({} if case.lower_bound is None else {"safe_gate": True})


def fla(case: Case) -> Forward:
    """FLA's chunk operators."""
    if case.op == "kda":
        from fla.ops.kda import chunk_kda as chunk
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as chunk
    return lambda x: chunk(x["q"], x["k"], x["v"], x["g"], x["beta"], **fla_flags(case, x))[0]


def fla_step(case: Case, x: Inputs) -> Step:
    """FLA's decode: KDA on a pool in place, GDN from state to state."""
    v_first, words = case.layout == "vk", fla_flags(case, x)
    q, k, v, g, beta = (x[n] for n in INPUTS[:5])
    if case.op == "kda":
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd as step

        words.pop("safe_gate", None)
        slots = torch.arange(case.sizes["B"], device=case.device, dtype=torch.int32)
        words |= dict(ssm_state_indices=slots, state_v_first=v_first, scale=q.shape[-1] ** -0.5)
        return lambda pool: step(q, k, v, g, beta, initial_state=pool, **words)[:2]
    if case.state != "fp32":
        raise Unsupported("its GDN decode keeps float32 states only")
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as recur

    words |= dict(output_final_state=True, state_v_first=v_first)
    return lambda pool: recur(q, k, v, g=g, beta=beta, initial_state=pool, **words)[:2]


def fla_layer(
    layer: nn.Module, *args: Tensor, group: None, **flags
) -> tuple[Tensor, Tensor | None]:
    """FLA's operator in a KDA layer of ours."""
    from fla.ops.kda import chunk_kda

    same = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    words = {n: flags[n] for n in (*same, "A_log", "cu_seqlens")}
    return chunk_kda(*args, **words, dt_bias=layer.dt_bias)


def fla_naive(case: Case) -> Forward:
    """FLA's KDA in plain torch."""
    if case.op != "kda" or case.sizes["T"] % 64:
        raise Unsupported("naive_chunk_kda is KDA on whole chunks")
    from fla.ops.kda.naive import naive_chunk_kda

    return lambda x: naive_chunk_kda(*activated(case, x))[0]


def transformers(case: Case) -> Forward:
    """Unwrap the torch code of transformers; wrapped, it would run installed kernels."""
    if case.op == "kda" and case.sizes["HV"] != case.sizes["H"]:
        raise Unsupported("its KDA has no grouped value heads")
    name, function = {
        "gdn": ("qwen3_next", "torch_chunk_gated_delta_rule"),
        "kda": ("kimi_linear", "chunk_kimi_delta_attention"),
    }[case.op]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    chunk = inspect.unwrap(getattr(module, function))
    return lambda x: chunk(*activated(case, x))[0]


def flash_qla(case: Case) -> Forward:
    """FlashQLA's GDN, which picks its context parallelism itself."""
    if case.op != "gdn":
        raise Unsupported("it has GDN only")
    from flash_qla import chunk_gated_delta_rule as chunk

    return lambda x: chunk(**dict(zip(INPUTS, activated(case, x))), auto_cp=True)[0]


def cudnn(case: Case) -> Forward:
    """KDA of the cuDNN frontend, on packed sequences."""
    if case.op != "kda" or case.sizes["D"] != 128:
        raise Unsupported("used for KDA with K = V = 128 only")
    from cudnn.linear_attention import kimi_delta_attention

    B, T = case.sizes["B"], case.sizes["T"]
    offsets = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=case.device)

    def forward(x):
        q, k, v, g, beta = (t.flatten(0, 1) for t in activated(case, x))
        o = kimi_delta_attention(q, k, v, g.float(), beta.float(), offsets)
        return (o[0] if isinstance(o, tuple) else o).unflatten(0, (B, T))

    return forward


@dataclass(frozen=True)
class Peer:
    """Another implementation, in a process of its own with `environment`."""

    name: str
    device: str
    package: str
    forward: Callable[[Case], Forward]
    step: Callable[[Case, Inputs], Step] | None = None  # of decode
    layer: Callable | None = None  # of a model, in place of `kda_ops.nn`'s `_chunk`
    environment: dict[str, str] = field(default_factory=dict)


# FLA's own Triton kernels, without its dispatch to TileLang and FlashKDA.
FLA_ALONE = {"FLA_DISABLE_BACKEND_DISPATCH": "1"}
PEERS = (
    Peer("transformers", "cpu", "transformers", transformers),
    Peer("fla-naive", "cpu", "fla-core", fla_naive),
    Peer("fla", "cuda", "fla-core", fla, fla_step, fla_layer, FLA_ALONE),
    Peer("flashqla", "cuda", "flash-qla", flash_qla),
    Peer("cudnn", "cuda", "nvidia-cudnn-frontend", cudnn),
)
