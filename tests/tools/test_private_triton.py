"""Private names of Triton behave as `kda_ops.backends.triton.private` relies on."""

import inspect
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("triton")

from kda_ops.backends.triton import private
from tests.support.fresh import ROOT, python


@pytest.mark.quick
def test_the_versions_are_those_that_ci_tests():
    nightly = (ROOT / ".ci/nightly").read_text("utf-8")
    for major, minor in private.VERSIONS:
        assert f"triton-{major}.{minor}." in nightly


@pytest.mark.quick
@pytest.mark.parametrize("scratch", (0, 64))
def test_a_plan_starts_a_kernel_as_the_launcher_of_triton_does(scratch, monkeypatch):
    from triton.backends.nvidia import driver
    from triton.runtime import _allocation

    launcher, calls = object.__new__(driver.CudaLauncher), []
    vars(launcher).update(
        launch=lambda *args: calls.append(args),
        num_ctas=1,
        global_scratch_size=scratch,
        global_scratch_align=1,
        profile_scratch_size=0,
        profile_scratch_align=1,
        launch_cooperative_grid=False,
        launch_pdl=True,
        gsan_enabled=False,
    )
    if "kernel_signature" in inspect.getsource(driver.CudaLauncher.__init__):
        launcher.arg_annotations, launcher.kernel_signature = "annotations", "signature"
    allocator = mock.Mock(get=lambda: lambda size, alignment, stream: size)
    compiled = SimpleNamespace(run=launcher, function="function", packed_metadata="packed")
    runtime = mock.Mock()  # Triton 3.9 asks it for the active driver
    with (
        mock.patch.object(_allocation, "_allocator", allocator),
        mock.patch.object(driver.triton.runtime, "driver", runtime, create=True),
    ):
        launcher(7, 1, 1, "stream", "function", "packed", None, None, None, 1, (2, 3))
        if not scratch:  # what it avoids
            monkeypatch.setattr(driver.CudaLauncher, "__call__", None)
        private.starter(compiled)(7, "stream", (1, (2, 3)))
    assert calls[0] == calls[1] and len(calls) == 2
    assert (64 * 7 in calls[1]) == bool(scratch)


@pytest.mark.quick
@pytest.mark.parametrize("change", ("version", "gsan", "launcher"))
def test_a_launcher_that_is_not_known_runs_by_its_public_method(change, monkeypatch):
    class CudaLauncher:
        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid = launch_pdl = False
        gsan_enabled = change == "gsan"

        def __call__(self, *args):
            calls.append(args)

        def launch(self, *args):
            raise AssertionError("the private way")

    calls: list = []
    if change == "version":
        monkeypatch.setattr(private.triton, "__version__", "3.10.0")
    if change == "launcher":
        CudaLauncher.__name__ = "AnotherLauncher"
    compiled = SimpleNamespace(run=CudaLauncher(), function="function", packed_metadata="packed")
    private.starter(compiled)(7, "stream", (1, (2, 3)))
    assert calls == [(7, 1, 1, "stream", "function", "packed", None, None, None, 1, (2, 3))]


@pytest.mark.quick
def test_a_profiler_is_seen_by_its_hook():
    hook, calls = private.RUNTIME.launch_enter_hook, []
    note = calls.append
    assert hook.calls == []  # `plan` then launches without the hook
    hook.add(note)
    try:
        assert private.RUNTIME.launch_enter_hook.calls == [note]
        private.RUNTIME.launch_enter_hook("metadata")
    finally:
        hook.remove(note)
    assert hook.calls == [] and calls == ["metadata"]


@pytest.mark.quick
@pytest.mark.parametrize("interpret", ("0", "1"))
def test_the_variable_chooses_the_interpreter(interpret):
    out = python(
        """
        import triton
        from kda_ops.backends.triton import gate, private
        print(private.INTERPRET, isinstance(gate.sigmoid, triton.JITFunction))
        """,
        TRITON_INTERPRET=interpret,
    )
    assert out.stdout.split() == (["True", "False"] if interpret == "1" else ["False", "True"])


@pytest.mark.quick
def test_a_target_needs_no_gpu():
    from triton.backends.nvidia.compiler import CUDABackend

    target = private.GPUTarget("cuda", 90, 32)
    assert CUDABackend.supports_target(target)
    assert CUDABackend(target).parse_options({}).arch == "sm90"


@pytest.mark.quick
def test_a_driver_can_be_replaced():
    """For a process of its own: Triton keeps the driver."""
    out = python("""
        from triton.runtime import driver
        from kda_ops.backends.triton import private
        from benchmarks.compile import offline_driver
        made = offline_driver(90)
        private.driver.set_active(made)
        assert driver.active is private.driver.active is made
        print(private.driver.active.get_current_target() == private.GPUTarget("cuda", 90, 32))
    """)
    assert out.stdout == "True\n"
