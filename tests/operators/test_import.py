"""Importing kda_ops registers every operator once, costs little, and pulls in nothing optional."""

import re
import shutil
from pathlib import Path

import pytest

import kda_ops
from tests.support.fresh import python

ROOT = Path(__file__).parents[2]

BLOCK = "import sys; sys.modules['triton'] = None\n"
CALL = """
    import torch, kda_ops
    q, k, v = (torch.randn(1, 70, 2, 8) for _ in range(3))
    v.requires_grad_()
    g, beta = -torch.rand(1, 70, 2, 8), torch.rand(1, 70, 2)
    flags = dict(use_qk_l2norm_in_kernel=True, output_final_state=True)
    o, state = {call}(q, k, v, g, beta, **flags)
    (o.sum() + state.sum()).backward()
    assert v.grad.abs().sum() > 0
    with torch.inference_mode():
        token, pool = [x[:, :1].detach() for x in (q, k, v)], torch.zeros(1, 2, 8, 8)
        kda_ops.recurrent_gdn_(*token, None, None, pool)
    print("right")
"""


def test_import_and_calls_work_where_there_is_no_triton():
    assert (
        python(BLOCK + CALL.format(call="kda_ops.chunk_kda").replace("\n    ", "\n")).stdout
        == "right\n"
    )


FAKE = """
import torch, kda_ops
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    q = torch.empty(1, 70, 64, 128, device="cuda", dtype=torch.bfloat16)
    flags = dict(use_qk_l2norm_in_kernel=True, safe_gate=True)
    _, _, A, *_ = torch.ops.kda.chunk_fwd(q, q, q, q, None, **flags)
assert A.shape[:2] == (2, 64) and "kda_ops.backends.triton.stages.walk" not in sys.modules
print("right")
"""


@pytest.mark.parametrize("block", (BLOCK, pytest.param("import sys\n", marks=pytest.mark.nightly)))
def test_a_fake_training_call_needs_no_triton_no_gpu_and_no_kernels(block):
    assert python(block + FAKE).stdout == "right\n"


@pytest.mark.parametrize("mode", ("training", pytest.param("inference", marks=pytest.mark.nightly)))
def test_the_first_call_of_a_process_may_be_compiled(mode):
    call = "torch.compile(kda_ops.chunk_kda, fullgraph=True, backend='aot_eager')"
    script = CALL.format(call=call).replace("\n    ", "\n")
    if mode == "inference":
        script = script.replace("v.requires_grad_()\n", "torch.set_grad_enabled(False)\n").replace(
            "(o.sum() + state.sum()).backward()\nassert v.grad.abs().sum() > 0\n", ""
        )
    assert python(script).stdout == "right\n"


@pytest.mark.quick
def test_import_pulls_in_nothing_optional():
    out = python("""
        import sys, torch
        before = set(sys.modules)
        import kda_ops
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        print(sorted(new - set(sys.stdlib_module_names)))
        costly = (
            "torch._inductor", "torch._dynamo", "torch.utils.flop_counter",
            "torch.distributed.tensor",
        )
        print(sorted(name for name in set(sys.modules) - before if name.startswith(costly)))
        print("triton" in sys.modules)
    """)
    assert out.stdout.splitlines() == ["['kda_ops']", "[]", "False"]


LATE = {
    "torch.utils.flop_counter": "torch.ops.kda.chunk in torch.utils.flop_counter.flop_registry",
    "torch.distributed.tensor": "torch.ops.kda.chunk.default in torch.distributed.tensor.DTensor."
    "_op_dispatcher.sharding_propagator.op_strategy_funcs",
}


@pytest.mark.parametrize("first", LATE)
def test_what_is_registered_late_is_registered_in_either_order(first):
    for order in (f"import {first}, kda_ops", f"import kda_ops, {first}"):
        assert python(f"import torch; {order}; print({LATE[first]})").stdout == "True\n"


def test_import_registers_every_operator_once():
    out = python("""
        import torch, kda_ops, importlib
        ops = "chunk chunk_fwd chunk_bwd recurrent recurrent_ chunk_ gate gate_bwd".split()
        ops += [f"chunk_{half}{back}" for half in ("map", "join") for back in ("", "_bwd")]
        every = torch._C._dispatch_get_all_op_names()
        for variant in ("kda", "gdn"):
            for op in ops:
                overload = getattr(getattr(torch.ops, variant), op)
                pool = op in ("recurrent_", "chunk_")
                assert overload.overloads() == ["default"] + ["out"] * pool, overload.overloads()
                assert torch.Tag.pt2_compliant_tag in overload.default.tags
            ours = {n.split("::")[1].split(".")[0] for n in every if n.startswith(variant + "::")}
            alone = {"check_writable", "short_conv", "short_conv_bwd", "short_conv_"}
            alone |= {"gated_rms_norm", "gated_rms_norm_bwd"}
            assert ours == set(ops) | (alone if variant == "kda" else set())
        import kda_ops
        importlib.import_module("kda_ops.registrations")
        try:
            torch.library.Library("kda", "FRAGMENT").define("chunk(Tensor x) -> Tensor")
        except RuntimeError as error:
            assert "multiple times" in str(error)
            print("once")
    """)
    assert out.stdout == "once\n"


def test_a_second_copy_is_an_import_error_that_says_so(tmp_path):
    out = python(
        """
        import sys, shutil, pathlib, kda_ops
        root = pathlib.Path(kda_ops.__file__).parent
        registrations = pathlib.Path(sys.modules["kda_ops.registrations"].__file__).parent
        copy = pathlib.Path(sys.argv[1])
        ignore = shutil.ignore_patterns("__pycache__", "registrations")
        shutil.copytree(root, copy / "kda_ops", ignore=ignore)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(registrations, copy / "registrations", ignore=ignore)
        for name in [n for n in sys.modules if n.split(".")[0] == "kda_ops"]:
            del sys.modules[name]
        ours = "kda_ops._checkout"
        sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, "__module__", "") != ours]
        sys.path.insert(0, str(copy))
        try:
            import kda_ops
        except ImportError as error:
            print(error)
        """,
        str(tmp_path),
    )
    assert out.stdout == (
        "torch.ops.kda.chunk is already registered: two copies of kda_ops are on the path, or "
        "another package took the name.\n"
    )


def test_a_checkout_that_is_not_installed_runs_its_own_registrations(tmp_path):
    """Not those of the checkout that is."""
    for folder in ("kda_ops", "registrations"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    out = python(
        "import sys; sys.path.insert(0, sys.argv[1]); import kda_ops; "
        "print(sys.modules['kda_ops.registrations'].__file__)",
        str(tmp_path),
    )
    assert out.stdout == f"{tmp_path / 'registrations' / '__init__.py'}\n"


@pytest.mark.quick
@pytest.mark.xdist_group("pace")
def test_import_costs_less_than_50_ms_over_torch():
    """In time of the process, at the pace of a quiet machine; the best of a few fresh ones, because
    a busy machine only ever adds. With bytecode, as an installed package has it: the first run
    writes it.
    """
    script = """
        import time, torch
        start = time.process_time()
        import kda_ops
        cost = time.process_time() - start
        from tests.support.pace import slower
        print(cost, slower())
    """
    shown = []
    for _ in range(6):
        cost, pace = map(float, python(script, PYTHONDONTWRITEBYTECODE="").stdout.split())
        shown.append(f"{1e3 * cost:.0f} ms at {pace:.2f} times a quiet machine's pace")
        if cost < 0.050 * pace:
            return
    raise AssertionError("importing kda_ops takes " + ", ".join(shown))


def test_an_unknown_cpu_backend_is_an_import_error():
    out = python("import kda_ops", check=False, KDA_OPS_CPU="fast")
    assert out.returncode
    assert "KDA_OPS_CPU must be 'native', 'reference' or 'triton', got 'fast'" in out.stderr


def test_the_definition_can_serve_a_whole_process():
    script = (
        CALL.format(call="kda_ops.chunk_kda").replace("\n    ", "\n")
        + "from kda_ops import dispatch; print(dispatch.backend_name(torch.device('cpu')))\n"
    )
    assert python(script, KDA_OPS_CPU="reference").stdout == "right\nreference\n"


def test_the_version_is_written_once():
    pyproject, citation, changelog = (
        (ROOT / name).read_text() for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")
    )
    assert 'version = { attr = "kda_ops.__version__" }' in pyproject
    for text in (pyproject, citation):
        assert not re.search(r"^version\b.*\d", text, re.M)
    assert re.search(r"^## \[(.*?)\]", changelog, re.M)[1] in ("Unreleased", kda_ops.__version__)
