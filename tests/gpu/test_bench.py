"""What the benchmark times on a GPU."""

import time
import weakref

import torch

from benchmarks import timer


def test_a_time_is_that_of_the_gpu_however_long_the_host_takes():
    x = torch.zeros(2**20, device="cuda")

    def quick():
        x.add_(1)

    def slow():
        time.sleep(2e-3)
        x.add_(1)

    assert timer.median_ms(slow, "cuda") < 2 * timer.median_ms(quick, "cuda") < 1


def test_a_replay_keeps_the_tensors_that_its_call_reads():
    def step_on(x):
        return lambda: x.add_(1)

    x = torch.zeros(4, device="cuda")
    kept = weakref.ref(x)
    replay = timer.replayed(step_on(x), "cuda")
    del x
    replay()
    assert kept() is not None
