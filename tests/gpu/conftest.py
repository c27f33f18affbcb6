"""What is said of tests that fail on a GPU, what no kernel may do there, and where calls run."""

from unittest import mock

import pytest
import torch

from tests.support import calls, cases, closeness, pieces, pools, served
from tests.support.needs import skip_files
from tests.support.suite import Reasons
from tests.support.target import GPU

if not torch.cuda.is_available():
    pytest_pycollect_makemodule = skip_files("needs a GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Print failures at once, and turn kernels that lose registers into errors."""
    config.pluginmanager.register(Reasons(config))
    config.addinivalue_line("filterwarnings", "error:.* has lost its registers:RuntimeWarning")


@pytest.fixture(autouse=True)
def on_the_gpu():
    """Run cases on the GPU, and let twins round as its kernels do."""
    modules = calls, cases, closeness, pieces, pools, served
    patches = [mock.patch.object(x, "TARGET", GPU) for x in modules]
    for patch in patches:
        patch.start()
    yield
    for patch in patches:
        patch.stop()
