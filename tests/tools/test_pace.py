"""The yardstick of the test that promises a short import."""

import itertools

import pytest

from tests.support.fresh import python
from tests.support.pace import SECONDS, slower


@pytest.mark.quick
def test_a_machine_at_a_third_of_the_speed_gets_three_times_as_long():
    # the best of several counts
    times = itertools.accumulate(itertools.cycle((0.0, 0.006, 0.0, 0.009)))
    assert slower(lambda: None, 0.002, lambda: next(times)) == pytest.approx(3)


def test_a_quick_machine_gets_no_less():
    times = itertools.accumulate(itertools.cycle((0.0, 0.001)))
    assert slower(lambda: None, 0.002, lambda: next(times)) == 1.0


@pytest.mark.xdist_group("pace")
def test_other_processes_are_not_counted():
    script = (
        "import time; from tests.support.pace import slower, registering; print(slower(lambda: "
        "(registering(), time.sleep(0.02))), slower())"
    )
    asleep, awake = map(float, python(script).stdout.split())
    assert asleep < awake + 0.02 / SECONDS / 2
