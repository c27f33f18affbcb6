"""Calls of every operator that its pass accepts, made from the operator's record alone.

Nothing here names an operator or an argument. A record says which axes each tensor has, and errors
of its pass, which begin with the name of an argument, say which dtype and form that argument wants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kda_ops.operators import Operator
from kda_ops.registrations import schemas
from tests.support.pretended_calls import LAYOUTS, make

CHUNK, RUN = 64, 2048  # of a shard
LENGTHS = dict(B=2, T=70, N=2, S=72, J=1, L=5, I=3, H=2, h=4, K=16, V=32, C=CHUNK)
LENGTHS |= dict(X=48, W=4, P=3, G=2)
DTYPES = (torch.bfloat16, torch.float32, torch.int32, torch.bool)
OTHER_DTYPES = (*DTYPES, torch.float16, torch.float64, torch.int64)
DEVICES = ("cuda:1", "cpu", "meta")
OTHER_FLAGS = dict(
    scale=0.3, lower_bound=-4.0, snapshot_every=3, need=1, activation="silu", eps=1e-3
)
FORMS = ("whole", "short", "turned")  # all axes; all but the last; the last two swapped


@dataclass(frozen=True)
class Given:
    """How an argument is given: None if it is absent."""

    dtype: torch.dtype
    form: str


@dataclass(frozen=True, eq=False)
class Call:
    """A call of an operator, with lengths of axes by letter."""

    record: Operator
    rank: int
    lengths: dict[str, int]
    given: dict[str, Given | None]
    flags: dict[str, Any]
    packed: bool

    def tensors(self) -> dict[str, Tensor | None]:
        """Make the tensors by name."""
        return {
            name: None if x is None else make(self.shape(name, x), x.dtype)
            for name, x in self.given.items()
        }

    def length(self, letter: str) -> int:
        """Return the length of an axis."""
        lengths = self.lengths
        if letter in lengths:
            return lengths[letter]
        if letter in "cs":
            B, T, N = (lengths[x] for x in "BTN")
            return T // CHUNK + N if self.packed else B * ((T + CHUNK - 1) // CHUNK)
        if letter == "r":  # a tail is a run too
            B, T, N = (lengths[x] for x in "BTN")
            return T // RUN + N + 1 if self.packed else B * ((T + RUN - 1) // RUN)
        D, R = (lengths["K"], 3) if self.rank else (1, 7)
        return {"D": D, "R": R, "M": lengths["N"] + 1, "Y": lengths["V"] + lengths["K"]}[letter]

    def shape(self, name: str, x: Given) -> tuple[int, ...]:
        """Return the shape of an argument in a form."""
        shape = [self.length(letter) for letter in self.record.axes_of(name)]
        if x.form == "short":
            del shape[-1]
        if x.form == "turned":
            shape[-2:] = reversed(shape[-2:])
        return tuple(shape)

    def error(self, tensors: dict[str, Tensor | None]) -> Exception | None:
        """Return the error of the pass, None if it accepts the tensors."""
        try:
            self.record.kind(self.rank, tuple(tensors.values()), self.flags)
        except (TypeError, ValueError) as error:
            return error
        return None


def _options(call: Call, name: str, style: str) -> list[Given | None]:
    """Return how an argument may be given, what is tried first in front."""
    short = ("short", "whole", "turned") if call.record.may_lack_last(name) else ()
    if style != "short" and short:
        short = FORMS[:2]
    forms = short or (FORMS[::2] if len(call.record.axes_of(name)) > 1 else FORMS[:1])
    some: list[Given | None] = [Given(*x) for x in product(DTYPES, forms)]
    return [None, *some] if style == "bare" else [*some, None]


def find(record: Operator, rank: int, packed: bool, flagged: bool, style: str) -> Call | None:
    """Return a call that the pass accepts; None if it has no packed one.

    Flags that are bools are all `flagged`. The call has as few tensors as the pass allows if the
    style is "bare", and else as many; tensors lack a last axis if they may and the style is
    "short".
    """
    if packed and "cu_seqlens" not in record.names:
        return None
    namespace = next(n for n, r in schemas.VARIANTS.items() if r == rank)
    flags: dict[str, Any] = {
        x.name: flagged if isinstance(x.default_value, bool) else x.default_value
        for x in record.overload(namespace)._schema.arguments
        if x.kwarg_only and x.name not in record.names
    }
    lengths = LENGTHS | ({"B": 1} if packed else {})
    call = Call(record, rank, lengths, {}, flags, packed)
    options = {name: iter(_options(call, name, style)) for name in record.names}
    given = {name: next(some) for name, some in options.items()}
    if "cu_seqlens" in record.names:
        given["cu_seqlens"] = Given(torch.int32, "whole") if packed else None
    while True:
        if record.gradients:  # a mask of what is wanted
            wanted = (given.get(name[1:]) is not None for name in record.results)
            flags["need"] = schemas.mask_of(wanted) if "need" in flags else None
            flags = {name: x for name, x in flags.items() if name != "need" or x is not None}
        if style == "bare" and record.mutates and f"{record.mutates}_indices" in record.names:
            lengths["L"] = lengths["N"]  # without a table, sequence n has slot n
        call = replace(call, given=dict(given), flags=flags)
        error = call.error(call.tensors())
        if error is None:
            return call
        name = str(error).split()[0]
        try:
            given[name] = next(options[name])
        except (KeyError, StopIteration):
            raise AssertionError(f"{record.name}: no call is accepted: {error}") from error


def changed(call: Call, name: str) -> Iterator[tuple[str, Tensor | None]]:
    """Return what may stand in the place of an argument, and what differs."""
    given = call.given[name]
    if given is None:
        for other in _options(call, name, "full")[:-1]:
            assert other is not None
            yield f"{other}", make(call.shape(name, other), other.dtype)
        return
    shape, dtype = call.shape(name, given), given.dtype
    yield "absent", None
    yield "empty", make((0,), dtype)
    for axis, length in enumerate(shape):
        for other in {0, 1, length + 1, 2 * length} - {length}:
            longer = (*shape[:axis], other, *shape[axis + 1 :])
            yield f"{longer}", make(longer, dtype)
    for other in ((1, *shape), (*shape, 1), shape[1:], shape[:-1]):
        yield f"{other}", make(other, dtype)
    for kind in OTHER_DTYPES:
        if kind is not dtype:
            yield f"{kind}", make(shape, kind)
    for device in DEVICES:
        yield device, torch.empty(shape, dtype=dtype, device=device)
    yield "off", make(shape, dtype, "off")
    yield from laid_out(call, name)
    yield "offset", make((1 + shape[0], *shape[1:]), dtype).narrow(0, 1, shape[0])
    yield "expanded", make((1, *shape[1:]), dtype).expand(shape)


def resized(call: Call) -> Iterator[tuple[str, Call]]:
    """Return calls with another length of one letter in all tensors."""
    for letter in sorted(
        {letter for name in call.record.names for letter in call.record.axes_of(name)}
    ):
        length = call.length(letter)
        for other in {1, length + 1, 16 * length} - {length}:
            yield f"{letter} = {other}", replace(call, lengths=call.lengths | {letter: other})


def reflagged(call: Call) -> Iterator[tuple[str, Call]]:
    """Return calls with another value of one flag."""
    for name, value in call.flags.items():
        other = not value if isinstance(value, bool) else OTHER_FLAGS.get(name, value)
        if other != value:
            yield f"{name} = {other}", replace(call, flags=call.flags | {name: other})


def laid_out(call: Call, name: str) -> list[tuple[str, Tensor]]:
    """Return an argument in layouts that are not contiguous."""
    given = call.given[name]
    if given is None:
        return []
    shape = call.shape(name, given)
    found = [(layout, make(shape, given.dtype, layout)) for layout in LAYOUTS[1:]]
    for more in (8, 16, 64):
        wide = make((*shape[:-1], shape[-1] + more), given.dtype)
        found.append((f"{more} apart", wide[..., : shape[-1]]))
    return [(layout, x) for layout, x in found if not x.is_contiguous()]
