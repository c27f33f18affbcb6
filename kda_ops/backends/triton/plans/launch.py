"""Allocate, launch, sum and copy: the only calls of torch and Triton that a stage may make.

A launch goes to the device of its tensors, on the current stream or on a second one. Inside
`recorded`, each function also reports what it does to a `Recording`. A plan replays only that.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import torch
import triton
from torch import Tensor

from kda_ops.backends.triton.plans.refs import Ref
from kda_ops.backends.triton.plans.sizes import Size, is_descriptor, is_multiple, value_of
from kda_ops.problem import Problem

if TYPE_CHECKING:
    from kda_ops.backends.triton.plans.recording import Recording


class _Here(threading.local):
    """The state of launches in this thread."""

    compiles: bool = False  # compile, launch nothing
    stream: torch.cuda.Stream | None = None  # where launches go, if not to the current stream
    held: list[tuple]  # arguments of launches on `stream`, kept alive until the join
    waits: bool  # each launch on `stream` waits for the current stream
    recorder: Recording | None = None
    uniform: bool = False  # one form of each kernel for all calls

    def __init__(self):
        # one per device: torch's pool of streams is shared with other libraries
        self.streams: dict[torch.device, torch.cuda.Stream] = {}


_HERE = _Here()
# Contract products and sums to fma with every Triton; Triton 3.10 does so only if asked.
FMA = {"enable_fp_fusion": True}


@contextmanager
def recorded(recorder: Recording) -> Iterator[None]:
    """Report to the recorder what this thread does in the context."""
    _HERE.recorder = recorder
    try:
        yield
    finally:
        _HERE.recorder = None


@contextmanager
def uniform(on: bool) -> Iterator[None]:
    """Compile each kernel in one form for all calls of one width, if `on`, and sum in one order.

    Triton compiles a kernel anew where a number is 1 or a multiple of 16, and may then lay out
    tiles, and so order sums, in another way. So it is shown the same numbers in every call.
    """
    before, _HERE.uniform = _HERE.uniform, on
    try:
        yield
    finally:
        _HERE.uniform = before


def new(
    like: Tensor,
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    zero: bool = False,
) -> Tensor:
    """Allocate a contiguous tensor of a pass on the device of `like`."""
    make = torch.zeros if zero else torch.empty
    x = make([*map(value_of, shape)], dtype=dtype or like.dtype, device=like.device)
    return x if _HERE.recorder is None else _HERE.recorder.allocate(name, x, shape, zero)


def copy_of(x: Tensor) -> Tensor:
    """Return a contiguous copy of an input of a pass."""
    y = new(x, "copy", x.shape)
    if not _HERE.compiles:
        values(y).copy_(values(x))
    if _HERE.recorder is not None:
        _HERE.recorder.copy(x, y)
    return y


def copy_to(x: Tensor, y: Tensor) -> None:
    """Copy y, which the pass has allocated, to x, an input that it writes."""
    if not _HERE.compiles:
        values(x).copy_(values(y))
    if _HERE.recorder is not None:
        _HERE.recorder.copy_back(x, y)


@overload
def strides_of(x: Tensor) -> tuple[int, ...]: ...
@overload
def strides_of(x: None) -> None: ...
def strides_of(x: Tensor | None) -> tuple[int, ...] | None:
    """Return the strides of a tensor; None for None."""
    return None if x is None else x.stride()


def columns_of(x: Tensor | None) -> tuple[int, ...]:
    """Return the strides of a [B, T, HV] tensor, zeros for None, to be passed one by one.

    Triton always specialises on tuples; on single arguments a kernel can turn that off.
    """
    return strides_of(x) or (0, 0, 0)


def as_kv(p: Problem, state: Tensor) -> Tensor:
    """Return a view S[k, v] of a state in the caller's layout, or the reverse."""
    return state.mT if p.transposed else state


def shared_constant(x: Tensor) -> Tensor:
    """Return x, and have plans keep it: every call uses the same one."""
    return x if _HERE.recorder is None else _HERE.recorder.constant(x)


@overload
def total(parts: Tensor, like: Tensor) -> Tensor: ...
@overload
def total(parts: Tensor | None, like: Tensor | None) -> Tensor | None: ...
def total(parts: Tensor | None, like: Tensor | None) -> Tensor | None:
    """Sum the parts over their first axis, in their dtype until the one cast at the end."""
    if parts is None or like is None:
        return None
    y = values(parts).sum(0).reshape(values(like).shape).to(like.dtype)
    return y if _HERE.recorder is None else _HERE.recorder.total(parts, y, like)


@contextmanager
def compiling() -> Iterator[None]:
    """Compile the kernels that the context launches, on threads; all are compiled on exit.

    The longest kernel of a call compiles for seconds, all of them in turn several times as long.
    """
    with (
        ThreadPoolExecutor(max(1, min(16, os.cpu_count() or 1))) as threads,
        triton.AsyncCompileMode(threads),
    ):
        _HERE.compiles = True
        try:
            yield
        finally:
            _HERE.compiles = False


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the second stream of this thread on a device."""
    if device not in _HERE.streams:
        _HERE.streams[device] = torch.cuda.Stream(device)
    return _HERE.streams[device]


@contextmanager
def overlap_streams(device: torch.device, early: bool = False) -> Iterator[AbstractContextManager]:
    """Overlap two streams: launches in the yielded context go to the second, joined on exit.

    Each of them waits for what the current stream holds at that moment. If `early`, they wait only
    for what the current stream holds on entry. Then nothing that they read may be allocated or
    copied after entry. Memory belongs to the current stream, so arguments of these launches are
    held until the join.
    """
    if device.type != "cuda" or _HERE.compiles:
        yield nullcontext()
        return
    side, here = side_stream(device), torch.cuda.current_stream(device)
    held: list[tuple] = []
    if early:
        side.wait_stream(here)
        if _HERE.recorder is not None:
            _HERE.recorder.wait(joins=False)

    @contextmanager
    def on_side_stream() -> Iterator[None]:
        _HERE.stream, _HERE.held, _HERE.waits = side, held, not early
        try:
            yield
        finally:
            _HERE.stream = None

    try:
        yield on_side_stream()
    finally:
        if held:
            here.wait_stream(side)
            held.clear()
            if _HERE.recorder is not None:
                _HERE.recorder.wait(joins=True)


def lost_registers(registers: int, stack: int) -> bool:
    """Return whether ptxas has given up registers (docs/kernels/hazards.md, "Lost registers").

    A kernel that spills normally uses all registers. One with few registers and much stack may
    compute wrong results.
    """
    return registers <= 128 and stack > 1024


def warn_if_lost(made) -> None:
    """Warn if a kernel, as Triton returns it from a launch, has lost its registers."""
    # None for a kernel that runs on no GPU
    registers, words = getattr(made, "n_regs", None), getattr(made, "n_spills", None) or 0
    if registers and lost_registers(registers, 4 * words):
        warnings.warn(
            f"{made.name} has lost its registers ({registers}, and {4 * words} bytes of stack): "
            "ptxas gave up on it for this GPU. It is slow, and what it computes may be wrong: "
            "please report it with the output of python -m kda_ops doctor, and use another "
            "version of triton or another dtype.",
            RuntimeWarning,
            stacklevel=2,
        )


def launch(
    kernel,
    programs: int,
    device: torch.device,
    *args,
    compiled_for: dict[str, Any] | None = None,
    **given,
) -> None:
    """Launch on the device of the tensors, on a grid of one dimension (up to 2^31 - 1 programs).

    Arguments are given by name, next to Triton's options; a small kernel may take them in order.
    `compiled_for` overrides values for compilation only: the kernel is specialised on them, and
    then launched with the real arguments.
    """
    if programs == 0:
        return
    options = given
    if given and not args:
        args, options = in_order(kernel, given)
    seen = None if compiled_for is None else in_order(kernel, given | compiled_for)[0]
    # The interpreter compiles nothing. Kernels of Gluon take descriptors, and name their layouts.
    uniform = _HERE.uniform and device.type != "cpu" and not any(map(is_descriptor, args))
    if uniform and seen is None:
        seen = shown(args, kernel.constexprs)
    recorder = _HERE.recorder
    if recorder is not None:
        if _HERE.stream is not None and _HERE.waits:
            recorder.wait(joins=False)
        recorder.launch(
            kernel, programs, args, options, _HERE.stream is not None, specialised=seen is None
        )
        programs, args = value_of(programs), values(args)
        seen = seen and values(seen)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            made = _launch(kernel, programs, device, args, seen, options)
    else:
        made = _launch(kernel, programs, device, args, seen, options)
    if recorder is not None:
        recorder.made(made)


def in_order(kernel, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Split keywords of a launch into the kernel's arguments, in order, and Triton's options."""
    names = kernel.arg_names
    if lacking := [name for name in names if name not in given]:
        raise TypeError(f"{kernel.__name__} also takes {', '.join(lacking)}.")
    options = {name: x for name, x in given.items() if name not in names}
    return tuple(given[name] for name in names), options


ODD, WHOLE, FAR = 3, 16, 2**32  # stand for any number, for a multiple of 16, and for 64 bits


def shown(args: tuple, constants: Sequence[int]) -> tuple:
    """Return arguments with the numbers that Triton is shown in every call (`uniform`).

    What decides on sizes becomes guards of a plan.
    """
    return tuple(x if i in constants else _shown(x) for i, x in enumerate(args))


def _shown(x):
    if type(x) in (int, Size):
        return _stand_in(x)
    if type(x) is tuple:
        return _strides(x)
    return type(x)(*map(_shown, x)) if isinstance(x, tuple) else x


def _strides(x: tuple) -> tuple:
    """Return strides: those of the last two of four axes as they are, stand-ins for the others.

    If 16 divides the length of a row of a contiguous tensor, it divides the strides before.
    """
    *outer, last = x
    if len(x) != 4:
        return (*map(_stand_in, outer), last if last == 1 else _stand_in(last))
    # as Triton specialises them: whether they are 1, and whether 16 divides them
    ones, whole = [y == 1 for y in x[2:]], [_is_whole(y) for y in x[2:]]
    if whole[1] if ones[0] else whole[0]:
        return (*(_stand_in(y, WHOLE if _is_whole(y) else ODD) for y in x[:2]), *x[2:])
    return (*map(_stand_in, x[:2]), *x[2:])


def _is_whole(x) -> bool:
    return is_multiple(x, 16) if isinstance(x, Size) else x % 16 == 0


def _stand_in(x, small: int = ODD) -> int:
    """Return a number in the place of x, of the same integer type."""
    return small if -(2**31) <= value_of(x) < 2**31 else small + FAR


def _launch(kernel, programs: int, device: torch.device, args: tuple, compiled_for, options: dict):
    options = FMA | options
    if _HERE.compiles:
        kernel.warmup(*(compiled_for or args), grid=(programs,), **options)
        return None
    if _HERE.stream is not None:
        if _HERE.waits:
            _HERE.stream.wait_stream(torch.cuda.current_stream(device))
        _HERE.held.append(args)
    with nullcontext() if _HERE.stream is None else torch.cuda.stream(_HERE.stream):
        if compiled_for is None or device.type == "cpu":
            made = kernel[(programs,)](*args, **options)
        elif device.type == "meta":  # offline compilation
            made = kernel[(programs,)](*compiled_for, **options)
        else:
            made = kernel.warmup(*compiled_for, grid=(1,), **options)
            made[(programs, 1, 1)](*args)
    warn_if_lost(made)
    return made


def values(x):
    """Replace sizes and refs by numbers and tensors, also in tuples and descriptors."""
    if isinstance(x, Ref):
        return x.data
    if is_descriptor(x):
        shape, strides = ([*map(value_of, some)] for some in (x.shape, x.strides))
        return replace(x, base=values(x.base), shape=shape, strides=strides)
    if isinstance(x, tuple):
        return tuple(map(values, x)) if type(x) is tuple else type(x)(*map(values, x))
    return value_of(x)
