"""The order of the tests on a GPU, and what is said of those that fail."""

import pytest

from tests.support.gpus import Reasons, longest_first


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest when it begins."""
    config.pluginmanager.register(Reasons(config))


def pytest_collection_modifyitems(items: list) -> None:
    """Called by pytest with all that it collected."""
    longest_first(items)
