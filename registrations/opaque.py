"""Dynamo: what runs below an operator is not for it to compile. In a compiled graph it sees the
operator alone, but in a frame that it gave up on, operators run as they are, and it would compile
each Python function of theirs, backends included, as if it were the user's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kda_ops.private import SKIP, set_code_exec_strategy

F = TypeVar("F", bound=Callable)


def opaque(function: F) -> F:
    """Keep Dynamo out of a function and of what it calls, as `torch.library.custom_op` does, at no
    cost per call and without importing Dynamo.
    """
    set_code_exec_strategy(function.__code__, SKIP)
    return function
