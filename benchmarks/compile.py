"""Compile the kernels without a GPU.

The real launchers run on meta tensors, with a driver that only names an architecture.
``python -m benchmarks compile`` does it for the configurations of a layer, ``--all`` for the
product of dtypes, widths, gates and modes too. Each line is one compiled kernel with what decides
its speed: registers, bytes of stack (spills), shared memory, instructions. A kernel beyond its
limits (`benchmarks.budgets`) is an error, and so is one that does not compile.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from multiprocessing import get_context

import torch

from benchmarks.budgets import ELSEWHERE, OTHERS, TABLE, Limits, everything
from benchmarks.calls import Call, LayerCall
from benchmarks.machine_code import (
    compiled_code,
    hasty,
    instructions,
    merged,
    refilled,
    resources,
    serialised,
)
from benchmarks.records import need_writable, write_json
from kda_ops.doctor import parse_version
from kda_ops.tools.machine import Help

SHARED = {80: 166912, 90: 232448, 100: 232448}  # bytes a program may have


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled kernel."""

    label: str
    kernel: str
    arch: int
    warps: int
    registers: int
    stack: int
    shared: int
    seconds: float
    refilled: bool
    hasty: bool = False
    merged: bool = False
    serialised: bool = False
    code: str = ""  # `code_digest` of what was compiled
    # of a kernel that does not compile, or of a call that launches none; then `kernel` is its type
    error: str = ""
    instructions: int = 0  # of machine code

    def faults(self, limits: Limits | None = None) -> list[str]:
        """List what is over its limits and what would compute wrong results.

        Shared memory always has a limit. Results are wrong if Triton refills a buffer too early,
        if ptxas merges sums or keeps almost nothing in registers, or if a kernel that overlaps the
        previous one reads before it waits.
        """
        import triton

        from kda_ops.backends.triton.plans.launch import lost_registers

        found = [self.error] if self.error else []
        if self.shared > SHARED[self.arch]:
            found.append(f"{self.shared} bytes of shared memory, the limit is {SHARED[self.arch]}")
        if lost_registers(self.registers, self.stack):
            found.append(
                f"{self.registers} registers and {self.stack} bytes of stack: ptxas has given "
                "registers up (docs/kernels/hazards.md, 'Lost registers')"
            )
        if self.refilled:
            found.append(
                "a buffer is filled again while a product may still read it "
                "(docs/kernels/hazards.md, 'Refilled buffers')"
            )
        if self.serialised:
            found.append(
                "ptxas makes all its products wait for each other (docs/kernels/hazards.md, "
                "'Serialised products')"
            )
        if self.merged:
            found.append(
                "ptxas merged a sum before a product with the same sum after it "
                "(docs/kernels/hazards.md, 'Merged sums')"
            )
        if self.hasty:
            found.append(
                "it overlaps the kernel launched before it, and touches memory before it waits "
                "for that one (tile.wait_for_previous)"
            )
        if limits is not None:
            version = parse_version(triton.__version__)
            found += limits.faults(self.registers, self.stack, self.instructions, version)
        return found

    def __str__(self) -> str:
        return (
            f"{self.label:34} {self.kernel:20} sm_{self.arch:<3} {self.warps} warps "
            f"{self.registers:3} registers {self.stack:5} B stack {self.shared:6} B shared "
            f"{self.instructions:5} instructions {self.seconds:5.1f} s"
        )


def offline_driver(arch: int):
    """Return a driver that knows an architecture and no device."""
    from kda_ops.backends.triton.private import GPUTarget

    class Offline:
        def get_current_target(self):
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self):
            return arch  # compiled kernels are kept per device

        def get_current_stream(self, device=0):
            return 0

        def get_device_capability(self, device=0):
            return divmod(arch, 10)

        def set_current_device(self, device):
            pass

        def get_active_torch_device(self):
            return torch.device("cpu")

        def map_python_to_cpp_type(self, name):
            return name

    return Offline()


@contextmanager
def offline(arch: int, label: list[str]) -> Iterator[list[CompiledKernel]]:
    """Compile launches for `arch` instead of running them; append a `CompiledKernel` for each.

    `label` holds the label of the rows. It needs a process of its own, because Triton keeps the
    driver.
    """
    from triton import JITFunction

    from kda_ops.backends.triton import tuning
    from kda_ops.backends.triton.private import driver

    rows: list[CompiledKernel] = []
    # by compiled kernel: Triton returns the same one for the same arguments
    made: dict[object, CompiledKernel] = {}
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        start = time.perf_counter()
        try:
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        except Exception as error:
            rows.append(_broken(label[0], self.fn.__name__, arch, error))
            raise
        if kernel not in made:
            made[kernel] = _compiled(label[0], self.fn.__name__, arch, kernel, start)
        rows.append(replace(made[kernel], label=label[0]))
        return kernel

    driver.set_active(offline_driver(arch))
    JITFunction.run = compile_only
    try:
        with tuning.force(architecture=arch // 10):
            yield rows
    finally:
        JITFunction.run = run


def _compiled(label: str, name: str, arch: int, kernel, start: float) -> CompiledKernel:
    about, ptx, cubin = kernel.metadata, kernel.asm["ptx"], kernel.asm["cubin"]
    registers, stack = resources(cubin)
    numbers = about.num_warps, registers, stack, about.shared, time.perf_counter() - start
    early = about.launch_pdl and hasty(ptx)
    wrong = refilled(kernel.asm["ttgir"]), early, merged(ptx, cubin, about.name), serialised(ptx)
    counted = instructions(cubin, about.name)
    return CompiledKernel(label, name, arch, *numbers, *wrong, compiled_code(kernel), "", counted)


def _broken(label: str, kernel: str, arch: int, error: Exception) -> CompiledKernel:
    why = str(error).strip()[-400:] or "no message"
    return CompiledKernel(label, kernel, arch, 0, 0, 0, 0, 0.0, False, error=why)


def compile_calls(calls: Iterable[Call | LayerCall], arch: int) -> list[CompiledKernel]:
    """Compile some calls for one architecture and return their rows."""
    label = [""]
    with offline(arch, label) as rows:
        for call in calls:
            label[:] = [call.label]
            try:
                call.compile()
            # a kernel that does not compile hides none of the calls after it
            except Exception as error:
                if not (rows and rows[-1].error and rows[-1].label == label[0]):
                    rows.append(_broken(label[0], type(error).__name__, arch, error))
    return rows


def faults_of(rows: list[CompiledKernel], limits: dict[str, Limits] | None) -> list[str]:
    """List what is wrong with the kernels of a call, by the limits that it has in the table."""
    found = [f"{r.kernel}: {x}" for r in rows for x in r.faults((limits or {}).get(r.kernel))]
    if limits is not None:
        launched = dict.fromkeys(r.kernel for r in rows if not r.error)
        found += [
            f"{k}: it has no limits in benchmarks/budgets.py"
            for k in sorted(launched.keys() - limits.keys())
        ]
        found += [
            f"{k}: benchmarks/budgets.py has it, the call does not"
            for k in sorted(limits.keys() - launched)
        ]
    return found


def main(argv: list[str] | None = None) -> int:
    """Compile, print, and count what is over its limits."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compile", description=__doc__, formatter_class=Help
    )
    add = parser.add_argument
    add("--all", action="store_true", help="every dtype, width, gate and mode, not only a layer's")
    what = "compute capabilities, times ten"
    add("--arch", type=int, nargs="+", choices=sorted(SHARED), default=[90], help=what)
    add("--only", action="append", default=[], metavar="WORD", help="calls that have this word")
    add("--jobs", type=int, default=1, help="processes")
    add("--json", metavar="FILE", help="write the kernels, with a digest of their machine code")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}.")
    need_writable(parser, args.json)
    written, faults = list[dict](), 0
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for arch in args.arch:
            some = (*TABLE, *OTHERS) if args.all or arch == 90 else ELSEWHERE
            # calls of one dtype, width and gate share kernels: one process compiles them in turn
            groups = dict[tuple[str, ...], list[Call | LayerCall]]()
            for call in dict.fromkeys(chain(some, everything() if args.all else ())):
                words = call.label.split()
                if set(args.only) <= set(words):
                    groups.setdefault(tuple(words[:4]), []).append(call)
            made = (map if args.jobs == 1 else pool.map)(
                compile_calls, groups.values(), repeat(arch)
            )
            for group, found in zip(groups.values(), made):
                for row in found:
                    print(row, flush=True)
                written += map(asdict, found)
                for call in group:
                    rows = [row for row in found if row.label == call.label]
                    for fault in faults_of(rows, TABLE.get(call) if arch == 90 else None):
                        faults += 1
                        where = f"{call.label} sm_{arch}"
                        print(f"OVER BUDGET: {where}: {fault}", file=sys.stderr, flush=True)
    if args.json:
        write_json(args.json, {"rows": written})
    return 1 if faults else 0
