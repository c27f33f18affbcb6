"""Measure `chunk_kda` under strong, uneven decays: many laws of decay in one call, one head each.

``python -m tests.support.decays`` prints for every law of decay the errors of o, of the final state
and of the worst gradient. Next to each it prints the twin's error and the used share of the budget
of `tests.support.closeness`. ``--device cpu`` runs the backend of CPU tensors.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product

import torch
from torch import Tensor

from kda_ops.backends.reference import Reference
from kda_ops.problem import Problem
from tests.support.calls import Results, as_leaves, overload, run_stages, with_gradients
from tests.support.cases import double, on
from tests.support.closeness import DRAWS, NORMS, drawn, vanished

K = V = 128
WEAK = 0.02
PATHS = ("given", "softplus", "bounded", "safe")
CLAMP = -19.0  # log decay; a reset keeps exp(-19) of the state before it
STRONGEST = 5.0  # of the bounded gate, and what safe_gate promises
GRADIENTS = ("q", "k", "v", "g", "beta", "initial_state")

Law = Callable[[Tensor, Tensor, Tensor], Tensor]  # (m, n uniform in [0, 1), row numbers) -> g


def _uniform(x: float) -> Law:
    return lambda m, n, row: -x * m


def _power(x: float, p: float) -> Law:
    return lambda m, n, row: -x * m**p


def _reset(strong: float, chance: float) -> Law:
    return lambda m, n, row: torch.where(m < chance, strong, -WEAK * n)


def _blocks(first: int, period: int, share: float) -> Law:
    def law(m: Tensor, n: Tensor, row: Tensor) -> Tensor:
        return torch.where((row % period < first) & (m < share), -1000.0, -WEAK * n)

    return law


LAWS: dict[str, Law] = {
    **{
        f"uniform {x:g}": _uniform(x) for x in (0.01, 0.1, 1, 5, 10, 20, 30, 50, 88, 150, 300, 1000)
    },
    **{f"{x:g} m^{p:g}": _power(x, p) for x in (88, 1000) for p in (0.5, 2, 4, 8)},
    **{f"-1000 with {c:g}": _reset(-1000.0, c) for c in (0.02, 0.2, 0.5, 0.9)},
    **{f"-inf with {c:g}": _reset(-torch.inf, c) for c in (0.02, 0.5, 0.9)},
    **{
        f"{n} rows of {m} with {c:g}": _blocks(n, m, c)
        for n, m, c in ((8, 16, 1), (8, 16, 0.5), (7, 16, 0.9))
    },
}


@dataclass(frozen=True)
class Setting:
    """One call: where the decays come from, its length, keys, dtype and what it keeps."""

    path: str = "given"
    T: int = 150
    keys: str = "unit"
    dtype: torch.dtype = torch.bfloat16
    disable_recompute: bool = False
    seed: int = 0

    def flags(self) -> dict[str, object]:
        """Return the keyword arguments of the operator."""
        flags: dict[str, object] = {
            "output_final_state": True,
            "disable_recompute": self.disable_recompute,
        }
        if self.path in ("softplus", "bounded"):
            flags["use_gate_in_kernel"] = True
        if self.path == "bounded":
            flags["lower_bound"] = -STRONGEST
        return flags | {"safe_gate": self.path == "safe"}

    def laws(self) -> list[str]:
        """Return the laws that this path can express: an activated gate has no -inf."""
        return [n for n in LAWS if self.path in ("given", "safe") or "inf" not in n]

    def inputs(self) -> dict[str, Tensor | None]:
        """Build the tensors on the CPU; head h decays by law h."""
        gen = torch.Generator().manual_seed(self.seed)
        laws = self.laws()
        shape = (1, self.T, len(laws))

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=gen, dtype=torch.float64)

        def uniform(*size: int) -> Tensor:
            return torch.rand(size, generator=gen, dtype=torch.float64)

        q, k, v = randn(*shape, K), randn(*shape, K), randn(*shape, V)
        alike = {"unit": 0.0, "correlated": 0.9, "repeated": 1.0}[self.keys]
        k = alike * randn(1, 1, len(laws), K) + (1 - alike**2) ** 0.5 * k
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        m, n, row = uniform(*shape, K), uniform(*shape, K), torch.arange(self.T)[:, None]
        g = torch.stack([LAWS[w](m[0, :, h], n[0, :, h], row) for h, w in enumerate(laws)], 1)[None]
        if self.path in ("bounded", "safe"):
            g = g.clamp(min=-STRONGEST)
        if self.path == "bounded":
            g = torch.logit(-g / STRONGEST, eps=1e-9)
        elif self.path == "softplus":
            g = g.neg() + torch.log(-torch.expm1(g).clamp(max=-1e-30))  # softplus of it is -g
        beta = torch.sigmoid(randn(*shape)).float()
        zero = torch.zeros(len(laws)) if self.path in ("softplus", "bounded") else None
        low = (x.to(self.dtype) for x in (q, k, v))
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
        tensors = (*low, g.float(), beta, zero, None, randn(1, len(laws), K, V).float(), None)
        return dict(zip(names, tensors))

    def cotangents(self) -> tuple[Tensor, Tensor]:
        """Build the gradients of o and of the final state."""
        gen, heads = torch.Generator().manual_seed(self.seed + 1), len(self.laws())
        do = torch.randn((1, self.T, heads, V), generator=gen, dtype=torch.float64)
        return do.to(self.dtype), torch.randn((1, heads, K, V), generator=gen)


def kernel(setting: Setting, device: torch.device) -> Results:
    """Run the operator, forward and backward."""
    inputs = on(setting.inputs(), device)
    leaves = as_leaves(inputs, GRADIENTS)
    o, final = overload("kda", "chunk")(*(inputs | leaves).values(), **setting.flags())
    outs = {"o": o, "final_state": final}
    return with_gradients(outs, leaves, (x.to(device) for x in setting.cotangents()))


def _on(p: Problem, device: torch.device) -> Problem:
    """Move a call that was parsed on the CPU, which alone takes float64."""
    for name in Problem.__slots__:
        if isinstance(x := getattr(p, name), Tensor):
            setattr(p, name, x.to(device))
    return p


def definition(setting: Setting, device: torch.device) -> Results:
    """Run the token recurrence in float64, and autograd through it."""
    inputs = double(setting.inputs())
    leaves = as_leaves(inputs, GRADIENTS)
    p = _on(Problem.parse(1, *(inputs | leaves).values(), **setting.flags()), device)
    outs = {"o": p.new_output(), "final_state": p.new_final_state()}
    Reference().step(p, *outs.values())
    cotangents = [x.double().to(device) for x in setting.cotangents()]
    return with_gradients(outs, leaves, cotangents)


class Clamped(Reference):
    """The twin with decays clamped as bf16 `chunk` on CUDA clamps them, which its limits state."""

    def _chunked(self, p: Problem):
        *found, g, beta = super()._chunked(p)
        return *found, g.clamp(min=CLAMP), beta


def twin(setting: Setting, device: torch.device, draw: int = 0, clamped: bool = False) -> Results:
    """Run the stages as the kernels may round them."""
    reference = drawn(draw, torch.float32, setting.dtype)
    if clamped:
        reference = Clamped(torch.float32, setting.dtype)
    if draw:
        reference.gen = torch.Generator(device).manual_seed(draw)
        reference._jitter = _jitter_on(reference.gen, device)
    gen = torch.Generator().manual_seed(draw)
    there = [torch.randperm(n, generator=gen) if draw else torch.arange(n) for n in (K, V)]
    inputs = {
        n: None if x is None else _permuted(n, x, *there) for n, x in setting.inputs().items()
    }
    p = _on(Problem.parse(1, *inputs.values(), **setting.flags()), device)
    do, dfinal = setting.cotangents()
    cotangents = (_permuted("v", do, *there), _permuted("initial_state", dfinal, *there))
    found = run_stages(reference, p, tuple(x.to(device) for x in cotangents), GRADIENTS)
    back = [x.argsort().to(device) for x in there]
    names = {"o": "v", "final_state": "initial_state"}
    return {n: _permuted(names.get(n, n[1:]), x, *back) for n, x in found.items()}


def _permuted(name: str, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Reorder the channels of a tensor of the call, which the definition does not notice."""
    if name == "initial_state":
        return x[..., keys, :][..., values]
    return x[..., values] if name == "v" else x[..., keys] if name in ("q", "k", "g") else x


def _jitter_on(gen: torch.Generator, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    def jitter(x: Tensor, size: Tensor) -> Tensor:
        half = 0.5 * torch.finfo(x.dtype).eps * size
        up = torch.rand(x.shape, generator=gen, device=device) < 0.5
        return torch.where(up, x - half, x + half)

    return jitter


@dataclass
class Row:
    """The errors of one tensor under one law: relative RMS, the twin's, and the share of the
    budget.
    """

    law: str
    name: str
    error: float
    twin: float
    budget: float


def rows(setting: Setting, device: torch.device) -> list[Row]:
    """Measure every tensor of every law of a setting."""
    got, want, near = kernel(setting, device), definition(setting, device), twin(setting, device)
    heads, fades = range(len(setting.laws())), setting.dtype is torch.float16
    found = {}
    for name, h in product(got, heads):
        x, ref, t = (_head(r[name], name, h) for r in (got, want, near))
        found[name, h] = _row(setting.laws()[h], name, x, ref, [t], got[name].dtype, fades)
    over = [key for key, row in found.items() if not row.budget <= 1.0]
    if over:
        draws = [near] + [twin(setting, device, i) for i in range(1, DRAWS)]
        if setting.dtype is torch.bfloat16:
            draws.append(twin(setting, device, clamped=True))
        for name, h in over:
            x, ref = _head(got[name], name, h), _head(want[name], name, h)
            twins = [_head(d[name], name, h) for d in draws]
            found[name, h] = _row(setting.laws()[h], name, x, ref, twins, got[name].dtype, fades)
    return list(found.values())


def _head(x: Tensor, name: str, h: int) -> Tensor:
    """Return head h of a result, in float64 on the CPU."""
    return x.select(1 if "state" in name else 2, h).double().cpu()


def _row(
    law: str,
    name: str,
    x: Tensor,
    ref: Tensor,
    twins: list[Tensor],
    dtype: torch.dtype,
    fades: bool = False,
) -> Row:
    """Return one row, `dtype` being that of x.

    It is beyond the budget if anything is not finite, or if rows of a gradient vanish. If it
    `fades`, as in fp16, only rows above the smallest number of fp16 count, because pairs of tokens
    below it fade to zero (docs/numerics.md).
    """
    eps, size, share = torch.finfo(dtype).eps, NORMS["rms"](ref), 0.0
    for norm in NORMS.values():
        budget = 2.0 * (max(norm(t - ref) for t in twins) + eps * NORMS["maximum"](ref))
        error = norm(x - ref)
        used = 0.0 if error == 0.0 else error / budget if budget else torch.inf
        share = max(share, used if budget < torch.inf and error < torch.inf else torch.inf)
    least = torch.finfo(torch.float16).smallest_normal * 2.0**-10 if fades else 0.0
    if name.startswith("d") and vanished(x.to(dtype), ref.where(ref.abs() > least, 0.0), *twins):
        share = torch.inf
    off = [NORMS["rms"](x - ref), max(NORMS["rms"](t - ref) for t in twins)]
    return Row(law, name, *(e / size if size else e for e in off), share)


def settings(full: bool = False) -> Iterator[Setting]:
    """Yield the settings of the map: all of them, or those of the GPU suite."""
    bf16, fp16 = torch.bfloat16, torch.float16
    if not full:
        yield from (Setting(path, disable_recompute=path == "given") for path in PATHS)
        yield Setting(keys="repeated")
        yield Setting(keys="correlated", T=64)
        yield Setting("softplus", keys="correlated", T=65, disable_recompute=True)
        yield Setting(dtype=fp16)
        return
    for path, T, dtype in product(PATHS, (1, 16, 63, 64, 65, 150, 300), (bf16, fp16)):
        for keys in ("unit", "correlated", "repeated") if T in (64, 150, 300) else ("unit",):
            for keep in (False, True) if T in (65, 150) else (False,):
                yield Setting(path, T, keys, dtype, keep)


def main(argv: list[str] | None = None) -> int:
    """Print the map; write every row to a file as JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.decays", description=__doc__)
    parser.add_argument("--full", action="store_true", help="every setting, not only the suite's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", metavar="FILE", help="all rows, as JSON lines")
    args = parser.parse_args(argv)
    worst: dict[tuple[str, str, str, str], Row] = {}
    with open(args.output or os.devnull, "w") as file:
        for setting in settings(args.full):
            for row in rows(setting, torch.device(args.device)):
                kind = row.name if row.name in ("o", "final_state") else "gradients"
                key = (str(setting.dtype)[6:], setting.path, row.law, kind)
                if key not in worst or not row.budget <= worst[key].budget:
                    worst[key] = row
                about = asdict(setting) | {"dtype": str(setting.dtype)[6:]} | asdict(row)
                print(json.dumps(about), file=file, flush=True)
    for key, row in worst.items():
        print(
            f"{' '.join(key):50} {row.name:15} {row.error:8.1e} twin {row.twin:8.1e} budget "
            f"{row.budget:6.2f}"
        )
    over = sum(not row.budget <= 1.0 for row in worst.values())
    print(f"{over} of {len(worst)} points beyond the budget")
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
