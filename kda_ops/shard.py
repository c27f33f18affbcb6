"""The passes over a shard, one rank's part of sequences that lie on several ranks.

A shard is an affine map from its entering state to its leaving state, ``S -> M S + b``. Forward and
backward have two halves each, between which ranks exchange maps (`kda_ops.distributed.chunk`). The
first half makes the tiles, and finds the map of each sequence by a scan without outputs. The second
half knows the states that enter, and does the rest from the same tiles. A backend may cut a shard
into runs, so that its scans fill the device. Then the first half passes on the maps of runs too.

States have the layout [K, V].
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from kda_ops import dispatch
from kda_ops.chunk import Backward, Whole, check_kept, empty, kept_shapes
from kda_ops.problem import Problem
from kda_ops.stages import TILE, Backend, Gradients, Keeps, Tile

SHARDED = {"sharded": True}


def _shapes(keeps: Keeps, p: Problem) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all that a first half may pass on, by name."""
    shapes, count = kept_shapes(p), keeps.runs(p)
    for name, columns in (("runs", p.V + p.K), ("starts", p.V)):
        shapes[name] = (count, p.HV, p.K, columns) if count else (0,)
    return shapes | {"AP": shapes["A"]}


def _present(x: Tensor | None) -> Tensor | None:
    """Return what a half got, or None for the empty tensor of one dimension in its place."""
    return x if x is not None and x.dim() > 1 else None


def _check(p: Problem, given: dict[str, Any], maps: tuple[str, ...]) -> None:
    """Refuse what another first half has passed on, and what is missing."""
    keeps = dispatch.keeps(p.q.device)
    for name in (*(maps if keeps.runs(p) else ()), *sorted(keeps.tile_names(p.rank))):
        if _present(given.get(name)) is None:
            raise ValueError(f"{name} must be what the first half of this call made, got none.")
    check_kept(p, given, _shapes(keeps, p))


def _new_tile(keeps: Keeps, p: Problem, names: frozenset[str], order) -> list[Tensor]:
    """Allocate the tensors of a tile, empty ones in the place of those not in `names`."""
    shapes = _shapes(keeps, p)
    return [empty(keeps, p, n, shapes[n] if n in names else (0,)) for n in order]


def _new_runs(keeps: Keeps, p: Problem, name: str) -> Tensor:
    """Allocate `runs` or `starts`; they are empty where sequences stay whole."""
    return p.q.new_empty(_shapes(keeps, p)[name], dtype=p.state_dtype)


def _started(p: Problem, starts: Tensor | None) -> Problem:
    """Return the call with the states that runs start from, if it is cut (`Backend.scan`)."""
    if starts is None:
        return p
    p = copy(p)
    p.state = starts
    return p


class MapForward(Whole):
    """First half of forward: the maps of sequences and of runs, and the tiles."""

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        super().__init__(rank, args, flags | SHARDED)

    def _names(self, keeps: Keeps) -> frozenset[str]:
        names = keeps.tile_names(self.p.rank)
        return names | {"AP"} if keeps.keeps_AP(self.p) else names

    def outputs(self) -> tuple[Tensor, ...]:
        """Allocate the maps of sequences and of runs, and the tiles."""
        p, keeps = self.p, dispatch.keeps(self.p.q.device)
        whole = p.q.new_empty((p.N, p.HV, p.K, p.V + p.K), dtype=p.state_dtype)
        tile = _new_tile(keeps, p, self._names(keeps), (*TILE, "AP"))
        return whole, _new_runs(keeps, p, "runs"), *tile

    def run(self, b: Backend) -> tuple[Tensor, ...]:
        """Return the maps of sequences and of runs, and the tiles."""
        p, names = self.p, self._names(b.keeps)
        if not p.HV:
            return self.outputs()
        tile = b.prepare(p, with_AP="AP" in names)
        whole, runs = b.map_shard(p, tile)
        made = [vars(tile)[n] if n in names else empty(b.keeps, p, n) for n in (*TILE, "AP")]
        return whole, _new_runs(b.keeps, p, "runs") if runs is None else runs, *made


class JoinForward(Whole):
    """Second half of forward: o, the final state, and what each run starts from."""

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        self.given = self.named(args)
        inputs = {n: x for n, x in self.given.items() if n not in (*TILE, "runs")}
        self.p = Problem.parse(rank, **inputs, **flags, **SHARDED)
        _check(self.p, self.given, ("runs",))

    def outputs(self) -> tuple[Tensor, ...]:
        """Allocate o, the final state, and what each run starts from."""
        return *super().outputs(), _new_runs(dispatch.keeps(self.p.q.device), self.p, "starts")

    def run(self, b: Backend) -> tuple[Tensor, ...]:
        """Return o, the final state, and what each run starts from."""
        # again, because the numbers of chunks become guards of a plan
        _check(self.p, self.given, ("runs",))
        p, runs, starts = self.p, _present(self.given.get("runs")), None
        if not p.HV:
            return self.outputs()
        o, final_state = super().outputs()
        if runs is not None:
            starts = b.starts_of_runs(p, runs, False, p.state)
        tile = Tile(**{n: _present(self.given.get(n)) for n in TILE})
        b.scan(_started(p, starts), tile, o, final_state, keep=False)
        return o, final_state, _new_runs(b.keeps, p, "starts") if starts is None else starts


class MapBackward(Backward):
    """First half of backward: the gradients of the states that enter, maps of runs, and tiles.

    `dfinal_state` has the gradients that are known yet, those of sequences that end in the shard.
    """

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        super().__init__(rank, args, flags | SHARDED)

    def _check_kept(self) -> None:
        check_kept(self.p, self.given, kept_shapes(self.p))

    def _names(self, keeps: Keeps) -> frozenset[str]:
        """Return the names of the tile; an A that is kept as it is, is not made again."""
        names = keeps.tile_names(self.p.rank)
        given = _present(self.given.get("A")) is not None
        return names - {"A"} if given and not keeps.keeps_AP(self.p) else names

    def outputs(self) -> tuple[Tensor, ...]:
        """Allocate the gradients of the states that enter, the maps of runs, and the tiles."""
        p, keeps = self.p, dispatch.keeps(self.p.q.device)
        dstate = p.q.new_empty((p.N, p.HV, p.K, p.V), dtype=p.state_dtype)
        return dstate, _new_runs(keeps, p, "runs"), *_new_tile(keeps, p, self._names(keeps), TILE)

    def run(self, b: Backend) -> tuple[Tensor, ...]:
        """Return the gradients of the states that enter, the maps of runs, and the tiles."""
        self._check_kept()
        p, names, A = self.p, self._names(b.keeps), _present(self.given.get("A"))
        if not p.HV:
            return self.outputs()
        tile = b.prepare(p, A, with_AP=A is not None and b.keeps.keeps_AP(p), norms=True)
        dfinal_state = _present(self.given.get("dfinal_state"))
        dstate, runs = b.map_shard_back(p, tile, self.given.get("do"), dfinal_state)
        made = [vars(tile)[n] if n in names else empty(b.keeps, p, n) for n in TILE]
        return dstate, _new_runs(b.keeps, p, "runs") if runs is None else runs, *made


class JoinBackward(Backward):
    """Second half of backward: the gradients."""

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        super().__init__(rank, args, flags | SHARDED)

    def _check_kept(self) -> None:
        _check(self.p, self.given, ("runs", "starts"))

    def _gradients(
        self,
        b: Backend,
        p: Problem,
        do: Tensor | None,
        dfinal_state: Tensor | None,
        need: frozenset[str],
    ) -> Gradients:
        p.scratch = {}
        runs = _present(self.given["runs"])
        if runs is not None:
            dfinal_state = b.starts_of_runs(p, runs, True, _present(dfinal_state))
        tile = Tile(**{n: _present(self.given[n]) for n in TILE})
        o = self._output(b, p, do, need)
        trace = b.scan(_started(p, _present(self.given["starts"])), tile, o, None, keep=True)
        assert trace is not None  # keep=True returns one
        reverse = b.reverse_scan(p, tile, do, dfinal_state, need)
        tile = replace(tile, P=None, w=None, u=None, qg=None, kg=None)
        return b.gradient(p, tile, trace, do, reverse, need)
