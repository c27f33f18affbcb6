"""The order of the tests on a GPU."""

from tests.support.gpus import longest_first


def pytest_collection_modifyitems(items: list) -> None:
    """Called by pytest with all that it collected."""
    longest_first(items)
