import pytest

from tests.support.layers import LAYERS


@pytest.fixture(params=LAYERS)
def make(request: pytest.FixtureRequest) -> type:
    """Run a test that takes a class of layers for each."""
    return request.param
