"""``python -m kda_ops counters``: what torch.compile makes of a model of a few layers, in training
and in inference.

Sides: the layers of `kda_ops.nn` as they are ("flags"), and the same layers with l2 norm, gate and
sigmoid written in PyTorch around the operator, folded by the pass of `kda_ops.inductor` ("plain").
Both must be one graph (``fullgraph=True``). Counted at the first call: graphs, breaks, and sites
folded into flags. Then come other lengths and batches: what is compiled for those is a
recompilation. Torch makes a size dynamic when it first changes, so there are two: for the length,
and for the batch. A peer's breaks are counted by ``bench --model``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import kda_ops
from kda_ops.bench import model
from kda_ops.bench.machine import (
    Help,
    describe,
    need_backend,
    need_device,
    need_positive,
    need_writable,
    write_json,
)
from kda_ops.nn import KimiDeltaAttention

PASSES = ("train", "infer")
# batch and length; the first is what is compiled first
SHAPES = ((2, 130), (2, 97), (2, 200), (3, 200), (5, 321))
COLUMNS = ("graphs", "breaks", "recompiles", "folded")


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


def _folding(backend: str) -> Callable | str:
    """A backend by name, after the pass."""
    from kda_ops.inductor import fold_preprocessing

    if backend == "inductor":
        return "kda_inductor"

    def compile_folded(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        fold_preprocessing(gm.graph)
        gm.recompile()
        return torch._dynamo.lookup_backend(backend)(gm, inputs)

    return compile_folded


def count(
    side: str,
    pass_: str,
    device: str,
    backend: str,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 2,
) -> dict:
    """The counters of one side and pass, and the loss of the first call, in this process."""
    from torch._dynamo.utils import counters

    import kda_ops.inductor

    torch.manual_seed(0)
    net = model.LanguageModel(layers, hidden, heads, 0, "softplus", torch.float32, SIDES[side]).to(
        device
    )
    folded = kda_ops.inductor.fold_preprocessing.folded
    torch._dynamo.reset()
    counters.clear()
    folded.clear()
    call = torch.compile(
        net, fullgraph=True, backend=_folding(backend) if side == "plain" else backend
    )
    found: dict = {"side": side, "pass": pass_}
    with torch._inductor.utils.fresh_cache():
        for B, T in SHAPES:
            tokens = torch.randint(
                model.VOCABULARY, (B, T + 1), generator=torch.Generator().manual_seed(T)
            ).to(device)
            with torch.inference_mode(pass_ == "infer"):
                loss = call(tokens)
            if pass_ == "train":
                loss.backward()
            graphs = counters["stats"]["unique_graphs"]
            if "graphs" not in found:
                found |= {
                    "graphs": graphs,
                    "breaks": sum(counters["graph_break"].values()),
                    "folded": folded.total(),
                    "loss": loss.item(),
                }
    return found | {"recompiles": graphs - found["graphs"]}


def main(argv: list[str]) -> int:
    """Run the command line; non-zero if a side of ours is not one graph."""
    parser = argparse.ArgumentParser(
        prog="python -m kda_ops counters", description=__doc__, formatter_class=Help
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--backend",
        default="aot_eager",
        help="of torch.compile; inductor takes longer to compile and counts the same",
    )
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--hidden", type=int, default=64, help="channels between layers")
    parser.add_argument("--heads", type=int, default=2, help="heads of a layer")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    args = parser.parse_args(argv)
    need_device(parser, args.device)
    need_writable(parser, args.json)
    need_backend(parser, args.backend)
    need_positive(parser, args, "layers", "hidden", "heads")
    spec = {n: getattr(args, n) for n in ("backend", "layers", "hidden", "heads")}
    about = describe(args.device) | spec
    print(", ".join(f"{n} {v}" for n, v in about.items()))
    print("side".ljust(8) + "pass".ljust(8) + "".join(n.rjust(12) for n in COLUMNS))
    rows = []
    for side in SIDES:
        for pass_ in PASSES:
            rows.append(row := count(side, pass_, args.device, **spec))
            print(
                side.ljust(8) + pass_.ljust(8) + "".join(f"{row[n]:12}" for n in COLUMNS),
                flush=True,
            )
    if args.json:
        write_json(args.json, about | {"rows": rows})
    return int(any(r["graphs"] != 1 or r["breaks"] for r in rows))
