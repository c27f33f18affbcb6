"""``python -m kda_ops drift``: does decoding drift from the chunk form? Thousands of single steps
on a pool, beside the same tokens in chunks.

Both are held against the chunk form in float64, per window of steps, as relative RMS of the output.
The limit of a window is twice the error of a twin: the same decoding on the CPU, sums in float32,
with its state rounded to the pool's dtype after every token.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import kda_ops
from kda_ops.bench.cases import WIDTH
from kda_ops.bench.machine import (
    Help,
    default_dtype,
    describe,
    names,
    need_device,
    need_writable,
    write_json,
)
from kda_ops.bench.worker import replayed
from kda_ops.problem import MAX_K

POOLS = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHUNK: dict[str, Callable] = {"kda": kda_ops.chunk_kda, "gdn": kda_ops.chunk_gdn}
STEP: dict[str, Callable] = {"kda": kda_ops.recurrent_kda_, "gdn": kda_ops.recurrent_gdn_}
FLAGS = {"use_qk_l2norm_in_kernel": True}
HEADS = 2
WINDOWS = 20


def tokens(op: str, steps: int, dtype: torch.dtype, width: int) -> list[Tensor]:
    """q, k, v, g, beta of one sequence, on the CPU; a state remembers some hundred tokens."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{op} drift".encode()))
    q, k, v, g = (torch.randn((1, steps, HEADS, width), generator=generator) for _ in range(4))
    g = -0.02 * (g if op == "kda" else g[..., 0]).abs()
    return [
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        g,
        torch.rand((1, steps, HEADS), generator=generator),
    ]


def decode(op: str, inputs: list[Tensor], pool: torch.dtype) -> Tensor:
    """Token by token from an empty state, o on the CPU in float64. On CUDA the calls of a window
    are captured once, and replayed for each window.
    """
    length = inputs[0].shape[1] // WINDOWS
    held = [x[:, :length].clone() for x in inputs]
    q, v = held[0], held[2]
    o, state = (
        torch.empty_like(v),
        torch.zeros((1, HEADS, q.shape[-1], v.shape[-1]), dtype=pool, device=q.device),
    )

    def window() -> None:
        with torch.inference_mode():
            for t in range(length):
                o[:, t : t + 1] = STEP[op](*(x[:, t : t + 1] for x in held), state, **FLAGS)

    run = replayed(window, q.device.type)
    state.zero_()
    outs = []
    for some in zip(*(x.split(length, 1) for x in inputs)):
        for into, x in zip(held, some):
            into.copy_(x)
        run()
        outs.append(o.cpu().double())
    return torch.cat(outs, 1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """A step on the CPU takes microseconds: where other processes have the cores, threads that wait
    for each other make it milliseconds.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _windows(x: Tensor) -> Tensor:
    return x.unflatten(1, (WINDOWS, -1)).transpose(0, 1).flatten(1)


def _errors(got: Tensor, exact: Tensor) -> list[float]:
    want = _windows(exact)
    return (_windows(got - exact).square().mean(1) / want.square().mean(1)).sqrt().tolist()


@_one_thread()
def measure(
    device: str,
    steps: int,
    ops: Iterable[str],
    pools: Iterable[str],
    dtype: torch.dtype,
    width: int = WIDTH,
) -> list[dict]:
    """A row per window: the last step of it, the error of decoding, its limit, and the error of the
    chunk form in the same dtype.
    """
    rows, steps = [], steps // WINDOWS * WINDOWS
    for op in ops:
        x = tokens(op, steps, dtype, width)
        with torch.inference_mode():
            exact = CHUNK[op](*(t.double() for t in x), **FLAGS)[0]
            there = [t.to(device) for t in x]
            chunk = _errors(CHUNK[op](*there, **FLAGS)[0].cpu().double(), exact)
        for pool in pools:
            errors, twin = (
                _errors(decode(op, inputs, POOLS[pool]), exact) for inputs in (there, x)
            )
            for i in range(WINDOWS):
                row = {"op": op, "pool": pool, "step": steps // WINDOWS * (i + 1)}
                rows.append(
                    row | {"error": errors[i], "limit": 2 * twin[i], "chunk_error": chunk[i]}
                )
    return rows


def growth(rows: list[dict]) -> dict[str, float]:
    """By operator and pool, the error of the last five windows over that of the second to the
    sixth.
    """
    errors: dict[str, list[float]] = {}
    for r in rows:
        errors.setdefault(f"{r['op']} {r['pool']}", []).append(r["error"])
    return {name: sum(x[-5:]) / sum(x[1:6]) for name, x in errors.items()}


def plot(rows: list[dict], path: str) -> None:
    """The error along the steps: decoding on each pool, and the chunk form."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ops = list(dict.fromkeys(r["op"] for r in rows))
    figure, axes = pyplot.subplots(
        1, len(ops), figsize=(5 * len(ops), 3.5), squeeze=False, sharey=True
    )
    for axis, op in zip(axes[0], ops):
        for pool in dict.fromkeys(r["pool"] for r in rows):
            mine = [r for r in rows if r["op"] == op and r["pool"] == pool]
            (line,) = axis.plot(
                [r["step"] for r in mine], [r["error"] for r in mine], label=f"decode, {pool} pool"
            )
            axis.plot(
                [r["step"] for r in mine],
                [r["limit"] for r in mine],
                ":",
                color=line.get_color(),
                label=f"limit, {pool} pool",
            )
        axis.plot(
            [r["step"] for r in mine], [r["chunk_error"] for r in mine], "k--", label="chunk form"
        )
        axis.set_title(op)
        axis.set_xlabel("step")
        axis.set_yscale("log")
    axes[0][0].set_ylabel("relative RMS error of o")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main(argv: list[str]) -> int:
    """Run the command line; non-zero if a window is over its limit."""
    parser = argparse.ArgumentParser(
        prog="python -m kda_ops drift", description=__doc__, formatter_class=Help
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--steps", type=int, default=10_000, help="tokens to decode")
    parser.add_argument("--ops", type=names(CHUNK), default=list(CHUNK), help="comma-separated")
    parser.add_argument(
        "--pools", type=names(POOLS), default=list(POOLS), help=f"of {','.join(POOLS)}"
    )
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="of q, k and v; bfloat16 on CUDA, float32 on CPU by default",
    )
    parser.add_argument("--width", type=int, default=WIDTH, help="K = V")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    parser.add_argument("--plot", metavar="FILE", help="draw the rows (needs matplotlib)")
    args = parser.parse_args(argv)
    need_device(parser, args.device)
    if args.steps < WINDOWS:
        parser.error(f"--steps must be at least {WINDOWS}, one for each window, got {args.steps}.")
    if not 1 <= args.width <= MAX_K:
        parser.error(f"--width must be between 1 and {MAX_K}, got {args.width}.")
    need_writable(parser, args.json, args.plot)
    dtype = getattr(torch, args.dtype) if args.dtype else default_dtype(args.device)
    rows = measure(args.device, args.steps, args.ops, args.pools, dtype, args.width)
    print(f"{'op':4}{'pool':6}{'step':>8}{'error':>10}{'limit':>10}{'chunk':>10}")
    for r in rows:
        print(
            f"{r['op']:4}{r['pool']:6}{r['step']:8}{r['error']:10.1e}{r['limit']:10.1e}"
            f"{r['chunk_error']:10.1e}"
        )
    if args.json:
        write_json(args.json, describe(args.device) | {"rows": rows})
    if args.plot:
        plot(rows, args.plot)
    for name, grown in growth(rows).items():
        print(
            f"{name}: the last five windows have {grown:.3f} times the error of the second to the "
            "sixth"
        )
    over = [r for r in rows if not r["error"] <= r["limit"]]
    print(f"{len(over)} of {len(rows)} windows are over their limit")
    return 1 if over else 0
