"""Cut sequences into runs of chunks that are scanned at once, where heads cannot fill the device.

A run maps the state that enters it to the state that leaves it, S -> M S + b. The scan itself finds
this map: over the columns ``[u | 0]``, started from ``[0 | I]``, it ends with ``[b | M]``. So there
are three launches. The first finds the maps of the inner runs, and the state that the first run
ends with. `join_runs` turns maps into states. The last is the ordinary scan, with one program per
run. Backward is the same from the other end, with ``[do | 0]`` and the transposed maps.

Cuts are multiples of one length (`tuning.run_length`) from the start of each sequence. So results
depend neither on its neighbours nor on later tokens. GDN's reverse walk has runs of its own
(`tuning.walk_run_length`), and takes what `join_runs` finds in the place of the last scan.

The launches share one tensor `maps`, ``[runs, HV, K, V + K]`` fp32. At run r it holds ``[b | M]``
of the run before r (after r in backward). After the join, its first V columns hold the state that r
starts from. At a sequence's first run that is a copy of the given state, whose memory may receive
the final state.

A shard of a sequence (`Problem.sharded`) has two halves, between which ranks exchange maps. There
the state that enters is not known yet, so the first launch finds the maps of all runs, and `maps`
holds at run r that of r itself. A first join makes them the map of the shard, a second one finds
from the state that enters it what each run starts from. The last launch is the same.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.operands import Strided, strided
from kda_ops.backends.triton.device.sequence import find_sequence
from kda_ops.backends.triton.device.state import (
    close_state,
    drop_null,
    is_resumed,
    open_state,
    state_at,
)
from kda_ops.backends.triton.device.tile import CHUNK, INTERPRETED, dense, locate_sequence
from kda_ops.backends.triton.plans.launch import launch, new
from kda_ops.problem import Problem


class Place(NamedTuple):
    """Where a program of a scan is: a run of one head of one sequence, and columns of its state."""

    i_n: Any  # the sequence
    i_h: Any  # the value head
    i_v: Any  # the first column of the state
    live: Any  # False for a sequence without a slot, a run that no sequence has, and the tail
    i_b: Any  # the row of the batch, int64
    bos: Any  # the first token of the sequence, int64
    length: Any  # its tokens
    first: Any  # the number of its first chunk, among those of all sequences
    start: Any  # the chunks of the run, in the sequence
    stop: Any
    # (number of the run, whether the scan begins here, whether it ends here, where its map goes)
    run: Any


@triton.jit
def place(
    cu_seqlens,
    slots,
    maps,
    N,
    T,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    RUN: tl.constexpr,
    BACK: tl.constexpr,
    OPEN: tl.constexpr,
    NULL: tl.constexpr = -1,
):
    """Return this program's `Place`.

    Slices of the columns of one head are neighbours, so that they find its tiles in the cache. The
    tail of a packed row is sequence N; its output is zero. With OPEN, no run begins or ends the
    scan: the state that enters is not known yet.
    """
    slices: tl.constexpr = (V + (K if maps.pointer is not None else 0) + BV - 1) // BV
    i_rh = tl.program_id(0) // slices
    i_r, i_h = i_rh // HV, i_rh % HV
    i_v = (tl.program_id(0) % slices) * BV
    i_n = i_r
    if RUN:
        if cu_seqlens is not None:
            i_n = find_sequence(cu_seqlens, i_r, N + 1, RUN * CHUNK)
        else:
            i_n = i_r // tl.cdiv(T, RUN * CHUNK)
    live = i_n < N
    if slots is not None:
        live = live & (drop_null(tl.load(slots + i_n, mask=live, other=-1), NULL) >= 0)
    i_b, bos, length, first = locate_sequence(cu_seqlens, i_n, N, T)
    start, stop, begins, ends = i_r * 0, tl.cdiv(length, CHUNK), live, live
    if RUN:
        first_run = locate_sequence(cu_seqlens, i_n, N, T, RUN * CHUNK)[3]
        start = (i_r - first_run).to(tl.int32) * RUN
        live = live & ((start == 0) | (start < stop))
        begins, ends = start == 0, start + RUN >= stop
        stop = tl.minimum(start + RUN, stop)
        if BACK:
            begins, ends = ends, begins
    i_to = i_r - 1 if BACK else i_r + 1
    if OPEN:
        begins, ends, i_to = i_n < 0, i_n < 0, i_r
    # the state that leaves the last run starts none, and the first one starts from the state itself
    if maps.pointer is not None:
        stop = tl.where(ends | begins & (i_v >= V) | (not live), start, stop)
    run = (i_r, begins, ends, i_to)
    return Place(i_n, i_h, i_v, live, i_b, bos, length, first, start, stop, run)


@triton.jit
def open_run(
    state,
    slots,
    maps,
    at,
    live,
    o_k,
    o_v,
    K: tl.constexpr,
    V: tl.constexpr,
    RUN: tl.constexpr,
    resumed=None,
):
    """Return what a program's scan starts from, [BK, BV] fp32: the state of its sequence, that of
    its run, or [0 | I] to find the map.
    """
    i_r, begins, _, _ = at.run
    if maps.pointer is not None:
        there = is_resumed(resumed, at.i_n, live & begins)
        b_S = open_state(state, slots, at.i_n, at.i_h, o_k, o_v, there, K, V)
        close_state(maps, None, i_r, at.i_h, b_S, o_k, o_v, live & begins, K, V)
        b_S = tl.where(((o_k + V)[:, None] == o_v[None, :]) & (not begins), 1.0, b_S)
    elif RUN:
        b_S = open_state(state, None, i_r, at.i_h, o_k, o_v, live, K, V)
    else:
        there = is_resumed(resumed, at.i_n, live)
        b_S = open_state(state, slots, at.i_n, at.i_h, o_k, o_v, there, K, V)
    return b_S


@triton.jit
def close_run(final, slots, maps, at, live, b_S, o_k, o_v, K: tl.constexpr, V: tl.constexpr):
    """Write what a program's scan ends with: the final state of its sequence, or its map."""
    _, _, ends, i_to = at.run
    if maps.pointer is not None:
        close_state(maps, None, i_to, at.i_h, b_S, o_k, o_v, live & (not ends), K, V + K)
    if final.pointer is not None:
        close_state(final, slots, at.i_n, at.i_h, b_S, o_k, o_v, live & ends, K, V)


# One rounding of fp32 to tf32 in three spellings, so that the compiler does not merge the calls.
ROUND = tl.constexpr("cvt.rna.tf32.f32 $0, $1;")
ROUND_2 = tl.constexpr("cvt.rna.tf32.f32  $0, $1;")
ROUND_3 = tl.constexpr("cvt.rna.tf32.f32   $0, $1;")


@triton.jit
def to_tf32(x, ROUND: tl.constexpr):
    """Round fp32 numbers to tf32, by one of the three spellings."""
    return tl.inline_asm_elementwise(ROUND, "=r,r", [x], tl.float32, True, 1)


@triton.jit
def map_state(b_M, b_S, b_b):
    """Return M S + b [K, BV] with the accuracy of fp32, as three products of tf32.

    This is ``tl.dot`` with "tf32x3", written out: each product rounds M for itself. Triton 3.8
    sends a rounded M that has two uses through shared memory (docs/kernels/hazards.md, "Shared
    operands").
    """
    if INTERPRETED:
        return tl.dot(b_M, b_S, b_b, input_precision="tf32x3")
    else:
        b_high = to_tf32(b_S, ROUND)
        b_low = b_S - b_high
        b_x = tl.dot(b_M - to_tf32(b_M, ROUND), b_high, input_precision="tf32")
        b_x = tl.dot(to_tf32(b_M, ROUND_2), b_low, b_x, input_precision="tf32")
        b_x = tl.where(b_x == b_x, b_x, 0.0)  # inf - inf is NaN; the last product alone decides
        return tl.dot(to_tf32(b_M, ROUND_3), b_high, b_x, input_precision="tf32") + b_b


class Joined(NamedTuple):
    """What the join of a shard reads and writes besides maps; each may be absent."""

    initial: Strided  # [N, HV, K, V], the states that sequences start from
    starts: Strided  # [runs, HV, K, V] fp32, the state that each run starts from
    final: Strided  # [N, HV, K, .] fp32, the states that sequences end with, or their maps


@triton.jit(do_not_specialize=["N", "T", "HV"])
def join_runs(
    maps,
    shard,
    cu_seqlens,
    N,
    T,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    RUN: tl.constexpr,
    BACK: tl.constexpr,
    SHARD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Carry a state through the maps of one sequence and head, BV of its W columns::

        S <- M S + b [K, W] fp32

    The state that each run starts from takes the place of b in `maps`. The states of the first two
    runs are there already: the given state, and the state that the first run ends with.

    With SHARD, `shard` is given (`Joined`), and `maps` has all runs and is not written. With more
    columns than V, the sequence starts from ``[initial | I]``, and ends with its map.
    """
    slices: tl.constexpr = (W + BV - 1) // BV
    i_nh = tl.program_id(0) // slices
    i_n, i_h = i_nh // HV, i_nh % HV
    o_k, o_v = tl.arange(0, BK), (tl.program_id(0) % slices) * BV + tl.arange(0, BV)
    _, _, length, first = locate_sequence(cu_seqlens, i_n, N, T, RUN * CHUNK)
    count = tl.cdiv(length, RUN * CHUNK)
    m_S, m_M = (o_k < K)[:, None] & (o_v < V)[None, :], (o_k < K)[:, None] & (o_k < K)[None, :]
    known: tl.constexpr = 0 if SHARD else 2
    if not SHARD:
        b_S = tl.load(
            state_at(maps, first + (count - 2 if BACK else 1), i_h, o_k, o_v),
            mask=m_S & (count > 2),
            other=0.0,
        )
    else:
        b_S = open_state(shard.initial, None, i_n, i_h, o_k, o_v, True, K, V)
        if W > V:
            b_S = tl.where((o_k + V)[:, None] == o_v[None, :], 1.0, b_S)
        if shard.starts.pointer is not None:  # an empty sequence has a run too
            close_state(shard.starts, None, first, i_h, b_S, o_k, o_v, count == 0, K, V)
    for i in tl.range(known, count, num_stages=STAGES):
        slot = first + (count - 1 - i if BACK else i)
        b_M = tl.load(state_at(maps, slot, i_h, o_k, o_k + V), mask=m_M, other=0.0)
        p_b = state_at(maps, slot, i_h, o_k, o_v)
        if SHARD:
            if shard.starts.pointer is not None:
                close_state(shard.starts, None, slot, i_h, b_S, o_k, o_v, True, K, V)
        b_S = map_state(b_M, b_S, tl.load(p_b, mask=m_S, other=0.0))
        if not SHARD:
            tl.store(p_b, b_S, mask=m_S)
    if SHARD:
        if shard.final.pointer is not None:
            close_state(shard.final, None, i_n, i_h, b_S, o_k, o_v, True, K, W)


class Runs:
    """How the sequences of a call are cut: into runs of `length` chunks, 0 where they stay whole.

    Without a length it is that of the scans. The module's docstring describes `maps`. Of a shard
    that stays whole it has one per sequence.
    """

    def __init__(self, p: Problem, length: int | None = None):
        self.p, self.length = p, tuning.run_length(p) if length is None else length
        # the tail of a packed row is one more sequence
        self.pieces = tuning.pieces(p, self.length) + int(p.cu_seqlens is not None)

    def new_maps(self) -> Tensor:
        """Allocate `maps`."""
        p, count = self.p, self.pieces if self.length else self.p.N
        return new(p.q, "maps", (count, p.HV, p.K, p.V + p.K), torch.float32)

    def programs(self, columns: int, block_v: int) -> int:
        """Return how many programs a launch over so many columns of the state has."""
        return self.pieces * self.p.HV * triton.cdiv(columns, block_v)

    def join(self, maps: Tensor, back: bool) -> Tensor:
        """Turn maps into states: return [runs, HV, K, V], the state that each run starts from."""
        self.through(maps, self.p.V, back, None)
        return maps[..., : self.p.V]

    def join_shard(self, maps: Tensor, back: bool, state: Tensor | None, columns: int) -> Tensor:
        """Return what the sequences of a shard end with, [N, HV, K, columns] fp32.

        They start from `state` [N, HV, K, V] (None: zero), with more columns from [state | I].
        """
        p = self.p
        final = new(p.q, "map", (p.N, p.HV, p.K, columns), torch.float32)
        self.through(maps, columns, back, Joined(strided(state), strided(None), strided(final)))
        return final

    def through(self, maps: Tensor, columns: int, back: bool, shard: Joined | None) -> None:
        """Launch `join_runs` on so many columns."""
        p, options = self.p, tuning.choose("join_runs", self.p, tuning.Columns)
        launch(
            join_runs,
            p.N * p.HV * triton.cdiv(columns, options.block_v),
            p.q.device,
            maps=strided(maps),
            shard=shard,
            cu_seqlens=dense(p.cu_seqlens),
            N=p.N,
            T=p.T,
            HV=p.HV,
            K=p.K,
            V=p.V,
            W=columns,
            BK=tuning.power(p.K),
            BV=options.block_v,
            RUN=self.length,
            BACK=back,
            SHARD=shard is not None,
            STAGES=options.stages,
            **options.launch,
        )


def starts_of_runs(p: Problem, maps: Tensor, back: bool, state: Tensor | None) -> Tensor:
    """Return what each run starts from; see `kda_ops.stages.Backend.starts_of_runs`."""
    runs, none = Runs(p), strided(None)
    starts = new(p.q, "starts", (runs.pieces, p.HV, p.K, p.V), torch.float32)
    runs.through(maps, p.V, back, Joined(strided(state), strided(starts), none))
    return starts
