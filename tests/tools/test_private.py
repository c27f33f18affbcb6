"""Private names of PyTorch behave as the package relies on, and are in `kda_ops.private` alone."""

import ast
import os
import re
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad
from torch.nn import Parameter

from kda_ops import private
from kda_ops.registrations.opaque import opaque
from tests.support.fresh import python

ROOT = Path(__file__).parents[2]
MODULES = {
    "kda_ops/private.py",
    "kda_ops/backends/triton/private.py",
    "kda_ops/backends/triton/gluon_names.py",
}
ELSEWHERE = {
    # it changes between calls, so no module can bind it (`kda_ops.private`)
    ("registrations/autograd.py", "_current_level"),
    # a mark on our parameters, which training scripts read
    ("kda_ops/nn/delta_attention.py", "_no_weight_decay"),
    # Inductor's table, imported with Inductor alone; tests/compile/test_decompositions.py uses it
    ("registrations/lazy.py", "torch._inductor.decomposition"),
    ("registrations/decompositions.py", "torch._inductor.decomposition.decompositions"),
    ("registrations/decompositions.py", "torch._inductor.decomposition.fast_random_decomps"),
}
NAMED_TUPLE = {"_replace", "_asdict", "_fields"}  # the standard library documents them
INSIDES = "runtime", "backends", "compiler", "knobs"
INTERNAL = re.compile(rf"triton\.({'|'.join(INSIDES)})\b")

# --- where private names are ----------------------------------------------------------------------


@cache
def sources() -> dict[str, ast.Module]:
    paths = [p for d in ("kda_ops", "registrations") for p in sorted((ROOT / d).rglob("*.py"))]
    return {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text("utf-8")) for p in paths}


def hidden(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module gives to functions, classes, variables and own attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr


def foreign(tree: ast.Module, ours: set[str]) -> Iterator[str]:
    """Yield the private names of other packages that a module reads, imports or spells."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in INSIDES and INTERNAL.match(ast.unparse(node)):
                yield ast.unparse(node)
            elif hidden(node.attr) and node.attr not in ours | NAMED_TUPLE:
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("kda_ops"):
            for name in node.names:
                path = f"{node.module}.{name.name}"
                if hidden(path) or INTERNAL.match(path):
                    yield path
        elif isinstance(node, ast.Import):
            yield from (n.name for n in node.names if hidden(n.name) or INTERNAL.match(n.name))
        elif isinstance(node, ast.Constant) and re.match(r"torch(\.\w+)+$", str(node.value)):
            if hidden(str(node.value)):
                yield str(node.value)


@pytest.mark.quick
def test_private_names_are_in_the_modules_for_them():
    trees = sources()
    ours = {name for tree in trees.values() for name in defined(tree)}
    found = {(path, name) for path, tree in trees.items() for name in foreign(tree, ours)}
    assert len({name for path, name in found if path in MODULES}) > 20
    assert {f for f in found if f[0] not in MODULES} == ELSEWHERE


@pytest.mark.quick
@pytest.mark.parametrize(
    "line",
    (
        "torch._C._any_requires_grad(x)",
        "from torch._inductor import config",
        "import torch._dynamo",
        "x._is_zerotensor()",
        "when_imported('torch.nested._internal.nested_tensor')",
        "triton.knobs.runtime.interpret",
        "from triton.runtime import driver",
    ),
)
def test_a_private_name_elsewhere_is_found(line):
    assert list(foreign(ast.parse(line), set()))


def exported(path: str) -> set[str]:
    """Return the names that one of the modules offers."""
    found: set[str] = set()
    for node in sources()[path].body:
        if isinstance(node, ast.If):  # under TYPE_CHECKING
            found |= {n.asname for i in node.body for n in i.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {n.asname for n in node.names if n.asname}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            found |= {
                n.id for n in ast.walk(node) if isinstance(getattr(n, "ctx", None), ast.Store)
            }
    return {n for n in found if not n.startswith("_")} - {"F", "VERSIONS"}


@pytest.mark.quick
@pytest.mark.parametrize("path", sorted(MODULES - {"kda_ops/backends/triton/gluon_names.py"}))
def test_each_name_is_used_and_tested(path):
    code = [p for p in sources() if p not in MODULES]
    used = "\n".join((ROOT / p).read_text("utf-8") for p in code)
    tests = "".join(p.read_text("utf-8") for p in (ROOT / "tests").rglob("test_private*.py"))
    names = exported(path)
    assert len(names) > 4
    assert not [name for name in names if not re.search(rf"\b{name}\b", used)]
    assert not [name for name in names if not re.search(rf"\bprivate\.{name}\b", tests)]


@pytest.mark.quick
def test_the_versions_are_those_that_ci_tests():
    oldest, newest = private.VERSIONS
    assert f'"torch>={oldest}"' in (ROOT / "pyproject.toml").read_text("utf-8")
    nightly = (ROOT / ".ci/nightly").read_text("utf-8")
    assert f"torch=={oldest}.0" in nightly and f"TORCH=torch=={newest}.0" in nightly


# --- operators and graph nodes --------------------------------------------------------------------


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


@pytest.mark.quick
def test_operators_are_overloads_with_schemas():
    packet = torch.ops.kda.recurrent_
    assert isinstance(packet, private.OpOverloadPacket)
    assert isinstance(packet.default, private.OpOverload)
    schema = private.schema_of(packet.default)
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["state"]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    assert defaults["scale"] is None and defaults["transpose_state_layout"] is False
    assert [r.name for r in private.schema_of(torch.ops.kda.chunk.default).returns] == [
        "o",
        "final_state",
    ]


def test_a_function_in_a_graph_is_a_higher_order_operator():
    def choose(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    targets = [n.target for n in graph_of(choose, torch.ones(3)).nodes]
    assert sum(isinstance(t, private.HigherOrderOperator) for t in targets) == 1


def test_modes_are_nodes_of_dynamo_graphs():
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


@pytest.mark.quick
def test_views_share_the_number_of_their_storage():
    with FakeTensorMode():
        fakes = torch.empty(4), torch.empty(4)
    for x, other in ((torch.ones(4), torch.ones(4)), fakes):
        assert private.storage_of(x) == private.storage_of(x[1:])
        assert private.storage_of(x) != private.storage_of(other)


# --- what a tensor is -----------------------------------------------------------------------------


@pytest.mark.quick
def test_wrapped_functional_and_zero_tensors_are_told():
    seen = []

    def note(x):
        seen.append((private.is_functorch_wrapped_tensor(x), private.is_functional_tensor(x)))
        return x.sum()

    x = torch.ones(2, 3)
    torch.vmap(note)(x), torch.func.grad(note)(x), torch.func.functionalize(note)(x), note(x)
    assert seen == [(True, False), (True, False), (True, True), (False, False)]
    zero = torch._efficientzerotensor(3)
    assert private.is_zero_tensor(zero) and not private.is_zero_tensor(torch.zeros(3))


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_wrapper_of_other_tensors_is_told():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert private.is_wrapper(nested)
    assert not private.is_wrapper(torch.ones(2)) and not private.is_wrapper(
        Parameter(torch.ones(2))
    )


@pytest.mark.quick
def test_any_argument_that_requires_a_gradient_is_found():
    x, y = torch.ones(2), torch.ones(2, requires_grad=True)
    assert private.any_requires_grad(x, None, y) and private.any_requires_grad(x, flag=1, key=y)
    assert private.any_requires_grad(x, [x, y])
    assert not private.any_requires_grad(x, None, 1, key=y.detach())


@pytest.mark.quick
def test_fake_and_functional_tensors_have_their_types():
    with FakeTensorMode():
        assert isinstance(torch.ones(2), private.FakeTensor)
    with FunctionalTensorMode():
        x = private.FunctionalTensor.to_functional(torch.ones(2))
        assert isinstance(x, private.FunctionalTensor) and not isinstance(x, private.FakeTensor)
    assert not isinstance(torch.ones(2), (private.FakeTensor, private.FunctionalTensor))


@pytest.mark.quick
def test_jagged_tensors_have_their_type():
    parts = [torch.ones(2, 3), torch.ones(1, 3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert isinstance(jagged * 2, private.NestedTensor)
    assert not isinstance(torch.nested.nested_tensor(parts), private.NestedTensor)


# --- dispatch, autograd and transforms ------------------------------------------------------------


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


@pytest.fixture(scope="module")
def square():
    """Return an operator whose Autograd kernel is made as in `registrations.autograd`."""
    library = torch.library.Library("kda_private_test", "DEF")  # noqa: TOR901
    library.define("square(Tensor x) -> Tensor")
    library.impl("square", lambda x: x * x, "CPU")
    op = torch.ops.kda_private_test.square.default

    def below(keyset, x):
        with private.BelowAutograd():
            return op.redispatch(keyset & private.AFTER_AUTOGRAD, x)

    def kernel(keyset, x):
        if not private.transforms_are_active():
            return Square.apply(partial(below, keyset), x)
        with private.enable_single_level_autograd_function():
            return Square.apply(partial(below, keyset), x)

    library.impl(op, kernel, "Autograd", with_keyset=True)
    yield op
    library._destroy()


@pytest.mark.quick
def test_below_autograd_nothing_is_recorded():
    x = torch.ones(2, requires_grad=True)
    with private.BelowAutograd():
        assert torch.is_grad_enabled() and not (x * 2).requires_grad
    assert (x * 2).requires_grad


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_kernel_of_one_level_differentiates_with_and_without_transforms(square):
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    square(x).sum().backward()
    assert x.grad.tolist() == [2.0, 6.0]
    x = x.detach()
    assert torch.func.grad(lambda x: square(x).sum())(x).tolist() == [2.0, 6.0]
    assert torch.vmap(torch.func.grad(square))(x).tolist() == [2.0, 6.0]


@pytest.mark.quick
def test_a_transform_refuses_a_function_of_one_level_without_its_context():
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: Square.apply(torch.square, x))(torch.tensor(2.0))


@pytest.mark.quick
def test_compiled_autograd_tells_functions_of_one_level_apart():
    x = torch.ones(2, requires_grad=True)
    one, two, other = (f.apply(torch.square, x).grad_fn for f in (Square, Square, Other))
    key = private.SingleLevelFunction._compiled_autograd_key
    assert key(one) == key(two) != key(other)


@pytest.mark.quick
def test_the_keys_of_autocast_can_be_excluded():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with private.ExcludeKeys(private.AUTOCAST):
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16


@pytest.mark.quick
def test_transforms_and_forward_mode_are_told():
    def state(x):
        seen.append((private.transforms_are_active(), forward_ad._current_level >= 0))
        return x.sum()

    x, seen = torch.ones(2, 3), []
    state(x), torch.func.grad(state)(x), torch.vmap(state)(x), torch.func.jvp(state, (x,), (x,))
    with forward_ad.dual_level():
        state(x)
    state(x)
    assert seen == [
        (False, False),
        (True, False),
        (True, False),
        (True, True),
        (False, True),
        (False, False),
    ]


@pytest.mark.quick
def test_tangents_can_be_turned_off_and_on():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        for on in (False, True):
            with private.set_fwd_grad_enabled(on):
                assert private.is_fwd_grad_enabled() == on
                assert (forward_ad.unpack_dual(x * 2).tangent is not None) == on
    assert private.is_fwd_grad_enabled()


# --- Dynamo and Inductor --------------------------------------------------------------------------


def test_dynamo_stays_out_of_a_marked_function():
    def inner(x):
        return double(x)

    def marked(x):
        return double(x)

    assert opaque(marked) is marked
    code = marked.__code__
    private.set_code_exec_strategy(code, private.SKIP)  # as `opaque` did
    for function, frames in ((inner, 1), (marked, 0)):
        compiled = []
        torch._dynamo.reset()
        run = torch.compile(function, backend=lambda gm, _, c=compiled: c.append(gm) or gm.forward)
        assert run(torch.ones(2)).tolist() == [2.0, 2.0] and len(compiled) == frames


def test_a_marked_method_is_a_constant_of_the_graph():
    class Layer(torch.nn.Module):
        def number(self):
            print(end="")  # Dynamo cannot trace it in a full graph
            return 3

        def forward(self, x):
            return x * self.number()

    class Marked(Layer):
        @private.constant_in_graphs
        def number(self):
            return Layer.number(self)

    x = torch.ones(2)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        graph_of(Layer(), x)
    assert [n.target for n in graph_of(Marked(), x).nodes if n.op.startswith("call")]


class Pass(private.CustomGraphPass):
    """A pass that Inductor can pickle, with a key that no earlier graph in its cache has."""

    asked: ClassVar[list] = []
    key = os.urandom(16)

    def __call__(self, graph):
        self.asked.append([n.target for n in graph.nodes if n.op == "call_method"])

    def uuid(self):
        self.asked.append("hash")
        return self.key


def test_inductor_runs_passes_before_autograd_and_asks_for_their_hash(tmp_path):
    sources = [tmp_path / "a.py", tmp_path / "b.py"]
    for i, path in enumerate(sources):
        path.write_text(f"x = {i}")
    one, both = (private.get_hash_for_files(tuple(map(str, s))) for s in (sources[:1], sources))
    assert isinstance(one, bytes) and one != both
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


def test_a_backend_is_registered_once_by_name():
    def kda_private_backend(gm, inputs):
        return gm.forward

    private.register_backend(kda_private_backend)
    assert torch.compile(double, backend="kda_private_backend")(torch.ones(1)).item() == 2
    with pytest.raises(AssertionError):
        private.register_backend(kda_private_backend)


# --- modules and process groups -------------------------------------------------------------------


@pytest.mark.quick
def test_pre_hooks_of_a_module_are_seen():
    layer = torch.nn.Linear(2, 2)
    assert not private.pre_hooks(layer)
    hook = layer.register_forward_pre_hook(lambda module, args: None)
    assert private.pre_hooks(layer)
    hook.remove()
    assert not private.pre_hooks(layer)


def test_groups_and_sharding_rules():
    out = python("""
        import torch, torch.distributed as dist
        from torch.distributed.tensor import DeviceMesh, DTensor, Replicate
        from kda_ops import private

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD
        assert private.backend_of(group, "cpu") == "gloo"
        try:
            private.backend_of(group, "xpu")
        except RuntimeError:
            pass
        else:
            raise AssertionError("a backend for a device that the group does not serve")

        x, ops = torch.arange(3.0), private.COLLECTIVES
        for y in (
            ops.all_gather_into_tensor(x, 1, group.group_name),
            ops.all_reduce(x, "sum", group.group_name),
        ):
            y = ops.wait_tensor(y)
            assert y.equal(x) and y.data_ptr() != x.data_ptr()

        propagator, chunk = private.sharding_propagator(), torch.ops.kda.chunk.default
        rule, seen = propagator.op_strategy_funcs[chunk], []

        def noted(schema):
            seen.append((schema, rule(schema)))
            return seen[-1][1]

        propagator.op_strategy_funcs[chunk] = noted
        x, mesh = torch.rand(1, 3, 2, 4), DeviceMesh("cpu", [0])
        x = DTensor.from_local(x, mesh, [Replicate()])
        with torch.no_grad():
            o, _ = chunk(x, x, x, None, None)
        assert o.placements == (Replicate(),)
        ((schema, strategy),) = seen
        assert isinstance(schema, private.OpSchema) and schema.op is chunk
        assert isinstance(strategy, private.OpStrategy) and strategy.strategies
        info = propagator.op_to_schema_info[chunk]
        assert isinstance(info, private.RuntimeSchemaInfo)
        assert "output_final_state" in info.static_kwargkey and info.needs_pytree
        dist.destroy_process_group()
        print("right")
    """)
    assert out.stdout == "right\n"


@pytest.mark.quick
def test_what_is_bound_later_is_bound_once():
    out = python("""
        import sys, torch
        from kda_ops import private
        assert not {"torch._inductor", "torch._dynamo", "torch.distributed.tensor"} & {*sys.modules}
        for name in private.LATER:
            assert getattr(private, name) is vars(private)[name]
        try:
            private.absent
        except AttributeError as error:
            assert "absent" in str(error)
            print("right")
    """)
    assert out.stdout == "right\n"
