"""Run a Gluon kernel for Hopper on the CPU, and name its faults of synchronisation.

Gluon has no interpreter. Here each partition of warps is a thread, and one thread runs at a time,
statement by statement, on whole tiles. Between two statements other partitions run, copies act, and
products read their operands, in an order that a seed draws. So a missing wait may show as a wrong
result, and a missing arrival shows as a hang. Programs run one after another, in a drawn order too.

A fault shows even where the drawn order does no harm, because every partition, copy and product
carries a vector clock of what it knows to have happened. `Fault` names both lines of

- a race: two accesses of the same bytes of shared memory, of which one is a store, in no order;
- a store that a copy or a product meets without `fence_async_shared`;
- an arrival, a copy or a product without a barrier of warps before it, for what the warps have done
  before that barrier is not known.

Not modelled: layouts, swizzles and registers, races in global memory, and races between the warps
of a partition at their own loads and stores, where Triton places barriers.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import math
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction

Clock = dict[int, int]
View = tuple  # bytes of an allocation, then of an element; shape, strides and offset in elements
GRAIN = 2  # bytes that an access names at once
OPERANDS = (torch.bfloat16, torch.float16)
TRITON = Path(__file__).parents[2] / "kda_ops" / "backends" / "triton"


class Fault(AssertionError):
    """A fault of synchronisation."""


class Stopped(BaseException):
    """Ends a partition whose program has failed elsewhere."""


def where_from() -> str:
    """Return the lines of the kernel under way, as `caller:line > function:line`."""
    frame, lines = sys._getframe(1), []
    while frame is not None:
        if frame.f_globals.get("IS_EMULATED"):
            lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " > ".join(reversed(lines))


def join(clock: Clock, other: Clock) -> None:
    """Let `clock` know what `other` knows."""
    for agent, time in other.items():
        clock[agent] = max(time, clock.get(agent, 0))


@dataclass
class Access:
    """A past load or store of shared memory. `agent` did it at its own `time`."""

    agent: int
    time: int
    stores: bool
    view: View  # what of the allocation it meets
    line: str
    fenced: bool  # whether copies and products see it


@dataclass(eq=False)
class Partition:
    """Some warps of a program: what they know, and what they have under way."""

    agent: int
    name: str = "kernel"
    clock: Clock = field(default_factory=dict)
    behind: int = 0  # own accesses before the last barrier of warps
    waited: Clock = field(default_factory=dict)  # each warp's own waits, since that barrier
    products: list[Product] = field(default_factory=list)
    stores: list[Copy] = field(default_factory=list)
    ready: Callable[[], bool] = lambda: True
    line: str = ""
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    over: bool = False

    def __post_init__(self):
        self.clock[self.agent] = 1

    def known(self) -> Clock:
        """Return what has happened for all warps of the partition."""
        return {**self.clock, self.agent: self.behind}

    def meet(self) -> None:
        """Pass a barrier of warps."""
        join(self.clock, self.waited)
        self.waited.clear()
        self.behind = self.clock[self.agent]


@dataclass(eq=False)
class Copy:
    """A copy under way: `act` does it, and `clock` is what its end makes known."""

    act: Callable[[], None]
    clock: Clock
    is_over: bool = False

    def run(self) -> None:
        """Copy the tile."""
        self.act()
        self.is_over = True


class Program:
    """A program under way: its partitions, its copies, and the past of its shared memory."""

    def __init__(self, index: int, seed: str):
        self.index, self.random = index, random.Random(seed)
        self.agents = itertools.count()
        self.current = Partition(next(self.agents))
        self.partitions: list[Partition] = []
        self.copies: list[Copy] = []
        self.loads: dict[int, str] = {}  # each copy to shared memory, and its line
        self.sent: list[tuple[int, int, str]] = []  # each copy from there, its tile and its line
        self.new_barriers: list[Barrier] = []  # initialised, and not fenced
        self.past: dict[int, list[Access]] = {}
        self.failure: BaseException | None = None
        self.pace: dict[object, float] = {}

    def fork(self) -> tuple[int, Clock]:
        """Name a copy or a product that is issued now; return its name and what it knows."""
        agent = next(self.agents)
        return agent, {**self.current.known(), agent: 1}

    def access(self, tile: Tensor, stores: bool, by: tuple[int, Clock] | None = None) -> None:
        """Note an access, of the current partition or `by` a copy or product; refuse a race."""
        if by is None:
            self.current.clock[self.current.agent] += 1
        agent, clock = by or (self.current.agent, self.current.clock)
        view, line = view_of(tile), where_from()
        past = self.past.setdefault(tile.untyped_storage().data_ptr(), [])
        for x in past:
            if not (x.stores or stores) or not meet(x.view, view):
                continue
            if by and x.stores and not x.fenced:
                raise Fault(f"no fence between {x.line}, which stores, and {line}")
            if clock.get(x.agent, 0) < x.time:
                does = {True: "stores", False: "loads"}
                raise Fault(f"race: {x.line} {does[x.stores]}, {line} {does[stores]}")
        if stores:
            past[:] = [x for x in past if not is_within(x.view, view)]
        past.append(Access(agent, clock[agent], stores, view, line, by is not None))
        if by is None:
            self.pause()

    def actors(self) -> list[Partition | Copy | Product]:
        """Return what may act next."""
        products = (next((x for x in p.products if not x.is_over), None) for p in self.partitions)
        ready = [p for p in self.partitions if not p.over and p.ready()]
        return [*ready, *self.copies, *(x for x in products if x is not None)]

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others act, in a random order, at least until `ready`."""
        me = self.current
        me.ready, me.line = ready, where_from()
        if me in self.partitions:
            self.hand_over(me)

    def hand_over(self, me: Partition) -> None:
        """Let copies and products act until it is a partition's turn, then let that one run."""
        while True:
            actors = self.actors()
            if not actors:
                if all(p.over for p in self.partitions):
                    return
                waiting = (f"{p.name} at {p.line}" for p in self.partitions if not p.over)
                raise Fault("hang: " + ", ".join(waiting))
            # an actor keeps its pace, so that some partitions and copies are far slower than others
            paces = [self.pace.setdefault(x, self.random.random() ** 3 + 0.01) for x in actors]
            chosen = self.random.choices(actors, paces)[0]
            if chosen is me:
                return
            if isinstance(chosen, Partition):
                self.current = chosen
                chosen.turn.release()
                if not me.over:
                    me.turn.acquire()
                    if self.failure is not None:
                        raise Stopped
                return
            chosen.run()
            if isinstance(chosen, Copy):
                self.copies.remove(chosen)

    def specialise(self, parts: Sequence[tuple], warps: object, registers: object) -> None:
        """Run each (function, arguments) as a partition, until all have ended."""
        begun = self.current
        begun.meet()
        for function, _ in parts:
            new = Partition(next(self.agents), function.__name__)
            join(new.clock, begun.known())
            self.partitions.append(new)
        threads = [
            threading.Thread(target=self.run_partition, args=(p, *part), daemon=True)
            for p, part in zip(self.partitions, parts)
        ]
        for thread in threads:
            thread.start()
        self.current = self.random.choice(self.partitions)
        self.current.turn.release()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        self.current, ended, self.partitions = begun, self.partitions, []
        for agent, line in self.loads.items():
            if not any(agent in p.clock for p in ended):
                raise Fault(f"nothing waits for the copy of {line}")

    def run_partition(self, me: Partition, function: Callable, args: tuple) -> None:
        """Run a partition on its thread."""
        me.turn.acquire()
        try:
            if self.failure is None:
                function(*args)
                if me.products or me.stores:
                    raise Fault(f"{me.name} ends before its products or stores do")
                me.over = True
                self.hand_over(me)
        except Stopped:
            pass
        except BaseException as failure:
            self.failure = failure
            for other in self.partitions:
                other.turn.release()


_program: Program  # the one under way; one thread runs at a time


def view_of(tile: Tensor) -> View:
    """Return which view of its allocation a tensor is."""
    size = tile.untyped_storage().nbytes()
    return size, tile.element_size(), tuple(tile.shape), tile.stride(), tile.storage_offset()


@lru_cache(None)
def touches(view: View) -> Tensor:
    """Mark the bytes of an allocation that a view touches, GRAIN by GRAIN."""
    size, element, shape, strides, offset = view
    mask, grains = torch.zeros(size // GRAIN, dtype=torch.bool), element // GRAIN
    steps = (*(s * grains for s in strides), 1)
    mask.as_strided((*shape, grains), steps, offset * grains).fill_(True)
    return mask


@lru_cache(None)
def meet(one: View, other: View) -> bool:
    """Return whether two views of an allocation have bytes in common."""
    return bool((touches(one) & touches(other)).any())


@lru_cache(None)
def is_within(one: View, other: View) -> bool:
    """Return whether a view of an allocation has no bytes but those of another."""
    return not (touches(one) & ~touches(other)).any()


class Barrier:
    """An mbarrier. Its phase ends with the last arrival and the last byte."""

    def __init__(self):
        self.phase = self.count = self.left = self.bytes = 0
        self.coming: Clock = {}  # of the phase under way
        self.clock: Clock = {}  # of the phases before it
        self.fenced = False

    def change(self, clock: Clock, arrivals: int = 0, size: int = 0) -> None:
        """Count arrivals and bytes to come, and end the phase if none is missing."""
        join(self.coming, clock)
        self.left -= arrivals
        self.bytes += size
        if self.left < 0:
            raise Fault(f"too many arrivals: {where_from()}")
        if self.left == 0 and self.bytes == 0:
            self.phase += 1
            self.left = self.count
            join(self.clock, self.coming)


class Barriers(list):
    """Several mbarriers in one allocation."""

    def index(self, i) -> Barrier:  # type: ignore[override]
        """Return barrier i."""
        return self[int(i)]


class mbarrier:
    """The functions of Gluon's module `mbarrier`. One thread arrives, all of a partition wait."""

    class MBarrierLayout:
        """The layout of an allocation of mbarriers."""

    @staticmethod
    def init(bar: Barrier, count: int) -> None:
        """Let each phase need `count` arrivals."""
        bar.count = bar.left = count
        _program.new_barriers.append(bar)

    @staticmethod
    def wait(bar: Barrier, parity, pred=True) -> None:
        """Wait for the end of the phase of this parity."""
        if pred:
            _program.pause(lambda: bar.phase & 1 != int(parity))
            join(_program.current.clock, bar.clock)

    @staticmethod
    def expect(bar: Barrier, size: int, pred=True) -> None:
        """Arrive, and let the phase need `size` bytes too."""
        if pred:
            bar.change(_program.current.known(), 1, size)
            _program.pause()

    @staticmethod
    def arrive(bar: Barrier, count: int = 1, pred=True) -> None:
        """Arrive `count` times."""
        if pred:
            bar.change(_program.current.known(), count)
            _program.pause()


def barrier() -> None:
    """Let the warps of the partition meet."""
    _program.current.meet()


def fence_async_shared() -> None:
    """Let copies and products see what the partition has stored."""
    for past in _program.past.values():
        for x in past:
            x.fenced = x.fenced or x.agent == _program.current.agent
    for bar in _program.new_barriers:
        bar.fenced = True
    _program.new_barriers.clear()


class Shared:
    """A view of shared memory, which holds NaN at first."""

    def __init__(self, tile: Tensor, layout: object = None):
        self.tile, self.layout, self.dtype = tile, layout, tile.dtype
        self.shape = tuple(tile.shape)

    def index(self, i) -> Shared:
        """Return entry i of the first axis."""
        return Shared(self.tile[int(i)], self.layout)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        """Return a part of an axis."""
        return Shared(self.tile.narrow(dim, start, length), self.layout)

    def permute(self, order: Sequence[int]) -> Shared:
        """Return a view with permuted axes."""
        return Shared(self.tile.permute(order), self.layout)

    def load(self, layout: object = None) -> Tensor:
        """Load the tile."""
        _program.access(self.tile, False)
        return self.tile.clone()

    def store(self, x: Tensor) -> None:
        """Store a tile of the same shape and dtype."""
        x = read(x)
        assert (x.shape, x.dtype) == (self.tile.shape, self.dtype), (x.shape, x.dtype, self.shape)
        _program.access(self.tile, True)
        self.tile.copy_(x)


def reinterpret(x: Shared, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared:
    """Return the view with another dtype and shape."""
    return Shared(x.tile.view(dtype).view(shape), layout)


class Product:
    """A product under way, and the accumulator that holds its result."""

    def __init__(self, a: Shared | Tensor, b: Shared, acc: Tensor | Product | None):
        self.a, self.b, self.acc = a, b, acc
        self.line, self.by, self.value = where_from(), _program.fork(), None
        dtypes = {x.dtype for x in (a, b)}
        assert len(dtypes) == 1 and dtypes <= {*OPERANDS}, f"{self.line} multiplies {dtypes}"
        for x in (a, b):
            if isinstance(x, Shared):
                _program.access(x.tile, False, self.by)

    @property
    def is_over(self) -> bool:
        """Return whether the operands have been read."""
        return self.value is not None

    def run(self) -> None:
        """Read the operands as they are at this moment, and multiply them."""
        a, b = (x.tile if isinstance(x, Shared) else x for x in (self.a, self.b))
        # in double precision, so that a BLAS may take any order of sums
        self.value = (a.double() @ b.double()).float()
        if self.acc is not None:
            self.value += self.acc.value if isinstance(self.acc, Product) else self.acc

    def __getattr__(self, name: str):
        raise Fault(f"{where_from()} reads the product of {self.line}, which nothing waits for")

    def _refuse(self, *other):
        return self.__getattr__("value")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __getitem__ = _refuse


def read(x: Tensor | Product) -> Tensor:
    """Return the operand of a statement; refuse a product under way."""
    return x.itself if isinstance(x, Product) else x


def warpgroup_mma(a, b, acc, *, use_acc: bool = True, is_async: bool = False):
    """Issue a product."""
    assert a.shape[-1] == b.shape[0] and acc is not None
    product = Product(read(a), b, acc if use_acc else None)
    _program.current.products.append(product)
    _program.pause()
    return product if is_async else wait_products(0, (product,))


def wait_products(outstanding: int, deps: Sequence) -> Any:
    """Wait until at most `outstanding` products are under way; each warp waits for its own."""
    me = _program.current
    while len(me.products) > outstanding:
        product = me.products.pop(0)
        if not product.is_over:
            product.run()
        join(me.waited, product.by[1])
    done = [x.value if isinstance(x, Product) and x not in me.products else x for x in deps]
    return done[0] if len(done) == 1 else tuple(done)


def mma_v2(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    """Multiply at once; each warp has its own rows of the result."""
    a, b = read(a), read(b)
    assert a.dtype == b.dtype and a.dtype in OPERANDS, f"{where_from()} multiplies {a.dtype}"
    return a.float() @ b.float() + acc


class Descriptor:
    """A tensor as TMA sees it. What lies outside is zero in a load, and skipped in a store."""

    def __init__(self, base: Tensor, shape: Sequence[int], strides: Sequence[int], block):
        self.tensor = base.as_strided([*shape], [*strides], base.storage_offset())
        self.block, self.dtype, self.layout = tuple(block), base.dtype, None
        # as in scratch [chunks, heads, rows, columns], of which `exchange` tells
        self.tiles = math.prod(base.shape[:2])

    def meets(self, at: Sequence, tile: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of tensor and tile that a copy at these coordinates concerns."""
        copied, expected = (tuple(tile.shape), tile.dtype), (self.block, self.dtype)
        assert copied == expected, f"{where_from()} copies {copied}, the descriptor has {expected}"
        inside, part = self.tensor, tile
        for axis, (first, size) in enumerate(zip(map(int, at), self.tensor.shape, strict=True)):
            count = max(0, min(self.block[axis], size - first))
            inside = inside.narrow(axis, min(first, size), count)
            part = part.narrow(axis, 0, count)
        return inside, part


def load_tile(source: Descriptor, at: Sequence, bar: Barrier, to: Shared, pred=True) -> None:
    """Copy a tile to shared memory, and tell the barrier its bytes."""
    if not pred:
        return
    if not bar.fenced:
        raise Fault(f"no fence after the initialisation of the barrier of {where_from()}")
    by = _program.fork()
    _program.loads[by[0]] = where_from()
    _program.access(to.tile, True, by)
    inside, part = source.meets(at, to.tile)

    def act() -> None:
        to.tile.zero_()
        part.copy_(inside)
        bar.change(by[1], size=-to.tile.nbytes)

    _program.copies.append(Copy(act, by[1]))
    _program.pause()


def store_tile(target: Descriptor, at: Sequence, source: Shared) -> None:
    """Copy a tile from shared memory."""
    by = _program.fork()
    _program.access(source.tile, False, by)
    inside, part = target.meets(at, source.tile)
    copy = Copy(lambda: inside.copy_(part), by[1])
    tile = int(at[0]) * target.tiles // target.tensor.shape[0]
    _program.sent.append((by[0], tile, where_from()))
    _program.copies.append(copy)
    _program.current.stores.append(copy)
    _program.pause()


def store_wait(outstanding: int) -> None:
    """Wait until stores have read shared memory; Triton lets the warps meet behind this wait."""
    wait_written(outstanding)
    _program.current.meet()


class Pointer:
    """A pointer to numbers of a tensor, or a tile of such pointers."""

    def __init__(self, memory: Tensor, at):
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, x: Tensor) -> Pointer:
        """Return the pointer to the first number of a tensor."""
        count = x.untyped_storage().nbytes() // x.element_size()
        return cls(x.as_strided((count,), (1,), 0), x.storage_offset())

    def __add__(self, offset) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def places(self, mask, shape: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Return where to read or write, and which of these places count."""
        shape = torch.broadcast_shapes(torch.as_tensor(self.at).shape, shape)
        at, mask = (torch.as_tensor(x).broadcast_to(shape) for x in (self.at, mask))
        assert not ((at < 0) & mask).any(), f"{where_from()} reads or writes before its tensor"
        return at, mask


def load(p: Pointer, mask=True, other=0) -> Tensor:
    """Load from global memory, `other` where the mask is false."""
    at, mask = p.places(mask, torch.as_tensor(mask).shape)
    return torch.where(mask, p.memory[at * mask], torch.as_tensor(other, dtype=p.memory.dtype))


def store(p: Pointer, x, mask=True) -> None:
    """Store to global memory where the mask is true."""
    x = torch.as_tensor(read(x), dtype=p.memory.dtype)
    at, mask = p.places(mask, x.shape)
    p.memory[at[mask]] = x.broadcast_to(at.shape)[mask]


def flush(x: Tensor) -> Tensor:
    """Replace numbers below the least normal one by zero."""
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, 0.0, x)


def scaled(x: Tensor, assembly: str) -> Tensor:
    """Return x times the pair of bf16 numbers that the assembly names."""
    words = torch.tensor([int(re.findall("0x([0-9a-f]{4})", assembly)[0], 16)], dtype=torch.int16)
    return x * words.view(torch.bfloat16)


ASSEMBLY: dict[str, Callable[[Tensor, str], Tensor]] = {
    "mul.rn.bf16x2 ": scaled,
    "ex2.approx.ftz.f32 ": lambda x, _: flush(torch.exp2(flush(x))),
    "lg2.approx.ftz.f32 ": lambda x, _: torch.log2(flush(x)),
    "rcp.approx.ftz.f32 ": lambda x, _: flush(1.0 / flush(x)),
    "cvt.rn.bf16x2.f32 ": lambda x, _: x.bfloat16(),
    "cvt.rn.f16x2.f32 ": lambda x, _: x.half(),
    "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;": lambda x, _: x.float(),
}


def wait_written(outstanding: int) -> None:
    """Wait until stores have written global memory; each warp waits for its own."""
    me = _program.current
    while len(me.stores) > outstanding:
        copy = me.stores.pop(0)
        _program.pause(lambda copy=copy: copy.is_over)
        join(me.waited, copy.clock)


def exchange(p: Pointer, x: int, sem: str, scope: str) -> None:
    """Tell other kernels that tile `p.at` is written; refuse where its stores are not known."""
    known = _program.current.known()
    for agent, tile, line in _program.sent:
        if tile == int(p.at) and agent not in known:
            raise Fault(f"{where_from()} tells of a tile that {line} may not have written")
    p.memory[int(p.at)] = x


def assemble(assembly: str, constraints, args, dtype: torch.dtype, is_pure, pack) -> Tensor:
    """Do what the assembly of these kernels does to the entries of a tile."""
    if written := re.match(r"cp.async.bulk.wait_group (\d)", assembly):
        wait_written(int(written[1]))
        return torch.tensor(0, dtype=dtype)
    if "griddepcontrol" in assembly:
        return torch.tensor(0, dtype=dtype)
    if "ld.acquire" in assembly:
        if not int(args[0].memory[int(args[0].at)]):
            raise Fault(f"{where_from()} waits for a tile that nobody has written")
        return torch.tensor(0, dtype=dtype)
    (x,) = map(read, args)
    (does,) = (f for words, f in ASSEMBLY.items() if words in assembly)
    y = does(x, assembly)
    assert y.dtype == dtype, f"{where_from()} makes {y.dtype}"
    return y


def accumulate(x: Tensor, axis: int, combine: Callable) -> Tensor:
    """Combine entries along an axis, one after another."""
    return torch.stack([*itertools.accumulate(read(x).unbind(axis), combine)], axis)


def allocate(dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared | Barrier | list:
    """Allocate shared memory."""
    if isinstance(layout, mbarrier.MBarrierLayout):
        return Barrier() if len(shape) == 1 else Barriers(Barrier() for _ in range(shape[0]))
    unset = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
    return Shared(torch.full(shape, unset, dtype=dtype), layout)


def numbers(*bounds) -> Iterator[Tensor]:
    """Count as a loop of a kernel does, in 32 bits."""
    for i in range(*map(int, bounds)):
        yield torch.tensor(i, dtype=torch.int32)


class PropagateNan:
    """Whether NaN is in the result where it is in one argument."""

    NONE, ALL = False, True


def likewise(function: Callable, propagating: Callable) -> Callable:
    """Let a function of two tensors take a number in place of either."""

    def of_two(a, b, propagate_nan: bool = PropagateNan.NONE) -> Tensor:
        a = torch.as_tensor(a)
        return (propagating if propagate_nan else function)(a, torch.as_tensor(b, dtype=a.dtype))

    return of_two


class Layout:
    """Any layout: the emulator has none."""

    def __init__(self, *args, **options):
        pass

    @classmethod
    def get_default_for(cls, *args) -> Layout:
        """Return a layout."""
        return cls()


class Constant:
    """A constant of a kernel, which is a plain value here."""

    def __new__(cls, x=None):
        """Return the value."""
        return x


def static_assert(holds: bool) -> None:
    """Fail where the kernel would not compile."""
    assert holds, where_from()


def jit(function: Callable | None = None, **options) -> Callable:
    """Leave a function as it is."""
    return (lambda function: function) if function is None else function


gl = SimpleNamespace(
    **{name: getattr(torch, name) for name in "bfloat16 float16 float32 int32 int64".split()},
    **{
        name + "Layout": Layout
        for name in (
            *("Blocked", "DistributedLinear", "Slice", "SwizzledShared"),
            *("NVMMAShared", "NVMMADistributed", "DotOperand"),
        )
    },
    constexpr=Constant,
    tensor=Tensor,
    shared_memory_descriptor=Shared,
    allocate_shared_memory=allocate,
    warp_specialize=lambda *args: _program.specialise(*args),
    program_id=lambda axis: torch.tensor(_program.index, dtype=torch.int32),
    static_range=range,
    static_assert=static_assert,
    arange=lambda first, end, layout=None: torch.arange(first, end, dtype=torch.int32),
    zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    load=load,
    store=store,
    atomic_xchg=exchange,
    inline_asm_elementwise=assemble,
    associative_scan=accumulate,
    convert_layout=lambda x, layout: read(x),
    reshape=lambda x, shape: read(x).reshape(shape),
    permute=lambda x, order: read(x).permute(order),
    expand_dims=lambda x, axis: read(x).unsqueeze(axis),
    join=lambda a, b: torch.stack((read(a), read(b)), -1),
    split=lambda x: read(x).unbind(-1),
    sum=lambda x, axis: read(x).sum(axis),
    where=lambda c, a, b: torch.where(torch.as_tensor(c), read(a), read(b)),
    maximum=likewise(torch.fmax, torch.maximum),
    minimum=likewise(torch.fmin, torch.minimum),
    PropagateNan=PropagateNan,
    abs=torch.abs,
    exp=torch.exp,
    exp2=torch.exp2,
    rsqrt=torch.rsqrt,
)
IMPORTED = SimpleNamespace(  # what kernels import, from whichever module
    gluon=SimpleNamespace(jit=jit, constexpr_function=jit),
    jit=jit,  # of Triton, whose functions kernels of Gluon may call
    language=gl,
    aggregate=jit,
    mbarrier=mbarrier,
    tma=SimpleNamespace(store_wait=store_wait, tensor_descriptor=Descriptor),
    tensor_descriptor=Descriptor,
    barrier=barrier,
    fence_async_shared=fence_async_shared,
    load_tile=load_tile,
    store_tile=store_tile,
    reinterpret=reinterpret,
    warpgroup_mma=warpgroup_mma,
    wait_products=wait_products,
    mma_v2=mma_v2,
    SUMS_OF_WORDS=False,
)


class Rewritten(ast.NodeTransformer):
    """Replace what means something else for tensors of torch, on the same lines."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace `x.type.layout` and `dtype.primitive_bitwidth`, which torch does not have."""
        self.generic_visit(node)
        inner = node.value.attr if isinstance(node.value, ast.Attribute) else ""
        new: ast.AST = node
        if (inner, node.attr) == ("type", "layout"):
            new = ast.Constant(None)
        elif node.attr == "primitive_bitwidth":
            size = ast.Attribute(node.value, "itemsize", ast.Load())
            new = ast.BinOp(size, ast.Mult(), ast.Constant(8))
        return ast.copy_location(new, node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """Replace `x += y`, which changes a tensor of torch in place."""
        self.generic_visit(node)
        old = ast.parse(ast.unparse(node.target), mode="eval").body
        new = ast.Assign([node.target], ast.BinOp(old, node.op, node.value))
        return ast.copy_location(new, node)


@lru_cache(None)
def unchanged(path: Path) -> SimpleNamespace:
    """Load a module of functions that several kernels share."""
    return module(path)


def importer(changed: Mapping[str, str | None]) -> Callable:
    """Return what takes the place of `__import__` in modules of kernels."""

    def imported(name: str, *args) -> SimpleNamespace:
        folder, _, last = name.rpartition(".")
        if name.startswith("triton") or last == "gluon_names":
            return IMPORTED
        found = __import__(name, *args)
        taken = (getattr(found, n, None) for n in args[2] or ())
        if not any(isinstance(x, JITFunction) for x in taken):
            return SimpleNamespace(**{n: given(x) for n, x in vars(found).items()})
        path = TRITON / folder.rpartition(".")[2] / f"{last}.py"
        return module(path, changed) if changed.get(last) else unchanged(path)

    return imported


@lru_cache(64)
def rewritten(source: str, path: str) -> CodeType:
    """Return the code of a module for tensors of torch."""
    tree = Rewritten().visit(ast.parse(source))
    return compile(ast.fix_missing_locations(tree), path, "exec")


def module(path: str | Path, changed: Mapping[str, str | None] | None = None) -> SimpleNamespace:
    """Load a module of kernels. `changed` has other sources, by the names of modules."""
    changed, path = changed or {}, Path(path)
    source = changed.get(path.stem) or path.read_text(encoding="utf-8")
    replaced = {"__import__": importer(changed), "range": numbers}
    names = {"__builtins__": vars(builtins) | replaced, "__name__": str(path), "IS_EMULATED": True}
    exec(rewritten(source, str(path)), names)
    return SimpleNamespace(**names)


def given(x: Any) -> Any:
    """Return an argument of a launch as the kernel sees it."""
    if isinstance(x, Tensor):
        return Pointer.to(x)
    if isinstance(x, tuple):
        return type(x)(*map(given, x)) if hasattr(x, "_fields") else tuple(map(given, x))
    if hasattr(x, "block_shape"):
        return Descriptor(x.base, x.shape, x.strides, x.block_shape)
    return x.value if type(x).__name__ == "constexpr" else x


def launch(kernel: Callable, programs: int, seed: int = 0, **args: Any) -> None:
    """Run the programs of a kernel one after another; `seed` draws all orders."""
    global _program
    args = {name: given(x) for name, x in args.items()}
    for index in random.Random(seed).sample(range(programs), programs):
        _program = Program(index, f"{seed} {index}")
        kernel(**args)
