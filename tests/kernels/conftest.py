"""The Gluon kernels run on an emulator, which needs a Triton whose Gluon is known. Under Triton's
interpreter every two values of a test's parameters meet; all their combinations run nightly.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.support.needs import skip_files
from tests.support.suite import beyond_pairs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None or INTERPRETED:
    _skip = skip_files("needs triton, without its interpreter")

    def pytest_pycollect_makemodule(module_path, parent):
        walks = module_path.parent == Path(__file__).parent and "walk" in module_path.name
        return _skip(module_path, parent) if walks else None


def pytest_collection_modifyitems(items: list) -> None:
    """Leave to the nightly run what shows no new pair of values under the interpreter."""
    for item in beyond_pairs(items) if INTERPRETED else ():
        item.add_marker(pytest.mark.nightly)
