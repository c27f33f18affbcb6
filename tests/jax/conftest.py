"""The JAX backend is tested in interpret mode; what takes minutes runs nightly."""

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when JAX first looks for devices
# two devices for shard_map
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)


def pytest_collection_modifyitems(items: list) -> None:
    """Skip what runs nightly."""
    if os.environ.get("KDA_OPS_NIGHTLY") == "1":
        return
    skip = pytest.mark.skip(reason="nightly: set KDA_OPS_NIGHTLY=1")
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(skip)
