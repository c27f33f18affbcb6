"""Runs tests of the kernels in processes of their own: Triton must see TRITON_INTERPRET=1 before it
is first imported.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.support.fresh import ROOT, run_tests

KERNELS = Path(__file__).parent
# nightly, because at every change the same laws run natively or, for plans, on the simulated GPU
NIGHTLY = tuple(f"test_{name}.py" for name in "pieces plans promises tune".split())
# files that share a process, because its start takes seconds; a group takes about two minutes
TOGETHER = [
    [f"test_{name}.py" for name in names.split()]
    for names in (
        "backward forward split",
        "bfloat16 copying cotangents decays folds forgetting gates layer_operators mends "
        "reverse_walk",
    )
]
FILES = (*sorted((KERNELS / "interpreted").glob("test_*.py")), KERNELS / "test_split.py")
GROUPS = [[f for f in FILES if f.name in names] for names in TOGETHER]
GROUPS += [[f] for f in FILES if not any(f.name in names for names in TOGETHER)]
ENVIRONMENT = dict(TRITON_INTERPRET="1", KDA_OPS_CPU="triton", HYPOTHESIS_PROFILE="interp")
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="runs under the interpreter already"
    ),
]


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(
            files,
            id=" ".join(f.stem for f in files),
            marks=[pytest.mark.quick] * (files[0].name == "test_step.py")
            + [pytest.mark.nightly] * (files[0].name in NIGHTLY),
        )
        for files in GROUPS
    ],
)
def test_the_kernels_pass_under_the_interpreter(files):
    run_tests(*(f.relative_to(ROOT).as_posix() for f in files), **ENVIRONMENT)


@pytest.mark.nightly
@pytest.mark.parametrize("folder", ("interpreted", "test_split.py"))
def test_cases_left_to_the_night_pass_too(folder):
    tests = (KERNELS / folder).relative_to(ROOT).as_posix()
    run_tests(tests, "-m", "nightly", **ENVIRONMENT, KDA_OPS_NIGHTLY="1")
