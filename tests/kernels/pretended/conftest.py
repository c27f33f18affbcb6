"""These files need a simulated GPU, so tests/kernels/test_plans.py runs them."""

import os

from tests.support.needs import skip_files

if os.environ.get("KDA_OPS_PRETEND") != "1":
    pytest_pycollect_makemodule = skip_files("needs a process of its own: KDA_OPS_PRETEND=1")
