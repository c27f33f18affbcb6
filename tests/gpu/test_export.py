"""Exported programs on a GPU: through a file, and compiled into packages that a fresh process runs."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from examples import export


def test_a_package_without_our_operators_runs(tmp_path):
    """What the test below presupposes of the machine."""
    module, x = torch.nn.Linear(32, 32, device="cuda"), torch.randn(3, 32, device="cuda")
    got = export.run_elsewhere(export.package(torch.export.export(module, (x,)), tmp_path / "plain.pt2"), x)
    assert (got - module(x)).abs().max() < 1e-4


def test_programs_and_packages_compute_what_the_module_does(tmp_path):
    off = export.main(["--device", "cuda", "--package", str(tmp_path)])
    assert {"packaged prefill", "packaged decode"} < set(off) and len(off) == 5
    assert max(off.values()) < 1e-4, off  # outputs are of the order of 0.1
