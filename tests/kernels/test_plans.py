"""Runs tests of plans on a simulated GPU, in processes of their own, because Triton keeps the
driver that says so, and must not be its interpreter.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.support.fresh import ROOT, run_tests

FILES = sorted((Path(__file__).parent / "pretended").glob("test_*.py"))
LONG = {"test_mutations.py"}

ENVIRONMENT = dict(KDA_OPS_PRETEND="1", KDA_OPS_CPU="native")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(
            f.relative_to(ROOT).as_posix(), marks=() if f.name in LONG else pytest.mark.quick
        )
        for f in FILES
    ],
)
def test_plans_keep_their_laws_on_a_gpu_that_is_not_there(tests):
    run_tests(tests, **ENVIRONMENT)


@pytest.mark.nightly
def test_cases_left_to_the_night_pass_too():
    tests = (Path(__file__).parent / "pretended").relative_to(ROOT).as_posix()
    run_tests(tests, "-m", "nightly", **ENVIRONMENT, KDA_OPS_NIGHTLY="1")
