"""Tensors of a pass as its stages see them while they are recorded.

A stage uses the names of torch for shapes, strides and views of its tensors. Under a recording its
tensors are a `Ref` each, whose lengths and strides are sizes (`sizes.Size`) where calls of one plan
differ. What a plan cannot replay, such as ``x.zero_()`` or ``a + b``, raises a TypeError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from kda_ops.backends.triton.plans.sizes import value_of

VIEWS = "views are x[i], x[..., :n], x.mT and x.view(dtype)"


class Memory(NamedTuple):
    """Where a pointer points: an input, buffer or constant, and an offset in bytes."""

    name: str
    offset: Any  # a number or a size
    dtype: torch.dtype


class Ref:
    """A tensor of a pass: its name and dtype, and its shape and strides as sizes.

    `data` is the tensor of the call that is recorded. A kernel gets it; a stage must not read it,
    because later calls have other tensors.
    """

    __slots__ = ("_strides", "data", "memory", "shape")

    def __init__(self, data: Tensor, memory: Memory, shape: Sequence, strides: Sequence):
        self.data, self.memory = data, memory
        self.shape, self._strides = tuple(shape), tuple(strides)

    @property
    def name(self) -> str:
        """The name of its input, buffer or constant."""
        return self.memory.name

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self.memory.dtype

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.data.device

    def is_contiguous(self) -> bool:
        """Return whether the tensor is contiguous, which the key of a plan knows of an input."""
        return self.data.is_contiguous()

    def stride(self, axis: int | None = None) -> Any:
        """Return the strides as sizes, or that of one axis."""
        return self._strides if axis is None else self._strides[axis]

    def dim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    def numel(self) -> Any:
        """Return the number of elements, as a size."""
        count: Any = 1
        for n in self.shape:
            count = count * n
        return count

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        """Return the address modulo 16, which is all that a plan knows of it."""
        return self.data.data_ptr() % 16

    def contiguous(self) -> Ref:
        """Return a contiguous tensor as it is."""
        if not self.data.is_contiguous():
            self._refuse("contiguous()", "copy_of(x) copies an input in every call")
        return self

    def new_empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Return an empty tensor, which stands for an absent result."""
        if 0 not in map(value_of, shape):
            self._refuse("new_empty", "new(x, name, shape) allocates in every call")
        return self.data.new_empty([*map(value_of, shape)], dtype=dtype or self.dtype)

    # --- views ---

    @property
    def mT(self) -> Ref:
        """A view with its last two axes swapped."""
        *rows, a, b = self.shape
        *outer, c, d = self._strides
        return Ref(self.data.mT, self.memory, (*rows, b, a), (*outer, d, c))

    def __getitem__(self, key: Any) -> Ref:
        """Return row ``x[i]``, or the first columns ``x[..., :n]``."""
        if isinstance(key, tuple):
            if len(key) == 2 and key[0] is ... and key[1] == slice(None, key[1].stop):
                n, columns = value_of(key[1].stop), (*self.shape[:-1], key[1].stop)
                return Ref(self.data[..., :n], self.memory, columns, self._strides)
        elif type(key) is not slice:
            stride, *strides = self._strides
            offset = key * stride * self.element_size()
            memory = self.memory._replace(offset=offset + self.memory.offset)
            return Ref(self.data[value_of(key)], memory, self.shape[1:], strides)
        self._refuse(f"[{key}]", VIEWS)

    def view(self, *dtypes: Any) -> Ref:
        """Return a view of a contiguous tensor in a dtype that is as wide, or wider."""
        dtype = dtypes[0]
        if not isinstance(dtype, torch.dtype) or dtype.itemsize % self.element_size():
            self._refuse("view()", VIEWS)
        times = dtype.itemsize // self.element_size()
        shape = (*self.shape[:-1], self.shape[-1] // times)
        data = self.contiguous().data.view(dtype)
        return Ref(data, self.memory._replace(dtype=dtype), shape, contiguous(shape))

    # --- what a plan cannot replay ---

    def _refuse(self, what: str, instead: str = "") -> NoReturn:
        raise TypeError(
            f"{what} of the tensor {self.name!r} would not be in the plan, which replays what goes "
            f"through plans/launch.py: {instead or 'use new, total or copy_of, or a kernel'}."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # a protocol that Python or Triton asks for
            raise AttributeError(name)
        if hasattr(Tensor, name):
            self._refuse(f".{name}")
        raise AttributeError(f"a tensor has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None) -> NoReturn:
        given = (*args, *(kwargs or {}).values())
        nested = [y for x in given for y in (x if isinstance(x, (list, tuple)) else (x,))]
        next(x for x in nested if isinstance(x, Ref))._refuse(f"torch.{function.__name__}")

    def __bool__(self) -> NoReturn:
        self._refuse("a branch on the values", "branch on `x is None`, shapes or flags")

    def __repr__(self) -> str:
        return f"Ref({self.name}, {self.dtype}, {self.shape})"


def _refusal(name: str):
    def refuse(self: Ref, *_) -> NoReturn:
        self._refuse(name)

    return refuse


_BINARY = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift".split()
for _name in (
    *(f"__{side}{name}__" for name in _BINARY for side in ("", "r", "i")),
    *(f"__{name}__" for name in "eq ne lt le gt ge neg pos abs invert len iter".split()),
    *(f"__{name}__" for name in "contains setitem int float index".split()),
):
    setattr(Ref, _name, _refusal(_name))


def contiguous(shape: Sequence) -> tuple:
    """Return the strides of a contiguous tensor."""
    strides: list[Any] = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, n * strides[0])
    return tuple(strides) if shape else ()
