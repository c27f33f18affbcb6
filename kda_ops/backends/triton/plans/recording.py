"""Write down what a pass allocates and launches while it runs, so that a `Plan` can replay it.

The functions of `launch` report each step to a `Recording`. It names every tensor by the memory
that it points to, so that each argument of a launch is memory, a formula or a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_ops.backends.triton.plans.sizes import Guards, Size, is_descriptor, is_multiple, text_of

ALIGNMENT = 16  # bytes, of each tensor in the scratch block, which Triton assumes of a pointer


@dataclass
class Buffer:
    """A tensor that a pass allocates; `first` and `last` are the times at which it is used."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    zero: bool
    first: int = -1
    last: int = -1
    own: bool = False  # allocated by itself, not in the scratch block

    @property
    def bytes(self) -> int:
        """Return its size, rounded up to the alignment; of a formula, the factor is rounded up."""
        size: int = self.dtype.itemsize
        for n in self.shape:
            size = n * size
        if isinstance(size, Size):
            return size._made(0, size.unit, -(-size.factor // ALIGNMENT) * ALIGNMENT)
        return -(-size // ALIGNMENT) * ALIGNMENT


class Memory(NamedTuple):
    """Where a pointer points: an input, buffer or constant, and an offset in bytes."""

    name: str
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor of Triton or Gluon; `like` is a copy of it without its tensor."""

    memory: Memory
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    like: Any


@dataclass
class Launch:
    """A kernel, its grid, and its arguments by name: memory, formulas or constants."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    options: dict[str, Any]
    on_side_stream: bool
    compiled: Any = None


@dataclass
class Wait:
    """The second stream waits for the current one, or the reverse if `joins`."""

    joins: bool


@dataclass
class Total:
    """The sum of a buffer over its first axis, then given a shape and dtype."""

    parts: str
    result: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Copy:
    """The copy of an input to a buffer."""

    source: str
    result: str


class Recording:
    """The inputs, numbers, buffers and steps of one pass, as `launch` reports them."""

    def __init__(self, numbers: dict[str, int]):
        self.guards, self.numbers = Guards(), tuple(numbers)
        self.sizes = {n: Size(x, n, 1, self.guards) for n, x in numbers.items()}
        self.inputs: list[str] = []
        self.like: dict[tuple[str, torch.dtype], int] = {}  # contiguous inputs by shape and dtype
        self.constants: dict[str, Tensor] = {}
        self.buffers: dict[str, Buffer] = {}
        self.steps: list[Launch | Wait | Total | Copy] = []
        self._time, self._forked = 0, False  # all steps between fork and join have one time
        self._known: dict[int, tuple[Tensor, Memory, tuple[int, ...], tuple[int, ...]]] = {}

    def take(self, name: str, x: Tensor | None, shape: tuple, strides: tuple | None) -> None:
        """Name an input; strides are None for a contiguous one."""
        self.inputs.append(name if x is not None else "")
        if x is not None:
            self._know(x, Memory(name, 0, x.dtype), shape, strides or contiguous(shape))
            if strides is None:
                self.like.setdefault((tuple_of(shape), x.dtype), len(self.inputs) - 1)

    def _know(self, x: Tensor, memory: Memory, shape: tuple, strides: tuple) -> None:
        self._known[id(x)] = x, memory, shape, strides  # x is kept: ids of dead objects are reused

    def allocate(self, name: str, x: Tensor, shape: Sequence[int], zero: bool) -> None:
        """Add a buffer; a name that is taken gets an underscore."""
        while name in self.buffers or name in self.inputs:
            name += "_"
        self.buffers[name] = Buffer(name, tuple(shape), x.dtype, zero, own=zero)
        self._know(x, Memory(name, 0, x.dtype), tuple(shape), contiguous(tuple(shape)))

    def alias(self, y: Tensor, x: Tensor, offset: int, strides: tuple[int, ...]) -> None:
        """Add y, a view of x that begins `offset` bytes later; its dtype may differ."""
        memory = self._known[id(x)][1]
        begin = memory.offset + offset if memory.offset else offset
        self._know(y, memory._replace(offset=begin, dtype=y.dtype), (), strides)

    def constant(self, x: Tensor) -> None:
        """Add a tensor that every call shares."""
        name = f"constant_{len(self.constants)}"
        self.constants[name] = x
        self._know(x, Memory(name, 0, x.dtype), tuple(x.shape), x.stride())

    def total(self, parts: Tensor, y: Tensor, like: Tensor) -> None:
        """Add the step that sums parts to y, which has the shape of `like`."""
        name = self._used(parts).name
        self.buffers[name].own = True
        self._time += not self._forked
        self.steps.append(Total(name, f"{name}_total", self.shape(like), like.dtype))
        self._know(y, Memory(f"{name}_total", 0, like.dtype), (), ())

    def copy(self, x: Tensor, y: Tensor) -> None:
        """Add the step that copies x, an input, to y."""
        source, result = self._used(x).name, self._used(y).name
        assert source in self.inputs
        self.buffers[result].own = True
        self._time += not self._forked
        self.steps.append(Copy(source, result))

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of a tensor that was added, as sizes."""
        return self._known[id(x)][2]

    def strides(self, x: Tensor) -> tuple[int, ...]:
        """Return the strides of a tensor that was added, as sizes."""
        return self._known[id(x)][3]

    def _used(self, x: Tensor) -> Memory:
        memory = self._known[id(x)][1]
        buffer = self.buffers.get(memory.name)
        if buffer is not None:
            buffer.first = self._time if buffer.first < 0 else buffer.first
            buffer.last = self._time
        return memory

    def launch(
        self,
        kernel,
        programs: int,
        args: tuple,
        options: dict,
        on_side_stream: bool,
        specialised: bool,
    ) -> None:
        """Add a launch. If `specialised`, what Triton assumes of its arguments becomes guards."""
        fixed = _not_specialised(kernel)
        arguments = {
            # a tuple is specialised whether the name is in the list or not
            name: self._argument(x, specialised and (isinstance(x, tuple) or name not in fixed))
            for name, x in zip(kernel.arg_names, args)
        }
        self.steps.append(Launch(kernel, programs, arguments, options, on_side_stream))
        self._time += not self._forked

    def made(self, compiled) -> None:
        """Add the compiled kernel of the last launch."""
        step = self.steps[-1]
        assert isinstance(step, Launch)
        step.compiled = compiled

    def wait(self, joins: bool) -> None:
        """Add a wait of one stream for another."""
        self.steps.append(Wait(joins))
        self._forked = not joins
        self._time += joins

    def _argument(self, x, specialised: bool):
        if isinstance(x, Tensor):
            memory = self._used(x)
            if isinstance(memory.offset, Size):  # what Triton may assume of a pointer
                is_multiple(memory.offset, ALIGNMENT)
            return memory
        if is_descriptor(x):
            like = copy(x)
            like.base = None
            return Descriptor(self._used(x.base), tuple(x.shape), tuple(x.strides), like)
        if isinstance(x, tuple):
            parts = [self._argument(y, specialised) for y in x]
            return tuple(parts) if type(x) is tuple else type(x)(*parts)
        if isinstance(x, Size):  # an integer's type, and what Triton may assume of it
            self.guards.note(f"{x.text} < {2**31}", int(x) < 2**31)
            if specialised:
                is_multiple(x, 16)
                if x.factor == 1:
                    self.guards.note(f"{x.text} == 1", int(x) == 1)
        return x

    def name_of(self, x: Tensor) -> str | None:
        """Return the name of a result and give it its own memory; None for an empty tensor."""
        if id(x) not in self._known:
            assert not x.numel(), "a result that is nobody's"
            return None
        memory = self._known[id(x)][1]
        if memory.name in self.buffers:
            self.buffers[memory.name].own = True
        return memory.name


def _not_specialised(kernel) -> Sequence[str]:
    given = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)  # interpreted, or not
    return given.get("do_not_specialize") or ()


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, n * strides[0])
    return tuple(strides) if shape else ()


def tuple_of(x: tuple) -> str:
    """Return the formula of a tuple."""
    return f"({', '.join(map(text_of, x))}{',' * (len(x) == 1)})"
