"""Runs tests of plans on a simulated GPU, in processes of their own, because Triton keeps the
driver that says so, and must not be its interpreter.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.support.fresh import ROOT, run_tests

PRETENDED = Path(__file__).parent / "pretended"
LONG = PRETENDED / "test_mutations.py"
REST = sorted({*PRETENDED.glob("test_*.py")} - {LONG})
ENVIRONMENT = dict(KDA_OPS_PRETEND="1", KDA_OPS_CPU="native")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(files, id=" ".join(f.stem for f in files), marks=marks)
        for files, marks in (([LONG], ()), (REST, pytest.mark.quick))
    ],
)
def test_plans_keep_their_laws_on_a_gpu_that_is_not_there(files):
    run_tests(*(f.relative_to(ROOT).as_posix() for f in files), **ENVIRONMENT)


@pytest.mark.nightly
def test_cases_left_to_the_night_pass_too():
    tests = PRETENDED.relative_to(ROOT).as_posix()
    run_tests(tests, "-m", "nightly", **ENVIRONMENT, KDA_OPS_NIGHTLY="1")
