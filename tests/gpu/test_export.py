"""Exported programs on a GPU: through a file, and compiled into packages that a fresh process
runs.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import export

LOAD = (
    "import sys, torch; x = torch.load(sys.argv[2]); "
    "torch._inductor.aoti_load_package(sys.argv[1])(x)"
)


def how_a_plain_package_ends(folder: Path) -> int:
    """Return the exit status of a process that loads and runs a package of a plain Linear.

    Only torch makes and loads the package.
    """
    module, x = torch.nn.Linear(32, 32, device="cuda"), torch.randn(3, 32, device="cuda")
    torch.save(x, folder / "in.pt")
    package = export.package(torch.export.export(module, (x,)), folder / "plain.pt2")
    return subprocess.run(
        [sys.executable, "-c", LOAD, str(package), str(folder / "in.pt")]
    ).returncode


def test_packages_compute_what_the_module_does(tmp_path):
    status = how_a_plain_package_ends(tmp_path)
    if status < 0:
        pytest.skip(
            f"torch dies of signal {-status} on a package of a plain Linear here, so it is not "
            "shown whether it can run ours"
        )
    assert status == 0
    off = export.main(["--device", "cuda", "--package", str(tmp_path)])
    assert {"packaged prefill", "packaged decode"} < set(off) and len(off) == 5
    assert max(off.values()) < 1e-4, off  # outputs are of the order of 0.1


def test_programs_compute_what_the_module_does():
    off = export.main(["--device", "cuda"])
    assert len(off) == 3 and max(off.values()) < 1e-4, off
