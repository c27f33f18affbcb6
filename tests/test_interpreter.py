"""Runs tests of the kernels in a process of its own: Triton must see TRITON_INTERPRET=1 before it is first imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="runs under the interpreter already")
@pytest.mark.parametrize("tests", ("tests/interp", "tests/test_split.py"))
def test_the_kernels_pass_under_the_interpreter(tests):
    root = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", tests], cwd=root, capture_output=True, text=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "KDA_OPS_CPU": "triton", "HYPOTHESIS_PROFILE": "interp", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
