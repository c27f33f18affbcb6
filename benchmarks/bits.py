"""The bits of two trees: outputs, states and gradients of the same public calls.

Each tree runs them in processes of its own, which import this file and the tree's package. So this
file imports nothing else of the benchmark.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zlib
from itertools import chain, product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

Result = dict[str, tuple[str, Tensor]] | str  # hash and numbers of each tensor; or an error
LENGTHS = ((1, 64, 0, 63, 200, 65, 7), (3, 0, 62, 5))  # of packed sequences, and with --small
GATES = ("bound", "softplus", "given", "safe")
INSIDE = ("bound", "softplus")


def cases(small: bool, only: list[str]) -> list[tuple[str, ...]]:
    """List variant, operator, dtype, gate and further words, which `run` reads."""
    gates = [("kda", g) for g in GATES] + [("gdn", g) for g in ("softplus", "given")]
    found: list[tuple[str, ...]] = [(n, "chunk", "bfloat16", g) for n, g in gates]
    found += [(n, "chunk", t, "given") for n, t in product(("kda", "gdn"), ("float16", "float32"))]
    words = ("packed grouped", "vk kept", "narrow", "long", "few")
    some = (
        product(("kda", "gdn"), ("softplus",), words),
        product(("kda",), ("bound",), ("long", "few")),
    )
    found += [(n, "chunk", "bfloat16", g, *w.split()) for n, g, w in chain(*some)]
    for n, w in product(("kda", "gdn"), ("kv", "vk")):
        found.append((n, "chunk_", "bfloat16", "softplus", w))
        found.append((n, "recurrent", "bfloat16", "softplus", w))
        found += [(n, "recurrent_", "bfloat16", "softplus", w, s) for s in ("fp32", "bf16")]
    found += [("kda", "recurrent_", "bfloat16", g, "kv", "fp32") for g in ("bound", "given")]
    found += [("kda", "gate", "bfloat16", g) for g in INSIDE] + [
        ("gdn", "gate", "bfloat16", "softplus")
    ]
    dtypes = {"bfloat16": "float16" if small else "bfloat16"}  # the interpreter multiplies no bf16
    kept = [(n, o, dtypes.get(t, t), *rest) for n, o, t, *rest in found]
    kept = [c for c in dict.fromkeys(kept) if set(only) <= set(c)]
    return [c for c in kept if not (small and {"long", "few"} & set(c))]


def inputs(case: tuple[str, ...], small: bool) -> tuple[dict[str, Tensor], dict]:
    """Return a case's flags and tensors, drawn on the CPU from a seed made of its name."""
    variant, operator, dtype, gate, *words = case
    B, T, H, D = (
        (1, 70, 1, 16) if small else (1, 8192, 2, 128) if "few" in words else (2, 300, 4, 128)
    )
    B, T, H = (1, 7168, 80) if "long" in words else (B, T, H)  # `scan` follows `prepare`
    B, T = (
        (1, sum(LENGTHS[small]))
        if "packed" in words
        else (4, 1)
        if operator == "recurrent_"
        else (B, T)
    )
    T = min(T, 9) if operator == "recurrent" else T
    K, V, HV = (
        (D // 2, D - 4, H) if "narrow" in words else (D, D, 2 * H if "grouped" in words else H)
    )
    generator = torch.Generator().manual_seed(zlib.crc32(" ".join(case).encode()))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    wide = (K,) if variant == "kda" else ()
    x = {"q": draw(B, T, H, K), "k": draw(B, T, H, K), "v": draw(B, T, HV, V)}
    x |= {"g": draw(B, T, HV, *wide), "beta": draw(B, T, HV)}
    if gate in INSIDE:
        x = {n: t.to(getattr(torch, dtype)) for n, t in x.items()}
        x |= {"A_log": draw(HV).mul(0.5), "dt_bias": draw(HV, *wide)}
    else:
        x |= {n: F.normalize(x[n], dim=-1) for n in "qk"} | {"beta": x["beta"].sigmoid()}
        decay = x["g"].sigmoid().square().mul(-5.0)
        x = {n: t.to(getattr(torch, dtype)) for n, t in x.items()} | {"g": decay}
    flags: dict = {"lower_bound": -5.0} if gate == "bound" else {}
    if operator != "gate":
        inner = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
        flags |= dict.fromkeys(inner, gate in INSIDE)
        flags |= {"transpose_state_layout": True} if "vk" in words else {}
        flags |= {"safe_gate": True} if gate == "safe" else {}
        flags |= {"disable_recompute": True} if "kept" in words else {}
        N = len(LENGTHS[small]) if "packed" in words else B
        x["state"] = draw(N, HV, *((V, K) if "vk" in words else (K, V)))
        x["state"] = x["state"].to(torch.bfloat16) if "bf16" in words else x["state"]
    if "packed" in words:
        x["cu_seqlens"] = torch.tensor((0, *LENGTHS[small])).cumsum(0).int()
    return x, flags


def run(case: tuple[str, ...], small: bool, device: str) -> dict[str, Tensor]:
    """Call the operator of a case: outputs, states, and gradients where it has some."""
    import kda_ops

    variant, operator, *_ = case
    x, flags = inputs(case, small)
    x = {n: t.to(device) for n, t in x.items()}
    name = f"{operator.rstrip('_')}_{variant}{'_' * operator.endswith('_')}"
    call = getattr(kda_ops, f"{variant}_gate" if operator == "gate" else name)
    if operator.endswith("_"):
        slots = torch.arange(x["state"].shape[0], device=device, dtype=torch.int32).flip(0)
        names = ("q", "k", "v", "g", "beta", "state", "slots", "none", "A_log", "dt_bias")
        with torch.no_grad():
            o = call(*((x | {"slots": slots}).get(n) for n in names), **flags)
        return {"o": o, "state": x["state"]}
    leaves = {n: t.requires_grad_() for n, t in x.items() if t.is_floating_point()}
    if operator == "gate":
        leaves = {n: leaves[n] for n in ("g", "A_log", "dt_bias")}
        found = {"o": call(**leaves, **flags)}
    else:
        x["initial_state"] = x.pop("state")
        o, final = call(**x, output_final_state=True, **flags)
        with torch.no_grad():  # inference launches other kernels than training
            alone, _ = call(**x, **flags)
        found = {"o": o, "final_state": final, "o without gradients": alone}
    generator = torch.Generator().manual_seed(1)
    outputs = [t for n, t in found.items() if t.requires_grad]
    cotangents = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    return found | {f"d{n}": d for n, d in zip(leaves, gradients)}


def keep(x: Tensor) -> tuple[str, Tensor]:
    """Return the hash of a tensor's bits, and its numbers, thinned to about a million."""
    x = x.detach().cpu().contiguous()
    digest = hashlib.sha256(str(x.shape).encode() + x.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest(), x.flatten()[:: max(1, x.numel() >> 20)].clone()


def write(tree: str, path: str, small: bool, device: str, some: list[tuple[str, ...]]) -> None:
    """Run some cases in this process and save what came of them."""
    import kda_ops

    if not Path(kda_ops.__file__).is_relative_to(tree):
        raise SystemExit(f"{tree} has no kda_ops: {kda_ops.__file__} was imported.")
    made: dict[tuple[str, ...], Result] = {}
    for case in some:
        try:
            made[case] = {n: keep(x) for n, x in run(case, small, device).items()}
        except Exception as error:  # a case that one tree lacks hides none of the others
            made[case] = f"{type(error).__name__}: {error}"
    torch.save(made, path)


def compare(old: Result, new: Result) -> str:
    """Say what differs between two results of a case; nothing if no bit does."""
    if isinstance(old, str) or isinstance(new, str):
        return ", ".join(
            f"{n}: {x if isinstance(x, str) else 'ran'}" for n, x in (("base", old), ("tree", new))
        )
    said = []
    for name in dict.fromkeys((*old, *new)):
        (a, x), (b, y) = (found.get(name, ("", torch.empty(0))) for found in (old, new))
        if x.shape != y.shape:
            said.append(f"{name} has another shape")
        elif a != b:
            difference = (x.double() - y.double()).abs().max()
            said.append(f"{name} {difference:.1e} of {x.double().abs().max():.1e}")
    return ", ".join(said)


def differences(trees: list[Path], small: bool, only: list[str], jobs: int) -> dict[str, str]:
    """Run both trees side by side; return by case what differs, nothing where no bit does."""
    listed = cases(small, only)
    here = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r})"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: list[dict[tuple[str, ...], Result]] = [{}, {}]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for i, tree in enumerate(map(str, trees)):
            path = [tree, os.environ.get("PYTHONPATH", "")]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
            for j in range(jobs):
                words = (tree, f"{folder}/{i}.{j}", small, device, listed[j::jobs])
                command = [sys.executable, "-c", f"{here}['write'](*{words!r})"]
                processes.append(subprocess.Popen(command, cwd=folder, env=environment))
        if any([process.wait() for process in processes]):
            raise SystemExit("a process of these trees ended with an error.")
        for file in sorted(Path(folder).iterdir()):
            results[int(file.name[0])] |= torch.load(file, weights_only=True)
    old, new = results
    return {" ".join(case): compare(old[case], new[case]) for case in listed}
