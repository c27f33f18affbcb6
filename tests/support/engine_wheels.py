"""Take an engine's own Triton functions from its wheel, with stubs for the rest of the package.

``KDA_OPS_ENGINES`` names a folder with the wheels (``pip download --no-deps vllm==0.33.0``). Only
the files below are unpacked, to a folder of the test. For a machine without network,
``python -m tests.support.engine_wheels WHEEL... FOLDER`` writes wheels with these files alone.
"""

from __future__ import annotations

import ast
import os
import sys
import zipfile
from pathlib import Path

import pytest

# the interpreter patches tl in the module of a kernel, and misses names bound to its functions
_OP = "import triton\nimport triton.language as tl\n\n\n" + "".join(
    f"@triton.jit\ndef {n}(x):\n    return tl.{n}(x)\n\n\n" for n in ("exp", "exp2", "log")
)
_OP += """@triton.jit
def gather(x, index, axis: tl.constexpr):
    return tl.gather(x, index, axis)


@triton.jit
def safe_exp(x):
    return tl.where(x > 0, 0.0, tl.exp(tl.minimum(x, 0.0)))


make_tensor_descriptor = tl.make_tensor_descriptor
"""


def _constants(**values: object) -> str:
    return "".join(f"def {n}(*args, **given):\n    return {x!r}\n\n\n" for n, x in values.items())


# by which the engines choose how their kernels run
_SM = """import torch

SM = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


"""
_PDL = _SM + "def is_arch_support_pdl(*args):\n    return SM >= 9\n\n\n"
_NO_GPU = dict(is_cpu=False, is_cuda=False, is_hip=False, is_npu=False, is_xpu=False)
_NO_GPU |= dict(is_gfx95_supported=False, is_sm90_supported=False, get_device_sm=0)
_VLLM_FLA = "vllm.third_party.flash_linear_attention.ops"
_VLLM_KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
_SGLANG_OPS = "sglang.kernels.ops.attention"
_SGLANG_KERNELS = "sglang.srt.layers.attention.linear.kernels"

FILES = {  # modules that come from the wheel
    "vllm": (
        *(
            f"{_VLLM_FLA}.{name}"
            for name in (
                *("chunk", "chunk_delta_h", "chunk_o", "chunk_scaled_dot_kkt", "cumsum", "index"),
                *("l2norm", "solve_tril", "utils", "wy_fast"),
            )
        ),
        f"{_VLLM_FLA}.fused_recurrent",
        f"{_VLLM_FLA}.fused_sigmoid_gating",
        f"{_VLLM_KDA}.chunk",
        f"{_VLLM_KDA}.chunk_intra",
        f"{_VLLM_KDA}.chunk_intra_token_parallel",
        f"{_VLLM_KDA}.fused_recurrent",
    ),
    "sglang": (
        *(
            f"{_SGLANG_OPS}.fla.{name}"
            for name in (
                *("chunk_delta_h", "chunk_intra", "chunk_intra_token_parallel", "cumsum"),
                *("fused_recurrent", "index", "kda", "l2norm"),
            )
        ),
        f"{_SGLANG_OPS}.linear.fused_sigmoid_gating_recurrent",
        f"{_SGLANG_KERNELS}.kernel_backend",
        f"{_SGLANG_KERNELS}.kda_triton",
        f"{_SGLANG_KERNELS}.gdn_triton",
        "sglang.srt.plugins.hook_registry",
    ),
}
STUBS = {
    "vllm": {
        f"{_VLLM_FLA}.op": _OP,
        "vllm.platforms": (
            f"{_PDL}class current_platform:\n"
            "    is_arch_support_pdl = staticmethod(is_arch_support_pdl)\n"
            "    is_cuda = is_rocm = staticmethod(lambda *args: False)\n"
            "    is_cuda_alike = staticmethod(lambda: True)\n"
        ),
        "vllm.triton_utils": "import triton\nimport triton.language as tl\n\ntldevice = None\n",
        "vllm.utils.math_utils": (
            "from triton import cdiv as cdiv, next_power_of_2 as next_power_of_2\n"
            "RCP_LN2 = 1.4426950408889634\n"
        ),
        "vllm.utils.gpu_sync_debug": "from contextlib import nullcontext as gpu_sync_allowed\n",
        "vllm.utils.torch_utils": (
            "def async_tensor_h2d(data, device, dtype):\n    return data.to(device, dtype)\n"
        ),
    },
    "sglang": {
        f"{_SGLANG_OPS}.fla.op": _OP,
        f"{_SGLANG_OPS}.fla.utils": (
            f"{_SM}autotune_cache_kwargs = {{}}\n"
            "is_gather_supported, is_nvidia, is_intel = True, True, False\n"
            "is_nvidia_hopper, is_tf32_supported = SM == 9, SM >= 8\n\n\n"
            "def input_guard(function):\n    return function\n\n\n"
            "tensor_cache = input_guard\n\n\n"
            "def check_shared_mem(*args):\n    return SM == 9\n"
        ),
        f"{_SGLANG_OPS}.fla.fused_norm_gate": _constants(layer_norm_gated_fwd=None),
        f"{_SGLANG_OPS}.fla.chunk": _constants(chunk_gated_delta_rule=None),
        f"{_SGLANG_OPS}.kda_packed_decode": _constants(covered=False),
        f"{_SGLANG_OPS}.linear.fused_recurrent_linear_replayssm": _constants(
            fused_recurrent_linear_replayssm_decode=None, fused_recurrent_gdn_replayssm_decode=None
        ),
        "sglang.kernels.jit.utils": _PDL,
        "sglang.srt.utils": _constants(**_NO_GPU),
    },
}


def wheel(package: str, version: str) -> zipfile.ZipFile:
    """Open the wheel of an engine, or skip the test."""
    folder = os.environ.get("KDA_OPS_ENGINES")
    found = sorted(Path(folder).glob(f"{package}-{version}-*.whl")) if folder else []
    if not found:
        pytest.skip(
            f"no wheel of {package} {version}: set KDA_OPS_ENGINES to the folder of "
            f"`pip download --no-deps {package}=={version}`"
        )
    return zipfile.ZipFile(found[0])


def text(archive: zipfile.ZipFile, module: str) -> str:
    """Return the source of a module of a wheel.

    The interpreter's loop counters are no tensors, so offsets of chunks stay in 32 bits. It has no
    libdevice.
    """
    source = archive.read(f"{module.replace('.', '/')}.py").decode()
    return source.replace("i_t.to(tl.int64)", "i_t").replace("libdevice.exp(", "tl.exp(")


def one_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton take the first configuration: the choice among several needs a GPU."""
    triton = pytest.importorskip("triton")
    autotune = triton.autotune
    monkeypatch.setattr(
        triton, "autotune", lambda configs, key, **options: autotune(configs[:1], key)
    )


def package(name: str, version: str) -> dict[str, str]:
    """Return the files of an engine for `tests.support.engines.installed`."""
    archive = wheel(name, version)
    files = {name: f"__version__ = {version!r}\n"} | STUBS[name]
    return files | {module: text(archive, module) for module in FILES[name]}


def parameters(source: str, function: str, of: str | None = None) -> list[tuple[str, str | None]]:
    """Return the names and defaults of the parameters of a function, or of a method of class `of`.

    Those without position follow in the same list; ``*`` stands before them and ``**`` behind.
    """
    body = ast.parse(source).body
    if of is not None:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == of).body
    node = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == function)
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = [None] * (len(positional) - len(node.args.defaults)) + node.args.defaults
    rows = list(zip(positional, defaults))
    marks = [("*", None)] if node.args.kwonlyargs else []
    return [
        *((a.arg, None if d is None else ast.unparse(d)) for a, d in rows),
        *marks,
        *(
            (a.arg, None if d is None else ast.unparse(d))
            for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults)
        ),
        *([("**", None)] if node.args.kwarg else []),
    ]


def shrink(path: Path, folder: Path) -> None:
    """Write a wheel with the files of `FILES` alone."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(folder / path.name, "w") as small:
        for module in FILES[path.name.split("-")[0]]:
            name = f"{module.replace('.', '/')}.py"
            small.writestr(name, whole.read(name))


if __name__ == "__main__":
    for given in sys.argv[1:-1]:
        shrink(Path(given), Path(sys.argv[-1]))
