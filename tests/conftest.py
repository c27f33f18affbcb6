"""Profiles of hypothesis: `dev` looks at new cases each time, `ci` at the same ones, `nightly` at
many. Pick by HYPOTHESIS_PROFILE.
"""

import importlib.util
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.plans import forget_plans
from tests.support.suite import beyond_pairs, longest_first, rotated

if (_PROCESS := os.environ.get("PYTEST_XDIST_WORKER")) and (_GPUS := torch.cuda.device_count()) > 1:
    os.environ["CUDA_VISIBLE_DEVICES"] = rotated(
        _PROCESS, _GPUS, os.environ.get("CUDA_VISIBLE_DEVICES")
    )
# tensors here are small: a second thread costs more than it brings, and very much more on a busy
# machine
torch.set_num_threads(1)

_COMMON = dict(
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("dev", max_examples=20, **_COMMON)
settings.register_profile("ci", max_examples=8, derandomize=True, database=None, **_COMMON)
settings.register_profile("nightly", max_examples=400, **_COMMON)
# an example is kernels to compile
settings.register_profile("device", max_examples=4, derandomize=True, database=None, **_COMMON)
# a launch costs what an example costs elsewhere
settings.register_profile("interp", max_examples=3, derandomize=True, database=None, **_COMMON)
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if _INTERPRETED and importlib.util.find_spec("triton"):
    from tests.support.interpreter import mend

    mend()
_DEVICE = os.environ.get("KDA_OPS_TEST_DEVICE", "cpu") != "cpu"
_SAME = os.environ.get("CI") and os.environ.get("KDA_OPS_NIGHTLY") != "1"  # the same cases
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "device" if _DEVICE else "ci" if _SAME else "dev")
)

# on a device only the laws of the contract run: the rest would run on the CPU again, and tests/gpu
# is asked for by name
if _DEVICE:
    _LAWS = {
        f"{folder}/test_{name}.py"
        for folder, names in {
            "operators": "activations definition flags gradients layouts limits padding pools "
            "registrations sequences transforms",
            "compile": "compiled",
        }.items()
        for name in names.split()
    }
    _HERE = Path(__file__).parent
    collect_ignore = [
        name
        for f in _HERE.rglob("test_*.py")
        if (name := f.relative_to(_HERE).as_posix()) not in _LAWS
    ]


def pytest_collection_modifyitems(items: list) -> None:
    """Start the tests that take minutes first; skip what runs nightly.

    Under Triton's interpreter, where all is slow, that is what shows no new pair of parameters.
    """
    longest_first(items)
    few = [x for x in items if _INTERPRETED or x.get_closest_marker("once")]
    for item in () if _DEVICE else beyond_pairs(few):
        item.add_marker(pytest.mark.nightly)
    if os.environ.get("KDA_OPS_NIGHTLY") == "1":
        return
    skip = pytest.mark.skip(reason="nightly: set KDA_OPS_NIGHTLY=1")
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fresh_plans(request: pytest.FixtureRequest):
    """Leave no plan to a test that patches what plans follow from, nor from it."""
    patches = not {"monkeypatch", "force"}.isdisjoint(request.fixturenames)
    if patches:
        forget_plans()
    yield
    if patches:
        forget_plans()


@pytest.fixture(params=("kda", "gdn"))
def variant(request: pytest.FixtureRequest) -> str:
    """Run a test that takes a variant for both; hypothesis wants a parameter instead."""
    return request.param


@pytest.fixture
def force():
    """Return a function that puts values in the place of tuning's rules until the test ends."""
    from kda_ops.backends.triton import tuning

    with ExitStack() as stack:
        yield lambda **rules: stack.enter_context(tuning.force(**rules))


@pytest.fixture
def poisoned_scratch():
    """Fill what torch.empty gives with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def ranks():
    """Yield the processes of a gloo group; the first request starts them."""
    from tests.support.ranks import Ranks

    ranks = Ranks()
    yield ranks
    ranks.stop()
