"""``python -m kda_ops bench --model``: a training step of a whole model with our operators beside
the same model with a peer's.

All sides are one model: norm, `kda_ops.nn.KimiDeltaAttention`, norm, MLP, some times over, in bf16,
AdamW. A peer's side calls its own chunk operator where ours calls ours, or has its own layer,
convolutions and norm included, around the same parameters. Ours is compiled with
``fullgraph=True``, a peer's as far as it goes, and its graph breaks are counted. Each side has a
new process with empty caches; its first step is timed from the first call to the updated
parameters, then steps follow. A peer whose first gradients are not ours gets no time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda_ops.bench import sides
from kda_ops.bench.cases import Case
from kda_ops.bench.compare import compile_ahead
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

VOCABULARY = 256
SIZES = dict(layers=8, hidden=2048, heads=16, mlp=3, batch=4, length=4096, steps=20)
SAYS = dict(
    layers="of the model",
    hidden="channels between layers",
    heads="of a layer, as wide as hidden over heads",
    mlp="width of the MLPs over hidden; 0: none",
    batch="rows",
    length="tokens of a row",
    steps="to time",
)
# the RMS over parameters by which `probe` may differ between sides; 1.4 where gradients have
# nothing in common, their relative error otherwise
APART = 0.2
COLUMNS = ("step_ms", "first_step_s", "graphs", "breaks", "peak_gb", "loss")


def _fla(
    layer: KimiDeltaAttention, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **flags
) -> tuple[Tensor, Tensor | None]:
    from fla.ops.kda import chunk_kda

    same = (
        "A_log",
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "cu_seqlens",
    )
    words = {n: flags[n] for n in same} | dict(
        dt_bias=layer.dt_bias, safe_gate=layer.safe_gate, lower_bound=layer.lower_bound
    )
    return chunk_kda(q, k, v, g, beta, **words)


def _fla_layer(layer: KimiDeltaAttention) -> nn.Module:
    from fla.layers import KimiDeltaAttention as Theirs

    class Mixer(Theirs):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0]

    sizes = dict(
        hidden_size=layer.hidden_size,
        head_dim=layer.head_k_dim,
        num_heads=layer.num_heads,
        conv_size=layer.conv_size,
        norm_eps=layer.o_norm.eps,
    )
    mixer = Mixer(**sizes, safe_gate=layer.safe_gate, lower_bound=layer.lower_bound)
    mixer.load_state_dict(layer.state_dict(), assign=True)
    return mixer


PEERS: dict[str, Callable] = {"fla": _fla}  # called in place of our operator
LAYERS: dict[str, Callable] = {"fla-layer": _fla_layer}  # from our layer to theirs


def check_peers(*names: str) -> None:
    """Refuse what is no peer, which would be measured as ours."""
    if unknown := [n for n in names if n not in PEERS and n not in LAYERS]:
        raise ValueError(f"no {', '.join(unknown)} among the peers {', '.join([*PEERS, *LAYERS])}.")


class Attention(KimiDeltaAttention):
    """The layer around a peer's operator, or ours."""

    peer: Callable | None = None

    def _chunk(self, *args, group, **flags) -> tuple[Tensor, Tensor | None]:
        return (
            super()._chunk(*args, group=group, **flags)
            if self.peer is None
            else self.peer(self, *args, **flags)
        )


class Block(nn.Module):
    """Mix along time, then, where the MLP has a width, along channels."""

    def __init__(self, hidden: int, heads: int, mlp: int, **words):
        super().__init__()
        self.norm = nn.RMSNorm(hidden, dtype=words["dtype"])
        self.mixer: nn.Module = Attention(
            hidden, head_dim=hidden // heads, num_heads=heads, **words
        )
        width, dtype, self.mlp = mlp * hidden, words["dtype"], None
        if mlp:
            wide = (
                nn.RMSNorm(hidden, dtype=dtype),
                nn.Linear(hidden, width, dtype=dtype),
                nn.GELU(),
                nn.Linear(width, hidden, dtype=dtype),
            )
            self.mlp = nn.Sequential(*wide)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden] to the same."""
        x = x + self.mixer(self.norm(x))
        return x if self.mlp is None else x + self.mlp(x)


class LanguageModel(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        mlp: int,
        gate: str,
        dtype: torch.dtype,
        peer: Callable | None = None,
        layer: Callable | None = None,
    ):
        super().__init__()
        words = dict(dtype=dtype) | (
            dict(safe_gate=True, lower_bound=-5.0) if gate == "bound" else {}
        )
        self.embed, self.head = (
            nn.Embedding(VOCABULARY, hidden, dtype=dtype),
            nn.Linear(hidden, VOCABULARY, bias=False, dtype=dtype),
        )
        blocks = [Block(hidden, heads, mlp, **words) for _ in range(layers)]
        for module in (m for block in blocks for m in block.modules() if isinstance(m, Attention)):
            module.peer = peer
        # when all have drawn their parameters: a layer draws some of its own
        if layer is not None:
            for block in blocks:
                block.mixer = layer(block.mixer)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next token, of [B, T + 1]."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


def probe(i: int, gradient: Tensor) -> float:
    """The i-th random direction's share of a gradient, as a number that another process can
    compare.
    """
    x = gradient.float()
    direction = torch.randn(
        x.shape, generator=torch.Generator(x.device).manual_seed(i), device=x.device
    )
    return ((x * direction).sum() / x.norm().clamp(min=1e-30)).item()


def measure(side: str, spec: dict, report: Callable[[dict], None] = lambda found: None) -> dict:
    """One side, ``ours`` or a name of `PEERS` or `LAYERS`, in this process; `report` gets what is
    known so far after the first step.
    """
    from torch._dynamo.utils import counters

    if side != "ours":
        check_peers(side)
    device, dtype = spec["device"], torch.bfloat16 if spec["device"] == "cuda" else torch.float32
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(0)
    sizes = {n: spec[n] for n in ("layers", "hidden", "heads", "mlp", "gate")}
    with torch.device(device):
        tokens = torch.randint(VOCABULARY, (spec["batch"], spec["length"] + 1))
        model = LanguageModel(**sizes, dtype=dtype, peer=PEERS.get(side), layer=LAYERS.get(side))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    call = torch.compile(model, fullgraph=side == "ours", backend=spec["backend"])
    counters.clear()
    # layers register theirs in orders of their own
    parameters = dict(sorted(model.named_parameters()))
    gradients: list[Tensor] = []  # after the first step

    def step() -> Tensor:
        loss = call(tokens)
        loss.backward()
        if not gradients:
            gradients.extend(p.grad for p in parameters.values() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    synchronize()
    start = time.perf_counter()
    loss = step().item()
    synchronize()
    took = time.perf_counter() - start
    lost = [n for n, x in zip(parameters, gradients) if x is None or not x.any()]
    if lost:  # by a compiler; both sides would lose the same, and be the faster for it
        raise RuntimeError(f"no gradient reached {', '.join(lost)}")
    found = {
        "first_step_s": took,
        "loss": loss,
        "probe": [probe(i, x) for i, x in enumerate(gradients)],
    }
    found |= {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }
    report(found)
    gradients[:] = [tokens]  # looked at; what they hold is free again
    for _ in range(2):
        step()
    if device == "cuda":
        synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(spec["steps"]):
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None
    return found | {
        "step_ms": statistics.median(times),
        "peak_gb": peak,
        "graphs": counters["stats"]["unique_graphs"],
    }


def _ahead(side: str, spec: dict, caches: dict[str, str]) -> None:
    """Compile what a peer's operator will choose from, on all cores."""
    peer = next(p for p in sides.PEERS if p.name == side.removesuffix("-layer"))
    setting = "B{batch}T{length}H{heads}D".format(**spec) + str(spec["hidden"] // spec["heads"])
    case = Case("kda", "fwdbwd", setting, spec["gate"], spec["device"], torch.bfloat16)
    compile_ahead([case], replace(peer, environment=peer.environment | caches), float("inf"))


def measure_apart(side: str, spec: dict, limit: float | None, ahead: bool = False) -> dict:
    """`measure` in a new process with empty caches, as far as it comes within `limit` seconds;
    `ahead`: with a peer's kernels in them, and no first step.
    """
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        }
        if ahead:
            _ahead(side, spec, caches)
        environment = os.environ | caches | {"FLA_DISABLE_BACKEND_DISPATCH": "1"}
        command = [sys.executable, "-m", "kda_ops.bench.model", json.dumps(spec | {"side": side})]
        why = None
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=limit
            )
            out = done.stdout
            if done.returncode:
                why = (done.stderr.strip().splitlines() or ["no output"])[-1]
        except subprocess.TimeoutExpired as cut:
            out, why = bytes(cut.stdout or b"").decode(), f"not done after {limit:g} s"
    rows = [json.loads(line) for line in out.splitlines() if line.startswith('{"first_step_s"')]
    found = (rows[-1] if rows else {}) | ({"says": why} if why else {})
    return {n: x for n, x in found.items() if n != "first_step_s" or not ahead}


def refuse(found: dict, ours: dict) -> dict:
    """A side's figures, without times where its first step did not compute the gradients of
    ours.
    """
    if "probe" not in found:
        return found
    apart = [(a - b) ** 2 for a, b in zip(found["probe"], ours.get("probe", []))]
    if apart and (sum(apart) / len(apart)) ** 0.5 < APART:
        return found
    return {n: x for n, x in found.items() if not n.startswith(("step", "first"))} | {
        "says": "other gradients than ours"
    }


def main(argv: list[str]) -> int:
    """Measure all sides and print them; non-zero if ours has no time."""
    parser = argparse.ArgumentParser(
        prog="python -m kda_ops bench --model", description=__doc__, formatter_class=Help
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--gate",
        choices=("softplus", "bound"),
        default="softplus",
        help="of the layers; softplus is their default",
    )
    parser.add_argument(
        "--peers",
        type=lambda s: [n for n in s.split(",") if n],
        default=[*PEERS, *LAYERS],
        help="comma-separated, after ours; '' for none",
    )
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--time-limit", type=float, metavar="S", help="end a side after S seconds")
    parser.add_argument(
        "--ahead",
        action="store_true",
        help=(
            "compile the peer's kernels on all cores first: less time, but none for its first step"
        ),
    )
    parser.add_argument("--json", metavar="FILE", help="write what was found")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=SAYS[name])
    args = parser.parse_args(argv)
    try:
        check_peers(*args.peers)
    except ValueError as error:
        parser.error(f"--peers: {error}")
    need_device(parser, args.device)
    need_writable(parser, args.json)
    need_backend(parser, args.backend)
    need_positive(parser, args, *(n for n in SIZES if n != "mlp"))
    spec = {n: getattr(args, n) for n in ("device", "gate", "backend", *SIZES)}
    about = describe(args.device)
    print(", ".join(f"{n} {v}" for n, v in (about | spec).items()))
    print("side".ljust(10) + "".join(n.rjust(14) for n in COLUMNS))
    found: dict[str, dict] = {}
    for side in ("ours", *args.peers):
        row = measure_apart(side, spec, args.time_limit, args.ahead and side != "ours")
        row = found[side] = row if side == "ours" else refuse(row, found["ours"])
        cells = [row.get(n) for n in COLUMNS]
        print(
            side.ljust(10)
            + "".join(("-" if c is None else format(c, ".5g")).rjust(14) for c in cells),
            row.get("says", ""),
            flush=True,
        )
        if args.json:
            write_json(args.json, about | {"spec": spec, "sides": found})
    return 0 if "step_ms" in found["ours"] else 1


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(
        json.dumps(
            measure(given["side"], given, lambda found: print(json.dumps(found), flush=True))
        ),
        flush=True,
    )
