"""Whole sequences in chunks: the stages in order, and what is kept for backward.

Kept by default: nothing besides the inputs, or, where a kernel's operands have 16 bits, A (2 C =
128 bytes per token and value head), for KDA on Triton with P in the half of its tile that is zero.
With `disable_recompute` also the rest of the `Tile` and the `Trace`, so that backward starts with
the reverse scan: per token and value head 2 C + 3 K + 2 V + K V / C elements of the operand dtype
and K / C (GDN: 1 / C) floats for gamma (where `dispatch.applies_beta` says so, V elements less and
3 floats more); and, where `dispatch.reads_output` says so, o itself, which autograd saves as the
output that it is. What is kept is what a recompute would produce, so both policies give the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import Context
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from kda_ops import dispatch
from kda_ops.problem import CHUNK, Problem
from kda_ops.sequences import count_chunks
from kda_ops.stages import GRADIENTS, KEPT, Gradients, Tile, Trace

R = TypeVar("R")


def kept_names(p: Problem) -> frozenset[str]:
    """The names, among `stages.KEPT`, of what training keeps besides the inputs."""
    if p.disable_recompute:
        if dispatch.forms_tile(p):
            return frozenset(("A", "states", "v_new"))
        return frozenset(KEPT) - ({"u"} if dispatch.applies_beta(p) else {"rows"})
    return frozenset(("A",)) if dispatch.operand_dtype(p).itemsize == 2 else frozenset()


def packs(p: Problem) -> bool:
    """Whether the A that is kept shares its tile with P: where no scan reads it before `prepare`
    takes it back.
    """
    return not p.disable_recompute and "A" in kept_names(p) and dispatch.packs_pairs(p)


def new_kept(p: Problem) -> list[Tensor]:
    """What `forward` keeps, allocated: the shapes for the fake implementation, one tensor per name
    in `stages.KEPT`, empty where not kept.
    """
    NT, D = count_chunks(p), p.K if p.rank else 1
    rows = {"A": CHUNK, "P": CHUNK, "w": p.K, "u": p.V, "qg": p.K, "kg": p.K, "v_new": p.V}
    shapes = {name: (NT, p.HV, CHUNK, width) for name, width in rows.items()} | {
        "gamma": (NT, p.HV, D),
        "states": (NT, p.HV, p.K, p.V),
    }
    shapes["rows"] = (NT, p.HV, 3, CHUNK)
    names = kept_names(p)
    return [_empty(p, n, shapes[n] if n in names else (0,)) for n in KEPT]


def _empty(p: Problem, name: str, shape: tuple = (0,)) -> Tensor:
    return p.q.new_empty(
        shape, dtype=p.state_dtype if name in ("gamma", "rows") else dispatch.operand_dtype(p)
    )


def _compiled_at_once(run: Callable[..., R]) -> Callable[..., R]:
    """A pass whose first call of a kind runs twice: once with kernels that compute nothing, so that
    all of them are compiled side by side.
    """

    def compile_only(first: AbstractContextManager, *args: Any) -> None:
        with first:
            run(*args)

    @wraps(run)
    def at_once(p: Problem, *args: Any) -> R:
        # the last one is what backward needs
        first = dispatch.compiling(p, run.__name__, *args[-1:])
        # in a context of its own: the compiler has its mode in a context variable, and leaves it
        # there where a kernel does not compile
        if first is not None:
            Context().run(compile_only, first, p, *args)
        return run(p, *args)

    return at_once


@_compiled_at_once
def infer(p: Problem) -> tuple[Tensor, Tensor]:
    """Forward without a thought of backward: o and the final state."""
    o, final_state = p.new_output(), p.new_final_state()
    if p.HV:
        b = dispatch.backend(p.q.device)
        b.scan(p, b.prepare(p, overlap=True), o, final_state, keep=False)
    return o, final_state


@_compiled_at_once
def prefill(p: Problem) -> Tensor:
    """Forward on a state pool: states are read from and written to its slots."""
    o = p.new_output()
    if p.HV:
        b = dispatch.backend(p.q.device)
        b.scan(p, b.prepare(p, overlap=True), o, p.state, keep=False)
    return o


@_compiled_at_once
def forward(p: Problem) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o, the final state, and what is kept for `backward`, one tensor per name in `stages.KEPT`."""
    o, final_state = p.new_output(), p.new_final_state()
    if not p.HV:
        return o, final_state, new_kept(p)
    b, names = dispatch.backend(p.q.device), kept_names(p)
    tile = b.prepare(p, pack=packs(p), norms=p.disable_recompute, overlap=True)
    trace = b.scan(p, tile, o, final_state, keep=p.disable_recompute)
    made = (
        vars(tile)
        | (vars(trace) if trace is not None else {})
        | ({"A": tile.pairs} if packs(p) else {})
    )
    return o, final_state, [made[n] if n in names else _empty(p, n) for n in KEPT]


@_compiled_at_once
def backward(
    p: Problem,
    o: Tensor | None,
    kept: list[Tensor],
    do: Tensor | None,
    dfinal_state: Tensor | None,
    need: frozenset[str],
) -> Gradients:
    """Gradients of the inputs named in `need`, from the gradients of o and of the final state
    (None: zero); o as kept, if it was.
    """
    if not p.HV:
        return Gradients(
            **{
                n: torch.zeros_like(x)
                for n, x in zip(GRADIENTS, p.differentiable())
                if n in need and x is not None
            }
        )
    p.scratch = {}
    b, names = dispatch.backend(p.q.device), kept_names(p)
    have = {n: x for n, x in zip(KEPT, kept) if n in names}
    asked = do is not None and "q" in need and dispatch.reads_output(p.q.device, p.rank, p.l2norm)
    trace = None
    if p.disable_recompute:
        trace = Trace(have.pop("states"), have.pop("v_new"), o)
        tile = b.prepare(p, have["A"]) if dispatch.forms_tile(p) else Tile(**have)
    else:
        A = have.get("A")
        # empty after a forward that keeps nothing: the recurrence
        A = A if A is not None and A.numel() else None
        tile = b.prepare(p, A, pack=A is not None and packs(p), norms=True)
    with dispatch.beside(p, trace is None) as elsewhere:
        if trace is None:
            with elsewhere:
                trace = b.scan(p, tile, p.new_output() if asked else None, None, keep=True)
        reverse = b.reverse_scan(p, tile, do, dfinal_state, need)
    assert trace is not None  # it was kept, or else the scan has made it
    # most of the scratch so far gives its place to that of `gradient`
    tile = replace(tile, P=None, w=None, u=None, qg=None, kg=None)
    return b.gradient(p, tile, trace, do, reverse, need)
