"""Does decoding drift from the chunk form? Thousands of single steps on a pool, and the same tokens
in chunks.

Both are held against the chunk form in float64, per window of steps, as relative RMS of the output.
The limit of a window is twice the error of a twin: the same decoding on the CPU, sums in float32,
with its state rounded to the pool's dtype after every token.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import kda_ops
from benchmarks.timer import replayed
from kda_ops.tools.machine import WIDTH

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
    o = torch.empty_like(v)
    state = torch.zeros((1, HEADS, q.shape[-1], v.shape[-1]), dtype=pool, device=q.device)

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
    """Use one thread: a step takes microseconds, and threads that wait for cores milliseconds."""
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
    """Return a row per window: its last step, decoding's error and limit, the chunk's error."""
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
