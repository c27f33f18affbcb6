"""A call costs little above its computation; `tests/tools/overhead.py` prints the figure, whose
target is 20 microseconds.
"""

import re

import pytest

from tests.support.fresh import python


@pytest.mark.quick
@pytest.mark.xdist_group("pace")
@pytest.mark.parametrize("variant", ("gdn", "kda"))
def test_dispatch_and_validation_of_a_decode_step_take_microseconds(variant):
    """Twice the target as a guard, at the pace of a quiet machine: a busy or slow one must not fail
    this, a host-side slip of the usual size must.
    """
    script = f"""
        import sys
        from tests.tools import overhead
        from tests.support.pace import slower
        sys.argv = ["overhead", "{variant}", "20"]
        overhead.main()
        print(slower())
    """
    shown = []
    for _ in range(3):
        line, slower = python(script).stdout.splitlines()
        above = float(re.search(r"above it +(-?[0-9.]+) us", line).group(1))
        shown.append(f"{line} at {slower} times a quiet machine's pace")
        if above < 40.0 * float(slower):
            return
    raise AssertionError(shown)
