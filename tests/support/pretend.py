"""A simulated GPU: fake tensors with addresses, and launches that note what they would be
compiled for and compute nothing.

For a process of its own: Triton keeps the driver, and kernels' constants are kept per device.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

PROCESSORS = 132


@dataclass(frozen=True)
class Pointer:
    """An address as Triton takes one."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


@dataclass(frozen=True)
class Made:
    """What a kernel would be compiled for: type and assumption of each argument."""

    launches: list[Launched] = field(repr=False, compare=False)
    kernel: Any
    specialisation: tuple
    options: str

    def __getitem__(self, grid: tuple[int, ...]):
        """Return what launches it."""
        return lambda *args: self.launches.append(Launched(self, grid[0], args))


class Launched(NamedTuple):
    """A launch of a kernel with arguments."""

    made: Made
    programs: int
    args: tuple


class Stream:
    """A stream that does nothing."""

    cuda_stream = 0

    def __init__(self, device: torch.device | None = None):
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        """Wait for nothing."""


def specialise(kernel, args: tuple, options: dict) -> tuple:
    """Ask Triton's own binder what it takes the arguments for."""
    from triton.runtime import driver

    *_, binder = kernel.device_caches[driver.active.get_current_device()]
    _, specialisation, options = binder(*args, **options)
    return tuple(specialisation), str(sorted(options.items()))


def plain(x, taken, inputs: Mapping[int, str] = MappingProxyType({})):
    """Return numbers and constants of an argument; of an address, the input there or "pointer"."""
    if isinstance(taken, tuple) and isinstance(taken[0], tuple):
        return tuple(plain(*both, inputs) for both in zip(x, zip(*taken)))
    if hasattr(x, "block_shape"):  # a tensor descriptor has an address
        place = inputs.get(x.base.data_ptr(), "pointer")
        return tuple(x.shape), tuple(x.strides), tuple(x.block_shape), place
    if isinstance(taken[0], str) and taken[0].startswith("*"):
        return inputs.get(x if isinstance(x, int) else x.data_ptr(), "pointer")
    return x


def described(launched: Launched, inputs: Mapping[int, str] = MappingProxyType({})):
    """Return what a launch says, with names in place of the addresses of inputs."""
    made = launched.made
    args = [plain(*both, inputs) for both in zip(launched.args, made.specialisation)]
    return made, launched.programs, args


def _like_masks(device: torch.device) -> torch.Tensor:
    return torch.empty(14, 64, 64, dtype=torch.int16, device=device)


@contextmanager
def pretend_gpu() -> Iterator[list[Launched]]:
    """Within it tensors on ``cuda`` are fake, and launches go to the list that it gives."""
    import triton
    from triton import knobs
    from triton.runtime.jit import JITFunction

    from benchmarks.compile import offline_driver
    from kda_ops.backends.triton import tuning

    launches: list[Launched] = []
    addresses: dict[int, int] = {}
    free = count(1 << 40, 1 << 40)  # larger than any storage

    def data_ptr(x: torch.Tensor) -> int:
        storage = x.untyped_storage()._cdata
        if storage not in addresses:
            addresses[storage] = next(free)
        return addresses[storage] + int(x.storage_offset()) * x.element_size()

    def item(x: torch.Tensor, key) -> torch.Tensor:
        """Index as torch does, but for asking the library of the device."""
        dim = 0
        for k in key if isinstance(key, tuple) else (key,):
            if k is None:
                x = x.unsqueeze(dim)
            elif k is ...:
                dim = x.dim() - 2
            elif isinstance(k, int):
                x, dim = x.select(dim, k), dim - 1
            elif k.stop is not None:
                x = x.narrow(dim, 0, k.stop)
            dim += 1
        return x

    def contiguous(x: torch.Tensor) -> torch.Tensor:
        if x.is_contiguous():
            return x
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def copy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # into a buffer of a plan, or from there into a caller's tensor
        assert x.shape == y.shape and (x.is_contiguous() or y.is_contiguous())
        return x

    def run(self, *args, grid, warmup, **options):
        made = Made(launches, self, *specialise(self, args, options))
        if not warmup:
            launches.append(Launched(made, grid[0], args))
        return made

    current, pair_masks = Stream(), cache(_like_masks)
    changes: dict[Any, dict[str, Any]] = {
        torch.cuda: dict(
            current_device=lambda: 0,
            is_current_stream_capturing=lambda: True,  # so that nothing is compiled
            current_stream=lambda device=None: current,
            stream=lambda stream: nullcontext(),
            device=lambda device: nullcontext(),
            Stream=Stream,
        ),
        tuning: dict(
            _processors=lambda device: PROCESSORS,
            _capability=lambda device: (9, 0),
            tuned=lambda device=None: {},
        ),
        JITFunction: dict(run=run),
        importlib.import_module("kda_ops.backends.triton.stages.gradient"): dict(
            pair_masks=pair_masks
        ),
        FakeTensor: dict(data_ptr=data_ptr, __getitem__=item, contiguous=contiguous, copy_=copy),
        # a plan shows its launches to a hook
        knobs.runtime: dict(launch_enter_hook=lambda *args: None),
    }
    triton.runtime.driver.set_active(offline_driver(90))
    with ExitStack() as stack:
        for owner, words in changes.items():
            for name, x in words.items():
                stack.enter_context(mock.patch.object(owner, name, x))
        stack.enter_context(FakeTensorMode())
        yield launches
