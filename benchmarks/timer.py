"""Time what the benchmark alone needs: a copy, the host, and CUDA graphs of calls."""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Callable

import torch

from kda_ops.tools.timer import median_ms


@functools.cache
def copy_rate(device: str) -> float:
    """Return the bytes per second, read and written, of a copy too large for any cache."""
    x = torch.empty(2**30 if device == "cuda" else 2**28, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / (1e-3 * median_ms(lambda: y.copy_(x), device))


def host_us(call: Callable[[], object], device: str, count: int = 200) -> float:
    """Return the microseconds of Python and launch of a call; the GPU is left to follow.

    It is the smallest of 20 rounds, which move from core to core: what slows a core down lasts
    longer than a round.
    """
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    following, best = itertools.cycle(sorted(cores)), math.inf
    try:
        for _ in range(20):
            _run_on({next(following)} if cores else set())
            synchronize()
            call()
            start = time.perf_counter()
            for _ in range(count):
                call()
            best = min(best, 1e6 * (time.perf_counter() - start) / count)
            time.sleep(0.04)
        synchronize()
    finally:
        _run_on(cores)
    return best


def _run_on(cores: set[int]) -> None:
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except OSError:  # refused: the thread stays where it is
            pass


def replayed(call: Callable[[], object], device: str) -> Callable[[], object]:
    """Return the replay of a CUDA graph of a call; the call itself on CPU, or if capture fails."""
    if device != "cuda":
        return call
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        return call
    return functools.partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, call: Callable[[], object]) -> None:
    """Replay the graph of a call; holding the call keeps the tensors that it reads."""
    graph.replay()
