"""Train a small model of KDA and GDN layers with FSDP2, and compare it with one process.

Usage::

    # two processes on this machine, gloo, a few seconds
    python examples/fsdp.py
    # rows over two ranks, heads over two
    python examples/fsdp.py --processes 4 --tensor-parallel 2
    # compute in bfloat16
    python examples/fsdp.py --precision bfloat16
    # the same under a launcher
    torchrun --nproc-per-node 2 examples/fsdp.py
    # NCCL
    torchrun --nproc-per-node 2 examples/fsdp.py --device cuda

Each rank reads its rows of the batch and keeps its shard of every parameter, gradient and optimizer
state. `fully_shard` wraps each block as a whole and gathers one block at a time; the KDA and GDN
layers need nothing special. Before that, `HeadParallel` shards the heads on the other dimension of
the mesh. Then the first rank trains alone on the whole batches and compares.

In bfloat16 the gate's A_log and dt_bias must stay in float32, but a `MixedPrecisionPolicy` rounds
all parameters of a group. So the example shards a mixer twice: first its children with the policy,
then A_log and dt_bias without a policy. The same two calls, both without a policy, shard a layer
built with ``dtype=torch.bfloat16``, which FSDP2 otherwise refuses ("uniform original parameter
dtype").
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from kda_ops.nn import GatedDeltaNet, KimiDeltaAttention
from kda_ops.nn.tensor_parallel import HeadParallel

VOCABULARY, HIDDEN, ROWS, LENGTH = 64, 64, 8, 96


class Block(nn.Module):
    """A residual block: mix along time, then along channels."""

    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.mixer_norm, self.mixer, self.mlp_norm = nn.RMSNorm(HIDDEN), mixer, nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``[B, T, HIDDEN]`` to the same shape."""
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def new_model(seed: int, device: torch.device) -> nn.Sequential:
    """Build a language model of two KDA blocks and a GDN block, the same on every rank."""
    torch.manual_seed(seed)
    mixers = [
        layer(HIDDEN, head_dim=16, num_heads=4, expand_v=1)
        for layer in (KimiDeltaAttention, KimiDeltaAttention, GatedDeltaNet)
    ]
    return nn.Sequential(
        nn.Embedding(VOCABULARY, HIDDEN),
        *map(Block, mixers),
        nn.RMSNorm(HIDDEN),
        nn.Linear(HIDDEN, VOCABULARY, bias=False),
    ).to(device)


def shard(model: nn.Sequential, mesh: DeviceMesh, precision: torch.dtype) -> nn.Sequential:
    """Shard heads and hidden channels over "tp", then every parameter over "dp"."""
    dp, policy = mesh["dp"], MixedPrecisionPolicy()
    if precision is not torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for block in model[1:-2]:
        if mesh["tp"].size() > 1:
            plan = {"mixer": HeadParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        if precision is not torch.float32:
            fully_shard(list(block.mixer.children()), mesh=dp, mp_policy=policy)
            fully_shard(block.mixer, mesh=dp)  # what is left: A_log and dt_bias
        fully_shard(block, mesh=dp, mp_policy=policy)
    return fully_shard(model, mesh=dp, mp_policy=policy)


def train(
    model: nn.Sequential,
    args: argparse.Namespace,
    device: torch.device,
    mesh: DeviceMesh | None = None,
) -> list[float]:
    """Train and return each step's loss over the whole batch; a rank of a mesh runs its rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator, losses = torch.Generator().manual_seed(args.seed), []
    # the text: with probability 0.9, a token is followed by its fixed successor
    successor = torch.randperm(VOCABULARY, generator=generator)
    for _ in range(args.steps):
        text = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        for t in range(LENGTH):
            text[:, t + 1] = torch.where(
                torch.rand(ROWS, generator=generator) < 0.9, successor[text[:, t]], text[:, t + 1]
            )
        rows = text if mesh is None else text.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]
        rows = rows.to(device)
        loss = F.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()  # FSDP averages gradients over ranks: the gradient of the batch's mean loss
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if mesh is not None:
            dist.all_reduce(loss, group=mesh["dp"].get_group())
            loss = loss / mesh["dp"].size()
        losses.append(loss.item())
    return losses


def run(args: argparse.Namespace) -> None:
    """Train on all ranks, then on the first alone; raise if the results differ."""
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank())))
        torch.cuda.set_device(device)
    sizes = (dist.get_world_size() // args.tensor_parallel, args.tensor_parallel)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "tp"))
    precision = getattr(torch, args.precision)
    model = shard(new_model(args.seed, device), mesh, precision)
    held = sum(
        p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters()
    )
    losses = train(model, args, device, mesh)
    whole = {name: p.full_tensor() for name, p in model.named_parameters()}  # every rank takes part
    if dist.get_rank() == 0:
        alone = new_model(args.seed, device)
        losses_alone = train(alone, args, device)
        parameters = dict(alone.named_parameters())
        print(
            f"rows over {sizes[0]} ranks, heads over {sizes[1]}: a rank holds {held} of "
            f"{sum(p.numel() for p in parameters.values())} parameters"
        )
        for step, (a, b) in enumerate(zip(losses, losses_alone)):
            print(f"  step {step}: loss {a:.6f}, one process {b:.6f}")
        off = max(abs(a - b) / b for a, b in zip(losses, losses_alone))
        off_parameters = max(
            ((whole[name] - p).abs().max() / p.abs().max()).item() for name, p in parameters.items()
        )
        print(
            f"losses differ by at most {off:.1e}, parameters after the last step by "
            f"{off_parameters:.1e}"
        )
        eps = torch.finfo(precision).eps  # the process alone trains in float32
        bound, bound_parameters = max(1e-4, eps), max(1e-3, 2 * eps)
        if not (off < bound and off_parameters < bound_parameters and losses[-1] < losses[0]):
            raise RuntimeError(
                "training across ranks must match one process and lower the loss: see the "
                "differences above"
            )
    dist.barrier()


def _process(rank: int, store: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    _serve(args, init_method=f"file://{store}", rank=rank, world_size=args.processes)


def _serve(args: argparse.Namespace, **rendezvous: Any) -> NoReturn:
    """Run one rank, then end its process without finalising Python.

    A gloo thread that frees a tensor during finalisation aborts the process
    (pytorch/pytorch#190489).
    """
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", **rendezvous)
    run(args)
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
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--processes", type=int, default=2, help="processes to start if there is no launcher"
    )
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share the heads")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if launched else args.processes
    if ranks < 1 or args.tensor_parallel < 1 or ranks % args.tensor_parallel:
        parser.error(
            f"--tensor-parallel must divide the ranks, and both must be at least 1, got "
            f"{args.tensor_parallel} and {ranks} ranks."
        )
    if ROWS % (ranks // args.tensor_parallel):
        parser.error(
            f"ranks / --tensor-parallel must divide the {ROWS} rows of a batch, got {ranks} / "
            f"{args.tensor_parallel}: use 1, 2, 4 or 8."
        )
    if args.steps < 2:
        parser.error(f"--steps must be at least 2 to lower the loss, got {args.steps}.")
    if launched:
        _serve(args)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (os.path.join(folder, "store"), args), nprocs=args.processes)


if __name__ == "__main__":
    main()
