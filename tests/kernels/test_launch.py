"""The first call of a kind has all its kernels compiled side by side, once, and computes nothing
meanwhile.
"""

import importlib.util
import warnings
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.support.fresh import python

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


class Kernel:
    """A kernel that notes what is asked of it."""

    def __init__(self):
        self.asked = []

    def warmup(self, *args, grid, **options):
        self.asked.append(("compile", grid, args, options))

    def __getitem__(self, grid):
        return lambda *args, **options: self.asked.append(("launch", grid, args, options))


@pytest.mark.quick
def test_a_launch_compiles_and_does_no_more_only_while_it_is_asked_to():
    from kda_ops.backends.triton.plans.launch import FMA, compiling, launch, overlap_streams

    kernel, cpu = Kernel(), torch.device("cpu")
    with compiling():
        launch(kernel, 3, cpu, 1, 2, num_warps=4)
        with overlap_streams(cpu) as on_side_stream, on_side_stream:
            launch(kernel, 4, cpu)
    with pytest.raises(ZeroDivisionError), compiling():
        raise ZeroDivisionError
    launch(kernel, 3, cpu, 1, 2, num_warps=4)
    launch(kernel, 0, cpu)
    want = ((3,), (1, 2), {"num_warps": 4} | FMA)
    assert kernel.asked == [("compile", *want), ("compile", (4,), (), FMA), ("launch", *want)]
    # Triton 3.9 warns if a launch does not set it, and 3.10 then turns fusion off
    assert FMA == {"enable_fp_fusion": True}


@pytest.mark.quick
def test_a_launch_takes_arguments_by_name_in_any_order():
    from kda_ops.backends.triton.plans.launch import FMA, compiling, launch

    kernel, cpu = Kernel(), torch.device("cpu")
    kernel.arg_names, kernel.__name__ = ["x", "y", "N"], "add"
    launch(kernel, 3, cpu, num_warps=4, N=7, y=2, x=1)
    with compiling():
        launch(kernel, 3, cpu, compiled_for=dict(N=16), N=7, y=2, x=1)
    with pytest.raises(TypeError, match="add also takes y, N"):
        launch(kernel, 3, cpu, x=1)
    assert kernel.asked == [
        ("launch", (3,), (1, 2, 7), {"num_warps": 4} | FMA),
        ("compile", (3,), (1, 2, 16), FMA),
    ]


def test_a_launch_is_on_the_device_of_its_tensors(monkeypatch):
    from kda_ops.backends.triton.plans.launch import launch

    current = [0]

    @contextmanager
    def device(there):
        before, current[0] = current[0], there.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    seen, kernel = [], {(3,): lambda *args, **options: seen.append(current[0])}
    for index in (0, 1, 0):
        launch(kernel, 3, torch.device("cuda", index))
    assert seen == [0, 1, 0] and current == [0]


@pytest.mark.parametrize(
    "registers, words, lost",
    ((32, 2842, True), (128, 257, True), (255, 594, False), (32, 20, False), (None, None, False)),
)
def test_a_launch_warns_of_a_kernel_that_has_lost_its_registers(registers, words, lost):
    from kda_ops.backends.triton.plans.launch import launch

    made = SimpleNamespace(name="scan_kda", n_regs=registers, n_spills=words)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        launch({(3,): lambda *args, **options: made}, 3, torch.device("cpu"), 1)
    assert ["scan_kda has lost its registers" in str(w.message) for w in said] == [True] * lost


SIDE_BY_SIDE = """
import triton
from triton.runtime.jit import JITFunction
from benchmarks.compile import offline
from benchmarks.calls import Call
from kda_ops.backends.triton.plans.launch import compiling

compiled, do = [], JITFunction._do_compile
def count(self, *args):
    compiled.append(self.fn.__name__)
    return do(self, *args)
call = Call(0, gate="plain", K=16, V=16, keep=True)
run = JITFunction.run
with offline(90, [""]) as rows:
    shown, JITFunction.run, JITFunction._do_compile = JITFunction.run, run, count
    with compiling():
        call.compile()
    kernels = ["prepare_gdn", "scan_gdn", "reverse_scan_gdn", "gradient_gdn"]
    assert sorted(compiled) == sorted(kernels), compiled
    JITFunction.run = shown
    call.compile()
    assert len(compiled) == 4, compiled
    assert [row.kernel for row in rows] == kernels and all(row.registers for row in rows)
"""


def test_what_threads_compiled_is_what_is_launched(tmp_path):
    python(SIDE_BY_SIDE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


def test_a_plan_copies_the_inputs_of_its_call():
    from kda_ops.backends.triton.plans.launch import compiling, copy_of, recorded, values
    from kda_ops.backends.triton.plans.plan import Plan
    from kda_ops.backends.triton.plans.recording import Recording

    def strided(B, T):
        return torch.randn(B, T, 2, 8)[..., ::2]

    def numbers_of(x):
        return {"B": x.shape[0], "T": x.shape[1]} | {f"x_{i}": n for i, n in enumerate(x.stride())}

    first, other = strided(2, 3), strided(5, 70)
    recording = Recording(numbers_of(first))
    B, T, *strides = recording.sizes.values()
    ref = recording.take("x", first, (B, T, 2, 4), tuple(strides))
    with recorded(recording):
        results = [copy_of(ref), copy_of(ref)]
    with compiling(), mock.patch.object(torch.Tensor, "copy_", None):
        assert copy_of(first).shape == first.shape  # nothing is copied
    plan = Plan(recording, results, first.device)
    for x in (first, other):
        bound = plan.bind(tuple(numbers_of(x).values()))
        again = plan.run([x], [x.data_ptr()], bound)
        for y in (*values(tuple(results)), *again) if x is first else again:
            assert y.is_contiguous() and y.equal(x)
        assert again[0].data_ptr() != again[1].data_ptr()


def test_a_device_that_is_not_there_has_no_architecture(monkeypatch):
    from kda_ops.backends.triton import tuning

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    tuning._capability.cache_clear()
    found = [tuning.is_hopper(torch.device("cuda", i)) for i in (0, 1)]
    tuning._capability.cache_clear()
    assert found == [True, False]


def test_torch_is_asked_for_the_architecture_once_per_device(monkeypatch):
    from kda_ops.backends.triton import tuning

    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: asked.append(device) or (9, 0)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    device = torch.device("cuda", 6)
    tuning._capability.cache_clear()
    assert [tuning.architecture(device) for _ in range(3)] == [9] * 3 and asked == [device]
    tuning._capability.cache_clear()
