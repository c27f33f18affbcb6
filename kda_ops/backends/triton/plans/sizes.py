"""Integers that carry the formula by which they follow from the numbers of a call.

While a pass is recorded (`recording`), B, T and N are a `Size` each. Arithmetic on sizes makes new
sizes, whose formula is kept as text. A comparison returns its outcome for this call, and text and
outcome become a guard. The recording serves every call in which all guards have that outcome.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from math import gcd
from typing import Any, NoReturn


class Guards(dict[str, bool]):
    """The comparisons that a pass has made, as text, and their outcomes."""

    def note(self, text: str, outcome: bool) -> bool:
        """Add a guard and return its outcome."""
        self[text] = outcome
        return outcome


class Size:
    """A whole number with its formula ``unit * factor``: `unit` is text, `factor` a plain number.

    So `factor` divides every value of the formula. `value` is that of the call that is recorded. A
    size is no int, because a plan would keep the plain number for all its calls. An operation that
    formulas do not have raises a TypeError.
    """

    __slots__ = ("factor", "guards", "unit", "value")

    def __init__(self, value: int, unit: str, factor: int, guards: Guards):
        self.value, self.unit, self.factor, self.guards = value, unit, factor, guards

    @property
    def text(self) -> str:
        """Write the formula."""
        return self.unit if self.factor == 1 else f"{self.unit} * {self.factor}"

    def __repr__(self) -> str:
        return self.text

    def made(self, value: int, unit: str, factor: int = 1) -> Size:
        """Return another size of the same recording."""
        return Size(value, unit, factor, self.guards)

    def _whole(self, other: Any) -> int:
        """Return the value of a size or whole number."""
        if isinstance(other, Size):
            return other.value
        return other if isinstance(other, int) else self._refuse()

    def __mul__(self, other: Any) -> Any:
        value = self.value * self._whole(other)
        if isinstance(other, Size):
            return self.made(value, f"{self.unit} * {other.unit}", self.factor * other.factor)
        return self.made(value, self.unit, self.factor * other) if other else 0

    __rmul__ = __mul__

    def _sum(self, value: int, a: Any, sign: str, b: Any) -> Size:
        common = gcd(*(x.factor if isinstance(x, Size) else x for x in (a, b)))
        return self.made(value, f"({_share(a, common)} {sign} {_share(b, common)})", common)

    def __add__(self, other: Any) -> Any:
        value = self.value + self._whole(other)
        return (
            self
            if not isinstance(other, Size) and not other
            else self._sum(value, self, "+", other)
        )

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        value = self.value - self._whole(other)
        return (
            self
            if not isinstance(other, Size) and not other
            else self._sum(value, self, "-", other)
        )

    def __rsub__(self, other: Any) -> Any:
        return self._sum(self._whole(other) - self.value, other, "-", self)

    def __neg__(self) -> Size:
        return self.made(-self.value, self.unit, -self.factor)

    def __floordiv__(self, other: Any) -> Any:
        value = self.value // self._whole(other)
        if not isinstance(other, Size) and self.factor % other == 0:
            return self.made(value, self.unit, self.factor // other)
        return self.made(value, f"({self.text} // {_atom(other)})")

    def __mod__(self, other: Any) -> Any:
        return self.made(self.value % self._whole(other), f"({self.text} % {_atom(other)})")

    def _compare(self, sign: str, of: Callable[[Any, Any], bool], other: object) -> bool:
        outcome = of(self.value, self._whole(other))
        return self.guards.note(f"{self.text} {sign} {_atom(other)}", outcome)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (int, float, Size)):
            return False  # nothing but a number equals a number
        return self._compare("==", operator.eq, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        return self._compare("<", operator.lt, other)

    def __le__(self, other: Any) -> bool:
        return self._compare("<=", operator.le, other)

    def __gt__(self, other: Any) -> bool:
        return self._compare(">", operator.gt, other)

    def __ge__(self, other: Any) -> bool:
        return self._compare(">=", operator.ge, other)

    def __bool__(self) -> bool:
        return self != 0

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            f"{self.text} has no formula here: use +, -, *, //, % and comparisons, with whole "
            "numbers. (n + d - 1) // d rounds up."
        )

    def _refuse_plain(self, *_: Any) -> NoReturn:
        raise TypeError(
            f"{self.text} has no plain value, because a plan serves calls with other values: pass "
            "the size itself to launch or new, decide by comparisons, and loop in a kernel."
        )

    def _refuse_hash(self) -> NoReturn:
        raise TypeError(
            f"{self.text} cannot be a key of a cache or dictionary, because a plan serves calls "
            "with other values: decide by comparisons."
        )

    __truediv__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __divmod__ = __rdivmod__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _refuse
    __abs__ = __pos__ = __round__ = __trunc__ = __ceil__ = __floor__ = _refuse
    __int__ = __index__ = __float__ = __complex__ = bit_length = _refuse_plain
    __hash__ = _refuse_hash  # type: ignore[assignment]


def value_of(x: Any) -> Any:
    """Return the value of a size in the call that is recorded; all else as it is."""
    return x.value if isinstance(x, Size) else x


def _share(x: Any, of: int) -> str:
    """Return the formula of ``x / of``, where `of` divides x."""
    return x.made(0, x.unit, x.factor // of).text if isinstance(x, Size) else str(int(x) // of)


def text_of(x: Any) -> str:
    """Return the formula of a size, or a plain number as text."""
    return x.text if isinstance(x, Size) else str(int(x))


def _atom(x: Any) -> str:
    return f"({x.text})" if isinstance(x, Size) else str(int(x))


def is_multiple(x: Size, of: int) -> bool:
    """Return whether `of` divides x. If the formula does not show it, the answer is a guard."""
    if x.factor % of == 0:
        return True
    return x.guards.note(f"{x.text} % {of} == 0", x.value % of == 0)


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
