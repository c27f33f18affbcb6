"""Launch the kernels of a Gluon module on the emulator, whole or without one of their waits."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch

from tests.support import gluon_emulator

# what orders the accesses of partitions, copies and products
ORDERS = (
    *("wait", "arrive", "expect", "barrier", "fence_async_shared"),
    *("store_wait", "wait_products", "wait_written", "tell"),
)


class Launcher:
    """What takes the place of `launch` in modules of stages.

    `changed` replaces the source of Gluon modules, by name. `others` computes in torch what kernels
    of Triton do.
    """

    def __init__(
        self,
        seed: int = 0,
        changed: Mapping[str, str | None] | None = None,
        others: Mapping[str, Callable] | None = None,
    ):
        self.seed, self.changed, self.others = seed, changed or {}, others or {}

    def __call__(self, kernel, programs: int, device: torch.device, *, num_warps: int, **args):
        """Run a launch."""
        name = kernel.__name__
        if name in self.others:
            self.others[name](**args)
        else:
            path = sys.modules[kernel.__module__].__file__
            assert path is not None
            module = gluon_emulator.module(path, self.changed)
            gluon_emulator.launch(getattr(module, name), programs, self.seed, **args)


@contextmanager
def emulated(*stages: ModuleType, **options) -> Iterator[None]:
    """Let modules of stages launch on the emulator."""
    launcher = Launcher(**options)
    with ExitStack() as patches:
        for module in stages:
            patches.enter_context(patch.object(module, "launch", launcher))
        yield


def source_of(module: ModuleType) -> str:
    """Return the source of a Gluon module."""
    assert module.__file__ is not None
    return Path(module.__file__).read_text(encoding="utf-8")


def without_each(source: str) -> dict[str, str]:
    """Return the source without each call that orders accesses, named by its function and text.

    Methods count as part of what calls them. `x = wait_products(n, deps=(x,))` becomes `x = x`.
    """
    changed: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        calls = [x for x in ast.walk(function) if isinstance(x, ast.Call) and _orders(x)]
        for call in sorted(calls, key=lambda x: x.lineno):
            name = f"{function.name}: {ast.unparse(call)}"
            seen[name] += 1
            name += f" #{seen[name]}" if seen[name] > 1 else ""
            changed[name] = _replaced(source, call, _rest(call))
    return changed


def _orders(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    return name in ORDERS


def _rest(call: ast.Call) -> str:
    """Return what stays of a call that is taken out."""
    for option in call.keywords:
        if option.arg == "deps" and isinstance(option.value, ast.Tuple):
            first, *more = map(ast.unparse, option.value.elts)
            return ", ".join((first, *more))
    return "None"


def _replaced(source: str, call: ast.Call, text: str) -> str:
    """Return the source with other text for a call, on the same lines."""
    lines = source.splitlines(keepends=True)
    assert call.end_lineno is not None
    first, last = call.lineno - 1, call.end_lineno - 1
    before, after = lines[first][: call.col_offset], lines[last][call.end_col_offset :]
    return "".join([*lines[:first], before, text, after, *lines[last + 1 :]])
