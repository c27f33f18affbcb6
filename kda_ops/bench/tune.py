"""Measure kernel options on this GPU and keep the best: ``python -m kda_ops tune``.

A candidate is timed only after its results met the definition in float64 and came out the same twice; the winner goes to the cache file that
`kda_ops.backends.triton.tuning` reads. Calls never measure anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from kda_ops.backends.reference import Reference
from kda_ops.problem import Problem

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # relative RMS error


def inputs(rank: int, B: int, T: int, H: int, K: int, V: int, dtype: torch.dtype, gate: str, device: torch.device | str) -> dict[str, object]:
    """A layer's call with random values."""
    D = (K,) if rank else ()

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    return dict(
        q=randn(B, T, H, K).to(dtype), k=randn(B, T, H, K).to(dtype), v=randn(B, T, H, V).to(dtype), g=randn(B, T, H, *D).to(dtype),
        beta=randn(B, T, H).to(dtype), A_log=0.3 * randn(H), dt_bias=0.3 * randn(H, *D), lower_bound=-5.0 if gate == "bound" else None,
        use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=True,
    )  # fmt: skip


def _forward(p: Problem) -> tuple[Tensor, Tensor]:
    from kda_ops.backends import triton as kernels

    o, final_state = p.new_output(), p.new_final_state()
    o.fill_(float("nan"))
    kernels.scan(p, kernels.prepare(p, keep_A=False), o, final_state, False)
    return o, final_state


def _error(got: Tensor, want: Tensor) -> float:
    return ((got.double().cpu() - want).square().mean() / want.square().mean()).sqrt().item()


class Check:
    """A small call and its answer."""

    def __init__(self, rank: int, K: int, V: int, dtype: torch.dtype, gate: str):
        given = inputs(rank, 2, 197, 2, K, V, dtype, gate, "cuda")
        wide = {n: x.double().cpu() if isinstance(x, Tensor) else x for n, x in given.items()}
        p = Problem.parse(rank, **wide)
        self.p, self.limit, self.want = Problem.parse(rank, **given), LIMITS[dtype], (p.new_output(), p.new_final_state())
        Reference().step(p, *self.want)

    def passes(self) -> bool:
        """Whether the kernels as they are chosen now are right, and give the same bits twice."""
        first, second = _forward(self.p), _forward(self.p)
        return all(torch.equal(a, b) and _error(a, w) < self.limit for a, b, w in zip(first, second, self.want))


def candidates(kernel: str, base) -> Iterator:
    """Options around those of the table."""
    if kernel == "prepare_kda":
        for group, warps, cap in product((2, 4), (4, 8), (None, 168, 208)):
            yield replace(base, group=group, warps=warps, registers=cap)
    elif kernel == "prepare_gdn":
        for warps, cap in product((4, 8), (None, 128, 168, 208)):
            yield replace(base, warps=warps, registers=cap)
    else:
        for block_v, warps, stages in product((32, 64, 128), (4, 8), (1, 2, 3, 4)):
            yield replace(base, block_v=block_v, warps=warps, stages=stages)


def tune(rank: int, K: int, V: int, dtype: torch.dtype, gate: str, B: int, T: int, H: int) -> dict:
    """The rows of the table that a call uses, where a candidate is right and faster than the table."""
    import triton
    from triton.testing import do_bench

    from kda_ops.backends.triton import tuning

    check, big = Check(rank, K, V, dtype, gate), Problem.parse(rank, **inputs(rank, B, T, H, K, V, dtype, gate, "cuda"))
    best = {}
    for kernel in ("prepare_kda", "scan_tiles") if rank else ("prepare_gdn", "scan_rows"):
        name, base = tuning.row(kernel, big), tuning.table(kernel, big)
        times = {}
        for options in dict.fromkeys((base, *candidates(kernel, base))):
            tuning.tuned()[name] = options
            try:
                if check.passes():
                    times[options] = do_bench(lambda: _forward(big), warmup=10, rep=40, return_mode="median")
            except (triton.CompilationError, triton.runtime.errors.OutOfResources, RuntimeError) as error:
                print(f"  {name} {options}: {type(error).__name__}")
                if isinstance(error, torch.AcceleratorError):
                    raise
                continue
            print(f"  {name} {options}: {f'{times[options]:.3f} ms' if options in times else 'wrong results, not timed'}", flush=True)
        winner = min(times, key=times.get)
        tuning.tuned()[name] = winner
        if winner != base and times[winner] < 0.98 * times[base]:
            best[name] = winner
    return best


def main(argv: list[str] | None = None) -> int:
    """Tune for the given width and dtype and save what is better than the table."""
    parser = argparse.ArgumentParser(prog="python -m kda_ops tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=("kda", "gdn"), nargs="+", default=["kda", "gdn"])
    parser.add_argument("--gate", choices=("bound", "softplus"), nargs="+", default=["bound", "softplus"])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("-K", type=int, default=128)
    parser.add_argument("-V", type=int, default=128)
    parser.add_argument("--setting", type=int, nargs=3, metavar=("B", "T", "H"), default=[1, 8192, 96])
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("tuning measures on a GPU, and there is none; the built-in table is used without it.")
    from kda_ops.backends.triton import tuning

    for op in args.op:
        for gate in args.gate:
            found = tune(op == "kda", args.K, args.V, DTYPES[args.dtype], gate, *args.setting)
            print(f"{op} {gate}: " + (f"{len(found)} better rows, saved to {tuning.save(found)}" if found else "the table is best"), flush=True)
    return 0
