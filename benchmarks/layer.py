"""Time whole layers: eager and compiled, before and after a change, next to FLA's layers.

``python -m benchmarks.layer [--parts PART ...] [--variant kda gdn] [--before TREE] [--out JSON]``

  eager     the layer in eager mode, ours and FLA's: forward, and forward with backward
  compiled  our layer in one graph, with each choice of plain forms (registrations.decompositions)
  decode    one token per sequence on a cache: time of the host, and of the GPU
  kernels   the convolution and the norm alone, next to FLA's functions

With ``--before``, the first three are measured in another checkout too, in a process of its own.
Sides run one after another. A time is the median of the GPU alone (`kda_ops.tools.timer`). "MB" is
the peak memory of a pass above what was allocated before it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.records import stamp, write_json
from benchmarks.timer import host_us
from kda_ops.nn import GatedDeltaNet, KimiDeltaAttention
from kda_ops.tools.timer import gpu_ms

Row = dict[str, Any]
# a call, the number of tensors of x's size that forward and backward must move, and the cotangent
Calls = dict[str, tuple[Callable[[], Tensor], tuple[int, int], Tensor]]
SIZES = {"cuda": (4, 4096, 16, 128), "cpu": (1, 32, 2, 16)}  # B, T, heads, width
OURS = {"kda": KimiDeltaAttention, "gdn": GatedDeltaNet}
NAMES = ("short_conv", "short_conv_bwd", "gated_rms_norm", "gated_rms_norm_bwd")
FORMS = {
    "operators": (),
    "plain": NAMES,
    "plain convolution": NAMES[:2],
    "plain norm": NAMES[2:],
    "plain backward": NAMES[1::2],
    "plain forward": NAMES[::2],
}


def ours(variant: str, device: str) -> nn.Module:
    """Build our layer in bf16 (on a CPU fp32)."""
    _, _, heads, width = SIZES[device]
    torch.manual_seed(0)
    words = {"expand_v": 1.0} if variant == "gdn" else {}
    layer = OURS[variant](heads * width, head_dim=width, num_heads=heads, device=device, **words)
    if device == "cuda":
        for child in layer.children():  # the gate's parameters stay in fp32
            child.bfloat16()
    return layer


def theirs(variant: str, device: str) -> nn.Module:
    """Build FLA's layer with the same sizes."""
    from fla import layers

    _, _, heads, width = SIZES[device]
    make = layers.KimiDeltaAttention if variant == "kda" else layers.GatedDeltaNet
    sizes = dict(hidden_size=heads * width, head_dim=width, num_heads=heads, expand_v=1)
    return make(**sizes, mode="chunk", layer_idx=0).to(device, torch.bfloat16)


def output(y: Tensor | tuple) -> Tensor:
    """Return the output of a layer; FLA's returns a tuple that begins with it."""
    return y if isinstance(y, Tensor) else y[0]


def tokens(device: str) -> Tensor:
    """Draw the input of a layer."""
    B, T, heads, width = SIZES[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.randn(B, T, heads * width, device=device, dtype=dtype)


def ms(call: Callable[[], object], device: str) -> float:
    """Return the time of a call."""
    return gpu_ms(call) if device == "cuda" else host_us(call, device, 3) / 1e3


def passes(layer: Callable, x: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield forward without gradients, and forward with backward."""
    leaf = x.clone().requires_grad_()
    dy = torch.randn_like(x)

    @torch.no_grad()
    def forward() -> object:
        return layer(x)

    def both() -> None:
        output(layer(leaf)).backward(dy)

    yield "fwd", forward
    yield "fwdbwd", both


def peak_mb(call: Callable[[], object], device: str) -> float | None:
    """Return the peak memory of a call above what was allocated before it."""
    if device != "cuda":
        return None
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def rows_of(part: str, variant: str, side: str, layer: Callable, device: str) -> Iterator[Row]:
    """Yield the rows of one side: per pass a time, or the error that prevents it."""
    for name, call in passes(layer, tokens(device)):
        row: Row = dict(part=part, variant=variant, side=side) | {"pass": name}
        try:
            call()
            yield row | dict(ms=round(ms(call, device), 4), MB=peak_mb(call, device))
        except Exception as error:  # FLA's backward refuses some versions of Triton
            yield row | dict(error=(str(error).splitlines() or [type(error).__name__])[0][:200])


def eager(variant: str, device: str, alone: bool = False) -> Iterator[Row]:
    """Yield the rows of eager layers."""
    yield from rows_of("eager", variant, "ours", ours(variant, device), device)
    if device == "cuda" and not alone:
        yield from rows_of("eager", variant, "fla", theirs(variant, device), device)


def compiled(variant: str, device: str, alone: bool = False) -> Iterator[Row]:
    """Yield the rows of compiled layers, for each choice of plain forms."""
    import torch._inductor.config
    import torch._inductor.decomposition  # registers ours

    choose: Callable[..., object] = tuple  # does nothing
    forms: dict[str, tuple[str, ...]] = {"ours": ()}  # in a checkout without decompositions
    if not alone:  # alone: with the choice of the checkout
        with suppress(ImportError):
            from kda_ops.registrations import decompositions

            choose, forms = decompositions.choose, FORMS
    torch._inductor.config.force_disable_caches = True  # their keys lack the choice
    for side, names in forms.items():
        torch._dynamo.reset()
        choose(names)
        layer = torch.compile(ours(variant, device), fullgraph=True)
        yield from rows_of("compiled", variant, side, layer, device)
    choose()


def decode(variant: str, device: str) -> Iterator[Row]:
    """Yield the host's and the GPU's time of a step on a cache."""
    layer: Any = ours(variant, device)
    for B in (1, 64):
        x, cache = tokens(device)[:1, :1].expand(B, 1, -1).contiguous(), layer.new_cache(B)
        with torch.inference_mode():
            cache = layer.new_cache(B)

            def step(x=x, cache=cache) -> Tensor:
                return layer(x, cache=cache)

            step()
            row: Row = dict(part="decode", variant=variant, side="ours", B=B)
            gpu = {"ms": round(gpu_ms(step), 4)} if device == "cuda" else {}
            yield row | {"host_us": round(host_us(step, device, 50), 1)} | gpu


def kernels(variant: str, device: str) -> Iterator[Row]:
    """Yield the operators alone: times, and the achieved bandwidth of the unavoidable traffic."""
    import kda_ops

    B, T, heads, width = SIZES[device]
    for batch in {1, B}:
        x, dy = (tokens(device)[:batch].requires_grad_() for _ in range(2))
        weight = torch.randn(x.shape[-1], 4, device=device, dtype=x.dtype).requires_grad_()
        o = x.detach().view(batch, T, heads, width).requires_grad_()
        scale = torch.ones(width, device=device, dtype=x.dtype).requires_grad_()

        def convolve(x=x, weight=weight) -> Tensor:
            return kda_ops.short_conv(x, weight, activation="silu")[0]

        def normalise(o=o, scale=scale) -> Tensor:
            return kda_ops.gated_rms_norm(o, scale, o)

        calls: Calls = {"conv": (convolve, (2, 3), dy), "norm": (normalise, (3, 5), dy.view_as(o))}
        if device == "cuda":
            calls |= _fla_functions(x, weight, o, scale, dy)
        for name, (call, moves, gradient) in calls.items():
            y = call()
            for pass_, count, run in (
                ("fwd", moves[0], partial(_without_gradients, call)),
                ("bwd", moves[1], partial(y.backward, gradient, retain_graph=True)),
            ):
                took = ms(run, device)
                rate = count * x.nbytes / took / 1e6
                yield dict(
                    part="kernels", side=name, B=batch, ms=round(took, 4), GBps=round(rate)
                ) | {"pass": pass_}


@torch.no_grad()
def _without_gradients(call: Callable[[], Tensor]) -> Tensor:
    return call()


def _fla_functions(x: Tensor, weight: Tensor, o: Tensor, scale: Tensor, dy: Tensor) -> Calls:
    """Return FLA's convolution and norm as calls, or nothing without FLA."""
    try:
        from fla.modules.convolution import causal_conv1d
        from fla.modules.fused_norm_gate import rms_norm_gated
    except ImportError:
        return {}
    gated = dict(activation="sigmoid", eps=1e-5)
    return {
        "conv, fla": (lambda: causal_conv1d(x, weight, activation="silu")[0], (2, 3), dy),
        "norm, fla": (lambda: rms_norm_gated(o, o, scale, None, **gated), (3, 5), dy.view_as(o)),
    }


PARTS = dict(eager=eager, compiled=compiled, decode=decode, kernels=kernels)


def before(tree: Path, parts: list[str], variants: list[str], device: str) -> list[Row]:
    """Measure parts in another checkout with this file, in a process of its own."""
    words = ["--parts", *parts, "--variant", *variants, "--device", device, "--alone"]
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, __file__, *words],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return [row | {"side": "before"} for row in rows if row["side"] == "ours"]


def main() -> None:
    """Print the rows, one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--variant", nargs="+", choices=OURS, default=[*OURS])
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--alone", action="store_true", help="without FLA")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: list[Row] = []
    about = stamp(args.device)
    some = [part for part in args.parts if part in ("eager", "compiled", "decode")]
    if args.before is not None and some:
        found += before(args.before.resolve(), some, args.variant, args.device)
        for row in found:
            print(json.dumps(row), flush=True)
    for part in args.parts:
        for variant in args.variant[:1] if part == "kernels" else args.variant:
            given = {"alone": args.alone} if part in ("eager", "compiled") else {}
            for row in PARTS[part](variant, args.device, **given):
                found.append(row | about)
                print(json.dumps(found[-1]), flush=True)
    if args.out is not None:
        write_json(args.out, {"rows": found})


if __name__ == "__main__":
    main()
