"""The laws of `tests.support.gates` on a GPU."""

from tests.support.gates import *  # noqa: F403 (the tests)
