"""These files need Triton's interpreter, so tests/kernels/test_interpreter.py runs them."""

import os

from tests.support.needs import skip_files

if os.environ.get("TRITON_INTERPRET") != "1" or os.environ.get("KDA_OPS_CPU") != "triton":
    pytest_pycollect_makemodule = skip_files(
        "needs a process of its own: TRITON_INTERPRET=1 KDA_OPS_CPU=triton"
    )
