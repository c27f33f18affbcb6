"""Time calls: the GPU alone behind a slow host, the host alone, and a CPU."""

from __future__ import annotations

import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer


def median_ms(call: Callable[[], object], device: str) -> float:
    """Return the median time of a call; on CUDA that of the GPU alone (`gpu_ms`)."""
    if device == "cuda":
        return gpu_ms(call)
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return 1e3 * timer.blocked_autorange(min_run_time=1.0).median


def gpu_ms(call: Callable[[], object]) -> float:
    """Return the median between events around a call, each behind flushes of the L2 cache.

    The flushes take the GPU longer than the host needs to launch the call. `do_bench` flushes once,
    and times the host where kernels take less than a launch.
    """
    flushed = torch.empty(2**30, dtype=torch.uint8, device="cuda")

    def times(count: int, flushes: int, call: Callable[[], object]) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in pairs:
            for _ in range(flushes):
                flushed.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def host_ms() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    times(2, 1, call)
    launch = statistics.median(host_ms() for _ in range(9))
    flushes = 1 + math.ceil(1.5 * launch / statistics.median(times(9, 0, flushed.zero_)))
    once = statistics.median(times(5, flushes, call))
    return statistics.median(times(max(5, min(500, int(250 / once))), flushes, call)[2:])


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
