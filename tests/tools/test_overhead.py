"""A call costs little above its computation; `tests/tools/overhead.py` prints the time, whose
target is 20 microseconds.
"""

import pytest

from tests.tools import overhead


@pytest.mark.quick
@pytest.mark.parametrize("variant", ("gdn", "kda"))
def test_dispatch_and_validation_of_a_decode_step_take_few_calls(variant):
    """Counted, not timed, so that it holds at any load."""
    assert overhead.above(variant, overhead.count_calls) <= 55
    assert overhead.above(variant, overhead.count_operators) <= 6
