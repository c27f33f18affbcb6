"""Whether training on a GPU in bfloat16 follows the float32 run on a CPU:
``python -m tests.tools.parity`` on a machine with a GPU and some cores.

Runs `examples/train.py` on both devices, small, on the same text with the same seeds, for KDA and
GDN, all at once, and writes the loss curves to benchmarks/results/parity.json. A run follows
another one if they lie closer together than two native runs of different seeds do;
`tests/tools/test_parity.py` holds the file to that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product
from pathlib import Path

import torch

from benchmarks.records import results, stamp, write_json
from kda_ops.tools.machine import need_device

FILE = results() / "parity.json"
SEEDS = (0, 1)
STEPS = 120
SIZES = dict(layers=2, hidden=128, head_dim=64, batch=8, length=256, lr=4e-3, steps=STEPS, write=1)
SMOOTH = 12  # steps


def distance(a: list[float], b: list[float]) -> float:
    """Return the RMS difference of two smoothed curves over a run, in bits per byte."""
    x, y = (torch.tensor(c, dtype=torch.float64).unfold(0, SMOOTH, 1).mean(-1) for c in (a, b))
    return (x - y).square().mean().sqrt().item()


def verdict(curves: dict[str, dict[str, list[float]]]) -> tuple[float, float]:
    """Return the largest distance of GPU and native runs, and the smallest between seeds.

    The first compares runs of the same seed, the second native runs of different seeds.
    """
    native, cuda = curves["native"], curves["cuda"]
    return max(distance(cuda[s], native[s]) for s in cuda), min(
        distance(a, b) for a, b in combinations(native.values(), 2)
    )


def run(variant: str, device: str, seed: int, threads: int) -> list[float]:
    """Return the training losses of one run."""
    words = [
        f"--{n.replace('_', '-')}={x}" for n, x in (SIZES | dict(seed=seed, device=device)).items()
    ] + ["--gdn"] * (variant == "gdn")
    code = (
        "import json, sys; from examples import train; print(json.dumps([round(b, 4) for _, b in "
        "train.main(sys.argv[1:])['curve']['train']]))"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-c", code, *words, "--out", folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{variant} on {device}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str]) -> int:
    """Run both sides and write the file; non-zero if a side does not follow the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--variants", nargs="+", choices=("kda", "gdn"), default=["kda", "gdn"])
    parser.add_argument("--device", default="cuda", help="cpu for a rehearsal")
    args = parser.parse_args(argv)
    need_device(parser, args.device)
    runs = list(product(args.variants, (("native", "cpu"), ("cuda", args.device)), map(str, SEEDS)))
    threads = max(1, (os.cpu_count() or 1) // (len(args.variants) * len(SEEDS)))
    with ThreadPoolExecutor(len(runs)) as pool:
        losses = list(
            pool.map(
                lambda r: run(r[0], r[1][1], int(r[2]), threads if r[1][1] == "cpu" else 1), runs
            )
        )
    curves: dict = {}
    for (variant, (side, _), seed), curve in zip(runs, losses):
        curves.setdefault(variant, {}).setdefault(side, {})[seed] = curve
    write_json(args.output, stamp(args.device) | {"curves": curves})
    follows = True
    for variant in args.variants:
        apart, noise = verdict(curves[variant])
        follows &= apart < noise
        print(
            f"{variant}: {apart:.4f} bits per byte from the native run, native runs of other "
            f"seeds {noise:.4f}"
        )
    return 0 if follows else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
