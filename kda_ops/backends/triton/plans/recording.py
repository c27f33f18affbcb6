"""Write down what a pass allocates and launches while it runs, so that a `Plan` can replay it.

The functions of `launch` report each step to a `Recording`. It gives stages a `Ref` in the place of
each tensor, so that each argument of a launch is memory, a formula or a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kda_ops.backends.triton.plans.refs import Memory, Ref, contiguous
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
    def bytes(self) -> Any:
        """Return its size, rounded up to the alignment; of a formula, the factor is rounded up."""
        size: Any = self.dtype.itemsize
        for n in self.shape:
            size = n * size
        if isinstance(size, Size):
            return size.made(0, size.unit, -(-size.factor // ALIGNMENT) * ALIGNMENT)
        return -(-size // ALIGNMENT) * ALIGNMENT


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
    programs: Any
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


@dataclass
class CopyBack:
    """The copy of a buffer to an input that the pass writes."""

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
        self.steps: list[Launch | Wait | Total | Copy | CopyBack] = []
        self._time, self._forked = 0, False  # all steps between fork and join have one time

    def take(self, name: str, x: Tensor | None, shape: tuple, strides: tuple | None) -> Any:
        """Return an input as a `Ref`; strides are None for a contiguous one."""
        self.inputs.append(name if x is not None else "")
        if x is None:
            return None
        if strides is None:
            self.like.setdefault((tuple_of(shape), x.dtype), len(self.inputs) - 1)
        return Ref(x, Memory(name, 0, x.dtype), shape, strides or contiguous(shape))

    def allocate(self, name: str, x: Tensor, shape: Sequence, zero: bool) -> Any:
        """Add a buffer, and return it as a `Ref`; a name that is taken gets an underscore."""
        while name in self.buffers or name in self.inputs:
            name += "_"
        self.buffers[name] = Buffer(name, tuple(shape), x.dtype, zero, own=zero)
        return Ref(x, Memory(name, 0, x.dtype), shape, contiguous(tuple(shape)))

    def constant(self, x: Tensor) -> Any:
        """Return a tensor that every call shares as a `Ref`."""
        name = f"constant_{len(self.constants)}"
        self.constants[name] = x
        return Ref(x, Memory(name, 0, x.dtype), tuple(x.shape), x.stride())

    def total(self, parts: Any, y: Tensor, like: Any) -> Any:
        """Add the step that sums parts to y, which has the shape of `like`."""
        name = self._used(parts).name
        self.buffers[name].own = True
        self._time += not self._forked
        self.steps.append(Total(name, f"{name}_total", like.shape, like.dtype))
        memory = Memory(f"{name}_total", 0, like.dtype)
        return Ref(y, memory, like.shape, contiguous(like.shape))

    def copy(self, x: Any, y: Any) -> None:
        """Add the step that copies x, an input, to y."""
        source, result = self._used(x).name, self._used(y).name
        assert source in self.inputs
        self.buffers[result].own = True
        self._time += not self._forked
        self.steps.append(Copy(source, result))

    def copy_back(self, x: Any, y: Any) -> None:
        """Add the step that copies y to x, an input."""
        result, source = self._used(x).name, self._used(y).name
        assert result in self.inputs
        self.buffers[source].own = True
        self._time += not self._forked
        self.steps.append(CopyBack(source, result))

    def _used(self, x: Any) -> Memory:
        if type(x) is not Ref:
            raise TypeError(
                f"A stage passes a tensor of shape {list(x.shape)} that the plan does not know: "
                "make it by new, copy_of or total, or give a constant to shared_constant."
            )
        memory = x.memory
        buffer = self.buffers.get(memory.name)
        if buffer is not None:
            buffer.first = self._time if buffer.first < 0 else buffer.first
            buffer.last = self._time
        return memory

    def launch(
        self,
        kernel,
        programs: Any,
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
        if isinstance(x, (Ref, Tensor)):
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
            self.guards.note(f"{x.text} < {2**31}", x.value < 2**31)
            if specialised:
                is_multiple(x, 16)
                if x.factor == 1:
                    self.guards.note(f"{x.text} == 1", x.value == 1)
        return x

    def name_of(self, x: Ref) -> str:
        """Return the name of a result and give it its own memory."""
        memory = x.memory
        buffer = self.buffers.get(memory.name)
        if buffer is not None:
            buffer.own = True
            assert memory == (buffer.name, 0, buffer.dtype), "a result must be a whole buffer"
            assert [*map(text_of, x.shape)] == [*map(text_of, buffer.shape)], "likewise"
        return memory.name


def _not_specialised(kernel) -> Sequence[str]:
    given = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)  # interpreted, or not
    return given.get("do_not_specialize") or ()


def tuple_of(x: tuple) -> str:
    """Return the formula of a tuple."""
    return f"({', '.join(map(text_of, x))}{',' * (len(x) == 1)})"
