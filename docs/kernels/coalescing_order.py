"""Show a regression of Triton 3.7: its coalesce pass breaks ties towards the inner dimension.

A 3-D load of [groups, 4, width] of which only the last dimension is contiguous, with a stride that
the compiler does not know. Sums run along the 4. Triton 3.6 keeps them in one thread; 3.7.1 to 3.9
spread them over lanes and warps (pull request 7143 of Triton, "row major by default"). Run it with
each Triton; it needs no GPU and no other package.
"""

import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def prefix_sums(x, y, stride, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Write the prefix sums of each group of 4 rows."""
    rows = 4 * tl.arange(0, GROUPS)[:, None] + tl.arange(0, 4)[None, :]
    offsets = (rows * stride)[:, :, None] + tl.arange(0, WIDTH)[None, None, :]
    tl.store(y + offsets, tl.cumsum(tl.load(x + offsets).to(tl.float32), 1).to(tl.bfloat16))


def main() -> None:
    """Compile for sm_90 and print the layout of the load and what the sums cost."""
    signature = {"x": "*bf16", "y": "*bf16", "stride": "i32"}
    source = ASTSource(
        prefix_sums,
        signature | {"GROUPS": "constexpr", "WIDTH": "constexpr"},
        {"GROUPS": 8, "WIDTH": 128},
        {(i,): [["tt.divisibility", 16]] for i in range(3)},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ttgir, ptx = made.asm["ttgir"], made.asm["ptx"]
    layout = re.search(r"tt\.load .*#(blocked\d*)>", ttgir)
    assert layout is not None
    found = re.search(rf"#{layout[1]} = (.*)", ttgir)
    assert found is not None
    counts = {name: len(re.findall(name, ptx)) for name in ("bar.sync", "shfl.sync", "add")}
    print(f"triton {triton.__version__}: {found[1]} {counts}")


if __name__ == "__main__":
    main()
