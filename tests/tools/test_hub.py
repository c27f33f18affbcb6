"""The kernel for the Hugging Face hub: its format, and that it computes what the package does."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import kda_ops
from benchmarks import hub
from kda_ops.compat import hub_layers
from tests.support.cases import Case
from tests.support.closeness import assert_identical
from tests.support.fresh import ROOT, python

LAYERS = {
    "chunk_kimi_delta_attention": ("kda", "chunk"),
    "recurrent_kimi_delta_attention": ("kda", "recurrent"),
    "chunk_gated_delta_rule": ("gdn", "chunk"),
    "recurrent_gated_delta_rule": ("gdn", "recurrent"),
}


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Path:
    return hub.write(tmp_path_factory.mktemp("hub"))


def load(build: Path):
    """Import a build as `kernels` does: by its id, from the file."""
    metadata = json.loads((build / "metadata.json").read_text())
    if metadata["id"] not in sys.modules:
        path = build / metadata["name"].replace("-", "_") / "__init__.py"
        spec = importlib.util.spec_from_file_location(metadata["id"], path)
        sys.modules[metadata["id"]] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[metadata["id"]]


def given(variant: str) -> dict:
    """Return a layer's tensors by transformers' names."""
    x = Case(variant, T=70, B=2, seed=1).inputs()
    names = {"q": "query", "k": "key", "v": "value", "g": "g", "beta": "beta"}
    return {names[n]: x[n] for n in names} | {"initial_state": x["initial_state"]}


# --- the format -----------------------------------------------------------------------------------


def test_every_import_of_the_package_is_relative(build):
    files = [*build.rglob("*.py")]
    assert len(files) > 40
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                names = [ast.unparse(node.args[0]).strip("f'\"")]
            assert not [n for n in names if n.split(".")[0] == "kda_ops"], (path.name, names)


def test_no_operator_keeps_a_name_that_another_version_has(build):
    namespace = json.loads((build / "metadata.json").read_text())["id"]
    for path in build.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            assert text not in ("torch.ops.kda", "torch.ops.gdn"), path.name
    ops = load(build)._ops if hasattr(load(build), "_ops") else None
    assert (
        ops is not None and ops.add_op_namespace_prefix("kda::chunk") == f"{namespace}_kda::chunk"
    )
    assert hasattr(getattr(torch.ops, f"{namespace}_kda"), "chunk")


def test_the_id_follows_the_sources(build, tmp_path, monkeypatch):
    again = hub.write(tmp_path)
    files = {p.relative_to(build): p.read_bytes() for p in build.rglob("*.py")}
    assert files == {p.relative_to(again): p.read_bytes() for p in again.rglob("*.py")}
    monkeypatch.setattr(kda_ops, "__version__", "7.0.0")
    other = json.loads((hub.write(tmp_path) / "metadata.json").read_text())
    same = json.loads((build / "metadata.json").read_text())
    assert other["id"] != same["id"] and other["version"] == 7


def test_an_import_that_cannot_be_relative_is_refused():
    with pytest.raises(ValueError, match="relative imports alone, got `import kda_ops.problem`"):
        hub._imports(ast.parse("import kda_ops.problem"))


@pytest.mark.quick
@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_what_the_format_allows(name):
    layer = getattr(hub_layers, name)
    assert layer.has_backward and layer.can_torch_compile
    assert layer.__init__ is nn.Module.__init__
    more = {n for n, _ in inspect.getmembers(layer)} - {n for n, _ in inspect.getmembers(nn.Module)}
    assert more <= {"has_backward", "can_torch_compile"}
    assert {*hub_layers.__all__} == {*LAYERS}


# --- what it computes -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_the_build_and_its_one_graph_equal_the_operator(build, name):
    variant, form = LAYERS[name]
    layer = getattr(load(build).layers, name)()
    assert type(layer).__module__.startswith("_kda_ops_cuda_")
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def operator(query, key, value, **x):
        return getattr(kda_ops, f"{form}_{variant}")(query, key, value, **x)

    results = []
    for call in (operator, layer, compiled):
        leaves = {n: x.detach().requires_grad_() for n, x in given(variant).items()}
        o, state = call(**leaves, output_final_state=True, use_qk_l2norm_in_kernel=True)
        grads = torch.autograd.grad(o.sum() + state.sum(), [*leaves.values()])
        results.append((o, state, *grads))
    for want, eager, graph in zip(*results, strict=True):
        assert_identical(eager, want)
        assert_identical(graph, want)


def test_packed_rows_need_what_the_convolution_reads(build):
    x = Case(lengths=(30, 40)).inputs()
    call = load(build).layers.chunk_kimi_delta_attention()
    words = [x[n] for n in ("q", "k", "v", "g", "beta")]
    index = torch.repeat_interleave(torch.arange(2), torch.tensor([30, 40]))[None].int()
    with pytest.raises(ValueError, match="seq_idx must be given with cu_seq_lens_q, got None"):
        call(*words, cu_seq_lens_q=x["cu_seqlens"])
    o, _ = call(*words, cu_seq_lens_q=x["cu_seqlens"], seq_idx=index)
    assert_identical(o, kda_ops.chunk_kda(*words, cu_seqlens=x["cu_seqlens"])[0])


ALONE = """
import sys, torch
sys.path[:] = [p for p in sys.path if p not in ("", {checkout!r})]
from tests_load import load
module = load({build!r})
assert not [m for m in sys.modules if m.split(".")[0] == "kda_ops"]
assert "triton" not in sys.modules
x = torch.randn(1, 5, 1, 16, generator=torch.Generator().manual_seed(0))
o, _ = module.chunk_kda(x, x, x, None, None, use_qk_l2norm_in_kernel=True)
assert not hasattr(torch.ops.kda, "chunk")
assert ("triton" in sys.modules) == ({kernels!r} == "triton")
torch.save(o, "o.pt")
"""


def test_a_build_has_the_walks_of_its_own(build):
    # their modules are imported by name, and only where Triton has Gluon
    pytest.importorskip("triton")
    module = load(build)
    for stage in ("walk", "reverse_walk"):
        there = importlib.import_module(f"{module.__name__}.backends.triton.stages.{stage}")
        here = importlib.import_module(f"kda_ops.backends.triton.stages.{stage}")
        assert here.KERNEL is not None
        assert there.KERNEL.__name__.startswith(f"{module.__name__}.backends.triton.stages.")


@pytest.mark.parametrize("kernels", ("native", "triton"))
def test_it_runs_where_the_package_is_not_installed(build, tmp_path, kernels):
    if kernels == "triton":  # under the interpreter
        pytest.importorskip("triton")
    source = "import importlib.util\nimport json\nimport sys\nfrom pathlib import Path\n\n"
    body = inspect.getsource(load).replace("(build: Path)", "(build)")
    body = body.replace('"""Import', 'build = Path(build)\n    """Import')
    (tmp_path / "tests_load.py").write_text(source + body)
    checkout = str(Path(kda_ops.__file__).parent.parent)
    code = ALONE.format(checkout=checkout, build=str(build), kernels=kernels)
    env = dict(os.environ, PYTHONPATH=str(tmp_path), KDA_OPS_CPU=kernels, TRITON_INTERPRET="1")
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    x = torch.randn(1, 5, 1, 16, generator=torch.Generator().manual_seed(0))
    want, _ = kda_ops.chunk_kda(x, x, x, None, None, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(torch.load(tmp_path / "o.pt"), want, rtol=1e-4, atol=1e-5)


# --- the kernels package --------------------------------------------------------------------------


def test_the_kernels_package_loads_it(build):
    kernels = pytest.importorskip("kernels")
    module = kernels.get_local_kernel(build)
    x = torch.randn(1, 5, 2, 8)
    assert_identical(
        module.chunk_kda(x, x, x, None, None)[0], kda_ops.chunk_kda(x, x, x, None, None)[0]
    )


IN_TRANSFORMERS = """
import sys, torch
from pathlib import Path
import transformers.utils.import_utils as utils
# transformers 5.24 requires kernels 0.18.2: lift that, so that an older release will do
check = getattr(utils.is_kernels_available, "__wrapped__", utils.is_kernels_available)
check.__defaults__ = ("0.17.0", "99")
import kernels
from torch.utils._python_dispatch import TorchDispatchMode
from tests.support import models

NAMES = {{
    "kimi_linear": {{
        "chunk_kda": "chunk_kimi_delta_attention",
        "fused_recurrent_kda": "recurrent_kimi_delta_attention",
    }},
    "qwen3_next": {{
        "chunk_gated_delta_rule": "chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule": "recurrent_gated_delta_rule",
    }},
}}
ran = set()

class Record(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace.startswith("_kda_ops_cuda_"):
            ran.add(str(func).partition(".")[2])
        return func(*args, **(kwargs or {{}}))

for name, layers in NAMES.items():
    net, x = models.model(name), models.left_padded((20, 33))
    with models.torch_path():
        want = models.step(net, x, x["attention_mask"])
        tokens = net.generate(**x, max_new_tokens=4, do_sample=False)
    mapping = {{
        n: {{"cpu": kernels.LocalLayerRepository(Path({build!r}), layer_name=layer)}}
        for n, layer in layers.items()
    }}
    with kernels.use_kernel_mapping(mapping):
        mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
        kernels.kernelize(net, mode=mode, device="cpu")
    ran.clear()
    with Record():
        got = models.step(net, x, x["attention_mask"])
        again = net.generate(**x, max_new_tokens=4, do_sample=False)
    models.assert_same(got, want)
    assert torch.equal(again, tokens)
    assert any("chunk" in n for n in ran) and any("recurrent" in n for n in ran), ran
    try:
        net(**models.packed([models.tokens(n, seed=n) for n in (5, 9)]))
    except ValueError as error:
        assert "seq_idx must be given" in str(error) or "can't keep packed" in str(error), error
    else:
        raise AssertionError("packed rows were mixed")
"""


def test_models_of_transformers_take_the_layers(build):
    pytest.importorskip("kernels")
    pytest.importorskip("transformers")
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    script = IN_TRANSFORMERS.format(build=str(build))
    python(script, PYTHONPATH=path, PYTHONWARNINGS="ignore")
