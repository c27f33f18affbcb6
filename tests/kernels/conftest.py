"""The Gluon kernels run on an emulator, which needs a Triton whose Gluon is known."""

import importlib.util
import os
from pathlib import Path

from tests.support.needs import skip_files

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None or INTERPRETED:
    _skip = skip_files("needs triton, without its interpreter")

    def pytest_pycollect_makemodule(module_path, parent):
        walks = module_path.parent == Path(__file__).parent and "walk" in module_path.name
        return _skip(module_path, parent) if walks else None
