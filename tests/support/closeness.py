"""Check errors against a budget, derived per tensor from the definition and a twin of the kernel.

For the maximum and for the root mean square over a tensor x::

    |x - ref64| <= 2 (|twin - ref64| + eps max|ref64|)

- ref64 is the token recurrence in float64 on the same inputs, with gradients by autograd.
- twin is the chunk formulas with sums in the state dtype. It rounds every stored tensor and dot
  operand as the kernel does.
- eps is that of x's dtype.

A row of a gradient must not be zero if the oracle's is not and every draw of the twin is close to
it. The budget does not depend on the device.

The twin's error is one random draw. In a tensor of few independent entries (a parameter's gradient,
sums along a sequence) one draw may be small by luck. So the budget takes the largest error of up to
`DRAWS` draws, and computes more than one only if the first exceeds it or finds a row that is zero.
Another draw

- permutes the K and V channels, which does not change the definition;
- perturbs every dot product and decay by up to half a unit in the last place (of a product: in
  that of its terms);
- rounds 16-bit operands on a scaled grid, because the perturbation is too small to change them.
  Values that 16 bits hold exactly stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from kda_ops.backends.reference import Reference
from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS
from tests.support.calls import Results, as_leaves, run, run_stages
from tests.support.cases import Case, Tensors, double, on
from tests.support.target import TARGET, Target


def _maximum(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


NORMS: dict[str, Callable[[Tensor], float]] = {"maximum": _maximum, "rms": _rms}


DRAWS = 8


def excess(x: Tensor, ref: Tensor, *twins: Tensor) -> dict[str, float]:
    """Return error / budget per norm: at most 1 if x is close, NaN or inf if x is not finite."""
    band = torch.finfo(x.dtype).eps * _maximum(ref)
    out = {}
    for name, norm in NORMS.items():
        error = norm(x.double() - ref)
        budget = 2.0 * (max(norm(twin.double() - ref) for twin in twins) + band)
        out[name] = 0.0 if error == 0.0 else error / budget if budget else float("inf")
    return out


def vanished(x: Tensor, ref: Tensor, *twins: Tensor) -> int:
    """Count the rows (last dimension) of x that are zero although the oracle's are not.

    Count a row only if every twin is within half of the oracle: a row that is left over from sums
    which cancel differs from one draw to the next.
    """
    if x.dim() == 0 or not x.numel():
        return 0
    size = ref.abs().amax(-1)
    error = torch.stack([(t.double() - ref).abs().amax(-1) for t in twins]).amax(0)
    resolved = error < 0.5 * size
    return int((resolved & (size > torch.finfo(x.dtype).tiny) & (x == 0).all(-1)).sum())


def assert_close(name: str, x: Tensor, ref: Tensor, *twins: Tensor) -> None:
    """Fail unless x, named `name`, is within the twins' budget and has no vanished row."""
    x, ref, twins = x.detach().cpu(), ref.detach().cpu(), [t.detach().cpu() for t in twins]
    assert x.shape == ref.shape, (
        f"{name} has shape {list(x.shape)}, the definition gives {list(ref.shape)}"
    )
    assert x.dtype == twins[0].dtype, f"{name} is {x.dtype}, its twin is {twins[0].dtype}"
    assert ref.isfinite().all() and all(t.isfinite().all() for t in twins), (
        f"{name}: the oracle or the twin is not finite, the case is no test"
    )
    over = {n: e for n, e in excess(x, ref, *twins).items() if not e <= 1.0}
    error = max(_maximum(t.double() - ref) for t in twins)
    assert not over, (
        f"{name} is off by {over} times its budget (largest entry {_maximum(ref):.3g}, twin's "
        f"error {error:.3g})"
    )
    if name.startswith("d"):
        rows = vanished(x, ref, *twins)
        assert not rows, f"{name}: {rows} rows vanish where the definition's do not"


def assert_all_close(got: Results, ref: Results, twin: Callable[[int], Results]) -> None:
    """Call `assert_close` for every tensor of a call; `twin(i)` is draw i.

    All dictionaries must have the same names.
    """
    first = twin(0)
    assert got.keys() == ref.keys() == first.keys()
    for name in got:
        call = (got[name].detach().cpu(), ref[name], first[name])
        close = all(e <= 1.0 for e in excess(*call).values()) and not vanished(*call)
        draws = 1 if close else DRAWS
        assert_close(name, got[name], ref[name], *(twin(i)[name] for i in range(draws)))


def assert_identical(a: Tensor, b: Tensor, name: str = "") -> None:
    """Fail unless a and b have the same bits."""
    assert a.shape == b.shape and a.dtype == b.dtype, (
        f"{name}: {a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    )
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    same = a.contiguous().view(bits) == b.contiguous().view(bits)
    assert bool(same.all()), (
        f"{name}: {int((~same).sum())} of {same.numel()} entries differ, by at most "
        f"{_maximum(a.double() - b.double()):.3g}"
    )


def assert_all_identical(a: Results, b: Results) -> None:
    """Call `assert_identical` for every tensor of two calls, which must have the same names."""
    assert a.keys() == b.keys()
    for name in a:
        assert_identical(a[name], b[name], name)


def _same_result(case: Case) -> Case:
    promises = dict(safe_gate=False, safe_beta=False, safe_keys=False)
    return replace(case, **promises, disable_recompute=False)


def oracle(case: Case, need: tuple[str, ...] = GRADIENTS) -> Results:
    """Run the token recurrence in float64, and autograd through it."""
    return dict(_oracle(_same_result(case), need))


@lru_cache(maxsize=128)
def _oracle(case: Case, need: tuple[str, ...]) -> Results:
    return definition(case, case.inputs(), need)


def definition(case: Case, inputs: Tensors, need: Iterable[str] = GRADIENTS) -> Results:
    """Run the token recurrence in float64 on other inputs of a case, and autograd through it."""
    exact = double(on(inputs, "cpu"))
    leaves = as_leaves(exact, need)
    p = Problem.parse(case.rank, *(exact | leaves).values(), **case.flags())
    outs = {"o": p.new_output(), "final_state": p.new_final_state()}
    Reference().step(p, *outs.values())
    if not case.final:
        del outs["final_state"]
    read = [(x, d.double()) for x, d in zip(outs.values(), case.cotangents()) if x.requires_grad]
    grads = (torch.zeros_like(x) for x in leaves.values())
    if read and leaves:
        grads = torch.autograd.grad(
            [x for x, _ in read],
            list(leaves.values()),
            [d for _, d in read],
            materialize_grads=True,
        )
    return {n: x.detach() for n, x in outs.items()} | {"d" + n: d for n, d in zip(leaves, grads)}


def twin(
    case: Case,
    op: str = "chunk",
    need: tuple[str, ...] = GRADIENTS,
    draw: int = 0,
    target: Target | None = None,
) -> Results:
    """Run the chunk formulas with the roundings of a target's kernels, by default the suite's.

    For the forward of `recurrent` run the recurrence instead.
    """
    return dict(_twin(_same_result(case), op, need, draw, target or TARGET))


@lru_cache(maxsize=256)
def _twin(case: Case, op: str, need: tuple[str, ...], draw: int, target: Target) -> Results:
    inputs, cotangents, back = permuted(case, draw)
    p = Problem.parse(case.rank, *inputs.values(), **case.flags())
    operand = target.operand(p)
    reference = drawn(draw, p.state_dtype, None if operand is p.state_dtype else operand)
    return back(run_stages(reference, p, cotangents, need, step=op == "recurrent"))


class _Draw(Reference):
    """The twin with random roundings of dot products and decays, and operands on a scaled grid."""

    def __init__(self, dtype: torch.dtype, operand: torch.dtype | None, seed: int):
        super().__init__(dtype, operand)
        self.gen = torch.Generator().manual_seed(seed)
        # one grid for all tensors, so that rounded values stay on it
        self.unit = 2.0 ** torch.rand((), generator=self.gen).item()

    def _round(self, x: Tensor) -> Tensor:
        near = super()._round(x)
        return torch.where(near == x, near, super()._round(x * self.unit) / self.unit)

    def _jitter(self, x: Tensor, size: Tensor) -> Tensor:
        # Move x up or down by half an ulp of its size, then round. Equal values move alike, as
        # those of repeated keys do: their errors do not average out.
        half = 0.5 * torch.finfo(x.dtype).eps * size
        bits = x.abs().double().contiguous().view(torch.int64)
        factor, phase = torch.randint(2**31, (2,), generator=self.gen).tolist()
        mixed = (bits ^ bits >> 32) * (2 * factor + 1) + phase
        up = ((mixed >> 31) & 1).bool() ^ (x < 0)
        # a decay of -inf, which forgets everything, stays
        return torch.where(x.isfinite(), torch.where(up, x + half, x - half), x)

    def _dot(self, a: Tensor, b: Tensor) -> Tensor:
        # The rounding error of a sum scales with its terms: if they cancel, it exceeds an ulp of
        # the result.
        x, terms = super()._dot(a, b), (self._round(a).square() @ self._round(b).square()).sqrt()
        return self._jitter(x, torch.maximum(x.abs(), terms))

    def _decay(self, g: Tensor) -> Tensor:
        return self._jitter(g, g.abs())

    def _chunked(self, p: Problem):
        x, chunks, q, k, v, g, beta = super()._chunked(p)
        return x, chunks, q, k, v, self._jitter(g, g.abs()), beta


def drawn(draw: int, dtype: torch.dtype, operand: torch.dtype | None) -> Reference:
    """Return the twin's stages of draw `draw`."""
    return _Draw(dtype, operand, draw) if draw else Reference(dtype, operand)


def permuted(
    case: Case, draw: int
) -> tuple[Tensors, tuple[Tensor, Tensor], Callable[[Results], Results]]:
    """Permute the channels of a call's inputs and cotangents for draw `draw`.

    Also return the function that restores the order in its results.
    """
    there, back = channels(case, draw)
    inputs = {n: x if x is None else there(n, x) for n, x in case.inputs().items()}
    do, dfinal_state = case.cotangents()
    names = {"o": "v", "final_state": "initial_state"}
    return (
        inputs,
        (there("v", do), there("initial_state", dfinal_state)),
        lambda found: {n: back(names.get(n, n[1:]), x) for n, x in found.items()},
    )


def channels(case: Case, draw: int):
    """Return functions of (name, tensor) that permute and restore the K and V channels."""
    gen = torch.Generator().manual_seed(draw)
    K, V = (torch.randperm(n, generator=gen) if draw else torch.arange(n) for n in (case.K, case.V))

    def apply(name: str, x: Tensor, K: Tensor, V: Tensor) -> Tensor:
        if (
            not draw
            or name in ("beta", "A_log", "cu_seqlens")
            or (name in ("g", "dt_bias") and not case.rank)
        ):
            return x
        if name == "initial_state":
            return x[..., V, :][..., K] if case.transposed else x[..., K, :][..., V]
        if name == "dt_bias":
            return x.reshape(case.HV, case.K)[:, K].reshape(x.shape)
        return x[..., V if name == "v" else K]

    return lambda name, x: apply(name, x, K, V), lambda name, x: apply(
        name, x, K.argsort(), V.argsort()
    )


def assert_meets_budget(
    case: Case,
    op: str = "chunk",
    got: Results | None = None,
    only: Iterable[str] | None = None,
    target: Target | None = None,
) -> Results:
    """Run a case forward and backward; check every output and gradient against the definition.

    Check results of another run if they are given, and some tensors if `only` names them. The
    budget is that of a target's twin.
    """
    got = run(case, op) if got is None else got
    need = tuple(n for n in GRADIENTS if "d" + n in got)

    def some(found: Results) -> Results:
        return found if only is None else {n: found[n] for n in only}

    def near(draw: int) -> Results:
        return some(twin(case, op, need, draw, target))

    assert_all_close(some(got), some(oracle(case, need)), near)
    return got
