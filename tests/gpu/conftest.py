"""What is said of tests that fail on a GPU, and what all tests must leave behind."""

import pytest
import torch

from tests.support.suite import Reasons


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest when it begins."""
    config.pluginmanager.register(Reasons(config))


@pytest.fixture(scope="session", autouse=True)
def _kernels_keep_their_registers():
    yield
    if torch.cuda.is_available():
        from tests.support.registers import kernel_modules, lost_registers

        assert not (lost := lost_registers(kernel_modules())), lost
