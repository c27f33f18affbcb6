"""Importing kda_ops loads no JAX, and kda_ops.jax no torchax."""

import pytest

from tests.support.fresh import python

LOADED = "import sys, {}; print(*(name in sys.modules for name in ('jax', 'torchax')))"


@pytest.mark.quick
def test_import_of_the_package_does_not_import_jax():
    assert python(LOADED.format("kda_ops")).stdout == "False False\n"


def test_import_of_its_jax_does_not_import_torchax():
    pytest.importorskip("jax")
    assert python(LOADED.format("kda_ops.jax")).stdout == "True False\n"
