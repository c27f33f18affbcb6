"""Call `chunk_kda` under strong, uneven decays: many laws of decay in one call, one head each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kda_ops.backends.reference import Reference
from kda_ops.problem import Problem
from tests.support.calls import Results, run, run_stages
from tests.support.cases import BOUND, Case, Tensors, on
from tests.support.closeness import DRAWS, excess, oracle, twin, vanished

WEAK = 0.02
CLAMP = -19.0  # log decay; a reset keeps exp(-19) of the state before it
BF16, FP16 = torch.bfloat16, torch.float16

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
class Decays(Case):
    """A call whose head h decays by law h: given (the gate is "weak"), or by a gate's logits.

    `safe` promises the bound, and keeps it. Without `laws` the call has all that it can express: an
    activated gate has no -inf.
    """

    T: int = 150
    K: int = 128
    V: int = 128
    dtype: torch.dtype = BF16
    safe: bool = False
    laws: tuple[str, ...] = ()

    def __post_init__(self):
        laws = self.laws or tuple(n for n in LAWS if self.gate == "weak" or "inf" not in n)
        for name, x in (("laws", laws), ("H", len(laws)), ("HV", len(laws))):
            object.__setattr__(self, name, x)

    def flags(self, op: str = "chunk") -> dict[str, object]:
        """Return the keyword arguments of a call."""
        return super().flags(op) | {"safe_gate": self.safe}

    def inputs(self, device: torch.device | str = "cpu") -> Tensors:
        """Build the tensors of a call."""
        found, gen = super().inputs(), torch.Generator().manual_seed(self.seed + 2)
        shape = 1, self.T, self.HV, self.K
        m, n = (torch.rand(shape, generator=gen, dtype=torch.float64) for _ in range(2))
        row = torch.arange(self.T)[:, None]
        g = [LAWS[law](m[0, :, h], n[0, :, h], row) for h, law in enumerate(self.laws)]
        g = torch.stack(g, 1)[None]
        if self.safe or self.gate == "bounded":
            g = g.clamp(min=BOUND)
        if self.gate == "bounded":
            g = torch.logit(g / BOUND, eps=1e-9)
        elif self.gate == "softplus":
            g = g.neg() + torch.log(-torch.expm1(g).clamp(max=-1e-30))  # softplus of it is -g
        if self.gate != "weak":
            found |= {"A_log": torch.zeros(self.HV), "dt_bias": None}
        return on(found | {"g": g.float()}, device)


class Clamped(Reference):
    """The twin with decays clamped as bf16 `chunk` on CUDA clamps them, which its limits state."""

    def _chunked(self, p: Problem):
        *found, g, beta = super()._chunked(p)
        return *found, g.clamp(min=CLAMP), beta


def clamped(case: Decays) -> Results:
    """Return the results of the clamped twin."""
    p = Problem.parse(case.rank, *case.inputs().values(), **case.flags())
    return run_stages(Clamped(torch.float32, case.dtype), p, case.cotangents())


def failures(case: Decays) -> list[str]:
    """Run a call, and return the tensors and laws whose head exceeds its budget (`closeness`).

    In fp16, rows of gradients below its smallest number may vanish, because pairs of tokens below
    it fade to zero (docs/numerics.md).
    """
    got, want = run(case), oracle(case)
    least = 2.0**-24 if case.dtype is FP16 else 0.0

    def head(x: Tensor, name: str, h: int) -> Tensor:
        return x.select(1 if "state" in name else 2, h).cpu()

    def holds(name: str, h: int, twins: list[Results]) -> bool:
        x, ref, *near = (head(r[name], name, h) for r in (got, want, *twins))
        assert all(y.isfinite().all() for y in (ref, *near)), "the oracle or a twin is not finite"
        if not all(e <= 1.0 for e in excess(x, ref, *near).values()):
            return False
        return name[0] != "d" or not vanished(x, ref.where(ref.abs() > least, 0.0), *near)

    def beyond(twins: list[Results]) -> list[str]:
        return [
            f"{name} under {law!r}"
            for name in got
            if name not in ("dA_log", "ddt_bias")
            for h, law in enumerate(case.laws)
            if not holds(name, h, twins)
        ]

    if not beyond([twin(case)]):
        return []
    draws = [twin(case, draw=i) for i in range(DRAWS)]
    return beyond([*draws, clamped(case)] if case.dtype is BF16 else draws)


# what the GPU suite runs
SETTINGS = (
    Decays(disable_recompute=True),
    Decays(gate="softplus"),
    Decays(gate="bounded"),
    Decays(safe=True),
    Decays(keys="repeated"),
    Decays(keys="correlated", T=64),
    Decays(gate="softplus", keys="correlated", T=65, disable_recompute=True),
    Decays(dtype=FP16),
)
