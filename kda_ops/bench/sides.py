"""The two sides of a row: our operators, and the peers that may be installed beside them.

A side turns a case and its inputs into calls. What a peer does not do inside its kernels is done in
plain torch within its time; what it cannot do at all raises `Unsupported`, and the row is skipped
with that line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_ops.bench.cases import LOWER_BOUND, Case, activated, flags
from kda_ops.bench.machine import installed

Inputs = dict[str, Tensor]
Forward = Callable[[Inputs], Tensor]
Step = Callable[[Tensor], tuple[Tensor, Tensor]]


class Unsupported(Exception):
    """This side cannot run this case; the message says why."""


def our_forward(case: Case) -> Forward:
    """O [B, T, HV, V] of a chunk call."""
    import kda_ops

    chunk: Callable[..., tuple[Tensor, Tensor | None]] = {
        "kda": kda_ops.chunk_kda,
        "gdn": kda_ops.chunk_gdn,
    }[case.op]
    words = flags(case)
    return lambda x: chunk(**x, **words)[0]


def our_step(case: Case, x: Inputs) -> Step:
    """O [B, 1, HV, V] of a decode call of these inputs on a pool, and the pool, written in place;
    what a server has at hand is made here, not in the call.
    """
    import kda_ops

    step: Callable[..., Tensor] = {"kda": kda_ops.recurrent_kda_, "gdn": kda_ops.recurrent_gdn_}[
        case.op
    ]
    words = flags(case) | dict(transpose_state_layout=case.layout == "vk")
    slots = torch.arange(case.sizes["B"], device=case.device, dtype=torch.int32)
    q, k, v, g, beta, A_log, dt_bias = (
        x.get(n) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    )
    return lambda pool: (step(q, k, v, g, beta, pool, slots, None, A_log, dt_bias, **words), pool)


def _fla_flags(case: Case, x: Inputs) -> dict[str, Any]:
    words: dict[str, Any] = dict(
        use_qk_l2norm_in_kernel=case.inside,
        use_beta_sigmoid_in_kernel=case.inside,
        use_gate_in_kernel=case.inside,
    )
    if case.inside:
        words |= dict(A_log=x["A_log"], dt_bias=x["dt_bias"].flatten())
    if case.gate == "bound":
        words |= dict(safe_gate=True, lower_bound=LOWER_BOUND)
    if case.promised:
        words |= dict(safe_gate=True)
    return words


def _fla_forward(case: Case) -> Forward:
    if case.op == "kda":
        from fla.ops.kda import chunk_kda as chunk
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as chunk
    return lambda x: chunk(x["q"], x["k"], x["v"], x["g"], x["beta"], **_fla_flags(case, x))[0]


def _fla_step(case: Case, x: Inputs) -> Step:
    v_first, words = case.layout == "vk", _fla_flags(case, x)
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
    if case.op == "kda":
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

        words.pop("safe_gate", None)
        words |= dict(
            ssm_state_indices=torch.arange(case.sizes["B"], device=case.device, dtype=torch.int32),
            state_v_first=v_first,
        )
        words |= dict(scale=q.shape[-1] ** -0.5)
        return lambda pool: fused_recurrent_kda_fwd(q, k, v, g, beta, initial_state=pool, **words)[
            :2
        ]
    if case.state != "fp32":
        raise Unsupported("its GDN decode keeps float32 states only")
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    words |= dict(output_final_state=True, state_v_first=v_first)
    return lambda pool: fused_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=pool, **words
    )[:2]


def _fla_naive(case: Case) -> Forward:
    if case.op != "kda" or case.sizes["T"] % 64:
        raise Unsupported("naive_chunk_kda is KDA on whole chunks")
    from fla.ops.kda.naive import naive_chunk_kda

    return lambda x: naive_chunk_kda(*activated(case, x))[0]


def _transformers(case: Case) -> Forward:
    # Installed kernels would be called instead of the torch code: unwrap it.
    if case.op == "gdn":
        from transformers.models.qwen3_next.modeling_qwen3_next import (
            torch_chunk_gated_delta_rule as chunk,
        )
    else:
        try:
            from transformers.models.kimi_linear.modeling_kimi_linear import (
                chunk_kimi_delta_attention as chunk,
            )
        except ImportError:
            raise Unsupported("this version of transformers has no Kimi Linear") from None
        if case.sizes["HV"] != case.sizes["H"]:
            raise Unsupported("its KDA has no grouped value heads")
    chunk = inspect.unwrap(chunk)
    return lambda x: chunk(*activated(case, x))[0]


def _flash_qla(case: Case) -> Forward:
    if case.op != "gdn":
        raise Unsupported("it has GDN only")
    from flash_qla import chunk_gated_delta_rule

    return lambda x: chunk_gated_delta_rule(
        **dict(zip(("q", "k", "v", "g", "beta"), activated(case, x))), auto_cp=True
    )[0]


def _cudnn(case: Case) -> Forward:
    if case.op != "kda" or case.sizes["D"] != 128:
        raise Unsupported("used for KDA with K = V = 128 only")
    from cudnn.linear_attention import kimi_delta_attention

    B, T = case.sizes["B"], case.sizes["T"]
    offsets = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=case.device)

    def forward(x):
        q, k, v, g, beta = (t.flatten(0, 1) for t in activated(case, x))
        o = kimi_delta_attention(q, k, v, g.float(), beta, offsets)
        return (o[0] if isinstance(o, tuple) else o).unflatten(0, (B, T))

    return forward


def _sdpa(case: Case) -> Forward:
    if case.sizes["HV"] != case.sizes["H"]:
        raise Unsupported("for scale with as many value heads as key heads")

    def forward(x):
        q, k, v = (x[n].transpose(1, 2) for n in "qkv")
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return forward


@dataclass(frozen=True)
class Peer:
    """Another implementation. `package` is what must be installed (None: nothing), `environment`
    what its process needs from the start.

    `same` is False for what computes something else and stands there for scale: it has no error.
    `beside` are packages of which one must be there too. `tunes`: it measures configurations of its
    kernels at run time.
    """

    name: str
    device: str
    package: str | None
    forward: Callable[[Case], Forward]
    step: Callable[[Case, Inputs], Step] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    same: bool = True
    beside: tuple[str, ...] = ()
    tunes: bool = False

    @property
    def version(self) -> str | None:
        """What is installed, or None."""
        if self.beside and not any(map(installed, self.beside)):
            return None
        return torch.__version__ if self.package is None else installed(self.package)


PEERS = (
    Peer("transformers", "cpu", "transformers", _transformers),
    Peer("fla-naive", "cpu", "fla-core", _fla_naive),
    Peer(
        "fla",
        "cuda",
        "fla-core",
        _fla_forward,
        _fla_step,
        {"FLA_DISABLE_BACKEND_DISPATCH": "1"},
        tunes=True,
    ),
    Peer(
        "fla-dispatch",
        "cuda",
        "fla-core",
        _fla_forward,
        _fla_step,
        beside=("tilelang", "flash-qla", "flash-kda"),
        tunes=True,
    ),
    Peer("flashqla", "cuda", "flash-qla", _flash_qla),
    Peer("cudnn", "cuda", "nvidia-cudnn-frontend", _cudnn),
    Peer("sdpa", "cuda", None, _sdpa, same=False),
)


def peers_of(device: str) -> list[Peer]:
    """The peers that run on a device, installed or not."""
    return [p for p in PEERS if p.device == device]
