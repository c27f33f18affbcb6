"""Plans carry named tuples and tensor descriptors."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1" or os.environ.get("KDA_OPS_CPU") != "triton":
    pytest.skip(
        "needs a process of its own: TRITON_INTERPRET=1 KDA_OPS_CPU=triton", allow_module_level=True
    )

from tests.support import copying


def test_named_tuples_and_descriptors_are_made_for_the_tensors_of_the_call():
    copying.check("cpu")
