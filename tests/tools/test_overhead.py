"""A call costs little above its computation; `tests/tools/overhead.py` prints the time, whose
target is 20 microseconds.
"""

import pytest
import torch

from tests.tools import overhead


@pytest.mark.quick
@pytest.mark.parametrize("variant", ("gdn", "kda"))
def test_dispatch_and_validation_of_a_decode_step_take_few_calls(variant):
    """Counted, not timed, so that it holds at any load."""
    assert overhead.above(variant, overhead.count_calls) <= 55
    assert overhead.above(variant, overhead.count_operators) <= 6


def test_the_count_sees_functions_of_python_and_of_c():
    empty = overhead.count_calls(lambda: None)
    assert overhead.count_calls(lambda: len([])) == empty + 1
    assert overhead.count_calls(lambda: (lambda: len([]))()) == empty + 2


def test_the_count_sees_operators():
    x = torch.ones(2)
    assert overhead.count_operators(lambda: x + x + x) == 2
