"""What the benchmark times on a GPU."""

import time

import pytest
import torch

from kda_ops.tools import timer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_time_is_that_of_the_gpu_however_long_the_host_takes():
    x = torch.zeros(2**20, device="cuda")

    def quick():
        x.add_(1)

    def slow():
        time.sleep(2e-3)
        x.add_(1)

    assert timer.median_ms(slow, "cuda") < 2 * timer.median_ms(quick, "cuda") < 1
