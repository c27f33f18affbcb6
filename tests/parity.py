"""Whether training on a GPU in bfloat16 follows the float32 run on a CPU: ``python -m tests.parity native``, then, on a GPU, ``python -m tests.parity cuda``.

Both run `examples/train.py` at the size for a CPU, on the same text, with the same seeds, for KDA and GDN, and add their loss curves to tests/gpu/parity.json.
A run follows another one if they lie closer together than two native runs of different seeds do; `tests/test_parity.py` holds the file to that.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path

import torch

from examples import train
from kda_ops.bench.compare import describe

FILE = Path(__file__).parent / "gpu" / "parity.json"
SEEDS = (0, 1)
STEPS = 150
SMOOTH = 15  # steps


def distance(a: list[float], b: list[float]) -> float:
    """The RMS over a run of the difference between two smoothed curves, in bits per byte."""
    x, y = (torch.tensor(c, dtype=torch.float64).unfold(0, SMOOTH, 1).mean(-1) for c in (a, b))
    return (x - y).square().mean().sqrt().item()


def verdict(curves: dict[str, dict[str, list[float]]]) -> tuple[float, float]:
    """The largest distance of a run on the GPU from the native one of its seed, and the least between native runs of different seeds."""
    native, cuda = curves["native"], curves["cuda"]
    return max(distance(cuda[s], native[s]) for s in cuda), min(distance(a, b) for a, b in combinations(native.values(), 2))


def run(device: str, variant: str, seed: int, text: Path, folder: str) -> list[float]:
    """The training losses of one run."""
    sizes = train.SIZES["cpu"] | dict(steps=STEPS, write=1, seed=seed)
    words = [f"--{n.replace('_', '-')}={x}" for n, x in sizes.items()]
    code = "import json, sys; from examples import train; print(json.dumps([round(b, 4) for _, b in train.main(sys.argv[1:])['curve']['train']]))"
    command = [sys.executable, "-c", code, *words, "--device", device, "--text", str(text), "--out", folder, *(["--gdn"] if variant == "gdn" else [])]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def main(argv: list[str]) -> int:
    """Run one side and add it to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("native", "cuda"))
    parser.add_argument("--variants", nargs="+", choices=("kda", "gdn"), default=["kda", "gdn"])
    parser.add_argument("--text", type=Path, default=Path(torch.__file__).parent / "nn", help="folder of .py files, the same for both sides")
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args(argv)
    device = "cpu" if args.side == "native" else "cuda"
    text = hashlib.sha256(b"".join(bytes(t.tolist()) for t in train.read_library(args.text))).hexdigest()
    found = json.loads(args.output.read_text()) if args.output.exists() else {}
    if found.get("text_sha256") != text:
        if args.side == "cuda":
            raise SystemExit(f"{args.output} has no native runs on this text: run python -m tests.parity native --text {args.text}")
        found = {"text_sha256": text, "about": {}, "curves": {}}
    found["about"][args.side] = describe(device)
    for variant in args.variants:
        with tempfile.TemporaryDirectory() as folder:
            curves = {str(seed): run(device, variant, seed, args.text, folder) for seed in SEEDS}
        found["curves"].setdefault(variant, {})[args.side] = curves
        args.output.write_text(json.dumps(found) + "\n")
        if found["curves"][variant].keys() == {"native", "cuda"}:
            print("{}: {:.4f} bits per byte from the native run, native runs of other seeds {:.4f}".format(variant, *verdict(found["curves"][variant])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
