"""Block sizes, warps and stages per kernel, architecture and width: a table, never a measurement at
run time.

``python -m kda_ops tune`` measures alternatives and writes the better ones to a JSON file
(`cache_file`), which is read at the first call. Its entries count only for the device, the triton
version and the kernel sources they were measured with.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton

from kda_ops.problem import CHUNK, SAFE_BOUND, Problem

HOPPER = 9
# Clamp for log decays where 8 rows share an anchor: exp(-19) = 6e-9 is below a rounding of bf16.
# `decay.check_anchor` states its limits.
FLOOR = -19.0
# the architecture for tensors that are on no GPU: interpreter and offline compilation
ASSUMED = HOPPER
# the run length of tests and offline compilation, in place of the rule's
FORCED_RUN: int | None = None
# the chunks that tests have prepared before the scan, in place of the rule's
FORCED_AHEAD: int | None = None
# whether tests and offline compilation have GDN's backward walk (reverse_walk.py), in place of the
# rule's answer
FORCED_WALK: bool | None = None
# how often a scan that follows `prepare` looks for its next chunk, 1 us or so each time
PATIENCE = 1 if triton.knobs.runtime.interpret else 1000


@dataclass(frozen=True)
class Options:
    """How a kernel is cut: columns of K and of V per step, rows per thread (`tile.load_rows`),
    warps, pipeline stages, most registers per thread.
    """

    block_k: int = 64
    block_v: int = 64
    group: int = 4
    warps: int = 4
    stages: int = 1
    registers: int | None = None

    @property
    def launch(self) -> dict[str, Any]:
        """The options that are not arguments of a kernel."""
        return {"num_warps": self.warps} | registers(self)


def width(columns: int, dtype: torch.dtype) -> int:
    """The columns of a tile that holds `columns`: a power of two, and rows of 128 bytes at least.

    Narrower rows take a narrower swizzle in shared memory, and for that ptxas (as of triton 3.6)
    forms wrong wgmma descriptors inside loops.
    """
    return max(128 // dtype.itemsize, 1 << (columns - 1).bit_length())


def power(columns: int) -> int:
    """The least power of two that holds `columns`, and no less than a tensor core takes."""
    return max(16, 1 << (columns - 1).bit_length())


def registers(options: Options) -> dict[str, int]:
    """The launch option that caps registers, if there is a cap."""
    return {} if options.registers is None else {"maxnreg": options.registers}


def centred(p: Problem) -> bool:
    """Whether halves of a chunk can share an anchor: the flags promise a bound, and the operands
    have the range of fp32.
    """
    return p.q.dtype is torch.bfloat16 and p.gate_bound is not None and p.gate_bound >= SAFE_BOUND


def anchored(p: Problem) -> bool:
    """Whether the gradient may take factors as far as 2^58 from one where the decays of a chunk
    allow it: its operands have the range of fp32, and round by more than such a factor does.
    """
    return p.q.dtype is torch.bfloat16


def anchored_rows(p: Problem) -> int:
    """How many rows of a chunk share an anchor in `prepare_kda`: halves under a bound, eight where
    decays can be cut at FLOOR, else one.
    """
    return 32 if centred(p) else 8 if p.q.dtype is torch.bfloat16 else 1


def architecture(device: torch.device) -> int:
    """Return the major compute capability, which the table is keyed by."""
    return _capability(device)[0] if device.type == "cuda" else ASSUMED


def is_hopper(device: torch.device) -> bool:
    """Return whether kernels that know no other architecture run on a device."""
    if device.type != "cuda":
        return device.type == "meta" and ASSUMED == HOPPER  # offline compilation
    return _capability(device) == (9, 0)


@lru_cache(None)
def _capability(device: torch.device) -> tuple[int, int]:
    """Ask torch once per device: asking takes 10 us, and a training step asks 26 times."""
    return torch.cuda.get_device_capability(device)


def begins_early(device: torch.device) -> dict[str, Any]:
    """The launch option for a kernel that waits for the one before it itself
    (`tile.wait_for_previous`), where the architecture knows it.
    """
    return {"launch_pdl": True} if device.type != "cpu" and architecture(device) >= HOPPER else {}


def row(kernel: str, p: Problem) -> str:
    """The name of the table's row for a call: nothing in it depends on B, T, N, H or the values.
    (Scans have two cuts of the same bits.)
    """
    mode = f".rows{anchored_rows(p)}" if kernel == "prepare_kda" else ""
    return (
        f"{kernel}{mode}.sm{architecture(p.q.device)}0.{8 * p.q.dtype.itemsize}"
        f".K{width(p.K, p.q.dtype)}.V{min(width(p.V, p.q.dtype), 256)}"
    )


def choose(kernel: str, p: Problem) -> Options:
    """The options for a call: from the tuned file if it has the row, else from the table."""
    found = tuned(p.q.device).get(row(kernel, p))
    return table(kernel, p) if found is None else found


def table(kernel: str, p: Problem) -> Options:
    """Measured on an H200 with triton 3.6 (docs/kernels/journal.md); other architectures take what
    fits their shared memory.
    """
    wide, hopper, early = (
        p.q.dtype is torch.float32,
        architecture(p.q.device) == HOPPER,
        architecture(p.q.device) < HOPPER,
    )
    K, V = width(p.K, p.q.dtype), width(p.V, p.q.dtype)
    layer = hopper and not wide and K == V == 128
    # Scans of fp32: with 32 columns of V ptxas gives all registers up, and what it makes then may
    # be wrong (docs/kernels/hazards.md, "Lost registers").
    exact = Options(K, 16, warps=4 if K <= 64 else 8)
    if kernel == "prepare_kda":
        return Options(32 if wide else min(K, 128))
    if kernel == "prepare_gdn":
        # a group keeps its scores while each head is inverted
        return Options(registers=None if wide or K > 128 else 128 if p.HV == p.H else 168)
    one_wave = (
        kernel.endswith("_beside")
        or kernel.endswith(("scan_tiles", "scan_rows"))
        and 2 * p.N * p.HV > processors(p.q.device)
    )
    if layer and one_wave:
        # instead of two, the same bits: unless all halves run at once, with none to leave to
        # `prepare`
        return Options(128, 128, warps=8, stages=3)
    if kernel.startswith("scan"):
        # before Hopper ptxas gives all registers up for 64 of a scan that keeps its states, and for
        # a wider gradient
        columns = 32 if early else 64
        return (
            exact
            if wide
            else Options(
                K,
                min(V, columns),
                stages=(2 if kernel.endswith("_maps") else 3) if hopper and K <= 128 else 1,
            )
        )
    if kernel == "gradient_rows":
        return Options(32, 32) if wide or early else Options(min(K, 128), min(V, 128))
    if kernel == "gradient_pairs":
        return (
            Options(32, 32) if wide else Options(64, min(V, 128), registers=168 if hopper else None)
        )
    # where operands of products come from registers, 64 columns spill kilobytes
    if kernel == "gradient_keys":
        return Options(32 if early else 64, 32 if wide else 64)
    if kernel.startswith("reverse_scan"):
        return exact if wide else Options(K, min(V, 64), stages=3 if hopper and K <= 128 else 1)
    if kernel == "join_runs":
        return Options(power(p.K), 16, warps=8, stages=3 if hopper else 1)
    return Options(
        min(power(p.K), 64), min(power(p.V), 32 if wide else 64), stages=1 if wide else 2
    )


def leaves_room(p: Problem) -> bool:
    """Whether the scan and the reverse scan, which need nothing of each other, fit on the device at
    once, and are long enough to repay a second stream.
    """
    programs = (
        p.N * p.HV * triton.cdiv(p.V, choose("scan_tiles" if p.rank else "scan_rows", p).block_v)
    )
    return p.B * p.T >= 16384 * p.N and 2 * programs <= processors(p.q.device) and not run_length(p)


def ahead(p: Problem) -> int | None:
    """How many chunks of the one sequence of a call `prepare` makes before its scan begins; the
    others it makes beside the scan, on multiprocessors that the scan leaves idle, and is done with
    them when the scan needs the last. None: all of them. Either way the same bits.
    """
    if (
        p.N != 1
        or p.cu_seqlens is not None
        or p.state_indices is not None
        or p.snapshot_indices is not None
        or run_length(p)
    ):
        return None
    chunks, there = triton.cdiv(p.T, CHUNK), processors(p.q.device)
    if FORCED_AHEAD is not None:
        return FORCED_AHEAD if FORCED_AHEAD < chunks else None
    idle, step = there - p.HV, 2.3  # us, of the scan
    # less than two launches and two streams cost Python
    if 8 * idle < there or p.q.dtype is torch.float32 or not p.K == p.V == 128:
        return None
    if chunks < math.ceil(250 / step):
        return None
    # what an ordinary scan gains from its halves at once is more
    if not p.rank and 2 * p.HV <= there:
        return None
    # us, of `prepare` for a head, on all multiprocessors, and how much longer it takes beside the
    # scan
    tile = (
        0.0165
        if not p.rank
        else 0.05
        if anchored_rows(p) > 8
        else 0.068
        if p.activate_gate
        else 0.084
    )
    slower = 1 + 3 * (p.HV / there) ** 4 if p.rank else 1.0
    # chunks that `prepare` makes while the scan takes 1024 of them
    meanwhile = int(1024 * step / (p.HV * tile * slower * there / idle))
    return max(1, chunks - (chunks - 8) * meanwhile // 1024)


def run_length(p: Problem) -> int:
    """Chunks per run of the scans (runs.py), or 0 where sequences stay whole: measured on an H200
    (docs/kernels/journal.md, "Runs").

    It depends on HV too, and on how many multiprocessors there are for the heads of one sequence;
    never on B, N, T or the values.
    """
    if width(p.K, p.q.dtype) > 128 or p.V == 0:  # `join_runs` holds a map at once
        return 0
    if FORCED_RUN is not None:
        return FORCED_RUN
    programs, there = p.HV * triton.cdiv(p.V, 64), processors(p.q.device)
    return 0 if 3 * programs > there else 32 if 6 * programs > there else 16


@lru_cache(None)
def processors(device: torch.device) -> int:
    """The multiprocessors of a device; none where kernels run on no GPU."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 0
    )


def cache_file() -> Path:
    """Where tuned options are kept: KDA_OPS_TUNING, or the user's cache directory."""
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
    """What tuned options are valid for: this GPU (of tensors that are on none, the current one),
    this triton and these kernels.
    """
    sources = hashlib.sha256(
        b"".join(f.read_bytes() for f in sorted(Path(__file__).parent.glob("*.py")))
    ).hexdigest()[:16]
    on_gpu = device is not None and device.type == "cuda"
    name = (
        torch.cuda.get_device_name(device if on_gpu else None)
        if torch.cuda.is_available()
        else "none"
    )
    return f"{name}|triton {triton.__version__}|{sources}"


def tuned(device: torch.device | None = None) -> dict[str, Options]:
    """The tuned rows; none if there is no file, or none of its entries is for this machine. Unknown
    keys are ignored, and rows with values of a wrong type.
    """
    return _tuned(fingerprint(device))


@lru_cache(None)
def _tuned(machine: str) -> dict[str, Options]:
    rows = _entries(cache_file()).get(machine, {})
    known, found = {f.name for f in fields(Options)}, {}
    for name, given in rows.items() if isinstance(rows, dict) else ():
        words = {k: v for k, v in given.items() if k in known} if isinstance(given, dict) else None
        if words is not None and all(
            type(v) is int or (k == "registers" and v is None) for k, v in words.items()
        ):
            found[name] = Options(**words)
    return found


def _entries(path: Path) -> dict:
    """What the cache file holds, if it is one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def save(rows: dict[str, Options]) -> Path:
    """Add rows to the cache file under this machine's fingerprint."""
    path, machine = cache_file(), fingerprint()
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = _entries(path)
    mine = kept.get(machine)
    kept[machine] = (mine if isinstance(mine, dict) else {}) | {
        name: asdict(options) for name, options in rows.items()
    }
    path.write_text(json.dumps(kept, indent=1, sort_keys=True))
    forget()
    return path


def forget() -> None:
    """Read the cache file anew when it is asked for next."""
    _tuned.cache_clear()
    fingerprint.cache_clear()
