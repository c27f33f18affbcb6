"""Time decode with other cuts of its states: ``python -m benchmarks.cuts``.

A cut says how `recur` divides a state among programs and threads
(`kda_ops.backends.triton.stages.step`).
Each line is one cut at one batch size, next to the cut that is used and to FLA if it is installed.
"Bits" says whether o and the states equal those of the cut that is used. The error is relative to
float64. Nothing is chosen here: a better cut goes into `step.cut`, for every batch size.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, make_inputs
from benchmarks.peers import fla_step, our_step
from benchmarks.timer import copy_rate, replayed
from benchmarks.worker import UNCACHED, in_layers
from kda_ops.tools import machine
from kda_ops.tools.timer import median_ms, relative_error

WIDTH = 128
# KI, BV and warps of cuts of an fp32 state; the first of each layout is the one in use
CUTS = {
    "kv": ((1, 64, 4), (1, 32, 2), (1, 16, 1), (1, 32, 4), (2, 32, 2), (1, 64, 8)),
    "vk": ((64, 16, 1), (64, 8, 1), (32, 16, 2), (16, 16, 4), (16, 8, 2), (32, 32, 4)),
}


def measure(op: str, batch: int, layout: str, rounds: int) -> list[list[str]]:
    """Time every cut of a layout, and FLA, by turns; return the lines of the table."""
    # imported here, so that --help needs no Triton
    step: Any = import_module("kda_ops.backends.triton.stages.step")
    backend: Any = import_module("kda_ops.backends.triton.backend")
    gate = "bound" if op == "kda" else "softplus"
    case = Case(op, "decode", f"B{batch}T1H32", gate, "cuda", torch.bfloat16, "fp32", layout)
    x, H = make_inputs(case), case.sizes["H"]
    start = torch.randn(batch, H, WIDTH, WIDTH, device="cuda")
    wide = {n: t.cpu().double() for n, t in x.items()}
    exact = our_step(Case.named(case.name, "cpu", torch.float64), wide)(start.cpu().double())
    pools = [start.clone() for _ in range(min(64, -(-UNCACHED // start.nbytes)))]
    least = 2e3 * start.nbytes / copy_rate("cuda")
    own, sides, said = step.cut, {}, {}

    def add(name: str, call: Callable[[Tensor], Any], first: list[Tensor] | None) -> list[Tensor]:
        with torch.inference_mode():
            found = [t.clone() for t in call(start.clone())]
        error = max(relative_error(got, want) for got, want in zip(found, exact))
        same = all(map(torch.equal, found, first or found))
        said[name] = ["same" if same else "other", f"{error:.1e}"]
        sides[name] = replayed(in_layers(call, pools), "cuda")
        return found

    first = None
    try:
        for KI, BV, warps in CUTS[layout]:
            step.cut = lambda *_, c=(WIDTH // KI, KI, BV, {"num_warps": warps}): step.Cut(*c)
            backend.BACKEND.forget()
            found = add(f"KI {KI}, BV {BV}, {warps} warps", our_step(case, x), first)
            first = found if first is None else first
    finally:
        step.cut = own
        backend.BACKEND.forget()
    if machine.installed("fla-core"):
        add("FLA", fla_step(case, x), first)
    best = dict.fromkeys(sides, math.inf)
    for _ in range(rounds):
        for name, timed in sides.items():
            best[name] = min(best[name], 1e3 * median_ms(timed, "cuda") / len(pools))
    return [
        [op, f"B{batch}", layout, name, f"{us:.2f}", f"{100 * least * 1e3 / us:.0f} %", *said[name]]
        for name, us in best.items()
    ]


def main() -> None:
    """Run the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=machine.Help)
    parser.add_argument("--ops", type=machine.names(["kda", "gdn"]), default=["gdn"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 128])
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    machine.need_device(parser, "cuda")
    print("| op | batch | state | cut | us | of a copy | bits | error |\n|" + "---|" * 8)
    for op in args.ops:
        for layout in CUTS:
            for batch in args.batches:
                for line in measure(op, batch, layout, args.rounds):
                    print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    main()
