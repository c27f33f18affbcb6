"""Private names of PyTorch and Triton behave as the package relies on: one row for each.

A row is the names of `kda_ops.private` (or, after "triton.", of `kda_ops.backends.triton.private`),
why the package relies on them, and a check. An upgrade that changes one fails its row, or the tests
that `HELD` names.
"""

import ast
import importlib.util
import inspect
import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode

from kda_ops import private
from tests.support.fresh import python

ROOT = Path(__file__).parents[2]
ROWS: list[tuple] = []
PRIVATE = re.compile(
    r"\b(?:torch(?:\.\w+)*\._(?!_)\w+|triton\.(?:runtime|backends|compiler|knobs)\b)"
)
MODULES = {"kda_ops.private": "", "kda_ops.backends.triton.private": "triton."}
# names whose behaviour other tests see, by test file
HELD = {
    "compile/test_fold_refusals.py": "storage_of",
    "compile/test_compiled.py": "set_code_exec_strategy SKIP",
    "distributed/test_context_faults.py": "backend_of COLLECTIVES",
    "distributed/test_sharding.py": (
        "sharding_propagator result_shapes OpSchema OpStrategy RuntimeSchemaInfo"
    ),
    "layers/test_compiled.py": "constant_in_graphs",
    "layers/test_refusals.py": "pre_hooks",
    "operators/test_gradients.py": "any_requires_grad",
    "operators/test_registrations.py": "BelowAutograd ExcludeKeys AUTOCAST",
    "operators/test_transforms.py": (
        "SingleLevelFunction enable_single_level_autograd_function AFTER_AUTOGRAD "
        "transforms_are_active is_fwd_grad_enabled set_fwd_grad_enabled"
    ),
}
ELSEWHERE = {
    "exported.py": {"torch._check"},  # documented
    # Inductor's table, imported with Inductor alone; tests/compile/test_decompositions.py uses it
    "lazy.py": {"torch._inductor"},
    "decompositions.py": {"torch._inductor"},
}


def rely(names: str, why: str, *cases):
    """Make a row of the list for each case of a check."""

    def keep(check):
        label = f"{names.split()[0]}: {why}"
        ROWS.extend(
            pytest.param(names, partial(check, *case), id=" ".join([label, *map(str, case)]))
            for case in cases or [()]
        )
        return check

    return keep


def double(x):
    return x * 2


def graph_of(function, *args):
    """Return the Dynamo graph of a function."""
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*args)
    return graphs[0]


@rely("OpOverload OpOverloadPacket schema_of", "an operator tells its arguments and its writes")
def _():
    packet, op = torch.ops.kda.recurrent_, torch.ops.kda.recurrent_.default
    assert isinstance(packet, private.OpOverloadPacket) and isinstance(op, private.OpOverload)
    arguments = private.schema_of(op).arguments
    assert [a.name for a in arguments if a.alias_info and a.alias_info.is_write] == ["state"]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    assert defaults["scale"] is None and defaults["transpose_state_layout"] is False
    returns = private.schema_of(torch.ops.kda.chunk.default).returns
    assert [r.name for r in returns] == ["o", "final_state"]


@rely("HigherOrderOperator", "the pass stops at an operator that takes functions")
def _():
    def choose(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    targets = [n.target for n in graph_of(choose, torch.ones(3)).nodes]
    assert sum(isinstance(t, private.HigherOrderOperator) for t in targets) == 1


@rely("set_grad_enabled enter_autocast ENTERS EXITS", "modes are nodes of Dynamo's graphs")
def _():
    def modes(x):
        with torch.no_grad():
            x = x + 1
        with torch.autocast("cpu", torch.bfloat16):
            x = x + 2
        with torch.inference_mode():
            x = x + 3
        return x

    nodes = [n for n in graph_of(modes, torch.ones(3)).nodes if n.op == "call_function"]
    assert [n.args[0] for n in nodes if n.target is private.set_grad_enabled] == [False, True]
    enters = [n for n in nodes if n.target in private.ENTERS]
    exits = [n for n in nodes if n.target in private.EXITS]
    assert [n.target for n in enters] == list(private.ENTERS)
    assert [n.target for n in exits] == list(private.EXITS)
    assert [n.args[0] for n in exits] == enters
    assert enters[0].target is private.enter_autocast
    assert enters[0].args[:3] == ("cpu", torch.bfloat16, True)


@rely(
    "is_functorch_wrapped_tensor is_functional_tensor is_zero_tensor",
    "no check reads the memory of a tensor that has none",
)
def _():
    seen = []

    def note(x):
        seen.append((private.is_functorch_wrapped_tensor(x), private.is_functional_tensor(x)))
        return x.sum()

    x = torch.ones(2, 3)
    torch.vmap(note)(x), torch.func.grad(note)(x), torch.func.functionalize(note)(x), note(x)
    assert seen == [(True, False), (True, False), (True, True), (False, False)]
    zero = torch._efficientzerotensor(3)
    assert private.is_zero_tensor(zero) and not private.is_zero_tensor(torch.zeros(3))


@rely("is_wrapper NestedTensor", "a tensor that wraps others, and jagged tensors, are told apart")
def _():
    parts = [torch.ones(2, 3), torch.ones(1, 3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert private.is_wrapper(jagged) and isinstance(jagged * 2, private.NestedTensor)
    for plain in (torch.ones(2), torch.nn.Parameter(torch.ones(2))):
        assert not private.is_wrapper(plain)
    assert not isinstance(torch.nested.nested_tensor(parts), private.NestedTensor)


@rely("FakeTensor FunctionalTensor", "tensors without values have types of their own")
def _():
    with FakeTensorMode():
        assert isinstance(torch.ones(2), private.FakeTensor)
    with FunctionalTensorMode():
        x = private.FunctionalTensor.to_functional(torch.ones(2))
        assert isinstance(x, private.FunctionalTensor) and not isinstance(x, private.FakeTensor)
    assert not isinstance(torch.ones(2), (private.FakeTensor, private.FunctionalTensor))


class Square(private.SingleLevelFunction):
    @staticmethod
    def forward(ctx, below, x):
        ctx.save_for_backward(x)
        return below(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return None, 2 * x * dy


class Other(Square):
    pass


@rely("SingleLevelFunction", "compiled autograd tells two functions apart")
def _():
    x = torch.ones(2, requires_grad=True)
    one, two, other = (f.apply(torch.square, x).grad_fn for f in (Square, Square, Other))
    key = private.SingleLevelFunction._compiled_autograd_key
    assert key(one) == key(two) != key(other)


class Pass(private.CustomGraphPass):
    """A pass that Inductor can pickle, with a key that no earlier graph in its cache has."""

    asked: ClassVar[list] = []
    key = os.urandom(16)

    def __call__(self, graph):
        self.asked.append([n.target for n in graph.nodes if n.op == "call_method"])

    def uuid(self):
        self.asked.append("hash")
        return self.key


@rely(
    "CustomGraphPass compile_fx inductor_config list_mode_options takes_several_passes",
    "Inductor runs passes before autograd, and their hashes are in its key",
)
def _():
    asked = Pass.asked
    asked.clear()
    passes = [Pass(), Pass()] if private.takes_several_passes() else Pass()
    patches = private.list_mode_options("default") | {"pre_grad_custom_pass": passes}

    def backend(gm, inputs):
        return private.compile_fx(gm, inputs, config_patches=patches)

    torch._dynamo.reset()
    before = private.inductor_config.pre_grad_custom_pass
    assert torch.compile(lambda x: x.mul(2), backend=backend)(torch.ones(2)).tolist() == [2, 2]
    assert private.inductor_config.pre_grad_custom_pass is before is None
    if private.takes_several_passes():
        assert asked.count(["mul"]) == 2 and "hash" in asked
    else:  # the passes run before Inductor looks into its cache
        assert asked == [["mul"]]
    assert private.list_mode_options("reduce-overhead")["triton.cudagraphs"]


@rely("get_hash_for_files", "the hash of a pass changes with its files")
def _():
    one, both = (private.get_hash_for_files(f) for f in ((__file__,), (__file__, os.__file__)))
    assert isinstance(one, bytes) and one != both


@rely("register_backend", "a backend is registered once, by its name")
def _():
    def kda_private_backend(gm, inputs):
        return gm.forward

    private.register_backend(kda_private_backend)
    assert torch.compile(double, backend="kda_private_backend")(torch.ones(1)).item() == 2
    with pytest.raises(AssertionError):
        private.register_backend(kda_private_backend)


@rely("LATER", "names that take long to import are bound once, when first asked for")
def _():
    python("""
        import sys, torch
        from kda_ops import private
        assert not {"torch._inductor", "torch._dynamo", "torch.distributed.tensor"} & {*sys.modules}
        for name in private.LATER:
            assert getattr(private, name) is vars(private)[name]
        assert not hasattr(private, "absent")
    """)


def of_triton():
    pytest.importorskip("triton")
    from kda_ops.backends.triton import private

    return private


@rely("triton.starter", "a plan starts a kernel as Triton's launcher does", (0,), (64,))
def _(scratch):
    ours = of_triton()
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
    call = driver.CudaLauncher.__call__
    with (
        mock.patch.object(_allocation, "_allocator", allocator),
        mock.patch.object(driver.triton.runtime, "driver", runtime, create=True),
    ):
        launcher(7, 1, 1, "stream", "function", "packed", None, None, None, 1, (2, 3))
        # without scratch, `starter` avoids the launcher's call
        with mock.patch.object(driver.CudaLauncher, "__call__", call if scratch else None):
            ours.starter(compiled)(7, "stream", (1, (2, 3)))
    assert calls[0] == calls[1] and len(calls) == 2
    assert (64 * 7 in calls[1]) == bool(scratch)


@rely("triton.starter", "a descriptor is encoded once, as Triton's launcher does")
def _():
    ours = of_triton()
    from triton.backends.nvidia import driver

    calls, fill = [], mock.Mock(return_value="map")
    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    active = SimpleNamespace(driver=SimpleNamespace(active=SimpleNamespace(utils=utils)))
    about = dict(swizzle=3, elem_size=2, elem_type=9, block_size=[8, 64], fp4_padded=False)
    signature = {0: "i32", 1: "tensordesc<bf16[8, 64]>", 2: "tensordesc<bf16[8, 64]>", 3: "i32"}
    launch = driver.wrap_handle_tensordesc(lambda *args: calls.append(args), signature, [about] * 2)
    start, expand = ours._encoded_once(launch)

    def descriptor(address):
        base = SimpleNamespace(data_ptr=lambda: address)
        options = dict(padding="zero", round_f32_to_tf32=False, block_shape=[8, 64])
        return SimpleNamespace(base=base, shape=[16, 64], strides=[64, 1], **options)

    class Late(SimpleNamespace):
        """Lets another thread find the places of descriptors first, when it is asked for one."""

        @property
        def block_shape(self):
            if not vars(self).setdefault("asked", False):
                self.asked = True
                expand(args)
            return [8, 64]

    late = vars(descriptor(16))
    del late["block_shape"]
    args = 3, Late(**late), descriptor(32), 5
    one_by_one = ours.triton.__version__ < "3.7"  # later versions pass the kernel's as one
    before = ("stream",) * getattr(driver, "_BASE_ARGS_FORMAT_LEN", 15)
    with mock.patch.object(driver.triton, "runtime", active):
        launch(*before, *(args if one_by_one else (args,)))
        assert fill.call_count == 2
        for _ in range(3):
            expanded = expand(args)
            start(*before, *(expanded if one_by_one else (expanded,)))
    assert fill.call_count == 4 and len(calls) == 4
    assert all([*map(repr, x)] == [*map(repr, calls[1])] for x in calls[2:])
    last = [x if one_by_one else [*x[:-1], *x[-1]] for x in calls[:2]]
    assert [*last[0]] == [*last[1]]


@rely("triton.starter", "another launcher", ("version",), ("gsan",), ("name",))
def _(change):
    ours, calls = of_triton(), []

    class CudaLauncher:
        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid = launch_pdl = False
        gsan_enabled = change == "gsan"

        def __call__(self, *args):
            calls.append(args)

        def launch(self, *args):
            raise AssertionError("the private way")

    if change == "name":
        CudaLauncher.__name__ = "AnotherLauncher"
    compiled = SimpleNamespace(run=CudaLauncher(), function="function", packed_metadata="packed")
    version = "3.10.0" if change == "version" else ours.triton.__version__
    with mock.patch.object(ours.triton, "__version__", version):
        ours.starter(compiled)(7, "stream", (1, (2, 3)))
    assert calls == [(7, 1, 1, "stream", "function", "packed", None, None, None, 1, (2, 3))]


@rely("triton.RUNTIME", "a profiler is seen by its hook")
def _():
    runtime = of_triton().RUNTIME
    hook, calls = runtime.launch_enter_hook, []
    note = calls.append
    assert hook.calls == []  # `plan` then launches without the hook
    hook.add(note)
    try:
        assert runtime.launch_enter_hook.calls == [note]
        runtime.launch_enter_hook("metadata")
    finally:
        hook.remove(note)
    assert hook.calls == [] and calls == ["metadata"]


@rely("triton.INTERPRET", "the variable chooses the interpreter", ("0",), ("1",))
def _(interpret):
    of_triton()
    out = python(
        """
        import triton
        from kda_ops.backends.triton import private
        from kda_ops.backends.triton.device import gate
        print(private.INTERPRET, isinstance(gate.sigmoid, triton.JITFunction))
        """,
        TRITON_INTERPRET=interpret,
    )
    assert out.stdout.split() == (["True", "False"] if interpret == "1" else ["False", "True"])


@rely("triton.GPUTarget triton.driver", "a driver without a GPU compiles for one")
def _():
    ours = of_triton()
    from triton.backends.nvidia.compiler import CUDABackend

    target = ours.GPUTarget("cuda", 90, 32)
    assert CUDABackend.supports_target(target)
    assert CUDABackend(target).parse_options({}).arch == "sm90"
    # in a process of its own, because Triton keeps the driver
    python("""
        from triton.runtime import driver
        from kda_ops.backends.triton import private
        from benchmarks.compile import offline_driver
        made = offline_driver(90)
        private.driver.set_active(made)
        assert driver.active is private.driver.active is made
        assert made.get_current_target() == private.GPUTarget("cuda", 90, 32)
    """)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("names, check", ROWS)
def test_a_private_name_behaves_as_the_package_relies_on(names, check):
    check()


@pytest.mark.quick
def test_private_names_are_in_the_modules_for_them_and_have_a_row():
    used = set()
    for path in [*(ROOT / "kda_ops").rglob("*.py"), *(ROOT / "registrations").rglob("*.py")]:
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in MODULES:
                used |= {MODULES[node.module] + name.name for name in node.names}
        if path.name not in ("private.py", "gluon_names.py"):
            assert set(PRIVATE.findall(ast.unparse(tree))) <= ELSEWHERE.get(path.name, set()), path
    assert len(used) > 30
    rows = [row.values[0] for row in ROWS]
    assert used <= {x for names in (*rows, *HELD.values()) for x in names.split()}
    assert all((ROOT / "tests" / file).exists() for file in HELD)


@pytest.mark.quick
def test_the_versions_are_those_that_ci_tests():
    oldest, newest = private.VERSIONS
    assert f'"torch>={oldest}"' in (ROOT / "pyproject.toml").read_text("utf-8")
    nightly = (ROOT / ".ci/nightly").read_text("utf-8")
    assert f"torch=={oldest}.0" in nightly and f"TORCH=torch=={newest}.0" in nightly
    if importlib.util.find_spec("triton"):
        for major, minor in of_triton().VERSIONS:
            assert f"triton-{major}.{minor}." in nightly
