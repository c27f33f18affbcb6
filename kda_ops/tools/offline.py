"""Compile the kernels without a GPU: the real launchers on meta tensors, with a driver that only
names an architecture.

``python -m kda_ops compile`` does it for the configuration of a layer, ``--all`` for the product of
dtypes, widths, gates and modes too. Each line is one compiled kernel with what decides its speed:
registers, bytes of stack (spills), shared memory, instructions. A kernel beyond its budget
(`kda_ops.tools.budgets`) is an error, and so is one that does not compile.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, product, repeat
from multiprocessing import get_context
from pathlib import Path

import torch

from kda_ops import doctor
from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS
from kda_ops.tools import budgets
from kda_ops.tools.layer_calls import LAYER_CALLS, LayerCall
from kda_ops.tools.machine import Help

SHARED = {80: 166912, 90: 232448, 100: 232448}  # bytes a program may have


@dataclass(frozen=True)
class Row:
    """One compiled kernel."""

    label: str
    gate: str
    kernel: str
    arch: int
    warps: int
    registers: int
    stack: int
    shared: int
    seconds: float
    refilled: bool
    hasty: bool = False
    code: str = ""  # `code_digest` of what was compiled
    # of a kernel that does not compile, or of a call that launches none; then `kernel` is its type
    error: str = ""
    instructions: int = 0  # of machine code

    @property
    def name(self) -> str:
        """The kernel, and what else has budgets of its own.

        That is a scan for few heads, one that follows `prepare`, and a `gradient_gdn` whose key
        heads have one value head each.
        """
        marks = self.label.split()
        if self.kernel == "gradient_gdn":
            return self.kernel + ".single" * ("few" in marks)
        return self.kernel + "".join(
            f".{mark}" for mark in ("few", "ahead") if "scan" in self.kernel and mark in marks
        )

    def faults(self, strict: bool) -> list[str]:
        """List what is over budget and what would compute wrong results.

        Shared memory always has a budget, the rest in a layer's configurations. Results are wrong
        if Triton refills a buffer too early, if ptxas keeps almost nothing in registers, or if a
        kernel that overlaps the previous one reads before it waits.
        """
        import triton

        from kda_ops.backends.triton.launch import lost_registers

        found = [self.error] if self.error else []
        if self.shared > SHARED[self.arch]:
            found.append(f"{self.shared} bytes of shared memory, the limit is {SHARED[self.arch]}")
        if lost_registers(self.registers, self.stack):
            found.append(
                f"{self.registers} registers beside {self.stack} bytes of stack: ptxas has given "
                "registers up (docs/kernels/hazards.md, 'Lost registers')"
            )
        if self.refilled:
            found.append(
                "a buffer is filled again while a product may still read it "
                "(docs/kernels/hazards.md, 'Refilled buffers')"
            )
        if self.hasty:
            found.append(
                "it is launched beside the kernel before it, and touches memory before it waits "
                "for that one (tile.wait_for_previous)"
            )
        if strict:
            version = doctor.parse_version(triton.__version__)
            numbers = self.registers, self.stack, self.instructions
            found += budgets.faults(self.name, self.gate, *numbers, version)
        return found

    def __str__(self) -> str:
        return (
            f"{self.label:34} {self.kernel:20} sm_{self.arch:<3} {self.warps} warps "
            f"{self.registers:3} registers {self.stack:5} B stack {self.shared:6} B shared "
            f"{self.instructions:5} instructions {self.seconds:5.1f} s"
        )


def _driver(arch: int):
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
def offline(arch: int, label: list[str]) -> Iterator[list[Row]]:
    """Within it, a launch compiles for `arch` and appends a `Row` with this label and gate instead
    of running.

    For a process of its own: Triton keeps the driver.
    """
    from triton import JITFunction

    from kda_ops.backends.triton import tuning
    from kda_ops.backends.triton.private import driver

    rows: list[Row] = []
    # by compiled kernel: Triton returns the same one for the same arguments
    made: dict[object, Row] = {}
    run, assumed, forced, processors = (
        JITFunction.run,
        tuning.ASSUMED,
        (tuning.FORCED_RUN, tuning.FORCED_AHEAD, tuning.FORCED_WALK),
        tuning.processors,
    )

    def compile_only(self, *args, grid, warmup, **options):
        start = time.perf_counter()
        try:
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        except Exception as error:
            rows.append(_broken(label, self.fn.__name__, arch, error))
            raise
        if kernel not in made:
            made[kernel] = _compiled(label, self.fn.__name__, arch, kernel, start)
        rows.append(replace(made[kernel], label=label[0], gate=label[1]))
        return kernel

    driver.set_active(_driver(arch))
    JITFunction.run, tuning.ASSUMED = compile_only, arch // 10
    try:
        yield rows
    finally:
        JITFunction.run, tuning.ASSUMED = run, assumed
        tuning.FORCED_RUN, tuning.FORCED_AHEAD, tuning.FORCED_WALK = forced
        tuning.processors = processors


def refilled(ttgir: str) -> bool:
    """Whether a loop copies into a buffer of one stage while an asynchronous product of the same
    turn may still read it.

    The pipeliner gives a tile that is both an operand and a value in registers one stage, and lets
    products wait for the next turn.
    """
    seen: dict[str, str] = {}  # a view of a buffer: the buffer
    single, reads = set(), False
    for line in ttgir.splitlines():
        made = re.match(r"\s*(%[\w#]+)(?::\d+)? = ([\w.]+) ?(.*)", line)
        if made is None:
            continue
        name, op, rest = made.groups()
        operands = re.findall(r"%[\w#]+", rest.split(" : ")[0])
        if op == "scf.for":
            reads = False
        elif op == "ttg.local_alloc" and "memdesc<1x" in rest and not operands:
            single.add(name)
        elif (
            op in ("ttg.memdesc_index", "ttg.memdesc_trans") and operands[0] in single | seen.keys()
        ):
            seen[name] = seen.get(operands[0], operands[0])
        elif op == "ttng.warp_group_dot" and "isAsync = true" in rest:
            reads |= any(x in seen for x in operands[:2])
        elif op == "ttng.warp_group_dot_wait" and "pendings = 0" in rest:
            reads = False
        elif (
            op == "ttg.async_copy_global_to_local"
            and reads
            and any(x in single | seen.keys() for x in operands)
        ):
            return True
    return False


def hasty(ptx: str) -> bool:
    """Whether anything touches memory other than parameters and shared memory before the kernel has
    waited for the one before it.
    """
    begin = ptx.split("griddepcontrol.wait", 1)
    return (
        len(begin) == 1
        or re.search(r"\b(ld|st|atom|red|prefetch|cp)\.(?!param|shared)[\w.:]*global", begin[0])
        is not None
    )


def _sections(cubin: bytes, name: str) -> Iterator[tuple[str, int, int, bytes]]:
    """Yield name, flags, size and content of each ELF section, without the kernel's name."""
    table, size, count, strings = struct.unpack_from("<Q10x3H", cubin, 40)
    headers = [struct.unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]
    for at, kind, flags, _, offset, length in headers:
        start = headers[strings][4] + at
        section = cubin[start : cubin.index(b"\0", start)].decode().removesuffix(f".{name}")
        held = b"" if kind == 8 else cubin[offset : offset + length]  # SHT_NOBITS: a size only
        yield section, flags, length, held


def code_digest(cubin: bytes, name: str, *facts: object) -> str:
    """Hash what the file of a kernel of this name puts on a device, and `facts` of its launch.

    That is code, constants and the sizes of parameters and shared memory: the ELF sections marked
    as allocated. Source lines and names are in other sections.
    """
    found = [
        (section, length, held)
        for section, flags, length, held in _sections(cubin, name)
        if flags & 2  # SHF_ALLOC
    ]
    return hashlib.sha256(repr((sorted(found), facts)).encode()).hexdigest()[:12]


def _instructions(cubin: bytes, name: str) -> int:
    """Count the instructions of a kernel, 16 bytes each, with what fills its last line."""
    return sum(size for section, _, size, _ in _sections(cubin, name) if section == ".text") // 16


def compiled_code(kernel) -> str:
    """Return the digest of a kernel as Triton returns it from a launch."""
    cubin, about = kernel.asm["cubin"], kernel.metadata
    facts = about.num_warps, about.shared, about.launch_pdl
    return code_digest(cubin, about.name, *_resources(cubin), *facts)


def _compiled(label: list[str], name: str, arch: int, kernel, start: float) -> Row:
    about = kernel.metadata
    registers, stack = _resources(kernel.asm["cubin"])
    wrong = refilled(kernel.asm["ttgir"]), about.launch_pdl and hasty(kernel.asm["ptx"])
    numbers = about.num_warps, registers, stack, about.shared, time.perf_counter() - start
    counted = _instructions(kernel.asm["cubin"], about.name)
    return Row(label[0], label[1], name, arch, *numbers, *wrong, compiled_code(kernel), "", counted)


def _broken(label: list[str], kernel: str, arch: int, error: Exception) -> Row:
    return Row(
        label[0],
        label[1],
        kernel,
        arch,
        0,
        0,
        0,
        0,
        0.0,
        False,
        error=str(error).strip()[-400:] or "no message",
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return (registers, bytes of stack) per thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        said = subprocess.run(
            [tool, "--dump-resource-usage", f.name], capture_output=True, text=True, check=True
        ).stdout
    (registers,) = re.findall(r"REG:(\d+)", said)
    (stack,) = re.findall(r"STACK:(\d+)", said)
    return int(registers), int(stack)


@dataclass(frozen=True)
class Call:
    """A call to compile: as a layer makes it unless said."""

    rank: int = 1
    dtype: torch.dtype = torch.bfloat16
    K: int = 128
    V: int = 128
    gate: str = "bound"
    keep: bool = False
    packed: bool = False
    pool: torch.dtype | None = None  # one token per sequence on a pool of states
    transposed: bool = False
    # chunks prepared before the scan of one sequence; the others overlap it; 0: all of them
    ahead: int = 0
    run: int = 0  # chunks per run, where sequences are cut (backends/triton/runs.py)
    group: int = 2  # value heads per key head
    gates: bool = False  # the decay by itself, forward and backward
    walk: bool = False  # GDN's backward as one walk (backends/triton/reverse_walk.py)
    # so few heads that scans take half the columns each: on a GPU that has multiprocessors for all
    # of them at once
    few: bool = False

    @property
    def label(self) -> str:
        """What the row is called."""
        name = (
            f"{'kda' if self.rank else 'gdn'} {str(self.dtype)[6:]} {self.K}x{self.V} {self.gate}"
        )
        if self.pool is not None:
            return f"{name} on {str(self.pool)[6:]} {'vk' if self.transposed else 'kv'}"
        marks = {
            "keep": self.keep,
            "packed": self.packed,
            "runs": self.run,
            "ahead": self.ahead,
            "few": self.few,
            "gate": self.gates,
            "walk": self.walk,
            "grouped": (self.rank > 0 or self.walk) and self.group > 1,
        }
        return " ".join([name, *(mark for mark, there in marks.items() if there)])

    def problem(self) -> Problem:
        """Build the call on meta tensors."""
        B, T, H, HV = (
            (128, 1, 32 // self.group, 32)
            if self.pool is not None
            else (1 if self.packed or self.ahead else 2, 4096, 32 // self.group, 32)
        )

        def empty(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        D = (self.K,) if self.rank else ()
        activated = self.gate in ("bound", "softplus")
        flags = dict(
            use_qk_l2norm_in_kernel=activated,
            use_gate_in_kernel=activated,
            use_beta_sigmoid_in_kernel=activated,
            output_final_state=True,
        )
        g = empty(B, T, HV, *D) if activated else empty(B, T, HV, *D, dtype=torch.float32)
        A_log, dt_bias = (
            (empty(HV, dtype=torch.float32), empty(HV, *D, dtype=torch.float32))
            if activated
            else (None, None)
        )
        bound = -5.0 if self.gate == "bound" else None
        if self.pool is not None:
            state, slots = (
                empty(
                    B,
                    HV,
                    *((self.V, self.K) if self.transposed else (self.K, self.V)),
                    dtype=self.pool,
                ),
                empty(B, dtype=torch.int32),
            )
            del flags["output_final_state"]
            return Problem.parse_step(
                self.rank,
                empty(B, T, H, self.K),
                empty(B, T, H, self.K),
                empty(B, T, HV, self.V),
                g,
                empty(B, T, HV),
                state,
                slots,
                None,
                A_log,
                dt_bias,
                lower_bound=bound,
                transpose_state_layout=self.transposed,
                **flags,
            )
        return Problem.parse(
            self.rank,
            empty(B, T, H, self.K),
            empty(B, T, H, self.K),
            empty(B, T, HV, self.V),
            g,
            empty(B, T, HV),
            A_log,
            dt_bias,
            None,
            torch.empty(9, dtype=torch.int32, device="meta") if self.packed else None,
            lower_bound=bound,
            safe_gate=self.gate in ("safe", "promised"),
            safe_beta=self.gate == "promised",
            safe_keys=self.gate == "promised",
            **flags,
        )

    def compile(self) -> None:
        """Launch prepare and scan as inference does, the whole of training's backward if `keep`,
        step on a pool, or the gate.
        """
        from kda_ops.backends.triton import BACKEND as kernels
        from kda_ops.backends.triton import tuning

        p, tuning.FORCED_RUN, tuning.FORCED_AHEAD = self.problem(), self.run, self.ahead or None
        tuning.FORCED_WALK = self.walk
        there = 2 * tuning.pieces(p) * p.HV if self.few else 0
        tuning.processors = lambda device: there  # type: ignore[assignment]
        if self.pool is not None:
            return kernels.step(p, p.new_output(), p.state)
        if self.gates:
            assert p.g is not None  # a gate's call has its logits
            parameters = p.A_log, p.dt_bias, p.lower_bound, p.rank
            kernels.gate_backward(kernels.gate(p.g, *parameters), p.g, *parameters)
            return None
        with_AP = self.keep and kernels.keeps_AP(p)
        tile = kernels.prepare(
            p, with_AP=with_AP, norms=self.keep and not with_AP, overlap=self.ahead > 0
        )
        if with_AP:  # as backward calls it
            tile = kernels.prepare(p, tile.AP, with_AP=True, norms=True)
        o = (
            p.new_output()
            if not self.keep or "o" in kernels.keeps.names(p.rank, p.q.dtype, p.l2norm, True)
            else None
        )
        trace = kernels.scan(p, tile, o, None if self.keep else p.new_final_state(), self.keep)
        if self.keep:
            do = p.new_output()
            need = frozenset(n for n, x in zip(GRADIENTS, p.differentiable()) if x is not None)
            if self.walk:
                assert trace is not None and kernels.walks(p, do, None, need)
                kernels.reverse_walk(p, tile, trace, do, None, need)
                return
            reverse = kernels.reverse_scan(p, tile, do, None, need)
            assert trace is not None  # as keep asks
            kernels.gradient(p, tile, trace, do, reverse, need)


LAYER: tuple[Call | LayerCall, ...] = tuple(
    Call(rank, gate=gate, keep=keep, group=2 - rank)
    for rank in (1, 0)
    for gate in ("bound", "softplus")
    for keep in (False, True)
) + tuple(
    Call(pool=pool, transposed=transposed)
    for pool in (torch.float32, torch.bfloat16)
    for transposed in (False, True)
)
LAYER += tuple(Call(rank, gate="promised", group=2 - rank) for rank in (1, 0))
LAYER += (Call(1, gate="promised", keep=True, group=1),)
LAYER += tuple(Call(rank, ahead=32, group=1) for rank in (1, 0))
LAYER += tuple(
    Call(rank, keep=keep, group=1, few=True) for rank in (1, 0) for keep in (False, True)
)
LAYER += tuple(
    Call(rank, gate=gate, gates=True)
    for rank, gate in ((1, "bound"), (1, "softplus"), (0, "softplus"))
)
LAYER += tuple(
    Call(rank, keep=keep, packed=True, run=32, group=group, few=group == 1)
    for rank in (1, 0)
    for keep in (False, True)
    for group in (2, 1)
)
LAYER += tuple(
    Call(0, gate=gate, keep=True, packed=packed, walk=True, group=group)
    for gate, packed, group in (("bound", False, 1), ("softplus", True, 2), ("plain", True, 1))
)
LAYER += LAYER_CALLS
OTHERS: tuple[Call, ...] = (
    Call(1, torch.float32, gate="softplus", group=1),
    Call(0, torch.float32, gate="softplus"),
)
OTHERS += (
    Call(0, torch.float16, gate="softplus", keep=True, walk=True, group=1),
    Call(1, torch.float16, gate="plain"),
    Call(0, torch.float16, gate="plain"),
    Call(1, K=256, V=256),
)
OTHERS += tuple(
    Call(rank, torch.float32, K, K, "plain", keep, group=1)
    for rank in (1, 0)
    for K, keep in ((16, False), (16, True), (256, False))
)

# One row of each kernel, for the architectures that they have never run on.
ELSEWHERE: tuple[Call | LayerCall, ...] = tuple(
    Call(rank, keep=keep, group=2 - rank) for rank in (1, 0) for keep in (False, True)
)
ELSEWHERE += (
    Call(1, keep=True),
    Call(0, torch.float32, gate="plain", keep=True),
    Call(pool=torch.float32),
    Call(1, packed=True, run=32),
    Call(0, gate="softplus", gates=True),
    *LAYER_CALLS[:4],
)


def everything() -> Iterator[Call]:
    """Yield dtypes, widths, gates and modes.

    Neighbours differ in variant, dtype or width. Processes that take them in turn then seldom
    compile the same kernel at once.
    """
    gates = "bound", "softplus", "plain", "safe"
    for gate, keep, packed in product(gates, (False, True), (False, True)):
        for rank, dtype, K in product(
            (1, 0), (torch.bfloat16, torch.float16, torch.float32), (16, 60, 64, 128, 256)
        ):
            V, group = (128, 2) if packed else (K, 2 - rank)
            yield Call(rank, dtype, K, V, gate, keep, packed, group=group)


def compile_calls(calls: Iterable[Call | LayerCall], arch: int) -> list[Row]:
    """Compile some calls for one architecture and return their rows."""
    label = ["", ""]
    with offline(arch, label) as rows:
        for call in calls:
            label[:] = call.label, call.gate
            try:
                call.compile()
            # a kernel that does not compile hides none of the calls after it
            except Exception as error:
                if not (rows and rows[-1].error and rows[-1].label == label[0]):
                    rows.append(_broken(label, type(error).__name__, arch, error))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Compile, print, and count what is over budget."""
    parser = argparse.ArgumentParser(
        prog="python -m kda_ops compile", description=__doc__, formatter_class=Help
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="every dtype, width, gate and mode, not only those of a layer",
    )
    parser.add_argument(
        "--arch",
        type=int,
        nargs="+",
        choices=sorted(SHARED),
        default=[90],
        help="compute capabilities, times ten",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}.")
    faults = 0
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for arch in args.arch:
            strict = set(c.label for c in LAYER) if arch == 90 else set()
            calls = [
                (c,)
                for c in chain(
                    LAYER + OTHERS if args.all or arch == 90 else ELSEWHERE,
                    everything() if args.all else (),
                )
            ]
            for row in chain.from_iterable(
                (map if args.jobs == 1 else pool.map)(compile_calls, calls, repeat(arch))
            ):
                print(row, flush=True)
                for fault in row.faults(row.label in strict):
                    faults += 1
                    where = f"{row.label} {row.kernel} sm_{row.arch}"
                    print(f"OVER BUDGET: {where}: {fault}", file=sys.stderr, flush=True)
    return 1 if faults else 0
