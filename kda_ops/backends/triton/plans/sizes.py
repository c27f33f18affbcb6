"""Integers that carry the formula by which they follow from the numbers of a call.

While a pass is recorded (`recording`), B, T and N are a `Size` each. Arithmetic on sizes makes new
sizes, whose formula is kept as text. A comparison returns its outcome for this call, and text and
outcome become a guard. The recording serves every call in which all guards have that outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import gcd
from typing import Any, NoReturn


class Guards(dict[str, bool]):
    """The comparisons that a pass has made, as text, and their outcomes."""

    def note(self, text: str, outcome: bool) -> bool:
        """Add a guard and return its outcome."""
        self[text] = outcome
        return outcome


class Size(int):
    """An integer with its formula ``unit * factor``: `unit` is text, `factor` a plain number.

    So `factor` divides every value of the formula. To torch a size is the integer that it is in
    this call. An operation that formulas do not have raises a TypeError.
    """

    unit: str
    factor: int
    guards: Guards

    def __new__(cls, value: int, unit: str, factor: int, guards: Guards):
        """Make a size whose value in this call is known."""
        size = super().__new__(cls, value)
        size.unit, size.factor, size.guards = unit, factor, guards
        return size

    @property
    def text(self) -> str:
        """Write the formula."""
        return self.unit if self.factor == 1 else f"{self.unit} * {self.factor}"

    def _made(self, value: int, unit: str, factor: int = 1) -> Size:
        return Size(value, unit, factor, self.guards)

    def __mul__(self, other: int) -> int:  # type: ignore[override]
        if isinstance(other, Size):
            value = int.__mul__(self, other)
            return self._made(value, f"{self.unit} * {other.unit}", self.factor * other.factor)
        return self._made(int.__mul__(self, other), self.unit, self.factor * other) if other else 0

    __rmul__ = __mul__  # type: ignore[assignment]

    def _sum(self, value: int, a: int, sign: str, b: int) -> int:
        common = gcd(*(x.factor if isinstance(x, Size) else int(x) for x in (a, b)))
        return self._made(value, f"({_share(a, common)} {sign} {_share(b, common)})", common)

    def __add__(self, other: int) -> int:  # type: ignore[override]
        if not isinstance(other, Size) and not other:
            return self
        return self._sum(int.__add__(self, other), self, "+", other)

    __radd__ = __add__  # type: ignore[assignment]

    def __sub__(self, other: int) -> int:  # type: ignore[override]
        if not isinstance(other, Size) and not other:
            return self
        return self._sum(int.__sub__(self, other), self, "-", other)

    def __rsub__(self, other: int) -> int:  # type: ignore[override]
        return self._sum(int.__rsub__(self, other), other, "-", self)

    def __neg__(self) -> int:  # type: ignore[override]
        return self._made(int.__neg__(self), self.unit, -self.factor)

    def __floordiv__(self, other: int) -> int:  # type: ignore[override]
        value = int.__floordiv__(self, other)
        if not isinstance(other, Size) and self.factor % other == 0:
            return self._made(value, self.unit, self.factor // other)
        return self._made(value, f"({self.text} // {_atom(other)})")

    def __mod__(self, other: int) -> int:  # type: ignore[override]
        return self._made(int.__mod__(self, other), f"({self.text} % {_atom(other)})")

    def _compare(self, sign: str, outcome: bool, other: object) -> bool:
        if isinstance(other, float):
            self._refuse()
        if not isinstance(other, int):
            return outcome  # nothing but a number equals a number
        return self.guards.note(f"{self.text} {sign} {_atom(other)}", outcome)

    def __eq__(self, other: object) -> bool:
        return self._compare("==", int.__eq__(self, other), other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: int) -> bool:
        return self._compare("<", int.__lt__(self, other), other)

    def __le__(self, other: int) -> bool:
        return self._compare("<=", int.__le__(self, other), other)

    def __gt__(self, other: int) -> bool:
        return self._compare(">", int.__gt__(self, other), other)

    def __ge__(self, other: int) -> bool:
        return self._compare(">=", int.__ge__(self, other), other)

    def __bool__(self) -> bool:
        return self != 0

    __hash__ = int.__hash__

    def _refuse(self, *others: Any) -> NoReturn:
        raise TypeError(f"{self.text} has no formula here: use +, -, *, //, % and comparisons.")

    # ``2.5 * size`` cannot be refused: a float multiplies any int without asking it
    __truediv__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __divmod__ = __rdivmod__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _refuse
    __float__ = __abs__ = __pos__ = __round__ = __trunc__ = __ceil__ = __floor__ = _refuse
    bit_length = _refuse


def _share(x: int, of: int) -> str:
    """Return the formula of ``x / of``, where `of` divides x."""
    return x._made(0, x.unit, x.factor // of).text if isinstance(x, Size) else str(int(x) // of)


def text_of(x: int) -> str:
    """Return the formula of a size, or a plain number as text."""
    return x.text if isinstance(x, Size) else str(int(x))


def _atom(x: int) -> str:
    return f"({x.text})" if isinstance(x, Size) else str(int(x))


def is_multiple(x: Size, of: int) -> bool:
    """Return whether `of` divides x. If the formula does not show it, the answer is a guard."""
    if x.factor % of == 0:
        return True
    return x.guards.note(f"{x.text} % {of} == 0", int.__mod__(x, of) == 0)


def is_descriptor(x: object) -> bool:
    """Return whether x describes a tensor to the copy engine, by the class of Triton or Gluon."""
    return hasattr(x, "block_shape")


def formula(names: Iterable[str], texts: Iterable[str]) -> Callable[..., tuple]:
    """Compile formulas to one function of the named numbers; it returns a tuple of values."""
    return eval(f"lambda {', '.join(names)}: ({''.join(f'{t}, ' for t in texts)})")


def condition(names: Iterable[str], guards: Guards) -> Callable[..., bool]:
    """Compile guards to one function of the named numbers; it returns whether all of them hold."""
    held = (text if outcome else f"not {text}" for text, outcome in guards.items())
    return eval(f"lambda {', '.join(names)}: {' and '.join(held) or True}")
