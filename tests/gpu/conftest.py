"""What is said of tests that fail on a GPU."""

import pytest

from tests.support.suite import Reasons


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest when it begins."""
    config.pluginmanager.register(Reasons(config))
