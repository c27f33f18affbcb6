"""Calls of the short convolution and the gated norm as data, their definitions, and their errors.

A definition is a few lines of torch, in float64 with gradients by autograd. The twin computes in
float32 and rounds only its results, as the kernels do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.calls import Results, as_leaves, with_gradients
from tests.support.cases import on
from tests.support.closeness import assert_close

OUTPUTS = ("y", "final_tail")


def _strided(x: Tensor, strides: str) -> Tensor:
    """Return x with other strides: channels first, or columns of a wider tensor."""
    if strides == "fused":
        return torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]]
    if strides == "first":
        return x.mT.contiguous().mT
    return x


@dataclass(frozen=True)
class Conv:
    """A call of `kda::short_conv`."""

    B: int = 2
    T: int = 9
    D: int = 6
    W: int = 4
    lengths: tuple[int, ...] | None = None  # of packed sequences, and tokens behind them
    behind: int = 0
    bias: bool = True
    silu: bool = True
    tail: bool = True
    final: bool = True
    strides: str = ""
    nan: int | None = None  # the packed sequence whose tokens and tail are NaN
    dtype: torch.dtype = torch.float32
    seed: int = 0

    name = "short_conv"
    parameters = frozenset(("weight", "bias"))

    @property
    def N(self) -> int:
        """The number of sequences."""
        return self.B if self.lengths is None else len(self.lengths)

    def flags(self) -> dict[str, Any]:
        """Return the operator's keywords."""
        return {"activation": "silu" if self.silu else None, "output_final_tail": self.final}

    def inputs(self) -> dict[str, Tensor | None]:
        """Draw the operator's tensors, in order."""
        gen = torch.Generator().manual_seed(self.seed)
        B, T = self.B, self.T
        if self.lengths is not None:
            B, T = 1, sum(self.lengths) + self.behind

        def draw(*shape: int, strides: str = "") -> Tensor:
            return _strided(torch.randn(shape, generator=gen).to(self.dtype), strides)

        offsets = None
        if self.lengths is not None:
            offsets = torch.tensor([0, *self.lengths]).cumsum(0)
        inputs = {
            "x": draw(B, T, self.D, strides=self.strides),
            "weight": draw(self.D, self.W),
            "bias": draw(self.D) if self.bias else None,
            "initial_tail": draw(self.N, self.W - 1, self.D, strides=self.strides)
            if self.tail
            else None,
            "cu_seqlens": offsets,
        }
        if self.nan is not None:
            inputs["x"][:, offsets[self.nan] : offsets[self.nan + 1]] = torch.nan
            inputs["initial_tail"][self.nan] = torch.nan
        return inputs

    def define(self, x: dict[str, Tensor | None], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Compute y and the final tail, sequence by sequence."""
        rows, weight = x["x"].to(dtype), x["weight"].to(dtype)
        seqs = rows.unbind(0)
        if self.lengths is not None:
            seqs = rows[0].split([*self.lengths, self.behind])[:-1]
        ys, finals = [], []
        for n, seq in enumerate(seqs):
            tail = seq.new_zeros(self.W - 1, self.D)
            if x["initial_tail"] is not None:
                tail = x["initial_tail"][n].to(dtype)
            every = torch.cat([tail, seq])
            z = sum(every[i : i + len(seq)] * weight[:, i] for i in range(self.W))
            z = z if x["bias"] is None else z + x["bias"].to(dtype)
            ys.append(F.silu(z) if self.silu else z)
            finals.append(every[len(seq) :])
        if self.lengths is None:
            return torch.stack(ys), torch.stack(finals)
        behind = rows.new_zeros(self.behind, self.D)
        return torch.cat([*ys, behind])[None], torch.stack(finals)


@dataclass(frozen=True)
class NormCase:
    """A call of `kda::gated_rms_norm`."""

    B: int = 2
    T: int = 5
    H: int = 4
    G: int = 1
    V: int = 12
    gate: bool = True
    silu: bool = False
    strides: str = ""
    dtype: torch.dtype = torch.float32
    seed: int = 0

    name = "gated_rms_norm"
    parameters = frozenset(("weight",))
    final = False

    def flags(self) -> dict[str, Any]:
        """Return the operator's keywords."""
        return {"activation": "silu" if self.silu else "sigmoid", "eps": 1e-5}

    def inputs(self) -> dict[str, Tensor | None]:
        """Draw the operator's tensors, in order."""
        gen = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen).to(self.dtype)

        def rows() -> Tensor:
            return _strided(draw(self.B, self.T, self.H, self.V), self.strides)

        gate = rows() if self.gate else None
        return {"x": rows(), "weight": draw(self.G, self.V), "gate": gate}

    def define(self, x: dict[str, Tensor | None], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Compute y."""
        rows, weight = x["x"].to(dtype), x["weight"].to(dtype)
        y = rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        y = y * weight.repeat_interleave(self.H // self.G, 0)
        if x["gate"] is not None:
            gate = x["gate"].to(dtype)
            y = y * (F.silu(gate) if self.silu else gate.sigmoid())
        return (y,)


LayerCase = Conv | NormCase
CONVS = {
    "plain": Conv(),
    "nothing optional": Conv(bias=False, silu=False, tail=False, final=False),
    "packed": Conv(lengths=(2, 0, 5, 1, 67), behind=3),
    "packed, no tail": Conv(lengths=(0, 33, 0, 3), tail=False, final=False),
    "one tap": Conv(W=1),
    "two taps, one token": Conv(W=2, T=1, bias=False),
    "many taps": Conv(W=9, T=5, D=33),
    "several programs": Conv(T=259, D=40, bias=False),
    "channels first": Conv(T=37, strides="first"),
    "columns of a projection": Conv(T=37, D=64, strides="fused"),
}
NORMS = {
    "sigmoid": NormCase(),
    "silu": NormCase(silu=True, V=128, T=7),
    "no gate": NormCase(gate=False, V=7),
    "two rows of weight": NormCase(G=2),
    "a row per head": NormCase(G=4, V=33, silu=True),
    "several programs": NormCase(T=131, H=2),
    "columns of a projection": NormCase(strides="fused"),
    "channels first": NormCase(strides="first"),
}
CASES: dict[str, LayerCase] = {
    **{f"convolution, {n}": case for n, case in CONVS.items()},
    **{f"norm, {n}": case for n, case in NORMS.items()},
}


def operator(case: LayerCase, suffix: str = "") -> torch._ops.OpOverload:
    """Return the operator of a case."""
    return getattr(torch.ops.kda, case.name + suffix).default


def outputs(case: LayerCase, out) -> tuple[Tensor, ...]:
    """Return what a case asks for of an operator's results."""
    return tuple(out)[: 1 + case.final] if isinstance(out, (tuple, list)) else (out,)


def cotangents(case: LayerCase, outs: tuple[Tensor, ...]) -> list[Tensor]:
    """Draw the gradients of results."""
    gen = torch.Generator().manual_seed(case.seed + 1)
    return [torch.randn(y.shape, generator=gen).to(y.device, case.dtype) for y in outs]


def run(case: LayerCase, device: torch.device, compute=None) -> Results:
    """Run a case on a device, forward and backward, by `compute` or the operator."""
    inputs = on(case.inputs(), device)
    leaves = as_leaves(inputs, inputs.keys() - {"cu_seqlens"})
    call = operator(case) if compute is None else compute
    outs = outputs(case, call(*(inputs | leaves).values(), **case.flags()))
    return with_gradients(dict(zip(OUTPUTS, outs)), leaves, cotangents(case, outs))


def defined(case: LayerCase, dtype: torch.dtype) -> Results:
    """Compute a case by its definition in a dtype, gradients by autograd."""
    inputs = case.inputs()
    wide = {n: t.to(dtype) for n, t in inputs.items() if t is not None and n != "cu_seqlens"}
    leaves = as_leaves(wide, wide)
    outs = case.define(inputs | leaves, dtype)[: 1 + case.final]
    dys = [d.to(dtype) for d in cotangents(case, outs)]
    return with_gradients(dict(zip(OUTPUTS, outs)), leaves, dys)


def assert_meets_budget(case: LayerCase, device: torch.device) -> None:
    """Check results and gradients against the definition."""
    got = run(case, device)
    wide = torch.promote_types(case.dtype, torch.float32)
    ref, twin = defined(case, torch.float64), defined(case, wide)
    assert got.keys() == ref.keys()
    for name, x in got.items():
        if case.dtype is torch.float64:  # in which the twin is the definition
            torch.testing.assert_close(x, ref[name], rtol=0, atol=1e-12)
            continue
        assert_close(name, x, ref[name], twin[name].to(case.dtype))


def dtypes_of(case: LayerCase, dtypes: tuple[torch.dtype, ...]) -> list[LayerCase]:
    """Return a case in several dtypes."""
    return [replace(case, dtype=dtype) for dtype in dtypes]
