"""What is said of tests that fail on a GPU, and what no kernel may do there."""

import pytest
import torch

from tests.support.needs import skip_files
from tests.support.suite import Reasons

if not torch.cuda.is_available():
    pytest_pycollect_makemodule = skip_files("needs a GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Print failures at once, and turn kernels that lose registers into errors."""
    config.pluginmanager.register(Reasons(config))
    config.addinivalue_line("filterwarnings", "error:.* has lost its registers:RuntimeWarning")
