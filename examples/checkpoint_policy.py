"""Use selective activation checkpointing: recompute a block in backward, but not its attention.

Usage::

    python examples/checkpoint_policy.py       # CPU, under a minute

Checkpointing a whole block frees its activations but runs its forward twice, attention included. A
policy that names the operators in `kda_ops.SAVE_OPS` keeps the results of the attention. A policy
that names only ``torch.ops.kda.chunk`` never matches, because training graphs call ``chunk_fwd``.

The policy keeps the operator's output and, for 16-bit inputs on GPUs, the matrix A (128 bytes per
token and head). Backward recomputes the operator's inputs with the rest of the block.

The script takes one training step with each policy, eager and compiled. It prints how often the
operator's forward ran, and the peak memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import kda_ops
from kda_ops import dispatch
from kda_ops.chunk import Forward


class Block(nn.Module):
    """Attention and a wide MLP, each with a pre-norm and a residual."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkvg_proj = nn.Linear(hidden, 4 * hidden, bias=False)
        self.b_proj = nn.Linear(hidden, heads, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.up_proj = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down_proj = nn.Linear(4 * hidden, hidden, bias=False)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``[B, T, hidden]`` to the same shape."""
        y = self.norm(x)
        q, k, v, g = self.qkvg_proj(y).unflatten(-1, (4, self.heads, -1)).unbind(2)
        o, _ = kda_ops.chunk_kda(
            q,
            k,
            v,
            g,
            self.b_proj(y),
            self.A_log,
            self.dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
        )
        x = x + self.o_proj(o.flatten(-2))
        return x + self.down_proj(F.silu(self.up_proj(self.mlp_norm(x))))


def save_attention(context, op, *args, **kwargs) -> CheckpointPolicy:
    """Keep the operators' results; recompute everything else."""
    return (
        CheckpointPolicy.MUST_SAVE if op in kda_ops.SAVE_OPS else CheckpointPolicy.PREFER_RECOMPUTE
    )


POLICIES: dict[str, Callable | None] = {
    "keep everything": None,
    "recompute blocks": partial(checkpoint, use_reentrant=False),
    "but not attention": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, save_attention),
    ),
}


class Model(nn.Module):
    """A stack of blocks, each under a policy."""

    def __init__(self, policy: Callable | None, hidden: int = 64, heads: int = 4, layers: int = 6):
        super().__init__()
        self.policy = policy
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``[B, T, hidden]`` to the same shape."""
        for block in self.blocks:
            x = block(x) if self.policy is None else self.policy(block, x)
        return x


@dataclass
class Step:
    """The measurements of one training step."""

    forwards: int  # calls of the operator's forward
    peak: float  # MiB, largest memory in use above that before the step
    loss: float
    gradient: float  # the norm over all parameters


def measure(model: Callable, parameters: list[Tensor], x: Tensor) -> Step:
    """Measure one forward and backward, after a first one that compiles and warms up."""
    for p in parameters:
        p.grad = torch.zeros_like(p)
    model(x).square().mean().backward()
    for p in parameters:
        p.grad.zero_()
    # Counts the calls from eager code, compiled code and recomputation alike.
    backend = dispatch.backend(x.device)
    with mock.patch.object(backend, "run", wraps=backend.run) as run:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            loss = model(x).square().mean()
            loss.backward()
    gradient = torch.stack([p.grad.norm() for p in parameters]).norm().item()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    now = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    forwards = sum(call.args[0] is Forward for call in run.call_args_list)
    return Step(forwards, peak / 2**20, loss.item(), gradient)


def main(argv: list[str] | None = None) -> dict[tuple[str, str], Step]:
    """Measure every policy, eager and compiled."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--backend",
        default="aot_eager",
        help="torch.compile backend; inductor compiles longer and gives the same counts",
    )
    args = parser.parse_args(argv)
    if min(args.tokens, args.layers) < 1:
        parser.error(
            f"--tokens and --layers must be at least 1, got {args.tokens} and {args.layers}."
        )
    x, steps = torch.randn(2, args.tokens, 64, generator=torch.Generator().manual_seed(0)), {}
    print(
        f"{args.layers} layers, 2 x {args.tokens} tokens\n{'':28s} forwards of the operator   "
        "peak MiB"
    )
    for name, policy in POLICIES.items():
        torch.manual_seed(0)
        model = Model(policy, layers=args.layers)
        parameters = list(model.parameters())
        for mode, call in (
            ("eager", model),
            ("compiled", torch.compile(model, backend=args.backend, fullgraph=True)),
        ):
            step = steps[name, mode] = measure(call, parameters, x)
            print(f"{name:18s} {mode:9s} {step.forwards:24d} {step.peak:9.1f}")
    return steps


if __name__ == "__main__":
    main()
