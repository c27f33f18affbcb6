"""Export a KDA layer: prefill for any batch and length, and a decode step with buffered states.

Usage::

    # torch.export: save, load, run; a few seconds
    python examples/export.py
    # also compile with AOTInductor, into prefill.pt2 and decode.pt2; half a minute more
    python examples/export.py --package .
    # packages for CUDA are untested, see docs/compile.md
    python examples/export.py --device cuda --package .

In an exported program each operator is one node: ``torch.ops.kda.chunk`` or
``torch.ops.kda.recurrent_``. The program does not contain its kernels, so the process that runs it
must ``import kda_ops``. This holds for saved programs (``torch.export.load``) and for AOTInductor
packages (``torch._inductor.aoti_load_package``). Without the import, loading fails with "Could not
find schema for kda::chunk". Four more rules:

- Export and run decoding under ``torch.no_grad()``, because decoding writes its states in place.
- Initialise CUDA before loading a package for CUDA, for example by creating the inputs.
- Pass contiguous inputs, because a package expects the strides of the example inputs. A package
  checks strides only with AOTI_RUNTIME_CHECK_INPUTS=1.
- Set the flags for gate, norm and sigmoid, as this script does, because exported graphs skip the
  pass of `kda_ops.inductor`.

A package calls each operator through PyTorch's dispatcher, by name and schema. So a C++ process
without Python can run a package if a library defines the same schema and implements it for the
device. The ``TORCH_LIBRARY(kda, m)`` of that library takes the line that
``torch.ops.kda.chunk.default._schema`` prints. kda_ops ships no such library, because Python
launches its kernels. A C++ server can embed an interpreter (``pybind11::scoped_interpreter``),
import kda_ops once, and load packages in that process. A call then holds the GIL while it launches.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import kda_ops
from kda_ops.tools.machine import need_device

FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)


class Mixer(nn.Module):
    """A layer x ``[B, T, hidden]`` -> same shape: projections around a whole-sequence operator."""

    def __init__(
        self, hidden: int = 32, heads: int = 2, width: int = 16, operator=kda_ops.chunk_kda
    ):
        super().__init__()
        self.heads, self.width, self.operator = heads, width, operator
        self.qkvg_proj = nn.Linear(hidden, 4 * heads * width, bias=False)
        self.b_proj = nn.Linear(hidden, heads, bias=False)
        self.o_proj = nn.Linear(heads * width, hidden, bias=False)
        self.A_log = nn.Parameter(torch.linspace(-1, 1, heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads, width))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v, g ``[B, T, heads, width]`` and beta ``[B, T, heads]``."""
        return *self.qkvg_proj(x).unflatten(-1, (4, self.heads, self.width)).unbind(2), self.b_proj(
            x
        )

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Apply the operator to each row, or to each packed sequence."""
        o, _ = self.operator(
            *self.project(x), self.A_log, self.dt_bias, cu_seqlens=cu_seqlens, **FLAGS
        )
        return self.o_proj(o.flatten(-2))


class Decoder(Mixer):
    """A decode step: one token x ``[N, 1, hidden]`` for each of the sequences in slots ``[N]``.

    The pool of states is a buffer.
    """

    def __init__(self, *args, slots: int = 8, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("states", torch.zeros(slots, self.heads, self.width, self.width))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """Read and write the states in place."""
        o = kda_ops.recurrent_kda_(
            *self.project(x), self.states, slots, A_log=self.A_log, dt_bias=self.dt_bias, **FLAGS
        )
        return self.o_proj(o.flatten(-2))


def export_prefill(mixer: Mixer) -> ExportedProgram:
    """Export one program for any batch and length."""
    x = torch.randn(2, 70, 32, device=mixer.A_log.device)
    return torch.export.export(
        mixer, (x,), dynamic_shapes=({0: Dim("B", max=64), 1: Dim("T", max=65536)},)
    )


def export_packed(mixer: Mixer) -> ExportedProgram:
    """Export one program for any number of packed sequences, of any lengths."""
    device = mixer.A_log.device
    example = torch.randn(1, 70, 32, device=device), torch.tensor([0, 30, 30, 65], device=device)
    return torch.export.export(
        mixer,
        example,
        dynamic_shapes=({1: Dim("T", max=65536)}, {0: Dim("offsets", min=1, max=1024)}),
    )


@torch.no_grad()
def export_decode(decoder: Decoder) -> ExportedProgram:
    """Export one program for any number of sequences; each call mutates its buffer `states`."""
    N, device = Dim("N", max=64), decoder.A_log.device
    example = torch.randn(2, 1, 32, device=device), torch.tensor([0, 3], device=device)
    return torch.export.export(decoder, example, dynamic_shapes=({0: N}, {0: N}))


def through_file(program: ExportedProgram, folder: Path) -> nn.Module:
    """Save and load a program; return its module."""
    path = folder / "program.pt2"
    torch.export.save(program, path)
    return torch.export.load(path).module()


def package(program: ExportedProgram, path: Path) -> Path:
    """Compile with AOTInductor for the device of the program's parameters."""
    from torch._inductor import aoti_compile_and_package

    with torch.no_grad():
        return Path(aoti_compile_and_package(program, package_path=str(path.absolute())))


def run_elsewhere(path: Path, *inputs: Tensor) -> Tensor:
    """Run a package once in a fresh process, from the file and ``import kda_ops`` alone."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(inputs, Path(folder) / "in.pt")
        code = (
            "import sys, torch, kda_ops; package, folder = sys.argv[1:]; inputs = "
            "torch.load(folder + '/in.pt'); "
            "torch.save(torch._inductor.aoti_load_package(package)(*inputs), folder + '/out.pt')"
        )
        subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", code, str(path), folder],
            check=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        return torch.load(Path(folder) / "out.pt")


@torch.no_grad()
def main(argv: list[str] | None = None) -> dict[str, float]:
    """Export, save, load and run; return each program's largest difference from the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--package",
        type=Path,
        metavar="FOLDER",
        help="also compile packages with AOTInductor into this folder",
    )
    args = parser.parse_args(argv)
    need_device(parser, args.device)
    torch.manual_seed(0)
    mixer, decoder = Mixer().to(args.device), Decoder().to(args.device)
    decoder.load_state_dict(mixer.state_dict(), strict=False)
    x, slots, offsets = (
        t.to(args.device)
        for t in (torch.randn(3, 100, 32), torch.tensor([5, 0, 2]), torch.tensor([0, 7, 100]))
    )
    want = mixer(x)
    off: dict[str, float] = {}

    def compare(name: str, got: Tensor, want: Tensor) -> None:
        off[name] = (got - want).abs().max().item()
        print(f"{name:20s} differs by {off[name]:.1e}")

    with tempfile.TemporaryDirectory() as folder:
        prefill, decode = export_prefill(mixer), export_decode(decoder)
        compare("prefill", through_file(prefill, Path(folder))(x), want)
        compare(
            "packed sequences",
            through_file(export_packed(mixer), Path(folder))(x[:1], offsets),
            mixer(x[:1], offsets),
        )
        step = through_file(decode, Path(folder))
        compare(
            "decode, 5 tokens",
            torch.cat([step(x[:, t : t + 1].contiguous(), slots) for t in range(5)], 1),
            want[:, :5],
        )
    if args.package:
        args.package.mkdir(parents=True, exist_ok=True)
        compare(
            "packaged prefill",
            run_elsewhere(package(prefill, args.package / "prefill.pt2"), x),
            want,
        )
        compare(
            "packaged decode",
            run_elsewhere(
                package(decode, args.package / "decode.pt2"), x[:, :1].contiguous(), slots
            ),
            want[:, :1],
        )
    return off


if __name__ == "__main__":
    main()
