"""Measure kernel options on this GPU and keep the best: ``python -m kda_ops tune``.

A candidate is timed only if its results meet the definition in float64 and two runs give the same
bits. The fastest goes to the cache file that `kda_ops.backends.triton.tuning` reads. Calls never
measure anything. The rest of the table keeps its options (`UNTUNED`): kernels that only some forms
of chunk calls launch, the recurrence, and the gate, norm and convolution as operators. The walks
have no options. The candidates of a kernel run in a process of their own: some that compile read
where they must not, which ends the process, and the others are measured in the next one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kda_ops.backends.reference import Reference
from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS, Backend
from kda_ops.tools.machine import Help, names, parse_setting
from kda_ops.tools.timer import median_ms, relative_error

if TYPE_CHECKING:
    from kda_ops.backends.triton.tuning import Launch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # relative RMS error
# by the rank of the decay: forward first, whose options backward runs with
TUNED = {
    1: ("prepare_kda", "scan_kda", "reverse_scan_kda", "gradient_pairs", "gradient_keys"),
    0: ("prepare_gdn", "scan_gdn", "reverse_scan_gdn", "gradient_gdn"),
}
UNTUNED = (  # sequences cut into runs; chunks prepared during the scan; beta given; grouped heads
    *("scan_kda_maps", "scan_gdn_maps", "reverse_scan_kda_maps", "reverse_scan_gdn_maps"),
    *("join_runs", "scan_kda_overlapped", "scan_gdn_overlapped", "gradient_small", "gather_heads"),
    # recurrent; the gate, the norm and the convolution as operators
    *("recur", "recur_one", "recur_rows", "recur_one_rows", "gate_forward", "gate_gradient"),
    *("normalise", "normalise_gradient", "convolve", "convolve_one", "convolve_gradient"),
    *("write_tails", "tail_gradient"),
)


def inputs(
    rank: int,
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    gate: str,
    device: torch.device | str,
) -> dict[str, object]:
    """Build a layer's call with random values."""
    D = (K,) if rank else ()

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    return dict(
        q=randn(B, T, H, K).to(dtype),
        k=randn(B, T, H, K).to(dtype),
        v=randn(B, T, H, V).to(dtype),
        g=randn(B, T, H, *D).to(dtype),
        beta=randn(B, T, H).to(dtype),
        A_log=0.3 * randn(H),
        dt_bias=0.3 * randn(H, *D),
        lower_bound=-5.0 if gate == "bound" else None,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        output_final_state=True,
    )


def _forward(p: Problem) -> list[Tensor]:
    from kda_ops.backends.triton import BACKEND as kernels

    o, final_state = p.new_output(), p.new_final_state()
    o.fill_(float("nan"))
    kernels.scan(p, kernels.prepare(p), o, final_state, False)
    return [o, final_state]


def _backward(p: Problem, backend: Backend | None = None) -> list[Tensor]:
    """Return the gradients of the inputs per token, for a fixed gradient of o."""
    from kda_ops.backends.triton import BACKEND

    kernels: Backend = backend or BACKEND
    o, do = p.new_output(), torch.ones_like(p.v)
    do[:, ::2] = -0.5
    tile = kernels.prepare(p, norms=True)
    trace = kernels.scan(p, tile, o, None, True)
    assert trace is not None  # as asked
    need = frozenset(n for n, x in zip(GRADIENTS, p.differentiable()) if x is not None)
    found = kernels.gradient(
        p, tile, trace, do, kernels.reverse_scan(p, tile, do, None, need), need
    )
    return [x for n in GRADIENTS[:5] if (x := getattr(found, n)) is not None]


def _run_of(kernel: str) -> Callable[[Problem], list[Tensor]]:
    """Return what to time: the stages of forward or of backward."""
    return _backward if kernel.startswith(("reverse", "gradient")) else _forward


class Check:
    """A small call, its answer, and how far from it a candidate may be.

    Gradients may be twice as far as those of the table, because some are sums that cancel.
    """

    def __init__(
        self,
        kernel: str,
        rank: int,
        K: int,
        V: int,
        dtype: torch.dtype,
        gate: str,
        device: torch.device | str,
    ):
        given = inputs(rank, 2, 197, 2, K, V, dtype, gate, device)
        wide = {n: x.double().cpu() if isinstance(x, Tensor) else x for n, x in given.items()}
        p = Problem.parse(rank, **wide)
        self.p, self.run = Problem.parse(rank, **given), _run_of(kernel)
        if self.run is _forward:
            self.want = [p.new_output(), p.new_final_state()]
            Reference().step(p, *self.want)
            self.limits = [LIMITS[dtype]] * 2
        else:
            self.want = _backward(p, Reference())
            pairs = zip(_backward(self.p), self.want)
            self.limits = [max(LIMITS[dtype], 2 * relative_error(x, w)) for x, w in pairs]

    def passes(self) -> bool:
        """Return whether the chosen kernels are right and give the same bits twice."""
        found = zip(self.run(self.p), self.run(self.p), self.want, self.limits)
        return all(torch.equal(a, b) and relative_error(a, w) < limit for a, b, w, limit in found)


def candidates(base: Launch) -> Iterator[Launch]:
    """Yield options around those of the table: of each option that the kernel has, some values."""
    from kda_ops.backends.triton import tuning

    values: dict[str, tuple] = {"warps": (4, 8)}
    if isinstance(base, tuning.Columns):
        values["stages"] = (1, 2, 3, 4)
        # why 16 alone: `tuning._EXACT`; why 32 only where the table has it: `tuning.width`
        if base.block_v > 16:
            values["block_v"] = tuple(sorted({base.block_v, 64, 128}))
    else:
        values["registers"] = (None, 128, 168, 208)
    if isinstance(base, tuning.Rows):
        values["group"] = (2, 4)
    if isinstance(base, tuning.Blocks):  # its slices of K are fixed, and so is its pipeline
        values |= {"stages": (base.stages,), "registers": (None, 168)}
    for chosen in product(*values.values()):
        yield replace(base, **dict(zip(values, chosen)))


def _options(kernel: str, p: Problem) -> list[Launch]:
    from kda_ops.backends.triton import tuning

    base = tuning.table(kernel, p)
    return list(dict.fromkeys((base, *candidates(base))))


def measure(kernel: str, call: dict, chosen: dict, skip: list[int]) -> None:
    """Print, for each candidate of a kernel by its place, that it is tried, and then its time or
    why it has none. `chosen` are the options of other kernels.
    """
    import triton

    from kda_ops.backends.triton import tuning

    call = call | {"dtype": DTYPES[call["dtype"]]}
    others = {n: tuning.KERNELS[n](**words) for n, words in chosen.items()}
    with tuning.force(options=others):
        check = Check(kernel, **{n: call[n] for n in ("rank", "K", "V", "dtype", "gate", "device")})
    big = Problem.parse(call["rank"], **inputs(**call))
    name = tuning.row(kernel, big)
    for place, options in enumerate(_options(kernel, big)):
        if place in skip:
            continue
        print(json.dumps({"place": place, "name": name, "options": asdict(options)}), flush=True)
        ms, why = None, "wrong results"
        try:
            with tuning.force(options=others | {kernel: options}):
                if check.passes():
                    ms = median_ms(lambda: check.run(big), call["device"])
        except (triton.CompilationError, triton.OutOfResources, RuntimeError) as error:
            if isinstance(error, torch.AcceleratorError):
                raise
            why = type(error).__name__
        print(json.dumps({"place": place, "ms": ms, "why": None if ms else why}), flush=True)


def sweep(
    kernel: str, call: dict, chosen: dict, echo: Callable[[str], None]
) -> tuple[str, dict[int, dict], dict[int, float]]:
    """Return the row's name, every candidate by its place, and the times of the right ones.

    A candidate that ends its process costs only itself.
    """
    name, reason, running = "", "", True
    tried: dict[int, dict] = {}
    times: dict[int, float] = {}
    while running:
        work = dict(kernel=kernel, call=call, chosen=chosen, skip=sorted(tried))
        command, before = [sys.executable, "-m", "kda_ops.tools.tune", json.dumps(work)], len(tried)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None  # it is a pipe
            for line in process.stdout:
                if not line.startswith('{"place"'):
                    reason = line.strip() or reason
                    continue
                said = json.loads(line)
                place = said["place"]
                if "options" in said:
                    name, tried[place] = said["name"], said["options"]
                    continue
                echo(
                    f"  {name} {tried[place]}: "
                    + (f"{said['ms']:.3f} ms" if said["ms"] else said["why"])
                )
                if said["ms"]:
                    times[place] = said["ms"]
        running = process.returncode != 0
        if running and len(tried) == before:
            raise RuntimeError(f"{kernel} cannot be measured: {reason}")
        if running:
            echo(f"  {name} {list(tried.values())[-1]}: ended its process: {reason}")
    return name, tried, times


def tune(
    op: str,
    K: int,
    V: int,
    dtype: str,
    gate: str,
    B: int,
    T: int,
    H: int,
    echo: Callable[[str], None],
) -> dict[str, dict]:
    """Return the rows of the table that a call uses, where a candidate is right and faster than the
    table.
    """
    rank = int(op == "kda")
    call = dict(rank=rank, K=K, V=V, dtype=dtype, gate=gate, B=B, T=T, H=H, device="cuda")
    best: dict[str, dict] = {}
    rows: dict[str, dict] = {}
    for kernel in TUNED[rank]:
        name, tried, times = sweep(kernel, call, best, echo)
        winner = min(times, key=times.__getitem__, default=0)
        # the table's is in place 0
        if winner and times[winner] < 0.98 * times.get(0, float("inf")):
            best[kernel] = rows[name] = tried[winner]
    return rows


def _setting(text: str) -> dict[str, int]:
    try:
        if "HV" not in text and "D" not in text:
            return parse_setting(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"a call is written like B1T8192H96, its widths are -K and -V, got {text!r}"
    )


def main(argv: list[str] | None = None) -> int:
    """Tune for the given width and dtype and save what is better than the table."""
    parser = argparse.ArgumentParser(
        prog="python -m kda_ops tune", description=__doc__, formatter_class=Help
    )
    parser.add_argument(
        "--ops", type=names(("kda", "gdn")), default=["kda", "gdn"], help="comma-separated"
    )
    parser.add_argument(
        "--gates",
        type=names(("bound", "softplus")),
        default=["bound", "softplus"],
        help="of bound,softplus",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of q, k and v")
    parser.add_argument("-K", type=int, default=128, help="width of q and k")
    parser.add_argument("-V", type=int, default=128, help="width of v")
    parser.add_argument(
        "--setting",
        type=_setting,
        default="B1T8192H96",
        help="the call to be fast at: batch, tokens, heads",
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error(
            "tuning measures on a GPU, and there is none; the built-in table is used without it."
        )
    from kda_ops.backends.triton import tuning

    B, T, H = (args.setting[n] for n in "BTH")
    for op in args.ops:
        for gate in args.gates:
            found = tune(
                op,
                args.K,
                args.V,
                args.dtype,
                gate,
                B,
                T,
                H,
                echo=lambda line: print(line, flush=True),
            )
            better = {
                name: tuning.KERNELS[name.split(".")[0]](**words) for name, words in found.items()
            }
            print(
                f"{op} {gate}: "
                + (
                    f"{len(better)} better rows, saved to {tuning.save(better)}"
                    if better
                    else "the table is best"
                ),
                flush=True,
            )
    print(
        f"kept from the table, because the chunk forms timed do not run them: {', '.join(UNTUNED)}"
    )
    return 0


if __name__ == "__main__":
    measure(**json.loads(sys.argv[1]))
