"""Read what a compiled kernel is made of, and find defects in it (docs/kernels/hazards.md)."""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


def refilled(ttgir: str) -> bool:
    """Return whether a loop copies into a buffer that an asynchronous product may still read.

    The pipeliner gives a tile that is both an operand and a value in registers one stage, and lets
    products wait for the next iteration. So the copy of one iteration may overtake its product.
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
    """Return whether a kernel touches global memory before it waits for the kernel before it.

    Parameters and shared memory do not count. A kernel may wait for single tiles of the other
    instead, if that one has waited for all that is older (`walk_kda_apart`).
    """
    begin = ptx.split("griddepcontrol.wait", 1)
    if len(begin) == 1:
        return "ld.acquire.gpu" not in ptx
    return (
        re.search(r"\b(ld|st|atom|red|prefetch|cp)\.(?!param|shared)[\w.:]*global", begin[0])
        is not None
    )


def serialised(ptx: str) -> bool:
    """Return whether ptxas makes each wgmma of a warp-specialised kernel wait for the one before.

    It does so for all partitions where one lacks registers or breaks a rule of its pipeline, and
    says so with ``-v`` alone (docs/kernels/hazards.md, "Serialised products").
    """
    if "setmaxnreg" not in ptx:
        return False
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command: list[str | Path] = [get_ptxas(90).path, "-v", "-arch=sm_90a", source]
        command += ["-o", Path(folder, "cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    return re.search(r"C751[124-7]\b", said.stdout + said.stderr) is not None


def merged(ptx: str, cubin: bytes, name: str) -> bool:
    """Return whether ptxas merged two sums of a wgmma result, before and after another wgmma.

    Two signs together say so: `ptx` shuffles one expression of accumulators before and after, and
    the machine code of the kernel `name` has fewer shuffles than `ptx` has with a result that is
    read (docs/kernels/hazards.md, "Merged sums"). A sum that a loop carries into its next turn is
    not found.
    """
    used = Counter(re.findall(r"%\w+", ptx))
    results = re.findall(r"shfl\.sync\.\S+\s+(%\w+)", ptx)
    return _shuffles(cubin, name) < sum(used[x] > 1 for x in results) and _repeated(ptx)


def _shuffles(cubin: bytes, name: str) -> int:
    """Count the shuffles of a kernel, by the low 9 bits of each instruction."""
    code = b"".join(held for section, _, _, held in _sections(cubin, name) if section == ".text")
    return sum(code[i] == 0x89 and code[i + 1] & 1 for i in range(0, len(code), 16))


def _repeated(ptx: str) -> bool:
    """Return whether two shuffles read one expression of accumulators, before and after a product.

    The values of registers are numbered twice, with one number for equal expressions. In `exact` a
    product's result has a new number. In `blind` accumulators keep theirs. Found are two shuffles
    that read one number in `blind` and two in `exact`. Statements are taken in the order of the
    text, as if no branch left any out.
    """
    numbers: dict[tuple, int] = {}
    # of each register: a number, or a constant as it is written
    blind: dict[str, int | str] = {}
    exact: dict[str, int | str] = {}
    shuffled: dict[int | str, int | str] = {}

    def number(*value) -> int:
        return numbers.setdefault(value, len(numbers))

    for i, statement in enumerate(re.split(r"[;\n]", ptx)):
        found = re.match(r"\s*(?:@!?%\w+ )?([a-z][\w.:]*)\s+(.*)", statement)
        if found is None:
            continue
        op, rest = found.groups()
        outputs = re.findall(r"%\w+", rest.split("}" if rest.startswith("{") else ",")[0])
        of = re.findall(r"%\w+|[\w.]+", rest)[len(outputs) :]
        if op.startswith("wgmma.mma_async"):
            adds = re.search(r"%rd\d+, 0, 1, 1", rest) is None  # otherwise it starts from 0
            for x in outputs:
                exact[x] = number(i, x)
                if not (adds and isinstance(blind.get(x), int)):  # new, also after a constant
                    blind[x] = exact[x]
        elif re.match(r"(add|sub|mul|fma|neg|mov)\b.*[bf]32", op) and len(outputs) == 1:
            for seen in (blind, exact):
                values: list = [seen.get(x, x) for x in of]
                if op[:3] in ("add", "mul", "fma"):
                    values[:2] = sorted(values[:2], key=str)
                copied = op.startswith("mov") and values
                seen[outputs[0]] = values[0] if copied else number(op, *values)
        else:
            if op.startswith("shfl") and of[0] in exact:
                if shuffled.setdefault(blind[of[0]], exact[of[0]]) != exact[of[0]]:
                    return True
            for x in outputs:
                blind[x] = exact[x] = number(i, x)
    return False


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
    """Hash what a kernel puts on a device, and `facts` of its launch.

    That is code, constants and the sizes of parameters and shared memory: the ELF sections marked
    as allocated. Source lines and names are in other sections. `name` is the kernel's.
    """
    found = [
        (section, length, held)
        for section, flags, length, held in _sections(cubin, name)
        if flags & 2  # SHF_ALLOC
    ]
    return hashlib.sha256(repr((sorted(found), facts)).encode()).hexdigest()[:12]


def instructions(cubin: bytes, name: str) -> int:
    """Count the instructions of a kernel, 16 bytes each, with what fills its last line."""
    return sum(size for section, _, size, _ in _sections(cubin, name) if section == ".text") // 16


def compiled_code(kernel) -> str:
    """Return the digest of a kernel as Triton returns it from a launch."""
    cubin, about = kernel.asm["cubin"], kernel.metadata
    facts = about.num_warps, about.shared, about.launch_pdl
    return code_digest(cubin, about.name, *resources(cubin), *facts)


def resources(cubin: bytes) -> tuple[int, int]:
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
