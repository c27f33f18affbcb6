"""Time one long sequence on one device, and spread over several by context parallelism.

``torchrun --nproc-per-node 4 -m benchmarks.parallel`` times forward, and forward with backward, of
the same tokens on 1, 2 and 4 ranks. The slowest rank's median counts. Ranks have a GPU each over
NCCL, or share a CPU over gloo. Tests check the results, and the bytes that they send.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import product

import torch
import torch.distributed as dist

import kda_ops.distributed as cp
from benchmarks.cases import Case, make_inputs
from benchmarks.peers import our_forward
from benchmarks.records import need_writable, stamp, write_json
from kda_ops.tools.machine import Help, parse_setting

REPEATS = 9


def median_ms(
    call: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None
) -> float:
    """Return the median time of a call that the ranks of a group make together, on the slowest."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for _ in range(REPEATS + 2):  # the first two warm up
        if group is not None:
            dist.barrier(group)
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    slowest = torch.tensor(statistics.median(times[2:]), device=device)
    if group is not None:
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return round(slowest.item(), 3)


def measure(case: Case, device: torch.device, group: dist.ProcessGroup | None) -> dict:
    """Return the times of a case: whole without a group, otherwise one shard on each rank of it."""
    x, forward = make_inputs(case), our_forward(case)
    if group is not None:
        plan = cp.plan_context(case.sizes["T"], group, device=device)
        chunk: Callable = {"kda": cp.chunk_kda, "gdn": cp.chunk_gdn}[case.op]
        forward = lambda x: chunk(**x, group=plan)[0]  # noqa: E731
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
    do = torch.randn_like(x["v"])

    def train() -> None:
        torch.autograd.grad(forward(leaves), list(leaves.values()), do)

    row = {"op": case.op, "gate": case.gate, "gpus": 1 if group is None else group.size()}
    row["fwd_ms"] = median_ms(torch.no_grad()(lambda: forward(x)), device, group)
    return row | {"fwdbwd_ms": median_ms(train, device, group)}


def main() -> None:
    """Run the command line in one rank; the first one prints and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--setting", default="B1T131072H32D128", help="batch, tokens, heads, width")
    parser.add_argument("--output", metavar="FILE", help="written anew after every row")
    args = parser.parse_args()
    need_writable(parser, args.output)
    cuda, rows = torch.cuda.is_available(), list[dict]()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(rank)
    about = stamp(device.type)
    tokens, dtype = parse_setting(args.setting)["T"], torch.bfloat16 if cuda else torch.float32
    counts = [2**n for n in range(size.bit_length())]
    groups = {n: dist.new_group(range(n)) for n in counts[1:]}
    for op, gate, count in product(("kda", "gdn"), ("strong", "weak"), counts):
        if rank >= count:
            continue
        setting = args.setting.replace(f"T{tokens}", f"T{tokens // count}")
        case = Case(op, "fwdbwd", setting, gate, str(device), dtype)
        row = measure(case, device, groups.get(count))
        rows.append(row | about)
        if rank == 0:
            print(json.dumps(rows[-1]), flush=True)
        if rank == 0 and args.output:
            write_json(args.output, {"setting": args.setting, "rows": rows})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
