"""Profiles of hypothesis: `dev` looks at new cases each time, `ci` at the same ones, `nightly` at many. Pick by HYPOTHESIS_PROFILE."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # tensors here are small: a second thread costs more than it brings, and very much more on a busy machine

_COMMON = dict(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.register_profile("dev", max_examples=20, **_COMMON)
settings.register_profile("ci", max_examples=12, derandomize=True, database=None, **_COMMON)
settings.register_profile("nightly", max_examples=400, **_COMMON)
settings.register_profile("interp", max_examples=3, derandomize=True, database=None, **_COMMON)  # a launch costs what an example costs elsewhere
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def ranks():
    """Processes of a gloo group, started by the first test that asks for them."""
    from tests.support.ranks import Ranks

    ranks = Ranks()
    yield ranks
    ranks.stop()
