"""Choose block sizes, warps and stages per kernel, architecture and width, from a table.

Nothing is measured at run time. Each kernel has a record of the options that act on it: `KERNELS`.
`sum_decays` and `sum_gradients` have one warp. The warps of the walks in Gluon have roles, which
their files fix.

``python -m kda_ops tune`` measures alternatives and writes the better ones to a JSON file
(`cache_file`), which is read at the first call. Its entries count only for the device, the triton
version and the source of the kernel they were measured with.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import triton

from kda_ops.backends.triton.plans.descriptors import WIDTH, has_gluon
from kda_ops.backends.triton.private import INTERPRET
from kda_ops.gates import SAFE_BOUND
from kda_ops.problem import CHUNK, Problem
from kda_ops.sequences import count_chunks

HOPPER = 9
Options = TypeVar("Options", bound="Launch")
# Clamp for log decays where 8 rows share an anchor: exp(-19) = 6e-9 is below a rounding of bf16.
# `decay.check_anchor` states its limits.
FLOOR = -19.0
# how often a scan that follows `prepare` looks for its next chunk; a look takes about 1 us
PATIENCE = 1 if INTERPRET else 1000


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Warps, and the most registers per thread: the options of a kernel without others."""

    warps: int = 4
    registers: int | None = None

    @property
    def launch(self) -> dict[str, Any]:
        """Return the options that are not arguments of a kernel."""
        cap = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps} | cap


@dataclass(frozen=True, kw_only=True)
class Rows(Launch):
    """Columns of K per step, and rows per thread (`tile.load_rows`)."""

    block_k: int
    group: int = 4


@dataclass(frozen=True, kw_only=True)
class Columns(Launch):
    """Columns of V per program or step, and pipeline stages."""

    block_v: int
    stages: int = 1


@dataclass(frozen=True, kw_only=True)
class Blocks(Columns):
    """Columns of K per step too."""

    block_k: int


@dataclass(frozen=True, kw_only=True)
class Tile(Launch):
    """Columns of K and of V per step, without a pipeline."""

    block_k: int
    block_v: int


@dataclass(frozen=True, kw_only=True)
class Entries(Launch):
    """Entries of a program's tile, whose rows are whole."""

    entries: int


@dataclass(frozen=True, kw_only=True)
class Steps(Entries):
    """Tiles of a program too, which share one partial sum."""

    steps: int


@dataclass(frozen=True, kw_only=True)
class Held(Entries):
    """Entries of a program's part of a state, and the keys that lie along a row of its threads.

    Smaller parts have proportionally fewer warps.
    """

    keys: int


@dataclass(frozen=True, kw_only=True)
class Channels(Launch):
    """Channels of a program, unless many taps leave registers for fewer."""

    channels: int


@dataclass(frozen=True, kw_only=True)
class Runs(Channels):
    """Runs of a program and tokens of a run; in a turn of its loop, `unroll` tokens are loaded."""

    groups: int
    rows: int
    unroll: int


class Widths(NamedTuple):
    """What the table asks of a call. Without keys, K is 1, or the taps of a convolution."""

    dtype: torch.dtype  # of the operands, and of the states of `recur`
    device: torch.device
    K: int
    V: int  # or the channels of a head, or of all heads of a convolution
    invariant: bool = False


def widths_of(p: Problem | Widths) -> Widths:
    """Return what the table asks of a call."""
    if isinstance(p, Widths):
        return p
    return Widths(p.q.dtype, p.q.device, p.K, p.V, p.invariant)


@dataclass(frozen=True, eq=False)
class Forced:
    """What `force` puts in the place of rules; None: the rule decides.

    A plan belongs to the record under which it was made, so a record has no equal.
    """

    run: int | None = None  # chunks per run (`run_length`)
    ahead: int | None = None  # chunks that are prepared before the scan (`ahead`)
    walk: bool | None = None  # whether KDA walks, and GDN's backward (walk.py, reverse_walk.py)
    shares: int | None = None  # programs that prepare for one that scans (`shares`)
    patience: int | None = None  # PATIENCE
    anchored_rows: int | None = None
    anchored: bool | None = None
    leaves_room: bool | None = None
    processors: int | None = None  # multiprocessors of any device
    # the architecture for tensors that are on no GPU: interpreter and offline compilation
    architecture: int = HOPPER
    options: Mapping[str, Launch] = field(default_factory=dict)  # by kernel


FORCED = Forced()


@contextmanager
def force(**rules: Any) -> Iterator[None]:
    """Put values in the place of rules, for tests, tuning and offline compilation."""
    global FORCED
    before = FORCED
    FORCED = replace(before, **rules)
    try:
        yield
    finally:
        FORCED = before


def patience() -> int:
    """Return how often a scan that follows `prepare` looks for its next chunk."""
    return PATIENCE if FORCED.patience is None else FORCED.patience


def width(columns: int, dtype: torch.dtype) -> int:
    """Return the width of a tile that holds `columns`: a power of two, of at least 128 bytes.

    For narrower rows ptxas forms wrong wgmma descriptors in loops, as of Triton 3.6
    (docs/kernels/hazards.md, "Narrow shared rows").
    """
    return max(128 // dtype.itemsize, 1 << (columns - 1).bit_length())


def power(columns: int) -> int:
    """Return the least power of two that holds `columns`, at least 16 as for tensor cores."""
    return max(16, 1 << (columns - 1).bit_length())


def centred(p: Problem) -> bool:
    """Return whether the rows of half a chunk can share an anchor.

    They can if the flags promise a bound, and the operands have the range of fp32.
    """
    bound = p.gate.bound
    return p.q.dtype is torch.bfloat16 and bound is not None and bound >= SAFE_BOUND


def anchored(p: Problem) -> bool:
    """Return whether `gradient_keys` may use factors from 2^-58 to 2^58, where decays allow it.

    It may if its operands have the range of fp32, and round more coarsely than such factors do.
    """
    return p.q.dtype is torch.bfloat16 if FORCED.anchored is None else FORCED.anchored


def anchored_rows(p: Problem) -> int:
    """Return how many rows of a chunk share an anchor in `prepare_kda`.

    That is 32 under a bound, 8 where decays can be clamped at FLOOR, else 1.
    """
    if FORCED.anchored_rows is not None:
        return FORCED.anchored_rows
    return 32 if centred(p) else 8 if p.q.dtype is torch.bfloat16 else 1


def ragged(p: Problem) -> bool:
    """Return whether keys have more than 128 columns and do not fill 256."""
    return 128 < p.K < 256


def inverse_precision(p: Problem) -> str:
    """Return the precision of the products that form the inverse of a chunk.

    fp16 holds an inverse whose entries do not exceed 1. For fp16 inputs its error is twice their
    rounding: too much with correlated keys and a beta of exactly 0 or 1. A given beta may be so; a
    sigmoid inside is so for large logits only. The choice depends on flags and the dtype, never on
    values.
    """
    if p.q.dtype is torch.float32:
        return "tf32x3"
    coarse = p.q.dtype is torch.bfloat16 or (p.l2norm and p.sigmoid_beta)
    return "fp16" if p.bounded_inverse and coarse else "bf16x3"


def architecture(device: torch.device) -> int:
    """Return the major compute capability, which the table is keyed by."""
    return _capability(device)[0] if device.type == "cuda" else FORCED.architecture


def walks(p: Problem) -> bool:
    """Return whether flags, dtypes, widths, heads and device allow KDA's walk.

    A call whose decays have no bound walks only where `force(walk=True)` says so. Nothing here
    depends on values, B, N, T, strides or addresses.
    """
    return bool(
        p.rank
        and FORCED.walk is not False
        and p.q.dtype is torch.bfloat16
        and is_hopper(p.q.device)
        and has_gluon()
        and p.K == p.V == WIDTH
        and p.g is not None
        and p.g.dtype in (torch.bfloat16, torch.float32)
        and (centred(p) or FORCED.walk)
        and (FORCED.walk or p.invariant or not has_runs(p.HV, p.V, p.q.device))
        and p.HV * 128 * 64 < 2**31  # coordinates have 32 bits
    )


def shares(p: Problem) -> int:
    """Return how many programs prepare the chunks of each sequence and head, for one that scans.

    0 means that one program prepares and scans. To prepare a chunk takes about twice as long as to
    scan it, and without a bound about 3.5 times. So up to three programs, or five without a bound,
    keep one scan busy, if all fit on the device at once. Their number changes no bits.
    """
    if p.N == 0:
        return 0
    if FORCED.shares is not None:
        return FORCED.shares
    programs, room = p.N * p.HV, processors(p.q.device)
    if 3 * programs > room or p.B * p.T < 8 * CHUNK * p.N:  # two launches cost more
        return 0
    return next(n for n in range(3 if centred(p) else 5, 1, -1) if (n + 1) * programs <= room)


def walks_back(p: Problem, need: frozenset[str]) -> bool:
    """Return whether KDA's backward walks, after a forward that has walked.

    A walk takes the same time for one head as for as many as there are multiprocessors, so the
    separate kernels are faster for few sequences and heads. They are so too where only the
    gradients of v, of the initial state and of beta's logits are asked for, because they leave out
    `gradient_keys` then. Bits of gradients depend on that choice. With `invariant` it always walks.
    """
    few = 5 * p.N * p.HV < 2 * processors(p.q.device)
    light = need <= {"v", "initial_state"} | ({"beta"} if p.sigmoid_beta else set())
    return walks(p) and centred(p) and (FORCED.walk or p.invariant or not (few or light))


def is_hopper(device: torch.device) -> bool:
    """Return whether a device has compute capability 9.0, for kernels that need it."""
    if device.type != "cuda":
        return device.type == "meta" and FORCED.architecture == HOPPER  # offline compilation
    return _capability(device) == (9, 0)


@lru_cache(None)
def _capability(device: torch.device) -> tuple[int, int]:
    """Ask torch once per device: asking takes 10 us, and a training step asks 26 times.

    It is (0, 0) for a device that is not there, on which only fake tensors can be.
    """
    if (device.index or 0) >= torch.cuda.device_count():
        return 0, 0
    return torch.cuda.get_device_capability(device)


def begins_early(device: torch.device) -> dict[str, Any]:
    """Return the launch option by which a kernel may begin before the previous one ends.

    It is for kernels that call `tile.wait_for_previous`, from Hopper on, and for `scan_walk`, which
    waits for single tiles.
    """
    return {"launch_pdl": True} if device.type != "cpu" and architecture(device) >= HOPPER else {}


def row(kernel: str, p: Problem | Widths) -> str:
    """Return the name of a call's row in the tuned file.

    Nothing in it depends on B, T, N, H or values.
    """
    mode, w = "", widths_of(p)
    if kernel == "prepare_kda" and isinstance(p, Problem):
        mode = f".rows{anchored_rows(p)}" + ".ragged" * ragged(p)
    return (
        f"{kernel}{mode}.sm{architecture(w.device)}0.{8 * w.dtype.itemsize}"
        f".K{width(w.K, w.dtype)}.V{min(width(w.V, w.dtype), 256)}"
    )


def choose(
    kernel: str, p: Problem | Widths, kind: type[Options], length: int | None = None
) -> Options:
    """Return the options for a call, of the kernel's record: from the tuned file if it has the row,
    else from TABLE. `length` is that of `pieces`.

    Options decide in which order kernels sum, so calls with `invariant` ignore the file.
    """
    w = widths_of(p)
    given = None if w.invariant else tuned(w.device).get(row(kernel, p))
    found = FORCED.options.get(kernel) or given or table(kernel, p, length)
    assert isinstance(found, kind)  # `KERNELS` says which
    return found


class TableRow(NamedTuple):
    """A row of the table: operands of `bits`, architectures `sm`, keys up to `K` columns."""

    bits: int
    sm: str  # "early": before sm_90; "hopper"; "later": after sm_90; "any"
    K: int
    options: Launch
    fixed: bool = False  # blocks keep their size even where a tensor is narrower


ALL = 256  # the widest key; as a block: all columns
_EXACT = (  # with 32 columns of V, ptxas gives up registers (hazards.md, "Lost registers")
    TableRow(32, "any", 64, Columns(block_v=16)),
    TableRow(32, "any", ALL, Columns(block_v=16, warps=8)),
)
# How kernels are cut: of a kernel's rows, the first that fits. A block is at most as wide as its
# tensor. Measured on an H200 with triton 3.6 (docs/kernels/journal/); other architectures take what
# fits their shared memory.
TABLE: dict[str, tuple[TableRow, ...]] = {
    "prepare_kda": (
        TableRow(32, "any", ALL, Rows(block_k=32)),
        TableRow(16, "any", ALL, Rows(block_k=128)),
    ),
    # K from 129 to 255: with 128 columns ptxas gives up registers (hazards.md, "Lost registers")
    "prepare_ragged": (TableRow(16, "any", ALL, Rows(block_k=64)),),
    # three programs of 168 registers per multiprocessor beat four of 128, which spill; where the
    # inverse takes split products they are level
    # (docs/kernels/journal/three-programs-of-prepare-gdn.md)
    "prepare_gdn": (
        TableRow(16, "any", 128, Launch(registers=168)),
        TableRow(0, "any", ALL, Launch()),
    ),
    # for layers, K = V = 128: the same bits as "scan", in half as many programs
    "scan_wide": (TableRow(16, "hopper", 128, Columns(block_v=128, warps=8, stages=3)),),
    # before Hopper, ptxas gives up registers for 64 columns of a scan that keeps its states
    "scan": (
        *_EXACT,
        TableRow(16, "early", ALL, Columns(block_v=32)),
        TableRow(16, "hopper", 128, Columns(block_v=64, stages=3)),
        TableRow(16, "any", ALL, Columns(block_v=64)),
    ),
    "scan_maps": (
        *_EXACT,
        TableRow(16, "early", ALL, Columns(block_v=32)),
        TableRow(16, "hopper", 128, Columns(block_v=64, stages=2)),
        TableRow(16, "any", ALL, Columns(block_v=64)),
    ),
    "reverse_scan": (
        *_EXACT,
        TableRow(16, "hopper", 128, Columns(block_v=64, stages=3)),
        TableRow(16, "any", ALL, Columns(block_v=64)),
    ),
    # before Hopper, ptxas gives up registers for wider ones; after it, for 4 warps in fp32
    "gradient_gdn": (
        TableRow(32, "later", ALL, Blocks(block_k=32, block_v=32, warps=8)),
        TableRow(32, "any", ALL, Blocks(block_k=32, block_v=32)),
        TableRow(16, "early", ALL, Blocks(block_k=32, block_v=32)),
        TableRow(16, "any", ALL, Blocks(block_k=128, block_v=128)),
    ),
    "gradient_pairs": (
        TableRow(32, "any", ALL, Columns(block_v=32)),
        TableRow(16, "hopper", ALL, Columns(block_v=128, registers=168)),
        TableRow(16, "any", ALL, Columns(block_v=128)),
    ),
    # where operands of products come from registers, 64 columns spill kilobytes
    "gradient_keys": (
        TableRow(32, "early", ALL, Blocks(block_k=32, block_v=32)),
        TableRow(32, "any", ALL, Blocks(block_k=64, block_v=32), fixed=True),
        TableRow(16, "early", ALL, Blocks(block_k=32, block_v=64)),
        TableRow(16, "any", ALL, Blocks(block_k=64, block_v=64)),
    ),
    # one warp, so that many programs, most of which end at once, run together
    "gradient_small": (TableRow(0, "any", ALL, Tile(block_k=16, block_v=16, warps=1)),),
    "gather_heads": (TableRow(0, "any", ALL, Entries(entries=4096)),),
    "join_runs": (
        TableRow(0, "hopper", ALL, Columns(block_v=16, warps=8, stages=3)),
        TableRow(0, "any", ALL, Columns(block_v=16, warps=8)),
    ),
    # A thread holds 256 bytes of a state. Where keys are contiguous, 16 threads hold 256 bytes of
    # one column: a sum over keys then stays within a warp, and a program of one warp has no
    # barriers. Otherwise ("rows") a program reads rows of 64 columns, because long rows use the
    # memory's bandwidth best. Registers are capped where one more program per multiprocessor is
    # worth it. "one" is a token per sequence.
    "recur": (
        TableRow(16, "any", ALL, Held(entries=4096, keys=128, warps=1)),
        TableRow(0, "any", ALL, Held(entries=4096, keys=64, warps=2, registers=128)),
    ),
    "recur_one": (
        TableRow(16, "any", ALL, Held(entries=4096, keys=128, warps=1)),
        TableRow(0, "any", ALL, Held(entries=2048, keys=64, warps=1)),
    ),
    "recur_rows": (
        TableRow(16, "any", ALL, Held(entries=8192, keys=1, warps=2)),
        TableRow(0, "any", ALL, Held(entries=8192, keys=1, warps=4, registers=128)),
    ),
    "recur_one_rows": (
        TableRow(16, "any", ALL, Held(entries=8192, keys=1, warps=2, registers=168)),
        TableRow(0, "any", ALL, Held(entries=8192, keys=1, warps=4)),
    ),
    "gate_forward": (TableRow(0, "any", ALL, Entries(entries=2048)),),
    "gate_gradient": (TableRow(0, "any", ALL, Steps(entries=2048, steps=16)),),
    # tiles of backward stay in registers
    "normalise": (TableRow(0, "any", ALL, Entries(entries=4096)),),
    "normalise_gradient": (TableRow(0, "any", ALL, Steps(entries=4096, steps=4)),),
    # a warp per run
    "convolve": (TableRow(0, "any", ALL, Runs(channels=128, groups=4, rows=16, unroll=2)),),
    "convolve_one": (
        TableRow(0, "any", ALL, Runs(channels=128, groups=1, rows=1, unroll=1, warps=1)),
    ),
    "write_tails": (TableRow(0, "any", ALL, Channels(channels=128, warps=1)),),
    # so few registers that two programs share a multiprocessor
    "convolve_gradient": (
        TableRow(0, "any", ALL, Runs(channels=128, groups=4, rows=64, unroll=4, registers=128)),
    ),
    "tail_gradient": (TableRow(0, "any", ALL, Channels(channels=128, warps=1)),),
}


# Every kernel that `choose` knows, and the record of the options that act on it.
KERNELS: dict[str, type[Launch]] = {
    "prepare_kda": Rows,
    "prepare_gdn": Launch,
    **{
        f"{scan}_{variant}{part}": Columns
        for variant in ("kda", "gdn")
        for scan, parts in (("scan", ("", "_maps", "_overlapped")), ("reverse_scan", ("", "_maps")))
        for part in parts
    },
    "gradient_gdn": Blocks,
    "gradient_pairs": Columns,
    "gradient_keys": Blocks,
    "gradient_small": Tile,
    "gather_heads": Entries,
    "join_runs": Columns,
    **{f"recur{form}": Held for form in ("", "_one", "_rows", "_one_rows")},
    "gate_forward": Entries,
    "gate_gradient": Steps,
    "normalise": Entries,
    "normalise_gradient": Steps,
    "convolve": Runs,
    "convolve_one": Runs,
    "write_tails": Channels,
    "convolve_gradient": Runs,
    "tail_gradient": Channels,
}
# The files of kernels that are not named like their file.
_FILES = {
    "join_runs": "runs",
    "gather_heads": "gradient",
    "recur": "step",
    **dict.fromkeys(("gate_forward", "gate_gradient"), "gate"),
    **dict.fromkeys(("normalise", "normalise_gradient"), "gated_norm"),
    **dict.fromkeys(
        ("convolve", "write_tails", "convolve_gradient", "tail_gradient"), "short_conv"
    ),
}


def table(kernel: str, p: Problem | Widths, length: int | None = None) -> Launch:
    """Return the options of the first row of TABLE that fits a call."""
    w = widths_of(p)
    bits, sm = 8 * w.dtype.itemsize, architecture(w.device)
    wide = power if kernel == "join_runs" else partial(width, dtype=w.dtype)
    widths = {"block_k": wide(w.K), "block_v": wide(w.V)}
    for name in names(kernel, p, length):
        for row in TABLE.get(name, ()):
            era = "early" if sm < HOPPER else "hopper" if sm == HOPPER else "later"
            if row.bits in (0, bits) and row.sm in ("any", era) and widths["block_k"] <= row.K:
                o = row.options
                given = {n: getattr(o, n) for n in widths if hasattr(o, n) and not row.fixed}
                return replace(o, **{n: min(x, widths[n]) for n, x in given.items()})
    raise KeyError(kernel)


def kernel_of(name: str) -> Any:
    """Return the kernel that takes options of this name; importing it imports its stage."""
    base = name
    for form in ("_maps", "_overlapped", "_rows", "_one"):
        base = base.removesuffix(form)
    # both variants of a scan share a file
    file = _FILES.get(base, base)
    file = file[:-4] if "scan" in file else file
    return getattr(importlib.import_module(f"kda_ops.backends.triton.stages.{file}"), base)


@lru_cache(None)
def source_of(name: str) -> str:
    """Return a hash of a kernel's source, and of that of the functions which it calls."""
    kernel = kernel_of(name)
    key = getattr(kernel, "cache_key", None)  # a kernel that is interpreted has none
    return (key or hashlib.sha256(inspect.getsource(kernel.fn).encode()).hexdigest())[:16]


def names(kernel: str, p: Problem | Widths, length: int | None = None) -> Iterator[str]:
    """Yield the names under which TABLE may hold a kernel, the special ones first.

    The two variants of a scan are cut alike. With K = V = 128, two cases take wide programs: two
    narrow ones per head and piece do not all run at once, or `prepare` runs at the same time.
    Ragged keys have rows of their own in `prepare_kda`.
    """
    if isinstance(p, Widths):
        yield kernel
        return
    if kernel == "prepare_kda" and ragged(p):
        yield "prepare_ragged"
    if "scan" in kernel:
        stage = "reverse_scan" if kernel.startswith("reverse") else "scan"
        waves = 2 * pieces(p, length) * p.HV > processors(p.q.device)
        if (waves or kernel.endswith("_overlapped")) and (
            width(p.K, p.q.dtype) == width(p.V, p.q.dtype) == 128
        ):
            yield "scan_wide"
        if kernel.endswith("_maps"):
            yield f"{stage}_maps"
        yield stage
    yield kernel


def leaves_room(p: Problem) -> bool:
    """Return whether two scans of a call should run at once, on two streams.

    They are independent. Both must fit on the device, and be long enough to repay the second
    stream.
    """
    if FORCED.leaves_room is not None:
        return FORCED.leaves_room
    block_v = choose("scan_kda" if p.rank else "scan_gdn", p, Columns).block_v
    programs = p.N * p.HV * triton.cdiv(p.V, block_v)
    return p.B * p.T >= 16384 * p.N and 2 * programs <= processors(p.q.device) and not run_length(p)


# The cost model of `ahead`, from an H200 (docs/kernels/journal/chunks-prepared-during-the-scan.md),
# split products from an H100 (docs/kernels/journal/two-costs-for-gdn-chunks.md); bf16, K = V = 128.
STEP = 2.3  # us: one chunk of a scan
LEAST_SCAN = 250.0  # us: for a shorter scan, overlap saves less than its launches cost in Python
TILE = {  # us: one chunk and head of `prepare`, on all multiprocessors of the device
    "gdn": 0.0165,
    "gdn, inverse in split products": 0.0255,
    "kda, bounded": 0.05,
    "kda, gate inside": 0.068,
    "kda, decay given": 0.084,
}
SLOWER = 3.0  # during KDA's scan a tile takes 1 + SLOWER (heads / multiprocessors)^4 times as long


def ahead(p: Problem) -> int | None:
    """Return how many chunks of a call's one sequence `prepare` makes before the scan begins.

    None means all of them. The others are made during the scan, on multiprocessors that it leaves
    idle. The number is such that the last one is ready when the scan needs it. It changes no bits.
    """
    if (
        p.N != 1
        or p.cu_seqlens is not None
        or p.state_indices is not None
        or p.snapshot_indices is not None
        or run_length(p)
    ):
        return None
    chunks, multiprocessors = triton.cdiv(p.T, CHUNK), processors(p.q.device)
    if FORCED.ahead is not None:
        return FORCED.ahead if FORCED.ahead < chunks else None
    idle = multiprocessors - p.HV
    if 8 * idle < multiprocessors or p.q.dtype is torch.float32 or not p.K == p.V == 128:
        return None
    if chunks < math.ceil(LEAST_SCAN / STEP):
        return None
    # GDN: two narrow programs per head, all running at once, gain more than this overlap
    if not p.rank and 2 * p.HV <= multiprocessors:
        return None
    single = inverse_precision(p) == "fp16"
    if not p.rank:
        kind = "gdn" if single else "gdn, inverse in split products"
    elif anchored_rows(p) > 8:
        kind = "kda, bounded"
    else:
        kind = "kda, gate inside" if p.gate.inside or single else "kda, decay given"
    slower = 1 + SLOWER * (p.HV / multiprocessors) ** 4 if p.rank else 1.0
    # chunks that `prepare` makes while the scan takes 1024 of them
    meanwhile = int(1024 * STEP / (p.HV * TILE[kind] * slower * multiprocessors / idle))
    return max(1, chunks - (chunks - 8) * meanwhile // 1024)


SHARD_RUN = 32  # chunks per run of a shard


def has_runs(HV: int, V: int, device: torch.device) -> bool:
    """Return whether value heads are so few that long sequences are cut into runs."""
    return 3 * HV * triton.cdiv(V, 64) <= processors(device)


def longest_run(HV: int, K: int, V: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the most chunks that are scanned one after another, or 0 for any number.

    Longer sequences are cut into runs of so many (runs.py). The rule was measured on an H200
    (docs/kernels/journal/runs.md).
    """
    if width(K, dtype) > 128 or V == 0:  # `join_runs` holds a map at once
        return 0
    if FORCED.run is not None:
        return FORCED.run
    if not has_runs(HV, V, device):
        return 0
    return 32 if 6 * HV * triton.cdiv(V, 64) > processors(device) else 16


def run_length(p: Problem) -> int:
    """Return the chunks per run of the scans (runs.py), or 0 where sequences stay whole.

    They stay whole too if none is longer than a run. So results depend on the widths, HV and the
    number of multiprocessors, never on B, N, T or values, and with `invariant` on widths alone.

    A shard with tokens is always cut, unless a map is too wide for the join: few ranks leave few
    sequences and heads, and the state that enters comes late.
    """
    if p.sharded:
        length = SHARD_RUN if FORCED.run is None else FORCED.run
        return 0 if width(p.K, p.q.dtype) > 128 or p.V == 0 or p.T == 0 else length
    length = 0 if p.invariant else longest_run(p.HV, p.K, p.V, p.q.dtype, p.q.device)
    return length if p.T > length * CHUNK else 0


def cut_length(HV: int, K: int, V: int, dtype: torch.dtype, device: torch.device) -> int | None:
    """Return at which multiples of tokens a sequence may be cut; None where there are runs.

    The state that leaves a run comes from the scan of that run, and the next run starts from a
    product of maps. So a cut changes bits, even between two runs.
    """
    return None if longest_run(HV, K, V, dtype, device) else CHUNK


# Lengths of runs of GDN's reverse walk: each new one compiles kernels anew, so there are few.
WALK_RUNS = tuple(m << i for i in range(3, 14) for m in (2, 3))


def walk_run_length(p: Problem) -> int:
    """Return the chunks per run of GDN's reverse walk, or 0 where it walks whole sequences.

    A step takes longer the more programs run, but not in proportion. So runs are the shortest of
    WALK_RUNS with which all programs run at once. Packed sequences stay whole if they have no more
    tokens than a run, on average. The length depends on N and T, as do gradients.
    """
    length, room = FORCED.run, processors(p.q.device)
    if p.invariant or p.N == 0 or length is None and 2 * p.N * p.HV > room:
        return 0
    if length is None:
        fits = (n for n in WALK_RUNS if count_chunks(p, n * CHUNK) * p.HV <= room)
        length = next(fits, 0)
        if p.cu_seqlens is not None and p.T <= p.N * (length * CHUNK):
            return 0
    return length if p.T > length * CHUNK else 0


def pieces(p: Problem, length: int | None = None) -> int:
    """Return how many sequences there are, or runs of sequences: of `length` chunks, if given."""
    if length is None:
        length = run_length(p)
    return count_chunks(p, length * CHUNK) if length else p.N


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device, 0 if it is no GPU."""
    return _processors(device) if FORCED.processors is None else FORCED.processors


@lru_cache(None)
def _processors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 0
    )


def cache_file() -> Path:
    """Return where tuned options are kept: KDA_OPS_TUNING, or a file in the user's cache."""
    given = os.environ.get("KDA_OPS_TUNING")
    return (
        Path(given)
        if given
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "kda_ops"
        / "tuning.json"
    )


@lru_cache(None)
def fingerprint(device: torch.device | None = None) -> str:
    """Return what all tuned options are valid for: the GPU, and the version of Triton.

    For tensors on no GPU it names the current one.
    """
    on_gpu = device is not None and device.type == "cuda"
    name = (
        torch.cuda.get_device_name(device if on_gpu else None)
        if torch.cuda.is_available()
        else "none"
    )
    return f"{name}|triton {triton.__version__}"


def tuned(device: torch.device | None = None) -> dict[str, Launch]:
    """Return the tuned rows by name: none without a file, or without an entry for this machine.

    A row counts only for the source of the kernel that it was measured with. Rows of unknown
    kernels, unknown keys, and rows with values of a wrong type, are ignored.
    """
    return _tuned(fingerprint(device))


@lru_cache(None)
def _tuned(machine: str) -> dict[str, Launch]:
    rows = _entries(cache_file()).get(machine, {})
    found: dict[str, Launch] = {}
    for name, given in rows.items() if isinstance(rows, dict) else ():
        kind = KERNELS.get(kernel := name.split(".")[0])
        if kind is None or not isinstance(given, dict) or given.get("source") != source_of(kernel):
            continue
        words = {f.name: given[f.name] for f in fields(kind) if f.name in given}
        if words.get("registers", 0) is None:  # the compiler decides
            del words["registers"]
        if not all(type(x) is int for x in words.values()):
            continue
        with suppress(TypeError):  # a size is missing
            found[name] = kind(**words)
    return found


def _entries(path: Path) -> dict:
    """Return what the cache file holds, or nothing if it cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def save(rows: Mapping[str, Launch]) -> Path:
    """Add rows to the cache file under this machine's fingerprint, with their kernels' sources."""
    path, machine = cache_file(), fingerprint()
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = _entries(path)
    mine = kept.get(machine)
    kept[machine] = (mine if isinstance(mine, dict) else {}) | {
        name: asdict(options) | {"source": source_of(name.split(".")[0])}
        for name, options in rows.items()
    }
    path.write_text(json.dumps(kept, indent=1, sort_keys=True))
    forget()
    return path


def forget() -> None:
    """Read the cache file anew when it is asked for next."""
    _tuned.cache_clear()
    fingerprint.cache_clear()
