"""Sizes know their formulas, and note what was decided on their values."""

import importlib.util
import math
import operator

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from kda_ops.backends.triton.plans import sizes
from kda_ops.backends.triton.plans.sizes import Guards, Size

OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
VALUES = st.one_of(st.integers(1, 70), st.sampled_from((128, 1024, 2**31 - 1, 2**31, 2**40)))


@st.composite
def formulas(draw, depth: int = 3):
    """Draw a function of three numbers, made of what sizes can do."""
    if not depth or draw(st.booleans()):
        if draw(st.booleans()):
            i = draw(st.integers(0, 2))
            return lambda *numbers: numbers[i]
        constant = draw(st.one_of(st.integers(0, 64), st.sampled_from((-1, -16))))
        return lambda *numbers: constant
    word = draw(st.sampled_from((*OPERATIONS, "negative")))
    a = draw(formulas(depth - 1))
    if word == "negative":
        return lambda *numbers: -a(*numbers)
    b, f = draw(formulas(depth - 1)), OPERATIONS[word]
    return lambda *numbers: f(a(*numbers), b(*numbers))


def named(numbers) -> tuple[list[Size], Guards]:
    guards = Guards()
    return [Size(x, n, 1, guards) for n, x in zip("BTN", numbers)], guards


@pytest.mark.quick
@given(make=formulas(), numbers=st.tuples(VALUES, VALUES, VALUES), others=st.tuples(*[VALUES] * 3))
def test_a_formula_gives_what_plain_numbers_give(make, numbers, others):
    try:
        want, there = make(*numbers), make(*others)
    except ZeroDivisionError:
        reject()
    given_, _ = named(numbers)
    try:
        size = make(*given_)
    except TypeError:  # a number divided by a size
        reject()
    assert sizes.value_of(size) == want
    found = sizes.formula("BTN", [sizes.text_of(size)])
    assert found(*numbers) == (want,)
    if isinstance(size, Size):
        assert want % size.factor == 0
    # a size keeps its formula for other numbers; what decided on these alone, it noted
    if sizes.condition("BTN", given_[0].guards)(*others):
        assert found(*others) == (there,)


@given(
    make=formulas(),
    other=formulas(),
    compare=st.sampled_from(COMPARISONS),
    numbers=st.tuples(VALUES, VALUES, VALUES),
    others=st.tuples(*[VALUES] * 3),
)
def test_a_guard_holds_where_the_comparison_has_the_same_outcome(
    make, other, compare, numbers, others
):
    try:
        want, there = (compare(make(*x), other(*x)) for x in (numbers, others))
        given_, guards = named(numbers)
        assert bool(compare(make(*given_), other(*given_))) == want
    except (ZeroDivisionError, TypeError):
        reject()
    holds = sizes.condition("BTN", guards)
    assert holds(*numbers)
    if not any(isinstance(f(*given_), Size) for f in (make, other)):
        return
    if holds(*others):
        assert there == want
    elif len(guards) == 1:
        assert there != want


@given(size=VALUES, factor=st.integers(1, 40), of=st.sampled_from((2, 16, 64)))
def test_what_divides_a_size_is_known_or_noted(size, factor, of):
    guards = Guards()
    x = Size(size, "T", 1, guards) * factor
    assert sizes.is_multiple(x, of) == (x.value % of == 0)
    assert bool(guards) == (factor % of != 0)


@pytest.mark.quick
@pytest.mark.parametrize(
    "wrong",
    (
        "x / 2; 2 / x; 64 // x; 64 % x; x**2; 2**x; x << 1; 1 << x; x >> 1; 64 >> x; x & 1; "
        "1 & x; x | 1; 1 | x; x ^ 1; 1 ^ x; ~x; +x; abs(x); divmod(x, 2); divmod(7, x); "
        "float(x); round(x); math.ceil(x); math.floor(x); math.trunc(x); x.bit_length(); "
        "x * 2.5; x + 2.5; x // 2.5; x % 2.5; x < 2.5; x == 2.5; x - 2.5"
    ).split("; "),
)
def test_what_has_no_formula_is_refused(wrong):
    with pytest.raises(TypeError):
        eval(wrong, {"x": Size(70, "T", 1, Guards()), "math": math})
