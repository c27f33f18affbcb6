"""Plans on a device: bits, memory, and arguments that are made anew for every launch."""

from dataclasses import replace

import pytest
import torch

from kda_ops.backends.triton import BACKEND, backend, private
from tests.support import copying
from tests.support.calls import run
from tests.support.cases import Case
from tests.support.closeness import assert_all_identical

LAYER = Case(
    B=2, T=200, H=8, HV=8, K=128, V=128, dtype=torch.bfloat16, gate="softplus", l2norm=True
)


@pytest.fixture
def plans(monkeypatch):
    """Return the plans that are made from here on."""
    monkeypatch.setattr(BACKEND, "plans", {})
    return BACKEND.plans


def test_named_tuples_and_descriptors_are_made_for_the_tensors_of_the_call():
    copying.check("cuda")


def test_lengths_share_plans_that_give_the_bits_of_the_stages(variant, plans, monkeypatch):
    cases = [replace(LAYER, variant=variant, T=T, seed=T) for T in (200, 333, 65, 200)]
    planned = [run(case) for case in cases]
    assert plans and all(len(found) == 1 for found in plans.values())
    monkeypatch.setattr(backend, "call_key", lambda *call: None)
    for case, got in zip(cases, planned):
        assert_all_identical(got, run(case))


def test_a_plan_takes_at_most_a_result_more_memory_than_the_stages(variant, plans, monkeypatch):
    """It allocates all results before its scratch, and stages allocate some of them late."""
    case = replace(LAYER, variant=variant, T=4096)

    def peak() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run(case)
        return torch.cuda.max_memory_allocated()

    most = max(x.nbytes for x in run(case).values())
    planned = peak()
    monkeypatch.setattr(backend, "call_key", lambda *call: None)
    stages = peak()
    assert planned <= 1.01 * stages + most, (planned, stages, most)


def test_the_driver_gives_the_current_stream_of_torch():
    get, device = private.driver.active.get_current_stream, torch.cuda.current_device()
    side = torch.cuda.Stream()
    assert get(device) == torch.cuda.current_stream().cuda_stream
    with torch.cuda.stream(side):
        assert get(device) == side.cuda_stream
