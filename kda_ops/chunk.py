"""The passes over whole sequences in chunks: which stages run, and what is kept for backward.

By default training keeps its inputs. If a kernel's operands have 16 bits, it also keeps A: 2 C =
128 bytes per token and value head. KDA on Triton puts P into the half of A's tile that is zero.

With `disable_recompute` training keeps the rest of the `Tile` and the `Trace` too, and backward
starts with the reverse scan. Per token and value head, that is 2 C + 3 K + 2 V + K V / C elements
in the operand dtype. gamma adds K / C floats (GDN: 1 / C). On Triton, KDA keeps three floats per
row (`factors`) instead of u, and GDN keeps only A, the states and v_new. Kept tensors equal
recomputed ones, so both policies give the same bits.

Where training walks (`Keeps.trains`), it keeps A and P of each half of a chunk, in 2 C = 128 bytes
too. With `disable_recompute` it also keeps the state that enters each half and v_new, V + 2 K V / C
elements more, and a backward that walks does not make them again (`stages.Walked`). Without a bound
on decays it keeps nothing (`Keeps.trained_names`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kda_ops import dispatch
from kda_ops.checks import check_on_device
from kda_ops.problem import CHUNK, Problem
from kda_ops.sequences import count_chunks
from kda_ops.stages import (
    GRADIENTS,
    KEPT,
    SUMS,
    Backend,
    Gradients,
    Keeps,
    Pass,
    Tile,
    Trace,
    Walked,
    new_like,
)

INPUTS = (*GRADIENTS, "cu_seqlens")
HALF = CHUNK // 2
WALKED = (HALF, 2 * CHUNK)  # the last axes of the A that `Backend.train` returns


def kept_names(keeps: Keeps, p: Problem) -> frozenset[str]:
    """Return the names of what training keeps besides the inputs."""
    if keeps.trains(p):
        return keeps.trained_names(p)
    return keeps.names(p.rank, p.q.dtype, p.l2norm, p.disable_recompute)


def new_kept(keeps: Keeps, p: Problem) -> list[Tensor]:
    """Allocate what `Forward` keeps, one tensor per name in `stages.KEPT`, empty where not kept."""
    names, shapes = kept_names(keeps, p), kept_shapes(p)
    if keeps.trains(p):
        shapes |= walked_shapes(p)
    return [empty(keeps, p, n, shapes[n] if n in names else (0,)) for n in KEPT]


def kept_shapes(p: Problem) -> dict[str, tuple[int, ...]]:
    """Return the shapes of kept tensors by name, where training does not walk."""
    D, R = (p.K, 3) if p.rank else (1, 7)
    chunks = count_chunks(p)
    size = dict(c=chunks, s=chunks, h=p.HV, C=CHUNK, K=p.K, V=p.V, D=D, R=R)
    return {name: tuple(size[letter] for letter in axes) for name, axes in KEPT.items()}


def walked_shapes(p: Problem) -> dict[str, tuple[int, ...]]:
    """Return the shapes of `Walked` by name."""
    halves = count_chunks(p, HALF)
    return {
        "A": (count_chunks(p), p.HV, *WALKED),
        "states": (halves, p.HV, p.V, p.K),
        "v_new": (halves, p.HV, HALF, p.V),
    }


def has_walked(A: Tensor | None) -> bool:
    """Return whether a walk made this A. Where no A is kept, it is None or empty.

    Only the shape of A tells. The call of backward does not, because under vmap and DTensor it may
    have other heads and columns than that of forward.
    """
    return A is not None and tuple(A.shape[2:]) == WALKED


def check_kept(p: Problem, given: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse kept tensors of another call, because kernels would read past their ends."""
    for name, want in shapes.items():
        x = given.get(name)
        if x is None or not _kept(x):
            continue
        if tuple(x.shape) != want:
            raise ValueError(
                f"{name} must have shape {list(want)} for the tokens of this call, got "
                f"{list(x.shape)}: pass what the forward of the same inputs kept."
            )
        check_on_device(name, x, p.q.device)


def empty(keeps: Keeps, p: Problem, name: str, shape=(0,)) -> Tensor:
    """Allocate a kept tensor, or an empty one in its place."""
    dtype = p.state_dtype if name in SUMS else keeps.operand_dtype(p.q.dtype)
    return p.q.new_empty(shape, dtype=dtype)


def _kept(x: Tensor | None) -> bool:
    """Return whether a tensor is kept, not an empty one in its place."""
    return x is not None and x.dim() > 1


def _there(x: Tensor | None) -> Tensor | None:
    """Return a kept tensor, or None for an empty one."""
    return x if x is not None and x.numel() > 0 else None


def uniform(b: Backend, p: Problem) -> Problem:
    """Return a call as its backend reads it: with `invariant`, in the one form of all calls."""
    return b.uniform(p) if p.invariant else p


class Whole(Pass):
    """A pass over whole sequences."""

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        self.p = Problem.parse(rank, **self.named(args), **flags)

    def outputs(self) -> tuple[Tensor, ...]:
        """Allocate o and the final state."""
        return self.p.new_output(), self.p.new_final_state()


class Infer(Whole):
    """Forward for inference: o and the final state; nothing is kept."""

    def run(self, b: Backend) -> tuple[Tensor, Tensor]:
        """Return o and the final state."""
        o, final_state = self.outputs()
        if self.p.HV:
            b.infer(uniform(b, self.p), o, final_state)
        return o, final_state


class Prefill(Pass):
    """Forward on a state pool: states are read from its slots and written there."""

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        self.p = Problem.parse_prefill(rank, **self.named(args), **flags)

    def outputs(self) -> tuple[Tensor, ...]:
        """Allocate o."""
        return (self.p.new_output(),)

    def run(self, b: Backend) -> tuple[Tensor, ...]:
        """Return o."""
        o = self.p.new_output()
        self.write(b, o)
        return (o,)

    def write(self, b: Backend, o: Tensor) -> None:
        """Write o and the pool."""
        if self.p.HV:
            b.infer(uniform(b, self.p), o, self.p.state if self.p.output_final_state else None)


class Into(Pass):
    """A pass on a state pool that writes o to the caller's `out`, and returns nothing."""

    p: Problem

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        super().__init__(rank, args, flags)
        if self.p.out is None:
            raise TypeError("out must be a tensor, to which o is written, got None.")

    def outputs(self) -> tuple[()]:
        """Return nothing."""
        return ()

    def run(self, b: Backend) -> tuple[()]:
        """Write `out`, by way of a tensor of our own if the backend asks for that."""
        out = self.p.out
        assert out is not None  # as checked above
        o = out if b.writes_to(out) else self.p.new_output()
        self.write(b, o)
        if o is not out:
            b.copy_to(out, o)
        return ()

    def write(self, b: Backend, o: Tensor) -> None:
        """Write o and the pool."""
        raise NotImplementedError


class PrefillInto(Into, Prefill):
    """`Prefill` to the caller's `out`."""

    write = Prefill.write


class Forward(Whole):
    """Forward for training: o, the final state, and what is kept for `Backward`."""

    def outputs(self) -> tuple[Tensor, ...]:
        """Allocate o, the final state and what is kept."""
        return *super().outputs(), *new_kept(dispatch.keeps(self.p.q.device), self.p)

    def run(self, b: Backend) -> tuple[Tensor, ...]:
        """Return o, the final state, and one tensor per name in `stages.KEPT`."""
        p = self.p
        o, final_state = super().outputs()
        if not p.HV:
            return o, final_state, *new_kept(b.keeps, p)
        p = uniform(b, p)
        names = kept_names(b.keeps, p)
        if b.keeps.trains(p):
            made = vars(b.train(p, o, final_state))
        else:
            keeps_AP = b.keeps.keeps_AP(p)
            tile = b.prepare(p, with_AP=keeps_AP, norms=p.disable_recompute, overlap=True)
            trace = b.scan(p, tile, o, final_state, keep=p.disable_recompute)
            made = vars(tile) | ({} if trace is None else vars(trace))
            if keeps_AP:
                made["A"] = tile.AP
        return o, final_state, *(made[n] if n in names else empty(b.keeps, p, n) for n in KEPT)


class Backward(Pass):
    """Gradients of the inputs, from those of o and of the final state (None: zero).

    Bit i of the flag `need` asks for the gradient of ``stages.GRADIENTS[i]``. The last argument is
    o, if the forward kept it.
    """

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        self.given = self.named(args)
        flags = dict(flags)
        need = flags.pop("need", 0)
        self.need = frozenset(n for i, n in enumerate(GRADIENTS) if need >> i & 1)
        p = self.p = Problem.parse(rank, **{n: self.given.get(n) for n in INPUTS}, **flags)
        state = (p.N, p.HV, p.V, p.K) if p.transposed else (p.N, p.HV, p.K, p.V)
        for name, want in (("do", tuple(p.v.shape)), ("dfinal_state", state)):
            x = self.given.get(name)
            if x is None or name == "dfinal_state" and x.dim() == 1:
                continue  # zero
            if tuple(x.shape) != want:
                raise ValueError(f"{name} must have shape {list(want)}, got {list(x.shape)}.")
        self._check_kept()

    def _check_kept(self) -> None:
        shapes = kept_shapes(self.p)
        if has_walked(self.given.get("A")):
            shapes |= walked_shapes(self.p)
        check_kept(self.p, self.given, shapes)

    def outputs(self) -> tuple[Tensor | None, ...]:
        """Allocate the gradients, None where not asked for."""
        inputs = zip(GRADIENTS, self.p.differentiable())
        return tuple(new_like(x) if n in self.need else None for n, x in inputs)

    def run(self, b: Backend) -> tuple[Tensor | None, ...]:
        """Return the gradients, None where not asked for."""
        self._check_kept()  # again, because the numbers of chunks become guards of a plan
        p, need = self.p, self.need
        do, dfinal_state = self.given["do"], self.given["dfinal_state"]
        inputs = [*zip(GRADIENTS, p.differentiable())]
        if not p.HV:
            return tuple(
                torch.zeros_like(x) if n in need and x is not None else None for n, x in inputs
            )
        if p.invariant:  # which gradients are asked for decides nothing
            need = frozenset(n for n, x in inputs if x is not None)
            p = b.uniform(p)
            do, dfinal_state = b.uniform_gradients(p, do, dfinal_state)
        found = self._gradients(b, p, do, dfinal_state, need)
        return tuple(getattr(found, n) if n in self.need else None for n in GRADIENTS)

    def _output(
        self, b: Backend, p: Problem, do: Tensor | None, need: frozenset[str]
    ) -> Tensor | None:
        """Allocate o if the scan must write it again, because `gradient` reads it."""
        reads = "o" in b.keeps.names(p.rank, p.q.dtype, p.l2norm, disable_recompute=True)
        return p.new_output() if reads and do is not None and "q" in need else None

    def _gradients(
        self,
        b: Backend,
        p: Problem,
        do: Tensor | None,
        dfinal_state: Tensor | None,
        need: frozenset[str],
    ) -> Gradients:
        """Call the stages."""
        given = self.given
        p.scratch = {}
        # `recurrent`, and walks without a bound, keep no A, so backward gets an empty one
        A = _there(given["A"])
        if has_walked(A):
            assert A is not None  # it has a shape
            if do is not None and p.B * p.T * p.N > 0 and b.walks_back(p, need):
                kept = Walked(A, _there(given["states"]), _there(given["v_new"]))
                return b.walk_back(p, kept, do, dfinal_state, need)
            A = None  # the other stages cannot read what a walk has kept
        trace = None
        have: dict[str, Any] = {}
        if p.disable_recompute and A is not None and _there(given["states"]) is not None:
            names = b.keeps.names(p.rank, p.q.dtype, p.l2norm, disable_recompute=True)
            have = {n: given[n] for n in KEPT if n in names}
        # if the whole call walks and its shards do not, a shard gets only what the whole call keeps
        if have and all(_kept(x) for x in have.values()):
            trace = Trace(have.pop("states"), have.pop("v_new"), given.get("o"))
            tile = b.prepare(p, have["A"]) if have.keys() == {"A"} else Tile(**have)
        else:
            tile = b.prepare(p, A, with_AP=A is not None and b.keeps.keeps_AP(p), norms=True)
        if do is not None and b.walks(p, do, dfinal_state, need):
            return b.reverse_walk(p, tile, trace, do, dfinal_state, need)
        if trace is None:
            with b.overlap_streams(p) as on_side_stream:
                with on_side_stream:
                    trace = b.scan(p, tile, self._output(b, p, do, need), None, keep=True)
                reverse = b.reverse_scan(p, tile, do, dfinal_state, need)
            assert trace is not None  # keep=True returns one
        else:
            reverse = b.reverse_scan(p, tile, do, dfinal_state, need)
        # most of the scratch so far gives its place to that of `gradient`
        tile = replace(tile, P=None, w=None, u=None, qg=None, kg=None)
        return b.gradient(p, tile, trace, do, reverse, need)
