"""Keep Dynamo out of operator implementations.

In a compiled graph, Dynamo sees only the operator. After a graph break, operators run eagerly.
Dynamo would then compile their Python functions, backends included, as user code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kda_ops.private import SKIP, set_code_exec_strategy

F = TypeVar("F", bound=Callable)


def opaque(function: F) -> F:
    """Keep Dynamo out of a function and of what it calls, as `torch.library.custom_op` does.

    It costs nothing per call and does not import Dynamo.
    """
    set_code_exec_strategy(function.__code__, SKIP)
    return function
