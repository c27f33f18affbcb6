"""What torch.compile makes of a model of four layers, in training and in inference.

Sides: the layers of `kda_ops.nn` as they are ("flags"), and the same layers with l2 norm, gate and
sigmoid written in PyTorch around the operator, folded by the pass of `kda_ops.inductor` ("plain").
Both must be one graph (``fullgraph=True``). Counted at the first call: graphs, breaks, and sites
folded into flags. Other lengths and batches follow: what is compiled for those is a recompilation.
Torch makes a size dynamic when it first changes, so there are two: for the length, and for the
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import kda_ops
from examples.train import LanguageModel, loss_of
from kda_ops.nn import KimiDeltaAttention

PASSES = ("train", "infer")
# batch and length; the first is what is compiled first
SHAPES = ((2, 130), (2, 97), (2, 200), (3, 200), (5, 321))


def _plain(
    layer: KimiDeltaAttention, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **flags
) -> tuple[Tensor, Tensor | None]:
    q, k = (
        x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6).to(x.dtype) for x in (q, k)
    )
    g = -layer.A_log.exp()[:, None] * F.softplus(
        g.float() + layer.dt_bias.unflatten(0, (-1, layer.head_k_dim))
    )
    return kda_ops.chunk_kda(
        q, k, v, g, torch.sigmoid(beta.float()), cu_seqlens=flags["cu_seqlens"]
    )


SIDES: dict[str, Callable | None] = {"flags": None, "plain": _plain}


def _folding(backend: str) -> Callable:
    """Return a backend by name, after the pass."""
    from kda_ops.inductor import fold_preprocessing

    def compile_folded(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        fold_preprocessing(gm.graph)
        gm.recompile()
        return torch._dynamo.lookup_backend(backend)(gm, inputs)

    return compile_folded


def count(side: str, pass_: str, device: str, backend: str) -> dict[str, int]:
    """Return the counters of one side and pass, in this process."""
    from torch._dynamo.utils import counters

    import kda_ops.inductor

    torch.manual_seed(0)
    model = LanguageModel(layers=4, hidden=64, head_dim=32, gdn=False).to(device)
    for block in model.blocks if SIDES[side] else ():
        block.mixer._chunk = partial(SIDES[side], block.mixer)
    folded = kda_ops.inductor.fold_preprocessing.folded
    torch._dynamo.reset()
    counters.clear()
    folded.clear()
    call = torch.compile(
        partial(loss_of, model),
        fullgraph=True,
        backend=_folding(backend) if side == "plain" else backend,
    )
    found: dict[str, int] = {}
    with torch._inductor.utils.fresh_cache():
        for B, T in SHAPES:
            seeded = torch.Generator().manual_seed(T)
            tokens = torch.randint(256, (B, T + 1), generator=seeded).to(device)
            with torch.inference_mode(pass_ == "infer"):
                loss = call(tokens)
            if pass_ == "train":
                loss.backward()
            graphs = counters["stats"]["unique_graphs"]
            if not found:
                breaks = sum(counters["graph_break"].values())
                found = {"graphs": graphs, "breaks": breaks, "folded": folded.total()}
    return found | {"recompiles": graphs - found["graphs"]}
