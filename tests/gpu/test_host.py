"""What a call costs the host on a GPU, relative to an operator that only allocates."""

import pytest
import torch

from benchmarks import host
from benchmarks.cases import Case

FORWARD, FORWARD_AND_BACKWARD = 6.0, 4.0  # times the bare operator; the aims are 4.5 and 3


@pytest.mark.parametrize("op", ("kda", "gdn"))
def test_a_call_costs_the_host_a_few_times_what_allocating_its_results_does(op):
    gate = "bound" if op == "kda" else "softplus"
    case = Case(op, "fwdbwd", host.SETTINGS["cuda"]["small"][0], gate, "cuda", torch.bfloat16)
    found = host.eager(case, rounds=12, count=20)
    times = {call: us["ours"] / us["bare"] for call, us in found.items()}
    assert times["fwd"] < FORWARD and times["fwdbwd"] < FORWARD_AND_BACKWARD, found
