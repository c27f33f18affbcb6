"""The JAX backend is tested in interpret mode; what takes minutes runs nightly."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when JAX first looks for devices
# two devices for shard_map
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)
