"""Strong, uneven decays in 16 bits: every law of `tests.support.decays` within the budget; and
calls without a decay.
"""

import pytest
import torch

from tests.support.cases import FAR, Case, replace
from tests.support.closeness import assert_meets_budget
from tests.support.decays import SETTINGS, failures


@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_strong_decays_meet_their_budget(case):
    assert not failures(case)


@pytest.mark.parametrize("safe_gate", (False, True))
@pytest.mark.parametrize("gate", ("none", "zero"))
@pytest.mark.parametrize("name", FAR)
def test_a_call_without_a_decay_has_the_range_of_a_decay_of_zero(name, gate, safe_gate):
    if safe_gate and gate == "zero":
        pytest.skip("the promised bound of -5 limits the range")
    case = Case(dtype=torch.bfloat16, HV=8, T=130, K=128, V=128, gate=gate, state=False)
    assert_meets_budget(replace(case, safe_gate=safe_gate, **FAR[name]))
