"""Time what calls cost the host, next to operators that only allocate their results.

"us" is the least of several loops that do not wait for the device. The inputs are so small that the
GPU idles, and the sides take turns in one process. "bare" has our schema and autograd formula, and
launches nothing (`benchmarks.bare`). The parts:

  eager     a forward without gradients, and a forward with backward
  compiled  the same in one graph of 8 layers, per layer
  varying   the eager loop at one T, and at a T new to every call
  packed    the same with 4 sequences of new lengths in every call
  decode    one token per sequence on a pool of states
  wall      milliseconds of large eager calls, and of their replay in a CUDA graph
  model     the step of an 8-layer model, and how long the GPU is busy in it
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks import bare, records
from benchmarks.cases import INPUTS, Case, make_inputs
from benchmarks.peers import FLA_ALONE, Forward, Inputs, fla, our_forward, our_step
from benchmarks.timer import replayed
from benchmarks.worker import MODEL_LIMIT, first_line, in_new_process, work_of
from kda_ops.tools import machine

LAYERS = 8
TOKENS = range(200, 321)  # of the part "varying"
SETTINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {
        "small": ("B1T256H2",),
        "decode": ("B1T1H8", "B64T1H8"),
        "wall kda": ("B1T2048H16", "B4T4096H16"),
        "wall gdn": ("B4T4096H16",),
        "model": ("B1T2048H8",),
    },
    "cpu": {"small": ("B1T256H1D16",), "decode": ("B1T1H1D16",), "model": ("B1T66H1D16",)},
}
Figures = dict[str, float]
Calls = dict[str, Callable[[], object]]


def loops_us(calls: Calls, device: str, rounds: int, count: int, drained: bool = False) -> Figures:
    """Return the host's microseconds per call of each side, the least of its loops.

    A loop begins with an idle device, and waits for it only if it is to be `drained`.
    """
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    best = dict.fromkeys(calls, math.inf)
    for _, (name, call) in itertools.product(range(rounds), calls.items()):
        call()
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        if drained:
            synchronize()
        best[name] = min(best[name], 1e6 * (time.perf_counter() - start) / count)
        synchronize()
    return best


def both_us(
    sides: dict[str, tuple[Forward, Inputs]], case: Case, rounds: int, count: int
) -> dict[str, Figures]:
    """Return the figures of each side's forward, and of its forward with backward."""
    forward: Calls = {}
    training: Calls = {}

    def trained(run: Forward, x: Inputs) -> Callable[[], None]:
        leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
        do = torch.randn_like(run(leaves))

        def train() -> None:
            run(leaves).backward(do)
            for leaf in leaves.values():
                leaf.grad = None

        train()
        return train

    for name, (run, x) in sides.items():
        try:
            with torch.no_grad():
                run(x)
            forward[name] = partial(run, x)
            training[name] = trained(run, x)
        except Exception as error:  # what a peer cannot do has no figure
            if name in ("ours", "bare"):
                raise
            print(f"skipped: {case.op} {name}: {first_line(error)}", flush=True)
    with torch.no_grad():
        found = loops_us(forward, case.device, rounds, count)
    return {"fwd": found, "fwdbwd": loops_us(training, case.device, rounds, count)}


def sides_of(case: Case) -> dict[str, Forward]:
    """Return our operator and the bare one."""
    return {"ours": our_forward(case), "bare": our_forward(case, bare.operator(case.op, "chunk"))}


def rivals(case: Case) -> dict[str, tuple[Forward, Inputs]]:
    """Return the installed peers; cuDNN's takes packed inputs, activated beforehand."""
    found: dict[str, tuple[Forward, Inputs]] = {}
    if case.device == "cuda" and machine.installed("fla-core"):
        os.environ.update(FLA_ALONE)
        found["fla"] = fla(case), make_inputs(case)
    if case.device == "cuda" and case.op == "kda" and machine.installed("nvidia-cudnn-frontend"):
        from cudnn.linear_attention import kimi_delta_attention

        given, (B, T) = make_inputs(replace(case, gate="weak")), (case.sizes[n] for n in "BT")
        offsets = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=case.device)
        packed = {n: given[n].flatten(0, 1) for n in INPUTS[:5]}
        found["cudnn"] = lambda x: kimi_delta_attention(*x.values(), offsets)[0], packed
    return found


def eager(case: Case, rounds: int, count: int, peers: bool = False) -> dict[str, Figures]:
    """Return the figures of single calls."""
    x = make_inputs(case)
    sides = {name: (run, x) for name, run in sides_of(case).items()}
    return both_us(sides | (rivals(case) if peers else {}), case, rounds, count)


def compiled(case: Case, rounds: int, count: int) -> dict[str, Figures]:
    """Return the figures per layer of one graph, whose layers read each other's output as v."""
    first = make_inputs(case)
    x = {f"{n}{i}": t.clone() for i in range(LAYERS) for n, t in first.items() if n != "v"}
    x["v"] = first["v"]
    backend = "inductor" if case.device == "cuda" else "aot_eager"
    torch._dynamo.reset()  # the graphs of other operators count towards its limit of graphs

    def graph(run: Forward) -> Forward:
        def layers(x: Inputs) -> Tensor:
            v = x["v"]
            for i in range(LAYERS):
                v = run({n: v if n == "v" else x[f"{n}{i}"] for n in INPUTS})
            return v

        return torch.compile(layers, fullgraph=True, backend=backend)

    sides = {name: (graph(run), x) for name, run in sides_of(case).items()}
    found = both_us(sides, case, rounds, count)
    return {name: {n: us / LAYERS for n, us in each.items()} for name, each in found.items()}


def varying(case: Case, rounds: int, count: int, packed: bool) -> dict[str, Figures]:
    """Return the figures of our eager calls at one T, and at a T new to every call.

    `packed` gives every call 4 sequences, with offsets of its own. There are as many calls as
    `TOKENS` has lengths, at most.
    """
    count = max(1, min(count, len(TOKENS) // 2 // rounds - 1))
    draw = random.Random(0)
    lengths = itertools.cycle(draw.sample(TOKENS, len(TOKENS)))

    def make(T: int, grad: bool) -> Callable[[], object]:
        sized = replace(case, setting=case.setting.replace(f"T{case.sizes['T']}", f"T{T}"))
        x = {n: t.requires_grad_(grad) for n, t in make_inputs(sized).items()}
        ends = torch.tensor([0, *sorted(draw.sample(range(T + 1), 3)), T], dtype=torch.int32)
        run = our_forward(case, cu_seqlens=ends.to(case.device) if packed else None)
        do = torch.randn_like(x["v"])
        return lambda: torch.autograd.grad(run(x), list(x.values()), do) if grad else run(x)

    def figures(grad: bool) -> Figures:
        new = iter([make(next(lengths), grad) for _ in range(rounds * (count + 1))])
        sides: Calls = {"fixed": make(case.sizes["T"], grad), "new": lambda: next(new)()}
        with torch.set_grad_enabled(grad):
            return loops_us(sides, case.device, rounds, count)

    return {"fwd": figures(False), "fwdbwd": figures(True)}


def decode(case: Case, rounds: int, count: int) -> dict[str, Figures]:
    """Return the figures of one token per sequence on a pool, under inference mode."""
    x, (B, HV, D) = make_inputs(case), (case.sizes[n] for n in ("B", "HV", "D"))
    pool = torch.zeros(B, HV, D, D, device=case.device)
    plain = our_step(case, x, bare.operator(case.op, "recurrent_"))
    with torch.inference_mode():
        sides: Calls = {"ours": partial(our_step(case, x), pool), "bare": partial(plain, pool)}
        return {"decode": loops_us(sides, case.device, rounds, count)}


def wall(case: Case, rounds: int, count: int) -> dict[str, Figures]:
    """Return the milliseconds of an eager call, and of its replay in a CUDA graph."""
    x, run = make_inputs(case), our_forward(case)
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
    do = torch.randn_like(x["v"])

    def forward() -> None:
        with torch.no_grad():
            run(x)

    def train() -> None:
        torch.autograd.grad(run(leaves), list(leaves.values()), do)

    found = {}
    for name, call in {"fwd": forward, "fwdbwd": train}.items():
        replay = replayed(call, case.device)
        if case.device == "cuda" and replay is call:
            raise RuntimeError(f"{case.name}: the capture of a CUDA graph failed.")
        us = loops_us({"wall": call, "gpu": replay}, case.device, rounds, count, drained=True)
        found[name] = {n: x / 1e3 for n, x in us.items()}
    return found


def model(case: Case) -> dict[str, Figures]:
    """Return the milliseconds of a model's step, each side in a process of its own."""
    found = {}
    for name, side in {"ours": None, "bare": "bare", "reduce-overhead": None}.items():
        mode = name if name == "reduce-overhead" else None
        got = in_new_process(
            "benchmarks.model", work_of([case], side) | {"mode": mode}, MODEL_LIMIT
        )
        if "says" in got:
            print(f"skipped: {case.name} {name}: {got['says']}", flush=True)
        times = {"wall": got.get("ms"), "gpu busy": got.get("busy_ms")}
        found[name] = {n: ms for n, ms in times.items() if ms is not None}
    return found


PARTS: dict[str, Callable[..., dict[str, Figures]]] = {
    "eager": eager,
    "compiled": compiled,
    "varying": partial(varying, packed=False),
    "packed": partial(varying, packed=True),
    "decode": decode,
    "wall": wall,
    "model": model,
}


def rows(op: str, part: str, args: argparse.Namespace) -> Iterator[dict]:
    """Measure one part of one operator and yield its rows."""
    settings = SETTINGS[args.device]
    for setting in settings.get(f"wall {op}" if part == "wall" else part, settings["small"]):
        gate = "bound" if op == "kda" and part != "model" else "softplus"
        pass_ = part if part in ("decode", "model") else "fwdbwd"
        case = Case(op, pass_, setting, gate, args.device, torch.bfloat16)
        words: dict = {} if part == "model" else {"rounds": args.rounds, "count": args.count}
        if part == "eager":
            words["peers"] = not args.no_peers
        elif part == "compiled":  # more launches would fill the device's queue
            words["count"] = max(1, args.count // 4)
        about = {"part": part, "op": op, "setting": setting, "gate": gate}
        about["unit"] = "ms" if part in ("wall", "model") else "us"
        for call, figures in PARTS[part](case, **words).items():
            yield about | {"call": call, "figures": figures}


def line(row: dict) -> str:
    """Return the printed line of a row."""
    digits = 3 if row["unit"] == "ms" else 1
    figures = "".join(f"  {n} {x:.{digits}f}" for n, x in row["figures"].items())
    return (
        f"{row['part']:9}{row['op']:4} {row['setting']:12} {row['call']:16}{row['unit']}{figures}"
    )


def main(argv: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks host", description=__doc__, formatter_class=machine.Help
    )
    add, cuda = parser.add_argument, torch.cuda.is_available()
    add("--ops", type=machine.names(("kda", "gdn")), default=["kda", "gdn"], help="of kda,gdn")
    add("--parts", type=machine.names(PARTS), default=[*PARTS], help=f"of {','.join(PARTS)}")
    add("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    add("--rounds", type=int, default=12, help="loops of a side")
    add("--count", type=int, default=20, help="calls of a loop")
    add("--no-peers", action="store_true", help="leave FLA and cuDNN out")
    add("--output", metavar="FILE", help="written anew after every row")
    args = parser.parse_args(argv)
    machine.need_device(parser, args.device)
    records.need_writable(parser, args.output)
    about, found = records.stamp(args.device), list[dict]()
    print(json.dumps(about), flush=True)
    for op, part in itertools.product(args.ops, args.parts):
        for row in rows(op, part, args):
            print(line(row), flush=True)
            found.append(row | about)
            if args.output:
                records.write_json(args.output, {"rows": found})
    return 0
