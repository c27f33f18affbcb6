"""The laws of `tests.support.gates` under the interpreter."""

from tests.support.gates import *  # noqa: F403 (the tests)
