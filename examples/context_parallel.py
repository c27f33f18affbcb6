"""Train one step on a sequence sharded across processes, and compare it with one process.

Usage::

    python examples/context_parallel.py        # two processes on this machine, a few seconds
    python examples/context_parallel.py --processes 4 --gdn
    torchrun --nproc-per-node 2 examples/context_parallel.py    # the same under a launcher
    torchrun --nproc-per-node 2 examples/context_parallel.py --device cuda

Each rank runs the model on its shard of the tokens, and shards differ in length. Only two parts of
the model need tokens of other ranks. The short convolution reads the three tokens before the shard
(`exchange_tail`), and the attention reads the state before it (`chunk_kda`). The loss is the sum of
the ranks' losses, so the ranks sum their gradients. Then each rank takes the same step alone, on
the whole sequence, and compares loss and gradients.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import kda_ops
import kda_ops.distributed as cp

VOCABULARY, HIDDEN, HEADS, K, TAPS = 64, 64, 2, 32, 4
FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)


class Model(nn.Module):
    """A language model of one attention layer with a short convolution."""

    def __init__(self, gdn: bool):
        super().__init__()
        self.gdn = gdn
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HEADS * K, bias=False)
        self.taps = nn.Parameter(0.5 * torch.randn(3 * HEADS * K, 1, TAPS))
        self.decay = nn.Linear(HIDDEN, HEADS if gdn else HEADS * K, bias=False)
        self.beta = nn.Linear(HIDDEN, HEADS, bias=False)
        self.A_log = nn.Parameter(torch.zeros(HEADS))
        self.dt_bias = nn.Parameter(torch.randn(HEADS if gdn else HEADS * K))
        self.out = nn.Linear(HEADS * K, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, plan: cp.ContextPlan | None = None) -> Tensor:
        """Return logits [B, T, VOCABULARY] of this rank's tokens [B, T].

        Without a plan, the tokens are whole sequences.
        """
        x = self.embed(tokens)
        qkv = self.qkv(x)  # q, k and v concatenated: one exchange for the three convolutions
        tail = (
            qkv.new_zeros(qkv.shape[0], TAPS - 1, qkv.shape[2])
            if plan is None
            else cp.exchange_tail(qkv, TAPS, plan)
        )
        qkv = F.silu(F.conv1d(torch.cat([tail, qkv], 1).mT, self.taps, groups=qkv.shape[2]).mT)
        q, k, v = qkv.unflatten(2, (3, HEADS, K)).unbind(2)
        decay, beta = self.decay(x), self.beta(x)
        g = decay if self.gdn else decay.unflatten(2, (HEADS, K))
        if plan is None:
            chunk = kda_ops.chunk_gdn if self.gdn else kda_ops.chunk_kda
            o, _ = chunk(q, k, v, g, beta, self.A_log, self.dt_bias, **FLAGS)
        else:
            chunk = cp.chunk_gdn if self.gdn else cp.chunk_kda
            o, _ = chunk(q, k, v, g, beta, self.A_log, self.dt_bias, group=plan, **FLAGS)
        return self.head(x + self.out(o.flatten(2)))


def loss_of(
    model: Model, tokens: Tensor, targets: Tensor, total: int, plan: cp.ContextPlan | None = None
) -> Tensor:
    """Return this rank's part of the mean loss over `total` tokens."""
    logits = model(tokens, plan)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / total


def step(args: argparse.Namespace) -> float:
    """Train one step on this rank's shard; return its largest relative error to one process."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    model = Model(args.gdn).to(device)  # the same on every rank
    # in real training, each rank reads only its shard
    text = torch.randint(
        VOCABULARY, (1, args.length + 1), generator=torch.Generator().manual_seed(args.seed)
    )
    # rank i holds i + 1 parts of size * (size + 1) / 2
    cuts = [args.length * i * (i + 1) // (size * (size + 1)) for i in range(size + 1)]
    mine = slice(cuts[rank], cuts[rank + 1])
    tokens, targets = text[:, :-1][:, mine].to(device), text[:, 1:][:, mine].to(device)

    plan = cp.plan_context(tokens.shape[1], dist.group.WORLD, device=device)  # once per batch
    loss = loss_of(model, tokens, targets, args.length, plan)
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    torch.manual_seed(args.seed)
    alone = Model(args.gdn).to(device)
    loss_alone = loss_of(alone, text[:, :-1].to(device), text[:, 1:].to(device), args.length)
    loss_alone.backward()
    difference = {"loss": ((loss - loss_alone) / loss_alone).abs().item()}
    for (name, p), q in zip(model.named_parameters(), alone.parameters()):
        difference[name] = ((p.grad - q.grad).abs().max() / q.grad.abs().max()).item()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    difference["parameters after the step"] = max(
        (p - q).abs().max().item() for p, q in zip(model.parameters(), alone.parameters())
    )
    worst = max(difference.values())
    if rank == 0:
        print(
            f"{args.length} tokens on {size} ranks ({', '.join(map(str, plan.lengths))}): loss "
            f"{loss.item():.6f}, one process {loss_alone.item():.6f}"
        )
        for name, d in difference.items():
            print(f"  {name:26s} differs by {d:.1e}")
    if not worst < 1e-4:
        raise RuntimeError(
            f"rank {rank}: the step differs from that of one process by 1e-4 or more: {difference}"
        )
    return worst


def _process(rank: int, store: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    _serve(args, init_method=f"file://{store}", rank=rank, world_size=args.processes)


def _serve(args: argparse.Namespace, **rendezvous: Any) -> NoReturn:
    """Run one rank, then end its process without finalising Python.

    A gloo thread that frees a tensor during finalisation aborts the process
    (pytorch/pytorch#190489).
    """
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", **rendezvous)
    step(args)
    # gloo: a rank that exits breaks the last collective of a slower rank
    time.sleep(1)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def main(argv: list[str] | None = None) -> None:
    """Run one rank under torchrun; without a launcher, start the processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gdn", action="store_true", help="use Gated DeltaNet instead of KDA")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--processes", type=int, default=2, help="processes to start if there is no launcher"
    )
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if launched else args.processes
    if ranks < 1 or args.length < ranks * (ranks + 1) // 2:
        parser.error(
            "--processes must be at least 1, and --length at least ranks * (ranks + 1) / 2, got "
            f"{args.length} tokens for {ranks} ranks."
        )
    if launched:
        _serve(args)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (os.path.join(folder, "store"), args), nprocs=args.processes)


if __name__ == "__main__":
    main()
