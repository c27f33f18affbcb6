"""``python -m kda_ops parallel``: one long sequence on one device, and spread over several by
context parallelism.

Starts a process per device (NCCL on GPUs, gloo on CPU) and times forward, and forward with
backward, of the same tokens on the first device alone and over the first 2, 4, .. of them; the
slowest rank's median counts. One GPU keeps the sequence whole and, for comparison
(``fwd_split_ms``, ``fwdbwd_split_ms``), scans it in runs. Beside it stand the bytes that a rank
passes to collectives, counted and as `kda_ops.distributed.chunk` computes them. Results are checked
by tests/gpu/test_parallel.py, not here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from kda_ops.bench import sides
from kda_ops.bench.cases import Case, make_inputs
from kda_ops.bench.machine import Help, checkout, need_device, need_writable, write_json
from kda_ops.problem import MAX_K

REPEATS = 9
GROUPS = (2, 4, 8)  # ranks that share a sequence, as far as there are so many
RUN = 64  # chunks per run: the cheapest where many heads share a device


def _median_ms(call: Callable[[], object], device: torch.device, group) -> float:
    """The median time of a call that all ranks make, on the slowest of them."""
    times = []
    for repeat in range(REPEATS + 2):
        if group is not None:
            dist.barrier(group)
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            took = start.elapsed_time(end)
        else:
            begin = time.perf_counter()
            call()
            took = 1e3 * (time.perf_counter() - begin)
        if repeat >= 2:  # the first compile and warm up
            times.append(took)
    slowest = torch.tensor(statistics.median(times), device=device)
    if group is not None:
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return round(slowest.item(), 3)


def _sent(call: Callable[[], object]) -> int:
    """The bytes that this rank passes to collectives in a call."""
    from kda_ops.distributed import collectives

    total, original = 0, collectives.start_all_gather

    def counting(x: Tensor, size: int, name: str) -> Tensor:
        nonlocal total
        total += x.numel() * x.element_size()
        return original(x, size, name)

    try:
        collectives.start_all_gather = counting
        call()
    finally:
        collectives.start_all_gather = original
    return total


@contextmanager
def _run_length(chunks: int | None, device: torch.device) -> Iterator[None]:
    """Scan in runs of so many chunks, 0 for whole sequences, None for what the rule says."""
    if device.type != "cuda" or chunks is None:
        yield
        return
    from kda_ops.backends.triton import tuning

    before, tuning.FORCED_RUN = tuning.FORCED_RUN, chunks
    try:
        yield
    finally:
        tuning.FORCED_RUN = before


def _row(case: Case, group, device: torch.device) -> dict[str, Any]:
    """Times of one case, whose setting is a shard of it where there is a group."""
    import kda_ops.distributed as cp

    size = 1 if group is None else dist.get_world_size(group)
    x = make_inputs(case)
    do = torch.randn_like(x["v"])
    names = list(x)
    if group is None:
        forward = sides.our_forward(case)
    else:
        plan = cp.plan_context(case.sizes["T"], group, device=device)
        chunk: Callable = {"kda": cp.chunk_kda, "gdn": cp.chunk_gdn}[case.op]

        def forward(x: dict[str, Tensor]) -> Tensor:
            return chunk(**x, group=plan)[0]

    def infer() -> None:
        with torch.no_grad():
            forward(x)

    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}

    def train(forward=forward) -> None:
        torch.autograd.grad(forward(leaves), [leaves[n] for n in names], do)

    row: dict[str, Any] = {"op": case.op, "gate": case.gate, "gpus": size}

    def take(name: str) -> None:
        row[f"fwd{name}_ms"] = _median_ms(infer, device, group)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row[f"fwdbwd{name}_ms"] = _median_ms(train, device, group)

    with _run_length(0 if group is None else None, device):
        take("")
    row["peak_GiB"] = (
        round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None
    )
    if group is None:
        if device.type == "cuda":
            with _run_length(RUN, device):
                take("_split")
        return row
    HV, K, V = case.sizes["HV"], case.sizes["D"], case.sizes["D"]
    row |= {"sent_bytes": _sent(train), "computed_bytes": 4 * HV * K * (V + K) + 4 * HV * K * V}
    return row


def _late(until: float, device: torch.device) -> bool:
    """Whether it is too late for any rank; all wait for each other."""
    late = torch.tensor(int(time.time() >= until), device=device)
    dist.all_reduce(late, dist.ReduceOp.MAX)
    return bool(late)


def _serve(rank: int, store: str, args: argparse.Namespace) -> None:
    cuda = args.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    sizes = [n for n in GROUPS if n <= args.processes]
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=args.processes,
    )
    groups = {n: dist.new_group(list(range(n))) for n in sizes}
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
    }
    found["setting"] = f"B1T{args.length}H{args.heads}D{args.width}"
    if cuda:
        found |= {
            "triton": metadata.version("triton"),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    rows: list[dict] = []
    alone: dict = {}
    cases = list(product(("kda", "gdn"), ("strong", "weak"), (1, *sizes)))
    for reached, (op, gate, size) in enumerate(cases, 1):
        if rank < size:
            setting = f"B1T{args.length // size}H{args.heads}D{args.width}"
            row = _row(
                Case(
                    op,
                    "fwdbwd",
                    setting,
                    gate,
                    str(device),
                    torch.bfloat16 if cuda else torch.float32,
                ),
                groups.get(size),
                device,
            )
            if rank == 0:
                alone = row if size == 1 else alone
                row |= {
                    f"{name}_speedup": round(alone[f"{name}_ms"] / row[f"{name}_ms"], 2)
                    for name in ("fwd", "fwdbwd")
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
                found |= {
                    "rows": rows,
                    "missing": [f"{o} {g} on {n}" for o, g, n in cases[reached:]],
                }
                if args.output:
                    write_json(args.output, found)
            if cuda:
                torch.cuda.empty_cache()
        if _late(args.until, device):
            break
    if rank == 0 and found["missing"]:
        print("out of time:", ", ".join(found["missing"]), flush=True)
    # gloo: a rank that leaves ends what a slower one has yet to read of the last collective
    time.sleep(1)
    dist.destroy_process_group()


def main(argv: list[str]) -> int:
    """Run the command line."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m kda_ops parallel", description=__doc__, formatter_class=Help
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--processes",
        type=int,
        default=min(torch.cuda.device_count(), 8) if cuda else 2,
        help="ranks; as many as there are GPUs",
    )
    parser.add_argument("--length", type=int, help="131072 on GPUs, 2048 on CPU by default")
    parser.add_argument("--heads", type=int, help="32 on GPUs, 4 on CPU by default")
    parser.add_argument("--width", type=int, default=128, help="K and V")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=(
            "written anew after every row; on GPUs benchmarks/results/parallel.json of the "
            "checkout by default"
        ),
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=float("inf"),
        metavar="S",
        help="begin no row after S seconds; what was not reached is named",
    )
    args = parser.parse_args(argv)
    need_device(parser, args.device)
    need_writable(parser, args.output)
    cuda = args.device == "cuda"
    args.length, args.heads = (
        args.length if args.length is not None else 131072 if cuda else 2048,
        args.heads if args.heads is not None else 32 if cuda else 4,
    )
    if min(args.processes, args.length, args.heads, args.width) < 1 or args.width > MAX_K:
        parser.error(
            "--processes, --length, --heads and --width must be at least 1, --width at most "
            f"{MAX_K}."
        )
    if args.length % (most := max(n for n in (1, *GROUPS) if n <= args.processes)):
        parser.error(
            f"--length must be a multiple of {most}, the ranks that share it, got {args.length}."
        )
    args.output = args.output or (
        str(checkout() / "benchmarks" / "results" / "parallel.json") if cuda else None
    )
    args.until = time.time() + args.time_limit
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_serve, (os.path.join(folder, "store"), args), nprocs=args.processes)
    return 0
