"""Time calls, and tell how wrong they are: what `tune` and the benchmark share."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
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


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the RMS of an error relative to the result's; infinite for NaN."""
    error = (got.to(want.device, torch.float64) - want).norm() / (want.norm() + 1e-30)
    return error.nan_to_num(torch.inf).item()
