"""Refuse arguments that schemas accept silently or refuse with unclear messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from numbers import Real
from typing import NoReturn, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from kda_ops.private import is_zero_tensor

F = TypeVar("F", bound=Callable)

_CONSTANTS = {
    "scale": "multiply o by it",
    "lower_bound": "pass a constant",
    "eps": "pass a constant",
}


def types_of(function: Callable) -> Callable[[Iterable[tuple[str, object]]], None]:
    """Make a check of the types of a public function's arguments, given by name."""
    parameters = inspect.signature(function).parameters
    kinds = {p.name: str(p.annotation) for p in parameters.values()}
    ours = "scale" in parameters and parameters["scale"].kind is inspect.Parameter.KEYWORD_ONLY
    plain = {name: _plain(name, kind) for name, kind in kinds.items()}

    def check(arguments: Iterable[tuple[str, object]]) -> None:
        for name, x in arguments:
            if type(x) not in plain.get(name, ()):
                _check(name, kinds.get(name, ""), x, ours)

    return check


def _plain(name: str, kind: str) -> tuple[type, ...]:
    """Return the types whose values are all valid for an argument with this annotation."""
    if name in _CONSTANTS:
        return (int, float, type(None)) if "None" in kind else (int, float)
    if kind == "bool":
        return (bool,)
    return (Tensor, Parameter, type(None)) if kind.startswith("Tensor") else ()


def check_types(function: F) -> F:
    """Check the types of a public function's arguments before the operator's schema does."""
    names, check = tuple(inspect.signature(function).parameters), types_of(function)

    @wraps(function)
    def checked(*args, **given):
        check(zip(names, args))
        check(given.items())
        return function(*args, **given)

    return checked  # type: ignore[return-value]


def calls(operator: Callable, asked: str = "", into: Callable | None = None) -> Callable[[F], F]:
    """Make a public function call an operator, whose names, order and defaults its signature has.

    The function has no body. If `asked` names a flag, the second result is None without that flag.
    A function with the argument `out` calls the overload `into` for it, and returns `out`.
    """

    def decorate(function: F) -> F:
        names, check = tuple(inspect.signature(function).parameters), types_of(function)

        def call(*args, **given):
            check(zip(names, args))
            check(given.items())
            function(*args, **given)  # Python refuses what the signature does not have
            if into is not None and (out := given.pop("out", None)) is not None:
                return _write(into, operator, names.index("v"), out, args, given)
            if not asked:
                return operator(*args, **given)
            result, last = operator(*args, **given)
            return result, last if given.get(asked) else None

        # the name in tracebacks and profiles; a code of its own has its own graphs in Dynamo
        call.__code__ = call.__code__.replace(co_name=function.__name__)
        return wraps(function)(call)  # type: ignore[return-value]

    return decorate


def _write(into: Callable, operator: Callable, place: int, out: Tensor, args, given) -> Tensor:
    """Let an operator write to `out`, and return it; `place` is that of v among `args`."""
    if torch.compiler.is_dynamo_compiling() and not out.is_contiguous():
        # Dynamo refuses an `out` that is not contiguous
        check_out(out, given["v"] if "v" in given else args[place])
        return out.copy_(operator(*args, **given))
    into(*args, out=out, **given)
    return out


def _check(name: str, kind: str, x: object, ours: bool) -> None:
    """Refuse a value that is not a tensor where the signature has one, and the reverse.

    In the argument order of this package (`ours`), scale is a keyword.
    """
    if kind.startswith("Tensor"):
        if x is not None and not isinstance(x, Tensor):
            hint = ": torch.as_tensor(...) makes one"
            if ours and isinstance(x, (int, float)):
                hint = f": pass scale by keyword, scale={x}; for FLA's order use kda_ops.compat.fla"
            wanted = "a tensor or None" if "None" in kind else "a tensor"
            raise TypeError(f"{name} must be {wanted}, got {type(x).__name__}{hint}.")
    elif kind == "bool":
        check_flag(name, x)
    elif name in _CONSTANTS:
        if isinstance(x, Tensor) and x.requires_grad:
            raise TypeError(
                f"{name} must be a number, got a tensor that requires a gradient, which would be "
                f"lost: {_CONSTANTS[name]}, or pass {name}.item()."
            )
        if isinstance(x, (int, float)) or (x is None and "None" in kind):
            return
        if not hasattr(x, "__float__") or getattr(x, "shape", ()) != ():
            raise TypeError(f"{name} must be a number, got {x!r}.")
    elif kind == "int":
        check_whole(name, x)
    elif kind.startswith("str") and not isinstance(x, str) and not (x is None and "None" in kind):
        raise TypeError(f"{name} must be text{' or None' if 'None' in kind else ''}, got {x!r}.")


def check_tensor(name: str, x: object) -> None:
    """Refuse what is not a tensor."""
    if not isinstance(x, Tensor):
        got = "None" if x is None else f"{type(x).__name__}: torch.as_tensor(...) makes one"
        raise TypeError(f"{name} must be a tensor, got {got}.")


def check_flag(name: str, x: object) -> None:
    """Refuse a flag that is not true or false: None, text, a list, a tensor with axes."""
    if not hasattr(x, "__bool__") or x is None or getattr(x, "shape", ()) != ():
        raise TypeError(f"{name} must be True or False, got {x!r}.")


def check_whole(name: str, x: object) -> None:
    """Refuse what is not a whole number, or one that no size can be."""
    if isinstance(x, bool) or not hasattr(x, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {x!r}.")
    if isinstance(x, int) and not -(2**63) <= x < 2**63:
        raise ValueError(f"{name} must fit in 64 bits, got {x}.")


def check_number(name: str, x: object) -> None:
    """Refuse what is not a real number."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"{name} must be a number, got {x!r}.")


def is_dense(x: object) -> bool:
    """Return whether x has elements that strides address; True for anything but a tensor."""
    if not isinstance(x, Tensor):
        return True
    return x.layout is torch.strided and not x.is_quantized and not x.is_nested


_PACK = "pass its values in one row, with cu_seqlens"


def refuse_layout(names: Iterable[str], args: Iterable[object], nested: str = _PACK) -> NoReturn:
    """Raise an error that names the first sparse, quantised, nested or opaque argument.

    `nested` says what to do with a nested tensor.
    """
    for name, x in zip(names, args):
        if not is_dense(x):
            assert isinstance(x, Tensor)
            if x.is_nested:
                got, hint = "a nested tensor", nested
            elif x.is_quantized:
                got, hint = f"a quantised tensor ({x.dtype})", "call dequantize()"
            else:
                got, hint = f"a tensor of layout {x.layout}", "call to_dense()"
            raise TypeError(f"{name} must be a dense tensor, got {got}: {hint}.")
    raise TypeError("All tensors must be dense (layout torch.strided): convert them first.")


def all_dense(function: F) -> F:
    """Check the layouts of a function's tensors, where it reads them before an operator does."""
    names = tuple(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args, **given):
        for name, x in (*zip(names, args), *given.items()):
            check_dense(name, x)
        return function(*args, **given)

    return checked  # type: ignore[return-value]


def check_dense(name: str, x: object, nested: str = _PACK) -> None:
    """Refuse a tensor whose elements strides do not address."""
    if not is_dense(x):
        refuse_layout((name,), (x,), nested)


def check_rows(name: str, x: object) -> None:
    """Refuse what is not dense where the rows of a tensor do not form sequences."""
    check_dense(name, x, "pass its values")


def is_lazy(x: object) -> bool:
    """Return whether x is a tensor whose memory does not hold its values: a lazy view or zero."""
    return isinstance(x, Tensor) and (x.is_neg() or x.is_conj() or is_zero_tensor(x))


def check_memory(name: str, x: Tensor) -> None:
    """Refuse a pool or cache that is a lazy view."""
    if is_lazy(x):
        raise ValueError(
            f"{name} must be memory that can be written, got a view that torch negates, "
            "conjugates or takes for zero when it is read: clone it."
        )


def check_out(out: Tensor, v: Tensor) -> None:
    """Refuse a tensor for o that has not the shape, dtype and device of v."""
    if out.shape != v.shape:
        raise ValueError(
            f"out must have shape [B, T, HV, V] = {list(v.shape)} (as v has), got "
            f"{list(out.shape)}."
        )
    for what in ("dtype", "device"):
        want, got = getattr(v, what), getattr(out, what)
        if got != want:
            raise TypeError(
                f"out must have the {what} of v, {want}, got {got}: empty_like makes one."
            )


def check_apart(name: str, x: Tensor, others: Iterable[tuple[str, object]]) -> None:
    """Refuse a tensor to write whose memory another tensor of the call may share."""
    for other, y in others:
        if isinstance(y, Tensor) and y is not x and _may_share(x, y) or y is x:
            raise ValueError(
                f"{name} must not share memory with {other}, because the call writes it, got two "
                f"tensors that may overlap: pass a tensor of its own as {name}."
            )


def _may_share(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors may have an address in common.

    They have none if one ends before the other begins. Neither do columns of one buffer: tensors
    that repeat after the same number of bytes, and lie apart within that period.
    """
    if not x.numel() or not y.numel():
        return False
    begin, other = x.data_ptr(), y.data_ptr()
    reach, other_reach = _reach(x), _reach(y)
    if begin + reach <= other or other + other_reach <= begin:
        return False
    for period in {stride * x.itemsize for n, stride in zip(x.shape, x.stride()) if n > 1} - {0}:
        apart = (other - begin) % period
        if _reach(x, period) <= apart and apart + _reach(y, period) <= period:
            return False
    return True


def _reach(x: Tensor, period: int = 0) -> int:
    """Return the bytes from the first element to the end of the last.

    With a period, leave out the axes along which the tensor moves by multiples of it.
    """
    steps = ((n - 1, stride * x.itemsize) for n, stride in zip(x.shape, x.stride()))
    return x.itemsize + sum(n * step for n, step in steps if not period or step % period)


def check_writable(name: str, *written: Tensor | None) -> None:
    """Refuse to write tensors of inference mode outside that mode.

    torch would let the kernel write them, and raise afterwards. A graph does not know the mode in
    which it will run, so there an operator checks (`registrations.writable`).
    """
    if torch.compiler.is_compiling():
        torch.ops.kda.check_writable([x for x in written if x is not None], name)
    elif not torch.is_inference_mode_enabled():
        if any(x is not None and x.is_inference() for x in written):
            raise RuntimeError(
                f"{name} was made under torch.inference_mode() and must not be written outside: "
                "call under inference_mode too, or clone it outside."
            )
