"""What is said of tests that fail on a GPU, and what no kernel may do there."""

import pytest

from tests.support.suite import Reasons


def pytest_configure(config: pytest.Config) -> None:
    """Print failures at once, and turn kernels that lose registers into errors."""
    config.pluginmanager.register(Reasons(config))
    config.addinivalue_line("filterwarnings", "error:.* has lost its registers:RuntimeWarning")
