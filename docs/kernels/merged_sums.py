"""Show a defect of ptxas: it takes two sums for one, although wgmma changes what they add.

The PTX sums two accumulators times x, lets a wgmma add to them, and takes the same sum again. With
a label in front of the first sum, the machine code has one of the two. Triton emits such labels
with its line information. It needs no GPU, and the ptxas and nvdisasm of the installed Triton.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry sums(.param .u64 x, .param .u64 out, .param .u64 a, .param .u64 b)
.reqntid 128
{
  .reg .b32 %t;
  .reg .b64 %d<5>;
  .reg .f32 %x<3>, %y<4>, %first<4>, %again<4>;
  ld.param.u64 %d0, [x]; ld.param.u64 %d1, [out]; ld.param.u64 %d2, [a]; ld.param.u64 %d3, [b];
  mov.u32 %t, %tid.x; mul.wide.u32 %d4, %t, 16; add.s64 %d0, %d0, %d4; add.s64 %d1, %d1, %d4;
  ld.global.f32 %x0, [%d0]; ld.global.f32 %x1, [%d0+4]; ld.global.f32 %x2, [%d0+8];
  mul.f32 %y0, %x2, %x0;
  mul.f32 %y1, %x2, %x1;
  mul.f32 %y2, %x2, %x2;
  mul.f32 %y3, %x2, %x2;
LABEL
  mul.f32 %first0, %y0, %x0;
  fma.rn.f32 %first1, %y1, %x1, %first0;
  shfl.sync.bfly.b32 %first2, %first1, 1, 31, -1;
  add.f32 %first3, %first1, %first2;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%y0, %y1, %y2, %y3}, %d2, %d3, 1, 1, 1, 0, 0;
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
  mul.f32 %again0, %y0, %x0;
  fma.rn.f32 %again1, %y1, %x1, %again0;
  shfl.sync.bfly.b32 %again2, %again1, 1, 31, -1;
  add.f32 %again3, %again1, %again2;
  st.global.f32 [%d1], %first3; st.global.f32 [%d1+4], %again3;
  ret;
}
"""


def shuffles(ptxas: Path, ptx: str) -> int:
    """Return how many shuffles the machine code has; `ptx` has two."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "sums.ptx", Path(folder) / "sums.cubin"
        source.write_text(ptx)
        subprocess.run([ptxas, "--gpu-name=sm_90a", source, "-o", made], check=True)
        show = [ptxas.parent / "nvdisasm", "-c", made]
        said = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    return len(re.findall(r"\bSHFL\b", said))


def main() -> None:
    """Assemble with and without the label, and print the number of shuffles."""
    for ptxas in sorted((Path(triton.__file__).parent / "backends/nvidia/bin").glob("ptxas*")):
        said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True)
        found = re.search(r"release ([\d.]+)", said.stdout)
        counts = [shuffles(ptxas, PTX.replace("LABEL", label)) for label in ("", "here:")]
        print(f"ptxas {found and found[1]}: {counts[0]} shuffles, with the label {counts[1]}")


if __name__ == "__main__":
    main()
