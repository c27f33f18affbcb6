"""Replay a pass from data: allocate its tensors and launch its compiled kernels.

A `Plan` is made of a `Recording`. It serves every call with the same key (`call_key`) for whose
numbers B, T, N and strides its guards hold. Guards say how Triton specialised the kernels, and
which branches the stages took. All else that depends on the numbers is a formula. ``print(plan)``
shows tensors, launches and guards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_ops.backends.triton.plans.launch import side_stream
from kda_ops.backends.triton.plans.recording import (
    Buffer,
    Copy,
    CopyBack,
    Descriptor,
    Launch,
    Recording,
    Total,
    Wait,
    tuple_of,
)
from kda_ops.backends.triton.plans.refs import Memory, Ref
from kda_ops.backends.triton.plans.sizes import Size, condition, formula, text_of
from kda_ops.backends.triton.private import RUNTIME, driver, starter

MOST_BOUND = 64  # sets of numbers whose values a plan remembers
MOST_DESCRIPTORS = 64  # addresses and sizes whose descriptors an argument of a launch remembers


def lay_out(buffers: Sequence[Buffer]) -> tuple[dict[str, Any], Any]:
    """Return the place of each buffer in one block, and the size of the block, in bytes.

    Buffers whose sizes are multiples of one formula share places if their steps do not overlap.
    """
    places: dict[str, Any] = {}
    total: Any = 0
    units: dict[str, list[tuple[Buffer, int]]] = {}
    for b in buffers:
        size = b.bytes
        unit, factor = (size.unit, size.factor) if isinstance(size, Size) else ("1", size)
        units.setdefault(unit, []).append((b, factor))
    for found in units.values():
        size = found[0][0].bytes
        one = size.made(0, size.unit) if isinstance(size, Size) else 1
        placed: list[tuple[int, int, Buffer]] = []  # begin and end, in units
        for b, factor in sorted(found, key=lambda x: -x[1]):
            begin = 0
            for a, z, other in sorted(placed, key=lambda x: x[0]):
                not_vectorised = other.last < b.first or b.last < other.first
                if not not_vectorised and a < begin + factor and begin < z:
                    begin = z
            placed.append((begin, begin + factor, b))
            places[b.name] = total + one * begin if begin else total
        # small ones come last, and the next formula begins on a cache line
        total = (total + one * max(z for _, z, _ in placed) + 127) // 128 * 128
    return places, total


class Bound(NamedTuple):
    """The values of a plan's formulas for one set of numbers."""

    block: int  # bytes of scratch
    shapes: tuple[tuple[int, ...], ...]  # of the plan's own buffers
    ends: tuple[tuple[int, ...], ...]  # of its sums
    values: tuple  # of arguments, constants first
    places: tuple[int, ...]  # of buffers in the block
    offsets: tuple[int, ...]  # of rows in other buffers


class Plan:
    """The steps of a pass, for any call for which its guards hold.

    The arguments of all launches are in one list, the row. It holds values; pointers to inputs, own
    buffers and constants; pointers into the scratch block and to rows of buffers; tuples and
    descriptors of these. A launch picks its arguments from the row.
    """

    def __init__(
        self, recording: Recording, results: Sequence[Ref | Tensor | None], device: torch.device
    ):
        self.device, self.guards, self.steps = device, recording.guards, recording.steps
        self.on_gpu = device.type == "cuda"
        # whether another device may be current at a call
        self.may_switch_device = self.on_gpu and torch.cuda.device_count() > 1
        self.forks = self.on_gpu and any(isinstance(s, Wait) for s in self.steps)
        self.holds = condition(recording.numbers, self.guards)
        self.bound: dict[tuple[int, ...], Bound] = {}
        names = [recording.name_of(x) if isinstance(x, Ref) else None for x in results]
        used = [b for b in recording.buffers.values() if b.own or b.first >= 0]
        self.own = [b for b in used if b.own]
        self.scratch = [b for b in used if not b.own]
        self.sums = [s for s in self.steps if isinstance(s, Total)]
        self.constants = tuple(recording.constants.values())
        # inputs of a buffer's shape and dtype: `empty_like` takes half the time of `empty`
        self.like = [
            None if b.zero else recording.like.get((tuple_of(b.shape), b.dtype)) for b in self.own
        ]
        order = {name: i for i, name in enumerate([b.name for b in self.own])}
        self.copies = {
            s.result: (recording.inputs.index(s.source), order[s.result])
            for s in self.steps
            if isinstance(s, Copy)
        }
        self.copies_back = {
            s.result: (recording.inputs.index(s.result), order[s.source])
            for s in self.steps
            if isinstance(s, CopyBack)
        }
        self.parts = [order[s.parts] for s in self.sums]
        order |= {s.result: len(order) + i for i, s in enumerate(self.sums)}
        # a number among the own buffers and sums, None, or an empty tensor
        self.results = [
            order[n] if n is not None else x if x is None else torch.empty_like(x)  # type: ignore[arg-type]
            for n, x in zip(names, results)
        ]
        self._bind(recording)

    def _bind(self, recording: Recording) -> None:
        """Give each argument of each launch its place in the row."""
        places, block = lay_out(self.scratch)
        bases = [*recording.inputs, *(b.name for b in self.own), *recording.constants]
        constants: list[Any] = []
        made: list[tuple[Descriptor | tuple, list[tuple[int, int]]]] = []  # of parts of the row
        groups: list[dict[Any, int]] = [{}, {}, {}]  # formulas, buffers, rows of buffers

        def place(x) -> tuple[int, int]:
            """Return a group of the row, 0 and 2 being constants and bases, and a place in it."""
            if isinstance(x, Memory):
                offset = text_of(x.offset)
                if x.name in places:
                    text = text_of(places[x.name] + x.offset if x.offset else places[x.name])
                    return 3, groups[1].setdefault((text, x.dtype), len(groups[1]))
                if offset == "0":
                    return 2, bases.index(x.name)
                row = bases.index(x.name), offset, x.dtype
                return 4, groups[2].setdefault(row, len(groups[2]))
            if isinstance(x, Descriptor):
                made.append((x, [place(x.memory), place(x.shape), place(x.strides)]))
                return 5, len(made) - 1
            if isinstance(x, tuple) and self.on_gpu and _is_numbers(x):  # made once for its sizes
                return 1, groups[0].setdefault(_text(x), len(groups[0]))
            if isinstance(x, tuple) and any(isinstance(y, (Memory, tuple)) for y in x):
                made.append((x, [place(y) for y in x]))
                return 5, len(made) - 1
            if isinstance(x, Size) or _has_sizes(x):
                text = tuple_of(x) if isinstance(x, tuple) else text_of(x)
                return 1, groups[0].setdefault(text, len(groups[0]))
            for i, y in enumerate(constants):
                if type(x) is type(y) and (x is y or x == y):
                    return 0, i
            constants.append(x)
            return 0, len(constants) - 1

        found = [
            [place(x) for x in (s.programs, *s.arguments.values())]
            for s in self.steps
            if isinstance(s, Launch)
        ]
        starts = [0, len(constants), len(constants) + len(groups[0])]
        starts += [starts[2] + len(bases), starts[2] + len(bases) + len(groups[1])]
        starts.append(starts[4] + len(groups[2]))
        self.made = [
            _maker(x, [starts[group] + i for group, i in parts], self.on_gpu) for x, parts in made
        ]
        picks = iter([[starts[group] + i for group, i in one] for one in found])
        # a step, its grid, what picks its arguments, and what launches it
        self.order: list[tuple[Any, int, Any, Any]] = []
        for step in self.steps:
            first, *rest = next(picks) if isinstance(step, Launch) else (0, 0, 0)
            compiled = step.compiled if isinstance(step, Launch) and self.on_gpu else None
            self.order.append((step, first, itemgetter(*rest), compiled and starter(compiled)))
        self.fixed = tuple(constants)
        self.dtypes = [dtype for _, dtype in groups[1]]
        self.rows = [(base, dtype) for base, _, dtype in groups[2]]
        parts = (
            [tuple_of(b.shape) for b in self.own],
            [tuple_of(s.shape) for s in self.sums],
            groups[0],
            [text for text, _ in groups[1]],
            [offset for _, offset, _ in groups[2]],
        )
        texts = [f"({''.join(f'{text}, ' for text in part)})" for part in parts]
        self.formulas = formula(recording.numbers, [text_of(block), *texts])

    def __str__(self) -> str:
        buffers = [
            f"{'zeros' if b.zero else 'own' if b.own else 'scratch'} {b.name}: "
            f"{str(b.dtype).removeprefix('torch.')} {tuple_of(b.shape)}"
            for b in (*self.own, *self.scratch)
        ]
        steps = [
            f"{s.kernel.__name__}[{text_of(s.programs)}]"
            f"({', '.join(f'{n}={_shown(x)}' for n, x in s.arguments.items())})"
            if isinstance(s, Launch)
            else str(s)
            for s in self.steps
        ]
        guards = [text if holds else f"not {text}" for text, holds in self.guards.items()]
        return "\n".join([*buffers, *steps, *guards])

    def bind(self, numbers: tuple[int, ...]) -> Bound | None:
        """Return the values of the formulas, or None if the guards do not hold."""
        found = self.bound.get(numbers)
        if found is None and self.holds(*numbers):
            block, shapes, ends, values, places, offsets = self.formulas(*numbers)
            found = Bound(block, shapes, ends, (*self.fixed, *values), places, offsets)
            if len(self.bound) >= MOST_BOUND:
                self.bound.clear()
            self.bound[numbers] = found
        return found

    def run(
        self, tensors: Sequence[Tensor | None], pointers: Sequence[int], bound: Bound
    ) -> list[Tensor | None]:
        """Run the pass on inputs that have the plan's key."""
        if self.may_switch_device and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self._run(tensors, pointers, bound)
        return self._run(tensors, pointers, bound)

    def _run(
        self, tensors: Sequence[Tensor | None], pointers: Sequence[int], bound: Bound
    ) -> list[Tensor | None]:
        device = self.device
        own = [
            # without the input's strides, which are arbitrary for an axis of length 1
            torch.empty_like(tensors[like], memory_format=torch.contiguous_format)  # type: ignore[arg-type]
            if like is not None
            else (torch.zeros if b.zero else torch.empty)(shape, dtype=b.dtype, device=device)
            for b, shape, like in zip(self.own, bound.shapes, self.like)
        ]
        block = None
        if bound.block:
            block = torch.empty(bound.block, dtype=torch.uint8, device=device)
        if self.on_gpu:
            row, bases = [*bound.values, *pointers], len(bound.values)
            row += [x.data_ptr() for x in (*own, *self.constants)]
            if block is not None:
                begin = block.data_ptr()
                row += [begin + place for place in bound.places]
            if self.rows:
                row += [row[bases + i] + offset for (i, _), offset in zip(self.rows, bound.offsets)]
            stream = driver.active.get_current_stream(device.index)
            hook = RUNTIME.launch_enter_hook
            seen = hook is not None and getattr(hook, "calls", True)
        else:
            stream, seen, row = None, True, self._host_row(bound, [*tensors, *own], block)
        for make in self.made:
            row.append(make(row))
        side = side_stream(device) if self.forks else None
        for step, programs, pick, start in self.order:
            if type(step) is not Launch:
                if type(step) is Copy:
                    source, result = self.copies[step.result]
                    own[result].copy_(tensors[source])  # type: ignore[arg-type]
                elif type(step) is CopyBack:
                    result, source = self.copies_back[step.result]
                    tensors[result].copy_(own[source])  # type: ignore[union-attr]
                elif type(step) is Total:
                    i = len(own) - len(self.own)
                    own.append(own[self.parts[i]].sum(0).view(bound.ends[i]).to(step.dtype))
                elif side is not None:
                    current = torch.cuda.current_stream(device)
                    first, then = (side, current) if step.joins else (current, side)
                    then.wait_stream(first)
            elif seen:
                _show(step, row[programs], pick(row), side)
            else:
                where = side.cuda_stream if step.on_side_stream else stream  # type: ignore[union-attr]
                start(row[programs], where, pick(row))
        return [
            own[x] if isinstance(x, int) else x if x is None else torch.empty_like(x)
            for x in self.results
        ]

    def _host_row(self, bound: Bound, bases: list[Tensor | None], block: Tensor | None) -> list:
        """Return the row with tensors in place of pointers, for the interpreter."""
        row = [*bound.values, *bases, *self.constants]
        for place, dtype in zip(bound.places, self.dtypes):
            assert block is not None
            row.append(block[place:].view(dtype))
        for (i, dtype), offset in zip(self.rows, bound.offsets):
            base = bases[i]
            assert base is not None
            row.append(base.view(-1).view(torch.uint8)[offset:].view(dtype))
        return row


def _maker(x: Descriptor | tuple, places: list[int], on_gpu: bool) -> Callable[[list], Any]:
    """Return a function that makes a descriptor or a tuple from the row of a call."""
    if isinstance(x, Descriptor):
        return _Descriptors(x, places)
    if not on_gpu and type(x) is not tuple:  # the interpreter reads fields by name
        return lambda row: type(x)(*(row[i] for i in places))
    if len(places) == 1:  # of which `itemgetter` would return the item
        return lambda row: (row[places[0]],)
    return itemgetter(*places)  # type: ignore[return-value]


class _Descriptors:
    """The descriptors of one argument of a launch, for the memory that calls have given it."""

    def __init__(self, x: Descriptor, places: list[int]):
        self.x, self.pick = x, itemgetter(*places)
        self.known: dict[tuple, Any] = {}

    def __call__(self, row: list) -> Any:
        """Return the descriptor of a call; `starter` keeps in it what Triton makes of it."""
        base, shape, strides = key = self.pick(row)
        if isinstance(base, Tensor):
            return self._made(base, shape, strides)
        made = self.known.get(key)
        if made is None:
            if len(self.known) >= MOST_DESCRIPTORS:
                self.known.clear()
            base = _Pointer(base, self.x.memory.dtype)
            made = self.known[key] = self._made(base, shape, strides)
        return made

    def _made(self, base, shape: tuple, strides: tuple) -> Any:
        made = copy(self.x.like)
        made.base, made.shape, made.strides = base, [*shape], [*strides]
        return made


class _Pointer(NamedTuple):
    """Replace the tensor of a descriptor, which reads its address and dtype alone."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def _shown(x) -> str:
    if isinstance(x, Memory):
        return x.name + (f" + {text_of(x.offset)}" if x.offset else "")
    if isinstance(x, tuple):
        return f"({', '.join(map(_shown, x))})"
    return text_of(x) if isinstance(x, Size) else repr(x)


def _is_numbers(x) -> bool:
    """Whether a tuple has whole numbers and None alone, also inside."""
    return all(
        _is_numbers(y) if isinstance(y, tuple) else y is None or isinstance(y, (int, Size))
        for y in x
    )


def _text(x) -> str:
    """Return the formula of such a tuple, without the names of its fields."""
    if isinstance(x, tuple):
        return f"({''.join(f'{_text(y)}, ' for y in x)})"
    return "None" if x is None else text_of(x)


def _has_sizes(x) -> bool:
    return isinstance(x, tuple) and any(isinstance(y, Size) for y in x)


def _show(step: Launch, programs: int, arguments: tuple, side) -> None:
    """Launch so that a profiler's hook, or the interpreter, sees all of it."""
    with torch.cuda.stream(side if step.on_side_stream else None):
        if step.compiled is None:
            step.kernel[(programs,)](*arguments, **step.options)
        else:
            step.compiled[(programs, 1, 1)](*arguments)
