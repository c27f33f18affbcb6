"""``python -m kda_ops doctor``: what is installed, which backend serves what and why, and what is
known to go wrong with it.

triton is imported only where a CUDA device would import it anyway.
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
from kda_ops.bench.machine import installed
from kda_ops.stages import Backend

Version = tuple[int, ...]


def parse_version(text: str) -> Version:
    """The numbers at the start of a version: "3.7.1+git" -> (3, 7, 1)."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    assert found is not None  # every version of triton begins with a number
    return tuple(int(n) for n in found[0].split("."))


@dataclass(frozen=True)
class Hazard:
    """A known defect of triton versions `first` to `last` (None: open-ended), on one GPU
    architecture or on all.
    """

    first: Version
    last: Version | None
    arch: int | None
    what: str
    here: str  # how it concerns kda_ops
    # of these, where it is not mended, and what ``python -m kda_ops compile`` finds then
    kernels: tuple[str, ...] = ()
    fault: str = ""

    def concerns(self, triton: Version, archs: list[int]) -> bool:
        """Whether it concerns this triton, and a GPU that is here; with none here, every
        architecture counts.
        """
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
            "a dot result cast to 16 bits, then transposed, as a dot operand gives wrong numbers "
            "at some tile widths (fla-org/flash-linear-attention #640, #826)"
        ),
        "the kernels compute the transposed product instead; kernels of your own may not",
    ),
    Hazard(
        (3, 0),
        (3, 7, 1),
        9,
        (
            "a 64 x 64 backward through the triangular inverse with 4 warps is wrong "
            "(fla-org/flash-linear-attention #984, #988)"
        ),
        "configurations are checked numerically before they enter the table",
    ),
    Hazard(
        (3, 6),
        (3, 7, 1),
        10,
        "a pass over layouts of tensor memory fails",
        "gradient_rows, of GDN's backward, does not compile; with triton 3.8 it does",
        ("gradient_rows",),
        "PassManager",
    ),
    Hazard(
        (3, 9), None, None, "block pointers (tl.make_block_ptr) are gone", "the kernels use none"
    ),
    Hazard(
        (3, 10),
        None,
        None,
        "contraction to fma is off unless a launch asks for it",
        "the last bits may differ from those of earlier versions",
    ),
    Hazard(
        (3, 0),
        None,
        None,
        "the interpreter (TRITON_INTERPRET=1) multiplies the bits of bf16 dot operands as integers",
        "test with fp16 or fp32 there",
    ),
    Hazard(
        (3, 6),
        (3, 6, 99),
        None,
        "the interpreter needs numpy < 2.4 for loops over tl.cdiv",
        "pin numpy beside this triton",
    ),
)


def versions() -> Iterator[str]:
    """What is installed."""
    yield f"kda_ops {kda_ops.__version__} from {Path(kda_ops.__file__).parent}"
    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"torch {torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    yield f"triton {installed('triton') or 'not installed'}"
    for peer in (
        "fla-core",
        "flash-linear-attention",
        "flash-qla",
        "nvidia-cudnn-frontend",
        "transformers",
    ):
        if version := installed(peer):
            yield f"{peer} {version} (a peer of the benchmark)"


def devices() -> Iterator[str]:
    """What tensors can be on."""
    yield f"CPU: {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        yield "CUDA: none" + ("" if torch.version.cuda else " (this torch is built without CUDA)")
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        yield (
            f"CUDA {i}: {p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB, "
            f"{p.multi_processor_count} SMs"
        )


def _stages() -> list[str]:
    return [n for n in vars(Backend) if not n.startswith("_")]


def _lacking(name: str) -> str:
    backend = dispatch.load(name)
    missing = [s for s in _stages() if not hasattr(backend, s)]
    return f", without {', '.join(missing)}: calls that need them fail" if missing else ""


def backends() -> Iterator[str]:
    """Which backend serves what, and why."""
    name = dispatch.backend_name(torch.device("cpu"))
    chosen = "chosen by KDA_OPS_CPU" if "KDA_OPS_CPU" in os.environ else "the default"
    lacking = "" if name == "triton" and not installed("triton") else _lacking(name)
    yield f"CPU tensors: {name} ({chosen}){lacking}"
    if name == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        yield "  PROBLEM: KDA_OPS_CPU=triton needs TRITON_INTERPRET=1, set before python starts"
    if not installed("triton"):
        yield "CUDA tensors: none, triton is not installed (CUDA builds of torch bring it)"
    elif torch.cuda.is_available():
        yield f"CUDA tensors: triton{_lacking('triton')}"
        from kda_ops.backends.triton import tuning

        yield (
            f"tuned options: {len(tuning.tuned())} rows of {tuning.cache_file()} are for this "
            "GPU, triton and kernels"
        )
    else:
        yield "CUDA tensors: triton, once there is a device"


def hazards(triton: str | None, archs: list[int]) -> Iterator[str]:
    """The known defects of a triton version on some architectures (major numbers)."""
    if triton is None:
        return
    found = [h for h in HAZARDS if h.concerns(parse_version(triton), archs)]
    for h in found:
        on = f" on sm_{h.arch}x" if h.arch else ""
        yield f"triton {triton}{on}: {h.what}; {h.here}"
    if not found:
        yield f"triton {triton}: none known"


def compilers() -> Iterator[str]:
    """What torch.compile and triton need besides Python."""
    cxx = next(
        (c for c in (os.environ.get("CXX"), "g++", "clang++", "c++") if c and shutil.which(c)), None
    )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if cxx is None:
        yield (
            "C++: none found (CXX, g++, clang++): torch.compile on CPU needs one; "
            "backend='aot_eager' does without"
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
            f"Python.h: not at {header}: install the headers of this Python (triton and Inductor "
            "include it)"
        )


VARIABLES = {
    "KDA_OPS_CPU": "backend of CPU tensors: native (default), reference, triton (interpreted)",
    "KDA_OPS_CHECK": (
        "1: also check values that live on the device (cu_seqlens, slots, decays), at the price "
        "of a synchronisation per call"
    ),
    "KDA_OPS_TUNING": (
        "where `python -m kda_ops tune` keeps what it found; tuning.json in the user's cache "
        "otherwise"
    ),
    "TRITON_INTERPRET": "1: run Triton kernels in Python on the CPU; set before triton is imported",
}


def self_test() -> Iterator[str]:
    """A small call of both variants on the CPU, forward and backward, against the token recurrence
    in float64.
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
    """The sections of the report."""
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
    """The lines up to the exception that ends them, and that one as a problem."""
    try:
        yield from lines
    except Exception as error:
        yield f"PROBLEM: {type(error).__name__}: {error}"


def main(argv: list[str]) -> int:
    """Print the report; non-zero if it holds a problem."""
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
