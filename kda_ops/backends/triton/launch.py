"""How kernels are launched: on the device of their tensors, on the current stream or beside it, or
compiled only.
"""

import os
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import triton


class _Here(threading.local):
    """Whether launches of this thread compile and do no more; where they go, if not to the current
    stream, what they take, and whether they wait for it.
    """

    compiles: bool = False
    stream: torch.cuda.Stream | None = None
    held: list[tuple]
    waits: bool

    def __init__(self):
        # one per device, for torch's come from a pool that other libraries take theirs from
        self.streams: dict[torch.device, torch.cuda.Stream] = {}


_HERE = _Here()


@contextmanager
def compiling() -> Iterator[None]:
    """In it kernels are not launched but compiled, on threads, and all of them have been when it
    ends: a compiler takes seconds for the longest of a call, and several times that for one after
    the other.
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


@contextmanager
def beside(device: torch.device, early: bool = False) -> Iterator[AbstractContextManager]:
    """A second stream, joined at the end. In the context that it gives, launches go there, each
    after all that the current stream holds by then, or, if `early`, after what it holds now: then
    nothing that they take may be allocated or copied in between.

    Memory comes from the current stream as ever, so what such a launch takes is held until the
    streams have joined.
    """
    if device.type != "cuda" or _HERE.compiles:
        yield nullcontext()
        return
    if device not in _HERE.streams:
        _HERE.streams[device] = torch.cuda.Stream(device)
    side, here = _HERE.streams[device], torch.cuda.current_stream(device)
    held: list[tuple] = []
    if early:
        side.wait_stream(here)

    @contextmanager
    def elsewhere() -> Iterator[None]:
        _HERE.stream, _HERE.held, _HERE.waits = side, held, not early
        try:
            yield
        finally:
            _HERE.stream = None

    try:
        yield elsewhere()
    finally:
        if held:
            here.wait_stream(side)
            held.clear()


def lost_registers(registers: int, stack: int) -> bool:
    """Whether ptxas has given registers up: a kernel that spills otherwise uses all there are, and
    this one, with bytes of stack, may be wrong (docs/kernels/hazards.md, "Lost
    registers").
    """
    return registers <= 128 and stack > 1024


def warn_if_lost(made) -> None:
    """Warn of a kernel, as Triton returns it from a launch, that has lost its registers on this
    GPU.
    """
    # of one that runs on no GPU: None
    registers, words = getattr(made, "n_regs", None), getattr(made, "n_spills", None) or 0
    if registers and lost_registers(registers, 4 * words):
        warnings.warn(
            f"{made.name} has lost its registers ({registers} beside {4 * words} bytes of stack): "
            "ptxas gave up on it for this GPU. It is slow, and what it computes may be wrong: "
            "please report it with the output of python -m kda_ops doctor, and use another "
            "version of triton or another dtype.",
            RuntimeWarning,
            stacklevel=2,
        )


def launch(kernel, programs: int, device: torch.device, *args, **options) -> None:
    """Launch on a one-dimensional grid (its limit is 2^31 - 1 programs, not 65535), on the device
    of the tensors.
    """
    if programs == 0:
        return
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, device, *args, **options)
    elif _HERE.compiles:
        kernel.warmup(*args, grid=(programs,), **options)
    elif _HERE.stream is not None:
        if _HERE.waits:
            _HERE.stream.wait_stream(torch.cuda.current_stream(device))
        _HERE.held.append(args)
        with torch.cuda.stream(_HERE.stream):
            warn_if_lost(kernel[(programs,)](*args, **options))
    else:
        warn_if_lost(kernel[(programs,)](*args, **options))
