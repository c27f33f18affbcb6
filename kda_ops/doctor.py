"""Report what is installed, which backends run and why, and known compiler defects.

Run it as ``python -m kda_ops doctor``. Without a CUDA device it does not import triton.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import kda_ops
from kda_ops import dispatch
from kda_ops.tools.machine import installed

Version = tuple[int, ...]


def parse_version(text: str) -> Version:
    """Return the numbers at the start of a version: "3.7.1+git" -> (3, 7, 1)."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    assert found is not None  # every triton version begins with a number
    return tuple(int(n) for n in found[0].split("."))


@dataclass(frozen=True)
class Hazard:
    """A known defect of triton versions `first` to `last` (None: open-ended).

    `arch` is the major compute capability of the affected GPUs; None: all.
    """

    first: Version
    last: Version | None
    arch: int | None
    what: str
    here: str  # what it means for kda_ops

    def concerns(self, triton: Version, archs: list[int]) -> bool:
        """Return whether it affects this triton on one of `archs`; no archs means all of them."""
        return (
            self.first <= triton
            and (self.last is None or triton <= self.last)
            and (self.arch is None or not archs or self.arch in archs)
        )


HAZARDS = (
    Hazard(
        (3, 4),
        (3, 7, 0),
        9,
        (
            "at some tile widths, a dot operand is wrong if it is a dot result cast to 16 bits, "
            "then transposed (fla-org/flash-linear-attention #640, #826)"
        ),
        "our kernels avoid it: they compute the transposed product",
    ),
    Hazard(
        (3, 0),
        (3, 7, 1),
        9,
        (
            "with 4 warps, a 64 x 64 backward through the triangular inverse is wrong "
            "(fla-org/flash-linear-attention #984, #988)"
        ),
        "our backward has no such product: it solves with the inverse of forward",
    ),
    Hazard(
        (3, 9),
        None,
        9,
        "ptxas may merge two sums of a dot result, before and after another dot adds to it",
        "our kernels add the columns of one of them from right to left",
    ),
    Hazard((3, 9), None, None, "block pointers (tl.make_block_ptr) are removed", "we use none"),
    Hazard(
        (3, 10),
        None,
        None,
        "contraction to fma is off unless a launch enables it",
        "every launch does",
    ),
    Hazard(
        (3, 0),
        None,
        None,
        "the interpreter (TRITON_INTERPRET=1) multiplies the bits of bf16 dot operands as integers",
        "our tests replace this product; test with fp16 or fp32 otherwise",
    ),
    Hazard(
        (3, 6),
        (3, 6, 99),
        None,
        "the interpreter needs numpy < 2.4 for loops over tl.cdiv",
        "install numpy < 2.4 with this triton",
    ),
)


# The versions of Triton with which kernels were timed on a GPU (docs/kernels/journal/), and those
# whose machine code ``python -m benchmarks compile`` keeps within budgets.
TIMED = ((3, 6, 0), (3, 7, 1), (3, 8, 0), (3, 9, 0))
SLOWER = {(3, 9, 0): "up to 9 % slower than with 3.6 in the calls timed on Hopper"}  # by how much
COMPILED = ((3, 6, 0), (3, 7, 1), (3, 8, 0), (3, 9, 0))


def measured(triton: str) -> str:
    """Say whether the kernels were timed, compiled or not tried with this version of Triton."""
    here = parse_version(triton)
    how = "timed" if here in TIMED else "compiled, not timed" if here in COMPILED else "not tried"
    timed, compiled = (", ".join(".".join(map(str, v)) for v in x) for x in (TIMED, COMPILED))
    slower = f"; {SLOWER[here]}" if here in SLOWER else ""
    return f"{how} (timed: {timed}; compiled within budgets: {compiled}){slower}"


def versions() -> Iterator[str]:
    """Yield the installed versions."""
    yield f"kda_ops {kda_ops.__version__} from {Path(kda_ops.__file__).parent}"
    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"torch {torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    triton = installed("triton")
    yield f"triton {triton}, {measured(triton)}" if triton else "triton not installed"
    for peer in (
        "fla-core",
        "flash-linear-attention",
        "flash-qla",
        "nvidia-cudnn-frontend",
        "transformers",
    ):
        if version := installed(peer):
            yield f"{peer} {version} (a benchmark peer)"


def devices() -> Iterator[str]:
    """Yield the available devices."""
    yield f"CPU: {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        yield "CUDA: none" + ("" if torch.version.cuda else " (this torch is built without CUDA)")
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        yield (
            f"CUDA {i}: {p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB, "
            f"{p.multi_processor_count} SMs"
        )


def backends() -> Iterator[str]:
    """Yield which backend runs CPU and CUDA tensors, and why."""
    name = dispatch.backend_name(torch.device("cpu"))
    chosen = "chosen by KDA_OPS_CPU" if "KDA_OPS_CPU" in os.environ else "the default"
    yield f"CPU tensors: {name} ({chosen})"
    if name == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        yield "  PROBLEM: KDA_OPS_CPU=triton needs TRITON_INTERPRET=1, set before python starts"
    if not installed("triton"):
        yield "CUDA tensors: none, triton is not installed (CUDA builds of torch bring it)"
    elif torch.cuda.is_available():
        yield "CUDA tensors: triton"
        from kda_ops.backends.triton import tuning
        from kda_ops.backends.triton.stages import reverse_walk, walk

        yield f"KDA's forward: {walk.path(torch.device('cuda'))}"
        yield f"GDN's backward: {reverse_walk.path(torch.device('cuda'))}"
        yield (
            f"tuned options: {len(tuning.tuned())} rows of {tuning.cache_file()} match this "
            "GPU, triton and kernels"
        )
    else:
        yield "CUDA tensors: triton, but no device was found"


def hazards(triton: str | None, archs: list[int]) -> Iterator[str]:
    """Yield the known defects of a triton version on `archs` (major compute capabilities)."""
    if triton is None:
        return
    found = [h for h in HAZARDS if h.concerns(parse_version(triton), archs)]
    for h in found:
        on = f" on sm_{h.arch}x" if h.arch else ""
        yield f"triton {triton}{on}: {h.what}; {h.here}"
    if not found:
        yield f"triton {triton}: none known"


def compilers() -> Iterator[str]:
    """Yield the compilers and headers that torch.compile and triton need."""
    cxx = next(
        (c for c in (os.environ.get("CXX"), "g++", "clang++", "c++") if c and shutil.which(c)), None
    )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if cxx is None:
        yield (
            "C++: none found (CXX, g++, clang++): torch.compile on CPU needs one unless "
            "backend='aot_eager'"
        )
    else:
        yield f"C++: {shutil.which(cxx)}: torch.compile (Inductor) can build CPU code"
    cc = next(
        (c for c in (os.environ.get("CC"), "gcc", "clang", "cc") if c and shutil.which(c)), None
    )
    yield (
        f"C: {shutil.which(cc)}"
        if cc
        else "C: none found (CC, gcc, clang): triton needs one to launch kernels"
    )
    if not header.exists():
        yield (
            f"Python.h: not at {header}: triton and Inductor need it, install this Python's headers"
        )


VARIABLES = {
    "KDA_OPS_CPU": "backend of CPU tensors: native (default), reference, triton (interpreted)",
    "KDA_OPS_CHECK": (
        "1: also check values on the device (cu_seqlens, slots, decays); synchronises every call"
    ),
    "KDA_OPS_TUNING": (
        "file of `python -m kda_ops tune`; by default tuning.json in the user's cache"
    ),
    "TRITON_INTERPRET": "1: run Triton kernels in Python on the CPU; set before triton is imported",
}


def self_test() -> Iterator[str]:
    """Compare a small CPU call of both variants with the token recurrence in float64.

    Also check that a gradient is finite.
    """
    torch.manual_seed(0)
    for name, chunk, recurrent in (
        ("kda", kda_ops.chunk_kda, kda_ops.recurrent_kda),
        ("gdn", kda_ops.chunk_gdn, kda_ops.recurrent_gdn),
    ):
        decay = (1, 70, 2, 16) if name == "kda" else (1, 70, 2)
        x = [torch.randn(1, 70, 2, 16) for _ in range(3)] + [
            -torch.rand(decay),
            torch.rand(1, 70, 2),
        ]
        x[0].requires_grad_()
        o, _ = chunk(*x, use_qk_l2norm_in_kernel=True)
        (dq,) = torch.autograd.grad(o.sum(), x[:1])
        with torch.no_grad():
            want, _ = recurrent(*(t.double() for t in x), use_qk_l2norm_in_kernel=True)
        error = ((o - want).abs().max() / want.abs().max()).item()
        good = error < 1e-5 and bool(torch.isfinite(dq).all())
        yield f"{name}: chunk against recurrence {error:.1e}{'' if good else '  PROBLEM'}"


def report() -> list[tuple[str, list[str]]]:
    """Return the sections of the report, each a title and its lines."""
    archs = sorted(
        {torch.cuda.get_device_capability(i)[0] for i in range(torch.cuda.device_count())}
    )
    variables = [
        f"{n}={os.environ[n] if n in os.environ else '(unset)'}  {what}"
        for n, what in VARIABLES.items()
    ]
    return [
        ("Versions", list(versions())),
        ("Devices", list(devices())),
        ("Backends", list(backends())),
        (
            "Known compiler hazards",
            list(hazards(installed("triton"), archs)) or ["triton is not installed"],
        ),
        ("Compilers", list(compilers())),
        ("Environment", variables),
        ("Self-test", list(_or_why(self_test()))),
    ]


def _or_why(lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines; turn an exception into a PROBLEM line."""
    try:
        yield from lines
    except Exception as error:
        yield f"PROBLEM: {type(error).__name__}: {error}"


def main(argv: list[str]) -> int:
    """Print the report; return 1 if it holds a problem."""
    argparse.ArgumentParser(
        prog="python -m kda_ops doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(argv)
    sections = report()
    for title, lines in sections:
        print(title, *(f"  {line}" for line in lines), sep="\n")
    return int(any("PROBLEM" in line for _, lines in sections for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
