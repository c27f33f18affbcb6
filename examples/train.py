"""Train a byte-level language model with KDA layers on Python's standard library; generate text.

Usage::

    pip install -e ".[examples]"
    python examples/train.py                  # CPU, under 3 minutes on two cores
    python examples/train.py --gdn            # Gated DeltaNet instead of KDA
    python examples/train.py --resume         # continue from the last checkpoint
    python examples/train.py --device cuda    # a bigger model in bfloat16
    python examples/train.py --device cuda --mode reduce-overhead   # the same in CUDA graphs

The loss curve, the checkpoint and the text are written to runs/train (or --out).
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from kda_ops.nn import GatedDeltaNet, KimiDeltaAttention
from kda_ops.tools.machine import need_device

matplotlib.use("Agg")  # needs no display
import matplotlib.pyplot as plt

SIZES = {
    "cpu": dict(layers=3, hidden=128, head_dim=64, batch=16, length=256, steps=200, lr=4e-3),
    "cuda": dict(layers=12, hidden=768, head_dim=128, batch=32, length=1024, steps=2000, lr=1e-3),
}
# installed packages, tests and tables
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
LOG2E = math.log2(math.e)


# The text


def read_library() -> tuple[Tensor, Tensor]:
    """Return the bytes of the standard library's .py files, to train on and held out.

    Every tenth file is held out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(f for f in root.rglob("*.py") if not SKIPPED & set(f.relative_to(root).parts))
    parts = [
        b"\n\n".join(f.read_bytes() for f in chosen)
        for chosen in ([f for i, f in enumerate(files) if i % 10], files[::10])
    ]
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, held_out


def windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Return windows of text as int64 [len(starts), length + 1]: inputs, and targets one later."""
    return text[starts[:, None] + torch.arange(length + 1)].long()


def random_windows(text: Tensor, batch: int, length: int, seed: int) -> Tensor:
    """Draw `batch` windows from the seed alone, so that a resumed run sees the same windows."""
    generator = torch.Generator().manual_seed(seed)
    return windows(text, torch.randint(len(text) - length, (batch,), generator=generator), length)


def bigram_entropy(train: Tensor, held_out: Tensor) -> float:
    """Return the bits per byte of a bigram model, trained on `train`, on windows `held_out`.

    It predicts each target from the byte before, by smoothed counts.
    """
    counts = (
        torch.bincount(train[:-1].long() * 256 + train[1:].long(), minlength=256 * 256).view(
            256, 256
        )
        + 0.1
    )
    bits = -(counts / counts.sum(1, keepdim=True)).log2()
    return bits[held_out[:, :-1], held_out[:, 1:]].mean().item()


# The model


class Block(nn.Module):
    """A residual block: mix along time, then along channels."""

    def __init__(self, mixer: nn.Module, hidden: int):
        super().__init__()
        self.mixer_norm, self.mixer = nn.RMSNorm(hidden), mixer
        self.mlp_norm = nn.RMSNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 3 * hidden), nn.GELU(), nn.Linear(3 * hidden, hidden)
        )

    def forward(self, x: Tensor, cache=None) -> Tensor:
        """Map x ``[B, T, hidden]`` to the same shape."""
        x = x + self.mixer(self.mixer_norm(x), cache=cache)
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """A byte-level language model."""

    def __init__(self, layers: int, hidden: int, head_dim: int, gdn: bool):
        super().__init__()
        layer = GatedDeltaNet if gdn else KimiDeltaAttention
        mixers = [
            layer(hidden_size=hidden, head_dim=head_dim, num_heads=hidden // head_dim, expand_v=1)
            for _ in range(layers)
        ]
        self.embed = nn.Embedding(256, hidden)
        self.blocks = nn.ModuleList(Block(mixer, hidden) for mixer in mixers)
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, 256, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=hidden**-0.5)

    def forward(self, tokens: Tensor, caches=None) -> Tensor:
        """Map bytes [B, T] to logits [B, T, 256]; with `caches`, continue from their states."""
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[i])
        return self.head(self.norm(x))

    def new_caches(self, batch: int) -> list:
        """Return one empty cache per block."""
        return [block.mixer.new_cache(batch) for block in self.blocks]


def loss_of(model: LanguageModel, window: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next byte, in nats."""
    logits = model(window[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())


@torch.no_grad()
def generate(
    model: LanguageModel, prompt: bytes, count: int, temperature: float, seed: int
) -> bytes:
    """Read the prompt in one pass, then generate `count` bytes one by one.

    Each layer's cache is a state of constant size.
    """
    device, generator = model.head.weight.device, torch.Generator().manual_seed(seed)
    caches, out = model.new_caches(1), bytearray(prompt)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(count):
        logits = model(tokens, caches)[0, -1].float().cpu()
        out.append(
            int(torch.multinomial(F.softmax(logits / temperature, -1), 1, generator=generator))
        )
        tokens = torch.tensor([[out[-1]]], device=device)
    return bytes(out)


# The training


def can_build_cpp() -> bool:
    """Return whether Inductor finds a C++ compiler and Python's headers for its CPU kernels."""
    compiler = os.environ.get("CXX", {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++"))
    return (
        shutil.which(compiler) is not None
        and Path(sysconfig.get_paths()["include"], "Python.h").exists()
    )


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    # norms, biases, and the gate's A_log and dt_bias
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=rest, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate of a step: linear warm-up over 5 % of the run, cosine to 5 % of the peak."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (
        0.05 + 0.475 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    )


def draw(path: Path, curve: dict, bigram: float) -> None:
    """Write the loss curve as a PNG."""
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot([bits for _, bits in curve["train"]], color="tab:blue", alpha=0.5, label="train")
    axes.plot(*zip(*curve["held_out"]), "o-", color="tab:orange", label="held out")
    axes.axhline(bigram, color="gray", linestyle="--", label="bigram entropy, held out")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; the device sets the default sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument(
        "--mode",
        choices=("default", "reduce-overhead"),
        default="default",
        help="of torch.compile; reduce-overhead replays CUDA graphs on a GPU",
    )
    parser.add_argument("--gdn", action="store_true", help="use Gated DeltaNet instead of KDA")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/train"), help="folder for checkpoint, curve and text"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the checkpoint in --out"
    )
    parser.add_argument("--stop", type=int, help="stop after this many steps, as if interrupted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=int, default=500, help="bytes to generate")
    for name, kind in dict(
        layers=int, hidden=int, head_dim=int, batch=int, length=int, steps=int, lr=float
    ).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    args = parser.parse_args(argv)
    for name, value in SIZES[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    need_device(parser, args.device)
    for name in ("layers", "batch", "length", "steps", "stop"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}.")
    if args.head_dim < 1 or args.hidden < args.head_dim or args.hidden % args.head_dim:
        parser.error(
            f"--hidden must be a multiple of --head-dim, got {args.hidden} and {args.head_dim}."
        )
    return args


def main(argv: list[str] | None = None) -> dict:
    """Train, draw the curve, generate; return the losses in bits per byte and the text."""
    begin, args = time.perf_counter(), parse_arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out / "checkpoint.pt"
    torch.manual_seed(args.seed)
    train, held_out = read_library()
    evaluation = windows(
        held_out,
        torch.linspace(0, len(held_out) - args.length - 1, 4 * args.batch).long(),
        args.length,
    )
    bigram = bigram_entropy(train, evaluation)
    evaluation = evaluation.to(args.device)

    model = LanguageModel(args.layers, args.hidden, args.head_dim, args.gdn).to(args.device)
    optimizer = make_optimizer(model, args.lr)
    count = sum(p.numel() for p in model.parameters())
    print(
        f"{count:,} parameters, {'GDN' if args.gdn else 'KDA'} layers; {len(train):,} bytes to "
        f"train on, {len(held_out):,} held out"
    )

    options = dict(mode=args.mode)
    if not can_build_cpp():
        options = dict(backend="aot_eager")
        print(
            "No C++ compiler (or no Python headers) found: torch.compile runs with backend "
            "aot_eager, which is slower and has no modes."
        )
    compiled_loss = torch.compile(loss_of, fullgraph=True, **options)

    def loss(window: Tensor) -> Tensor:
        if args.mode == "reduce-overhead":
            # held-out losses have no backward, which would end a step
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.device == "cuda"):
            return compiled_loss(model, window)

    def held_out_bits() -> float:
        # Gradients stay enabled to reuse the compiled training graph.
        return sum(loss(window).item() for window in evaluation.split(args.batch)) / 4 * LOG2E

    first, curve = 0, dict(train=[], held_out=[])
    if args.resume:
        if not checkpoint.exists():
            raise SystemExit(f"--resume needs {checkpoint}, which does not exist: run without it.")
        saved = torch.load(checkpoint, map_location=args.device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, curve = saved["step"], saved["curve"]
        print(f"resumed after step {first}")

    last = args.steps if args.stop is None else min(args.stop, args.steps)
    progress = tqdm(
        range(first, last), initial=first, total=args.steps, desc="compiling", unit="step"
    )
    for step in progress:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        window = random_windows(
            train, args.batch, args.length, seed=args.seed * 1_000_000 + step
        ).to(args.device)
        value = loss(window)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve["train"].append((step, value.item() * LOG2E))
        progress.set_description(f"train {curve['train'][-1][1]:.2f} bits/byte")
        if (step + 1) % 50 == 0 or step + 1 == last:
            curve["held_out"].append((step, held_out_bits()))
            # write, then rename: an interrupted save keeps the last checkpoint
            partial = checkpoint.with_suffix(".tmp")
            torch.save(
                dict(
                    model=model.state_dict(),
                    optimizer=optimizer.state_dict(),
                    step=step + 1,
                    curve=curve,
                ),
                partial,
            )
            partial.replace(checkpoint)
    draw(args.out / "loss.png", curve, bigram)
    recent = [bits for _, bits in curve["train"][-20:]]
    result = dict(
        train=sum(recent) / len(recent),
        held_out=curve["held_out"][-1][1],
        bigram=bigram,
        curve=curve,
    )
    print(
        f"train {result['train']:.3f}, held out {result['held_out']:.3f}, bigram conditional "
        f"entropy of the held-out text {bigram:.3f} bits per byte"
    )

    prompt = b"class Reader:\n    def __init__(self, "
    text = generate(model, prompt, args.write, temperature=0.7, seed=args.seed)
    result["text"] = text.decode("utf-8", errors="replace")
    (args.out / "text.txt").write_text(result["text"], encoding="utf-8")
    print(f"--- {len(prompt)} bytes of prompt, then {args.write} generated\n{result['text']}\n---")
    result["seconds"] = time.perf_counter() - begin
    print(f"{args.out}/loss.png, {checkpoint}; {result['seconds']:.0f} s in all")
    return result


if __name__ == "__main__":
    main()
