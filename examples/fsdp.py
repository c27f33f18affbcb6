"""Train a small model of KDA and GDN layers with FSDP2, and show that its losses and parameters are
those of one process.

    python examples/fsdp.py                                     # two gloo processes, seconds
    python examples/fsdp.py --processes 4 --tensor-parallel 2   # rows over two, heads over two
    python examples/fsdp.py --precision bfloat16                # compute in bfloat16
    torchrun --nproc-per-node 2 examples/fsdp.py                # under a launcher
    torchrun --nproc-per-node 2 examples/fsdp.py --device cuda  # over NCCL

Each rank reads its rows of the batch and keeps its part of every parameter, gradient and optimizer
state; `fully_shard` gathers one block at a time. A block is wrapped as a whole: nothing about our
layers needs to be known. Heads are spread by `HeadParallel` before that, on the other dimension of
the mesh. Afterwards the first rank trains alone on the whole batches, to compare.

In bfloat16 the gate's A_log and dt_bias must stay in float32, and a `MixedPrecisionPolicy` rounds
all parameters of a group. So a mixer is sharded twice: its children with the policy, then A_log and
dt_bias without. The same two calls, without a policy, shard a layer that was built with
``dtype=torch.bfloat16``, which FSDP2 otherwise refuses ("uniform original parameter dtype").
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
    """Mix along time, then along channels."""

    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.mixer_norm, self.mixer, self.mlp_norm = nn.RMSNorm(HIDDEN), mixer, nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, HIDDEN] to the same."""
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def new_model(seed: int, device: torch.device) -> nn.Sequential:
    """An embedding, two KDA blocks and a GDN block, a choice of the next token; the same on every
    rank.
    """
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
    """Heads and hidden channels over "tp", then every parameter over "dp"."""
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
    """The loss of each step over the whole batch; a rank of a mesh computes its rows of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator, losses = torch.Generator().manual_seed(args.seed), []
    # the text: mostly, a token is followed by one of its own
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
        loss.backward()  # gradients are averaged over the ranks, as the loss of the batch is
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if mesh is not None:
            dist.all_reduce(loss, group=mesh["dp"].get_group())
            loss = loss / mesh["dp"].size()
        losses.append(loss.item())
    return losses


def run(args: argparse.Namespace) -> None:
    """Train on all ranks, and on the first alone; raise if it makes a difference."""
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
            raise RuntimeError("training across ranks is not the training of one process")
    dist.barrier()


def _process(rank: int, store: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    _serve(args, init_method=f"file://{store}", rank=rank, world_size=args.processes)


def _serve(args: argparse.Namespace, **rendezvous: Any) -> NoReturn:
    """Be one rank, then end its process without Python's own end: a thread of gloo that lets go of
    a tensor then would abort it (pytorch/pytorch#190489).
    """
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", **rendezvous)
    run(args)
    # gloo: a rank that leaves ends what a slower one has yet to read of the last collective
    time.sleep(1)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def main(argv: list[str] | None = None) -> None:
    """Run under torchrun, or start the processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--processes", type=int, default=2, help="how many to start, where no launcher has"
    )
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="over how many ranks the heads are spread"
    )
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if launched else args.processes
    if ranks < 1 or args.tensor_parallel < 1 or ranks % args.tensor_parallel:
        parser.error(
            f"--tensor-parallel must divide the {ranks} ranks, of which there is at least one, "
            f"got {args.tensor_parallel}."
        )
    if ROWS % (ranks // args.tensor_parallel):
        parser.error(
            f"{ranks} ranks, {args.tensor_parallel} of them for the heads, cannot share the "
            f"{ROWS} rows of a batch evenly: take 1, 2, 4 or 8 for rows."
        )
    if args.steps < 2:
        parser.error(f"--steps must be at least 2, so that the loss can fall, got {args.steps}.")
    if launched:
        _serve(args)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (os.path.join(folder, "store"), args), nprocs=args.processes)


if __name__ == "__main__":
    main()
