"""The shipped configurations compile for their architectures and stay within their registers,
spills and shared memory; no GPU needed.
"""

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import budgets, compile, machine_code

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.mark.nightly  # `.ci/run` compiles for sm_90 with two other Tritons
@pytest.mark.parametrize("arch", ("90", "80", "100"))
def test_every_kernel_is_within_its_limits(arch):
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "compile", "--arch", arch],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    # Triton prints the source of a kernel that ptxas refuses
    rows = [line for line in run.stdout.splitlines() if " B shared " in line]
    found = {line.split(" sm_")[0].split()[-1] for line in rows}
    known = {kernel for limits in budgets.TABLE.values() for kernel in limits}
    hopper = {
        "walk_kda",
        "prepare_walk",
        "scan_walk",
        "states_kda",
        "reverse_walk_kda",
        "finish_back",
    }
    hopper |= {"reverse_walk_gdn", "finish_walk", "gradient_small", "add_parts"}
    assert found == (known if arch == "90" else known - hopper)


@pytest.mark.quick
def test_every_call_has_a_label_of_its_own():
    calls = [*budgets.TABLE, *budgets.OTHERS]
    assert len({c.label for c in calls}) == len(calls)
    assert {c.label for c in budgets.ELSEWHERE} & {c.label for c in budgets.TABLE}


def kernel(name, registers=255, stack=0, **found):
    """Build the row of a kernel."""
    return compile.CompiledKernel("layer", name, 90, 8, registers, stack, 0, 1.0, False, **found)


WAIT = "griddepcontrol.wait; // dummy %r2"


@pytest.mark.quick
@pytest.mark.parametrize(
    "lines, found",
    (
        (("ld.param.b64 %rd1, [x];", WAIT, "ld.global.b32 %r1, [%rd1];"), False),
        (("ld.global.b32 %r1, [%rd1];", WAIT), True),
        ((" @%p1 st.global.v4.b32 [ %rd1 + 0 ], { %r1 };", WAIT), True),
        (("prefetch.global.L2 [%rd1];", WAIT), True),
        (("cp.async.cg.shared.global [%r1], [%rd1], 0x10;", WAIT), True),
        (("ld.shared.b32 %r1, [%r2];", WAIT), False),
        (("ret;",), True),
    ),
)
def test_a_kernel_that_reads_before_it_waits_is_found(lines, found):

    assert machine_code.hasty("\n".join(lines)) == found
    assert len(kernel("scan_kda", hasty=found).faults()) == found


@pytest.mark.quick
def test_registers_stack_and_instructions_have_limits_per_triton():
    limits = budgets.most(8, 16, 0, 24, instructions=1000, registers=168)

    def faults(registers=168, stack=0, instructions=1100, triton=(3, 6, 0)):
        found = limits.faults(registers, stack, instructions, triton)
        return [fault.split(",")[0] for fault in found]

    assert faults() == [] and faults(registers=169) == ["169 registers"]
    assert faults(instructions=1101) == ["1101 instructions"]
    for triton, most in (((3, 6, 0), 8), ((3, 7, 1), 16), ((3, 9, 0), 24), ((3, 11), 24)):
        assert faults(stack=most, triton=triton) == []
        assert faults(stack=most + 1, triton=triton) == [f"{most + 1} bytes of stack"]
    assert budgets.most(8).stack == (8, 8, 8, 8)


@pytest.mark.quick
def test_a_call_launches_the_kernels_that_the_table_says_within_their_limits():
    def faults(limits, **kernels):
        rows = [kernel(name, stack=stack) for name, stack in kernels.items()]
        return [x.split(",")[0] for x in compile.faults_of(rows, limits)]

    limits = {"scan": budgets.most(8), "recur": budgets.most(0)}
    assert faults(limits, scan=8, recur=0) == [] == faults(None, scan=1 << 9)
    assert faults(limits, scan=9, recur=0) == ["scan: 9 bytes of stack"]
    assert [x[:6] for x in faults(limits, scan=0, other=0)] == ["other:", "recur:"]


@pytest.mark.parametrize(
    "registers, stack, found",
    ((32, 11416, True), (128, 2560, True), (255, 2376, False), (32, 80, False), (128, 24, False)),
)
def test_a_kernel_that_has_lost_its_registers_is_found(registers, stack, found):
    """Of fp32 scans with 32 columns of V, K = 16, triton 3.6 made the first of these; a kernel that
    spills otherwise uses what registers there are.
    """
    faults = kernel("scan_kda", registers=registers, stack=stack).faults()
    assert ["given registers up" in fault for fault in faults] == [True] * found


# of what the compiler prints, types are shortened
LOOP = """
    %a = ttg.local_alloc : () -> !ttg.memdesc<STAGESx64x64xbf16>
    %l = scf.for %i = %c0 to %c2 step %c1 iter_args(%acc = %cst) -> (tensor<64x64xf32>) : i32 {
      %x = ttg.memdesc_index %a[%i] : !ttg.memdesc<STAGESx64x64xbf16> -> !ttg.memdesc<64x64xbf16>
      %t = ttg.memdesc_trans %x {order = array<i32: 1, 0>} : !ttg.memdesc<64x64xbf16>
      %d = ttng.warp_group_dot %b, %t, %acc {inputPrecision = 0 : i32, isAsync = true}
      %w:2 = ttng.warp_group_dot_wait %d, %t {pendings = PENDING : i32} : tensor<64x64xf32>
      %s = ttg.memdesc_index %a[%j] : !ttg.memdesc<STAGESx64x64xbf16> -> !ttg.memdesc<64x64xbf16>
      %c = ttg.async_copy_global_to_local %p, %s mask %m : tensor<64x64x!tt.ptr<bf16>>
"""


@pytest.mark.quick
@pytest.mark.parametrize("stages, pending, hazard", ((1, 1, True), (1, 0, False), (2, 1, False)))
def test_a_buffer_that_is_filled_while_a_product_reads_it_is_found(stages, pending, hazard):
    """The pipeliner of triton 3.6 and 3.7 emits the first of these for a tile that is both an
    operand and a value in registers.
    """
    assert (
        machine_code.refilled(LOOP.replace("STAGES", str(stages)).replace("PENDING", str(pending)))
        is hazard
    )


# products into %r1 and %r2, from shared memory and from registers, and sums of what they return
PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1,%r2}, %rd1, %rd2, ADDS, 1, 1, 0, 0;"
)
HALF = (
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1,%r2}, {%r30,%r31}, %rd2, ADDS, 1, 1;"
)
ZERO = "mov.b32 %r1, 0f00000000;", "mov.b32 %r2, 0f00000000;"
FIRST = "mul.f32 %r5, %r1, %r3;", "fma.rn.f32 %r6, %r2, %r4, %r5;"
SUMS = *FIRST, "shfl.sync.bfly.b32 %r9, %r6, 1, 31, -1;"
AGAIN = (
    "mul.f32 %r7, %r3, %r1;",
    "fma.rn.f32 %r8, %r4, %r2, %r7;",
    "shfl.sync.bfly.b32 %r10|%p2, %r8, 1, 31, -1;",
)
BACKWARDS = "mul.f32 %r7, %r4, %r2;", "fma.rn.f32 %r8, %r3, %r1, %r7;", AGAIN[2]
COPIED = "@%p4 mov.b32 %r20, %r3;", AGAIN[0].replace("%r3", "%r20"), *AGAIN[1:]
LOADED = "ld.shared.v2.b32 {%r3, %r4}, [%r40];", *AGAIN
CONVERTED = "@%p4 cvt.rn.f32.s32 %r3, %r40;", *AGAIN
DIFFERENCE = AGAIN[0], AGAIN[1].replace("fma.rn.f32 %r8, %r4", "sub.f32 %r8, %r7"), AGAIN[2]
ENDS = (
    "shfl.sync.bfly.b32 %r11, %r8, 2, 31, -1;",  # nothing reads it
    "add.f32 %r12, %r9, %r10;",
)
SHUFFLE, OTHER = "89790500" + "00" * 12, "89720000" + "00" * 12


@pytest.mark.quick
@pytest.mark.parametrize(
    "before, product, adds, after, shuffles, found",
    (
        (SUMS, PRODUCT, "%p1", AGAIN, 1, True),
        (SUMS, HALF, "%p1", AGAIN, 1, True),
        (SUMS, PRODUCT, "%p1", COPIED, 1, True),
        (SUMS, PRODUCT, "%p1", AGAIN, 2, False),  # ptxas kept both
        (SUMS, PRODUCT, "%p1", BACKWARDS, 1, False),
        (SUMS, PRODUCT, "%p1", LOADED, 1, False),
        (SUMS, PRODUCT, "%p1", CONVERTED, 1, False),
        (SUMS, PRODUCT, "%p1", DIFFERENCE, 1, False),
        (SUMS, PRODUCT, "0", AGAIN, 1, False),  # the second product starts from 0
        (SUMS, HALF, "0", AGAIN, 1, False),
        ((*SUMS, *ZERO), PRODUCT, "%p1", AGAIN, 1, False),  # the accumulators are zeroed before it
        (FIRST, PRODUCT, "%p1", AGAIN, 0, False),  # nothing shuffles the first sum
        (SUMS, "", "", AGAIN, 1, False),  # one sum, taken twice
    ),
)
def test_sums_that_ptxas_merged_are_found(
    before, product, adds, after, shuffles, found, monkeypatch
):

    start = *ZERO, PRODUCT.replace("ADDS", "%p1")
    ptx = "\n".join((*start, *before, product.replace("ADDS", adds), *after, *ENDS))
    code = bytes.fromhex(SHUFFLE * shuffles + OTHER * 3)
    monkeypatch.setattr(machine_code, "_sections", lambda cubin, name: [(".text", 6, 0, code)])
    assert machine_code.merged(ptx, b"", "kernel") is found
    assert len(kernel("gradient_gdn", merged=found).faults()) == found


@pytest.mark.quick
@pytest.mark.parametrize("label", ("", "here:"))
def test_ptxas_merges_sums_that_have_a_label_in_front(label, tmp_path):
    """Should a later ptxas keep them apart, hazards.md ("Merged sums") is to say so."""
    script = runpy.run_path(str(ROOT / "docs" / "kernels" / "merged_sums.py"))
    folder = importlib.util.find_spec("triton").submodule_search_locations[0]
    ptxas = Path(folder) / "backends" / "nvidia" / "bin" / "ptxas"
    ptx, made = script["PTX"].replace("LABEL", label), tmp_path / "sums.cubin"
    (tmp_path / "sums.ptx").write_text(ptx)
    command = [ptxas, "--gpu-name=sm_90a", tmp_path / "sums.ptx", "-o", made]
    subprocess.run(command, check=True)
    assert machine_code.merged(ptx, made.read_bytes(), "sums") == bool(label)
    assert script["shuffles"](ptxas, ptx) == (1 if label else 2)
