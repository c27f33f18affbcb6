"""What schemas let through in silence, or refuse in the dispatcher's words."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable)

_CONSTANTS = {"scale": "multiply o by it", "lower_bound": "it is a constant of the gate"}


def in_words(function: F) -> F:
    """Check the types of a public function's arguments before the operator's schema does."""
    kinds = {p.name: str(p.annotation) for p in inspect.signature(function).parameters.values()}
    names = tuple(kinds)

    @wraps(function)
    def checked(*args, **given):
        for name, x in (*zip(names, args), *given.items()):
            if not isinstance(x, Tensor) or name in _CONSTANTS:
                _check(name, kinds.get(name, ""), x)
        return function(*args, **given)

    return checked  # type: ignore[return-value]


def _check(name: str, kind: str, x: object) -> None:
    """Refuse an argument that is no tensor where one belongs, and the reverse."""
    if kind.startswith("Tensor"):
        if x is not None and not isinstance(x, Tensor):
            hint = ": torch.as_tensor(...) makes one"
            if isinstance(x, (int, float)):
                hint = f": scale is a keyword, scale={x}, and kda_ops.compat.fla has FLA's order"
            wanted = "a tensor or None" if "None" in kind else "a tensor"
            raise TypeError(f"{name} must be {wanted}, got {type(x).__name__}{hint}.")
    elif kind == "bool":
        if x is None or isinstance(x, str):
            raise TypeError(f"{name} must be True or False, got {x!r}.")
    elif name in _CONSTANTS:
        if isinstance(x, Tensor) and x.requires_grad:
            raise TypeError(
                f"{name} must be a number, got a tensor that requires a gradient, which would be "
                f"lost: {_CONSTANTS[name]}, or pass {name}.item()."
            )
        if isinstance(x, str):
            raise TypeError(f"{name} must be a number, got {x!r}.")


def is_dense(x: object) -> bool:
    """Whether x, if it is a tensor, has elements that strides address."""
    if not isinstance(x, Tensor):
        return True
    return x.layout is torch.strided and not x.is_quantized and not x.is_nested


def refuse_layout(names: Iterable[str], args: Iterable[object]) -> NoReturn:
    """Name the first argument that is sparse, quantised, nested, or laid out by a library."""
    for name, x in zip(names, args):
        if not is_dense(x):
            assert isinstance(x, Tensor)
            if x.is_nested:
                got, hint = "a nested tensor", "pass its values in one row, with cu_seqlens"
            elif x.is_quantized:
                got, hint = f"a quantised one ({x.dtype})", "call dequantize()"
            else:
                got, hint = f"one of layout {x.layout}", "call to_dense()"
            raise TypeError(f"{name} must be a dense tensor, got {got}: {hint}.")
    raise TypeError("Every tensor must be dense: strides address its elements.")


def check_writable(name: str, x: Tensor | None) -> None:
    """Refuse a pool or cache that torch would let us write, and raise for afterwards."""
    if x is None or torch.compiler.is_compiling():  # what the graph calls checks again
        return
    if not x.is_inference() or torch.is_inference_mode_enabled():
        return
    raise RuntimeError(
        f"{name} was made under torch.inference_mode() and must not be written outside: call under "
        "inference_mode too, or clone it outside."
    )
