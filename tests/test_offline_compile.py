"""The shipped configurations compile for their architectures and stay within their registers, spills and shared memory; no GPU needed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.mark.parametrize("arch", ("90", "80", "100"))
def test_every_kernel_is_within_its_budget(arch):
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "kda_ops", "compile", "--arch", arch], cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    training = "reverse_scan_tiles gradient_pairs sum_decays gradient_keys sum_gradients gather_heads reverse_scan_rows gradient_rows"
    for kernel in f"prepare_kda scan_tiles prepare_gdn scan_rows {training if arch == '90' else ''}".split():
        assert kernel in run.stdout
