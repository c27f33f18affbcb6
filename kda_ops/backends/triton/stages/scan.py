"""Carry the state through the chunks of each sequence: the only sequential part of the forward."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops import problem
from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.fragment import over_keys, store_turned, turn, turn_back
from kda_ops.backends.triton.device.operands import (
    BETA,
    BETA_KDA,
    COUNT_GDN,
    COUNT_KDA,
    FROM_START_K,
    FROM_START_Q,
    TO_END_K,
    Pointer,
    Strided,
    TileGDN,
    TileKDA,
    strided,
)
from kda_ops.backends.triton.device.state import drop_null
from kda_ops.backends.triton.device.tile import (
    CHUNK,
    FOLLOWED,
    INTERPRETED,
    UnfinishedTile,
    dense,
    fit,
    head_at,
    load_lower,
    load_tile,
    rows_at,
    wait_for_previous,
    widen,
)
from kda_ops.backends.triton.plans.launch import as_kv, launch, new, overlap_streams
from kda_ops.backends.triton.stages.runs import Runs, close_run, open_run, place
from kda_ops.problem import Problem
from kda_ops.sequences import count_chunks
from kda_ops.stages import Tile, Trace


class Ends(NamedTuple):
    """What a scan reads and writes besides its tiles; each may be absent."""

    o: Strided  # [B, T, HV, V], the output
    initial: Strided  # the states that sequences start from, [N, HV, K, V], or a pool of slots
    final: Strided  # the states that sequences end with, likewise
    slots: Pointer  # [N], the slot of each sequence in a pool
    pool: Strided  # of the slots of snapshots, where no final state is written
    into: Strided  # [N, columns], the slots of snapshots
    states: Pointer  # [NT, HV, K, V], the state before each chunk, kept for backward
    v_new: Pointer  # [NT, HV, 64, V], kept for backward
    maps: Strided  # [runs, HV, K, V + K] fp32; given in the pass that computes maps (`runs`)


class Progress(NamedTuple):
    """How a scan follows a `prepare` that still runs (`tile.UnfinishedTile`)."""

    ready: Pointer  # [groups, heads] int32, how many tiles of a group `prepare` has written
    missed: Pointer  # [programs] int32, 1 once a program of the scan has used up its `patience`


@triton.jit
def fill_zero(o, strides, i_b, i_h, bos, length, start, stop, o_v, V: tl.constexpr):
    """Zero the output of chunks start to stop - 1 of one head, columns o_v."""
    o_r = tl.arange(0, CHUNK)
    b_zero = tl.zeros((CHUNK, o_v.shape[0]), o.dtype.element_ty)
    for c in range(start, stop):
        m_o = (o_r + c * CHUNK < length)[:, None] & (o_v < V)[None, :]
        tl.store(rows_at(o, strides, i_b, i_h, bos + c * CHUNK, o_r, o_v), b_zero, mask=m_o)


@triton.jit
def snapshot(
    ends, at, chunk, b_S, every, columns, K: tl.constexpr, V: tl.constexpr, NULL: tl.constexpr
):
    """Write the state b_S after `chunk` chunks to its snapshot's slot.

    It is due after `every`, 2 `every`, ... whole chunks, `columns` times at most. A slot up
    to NULL is skipped.
    """
    if ends.into.pointer is not None:
        # the same pool, but a second pointer to it takes registers (100 B of stack with Triton 3.6)
        pool = ends.final if ends.final.pointer is not None else ends.pool
        table = ends.into
        due = (chunk % every == 0) & (at.length >= chunk * CHUNK) & (chunk // every <= columns)
        slot = tl.load(
            table.pointer
            + at.i_n.to(tl.int64) * table.strides[0]
            + (chunk // every - 1).to(tl.int64) * table.strides[1],
            mask=due,
            other=-1,
        )
        slot = drop_null(slot, NULL)
        if slot >= 0:
            p_s = pool.pointer + (
                slot.to(tl.int64) * pool.strides[0]
                + at.i_h.to(tl.int64) * pool.strides[1]
                + at.i_v.to(tl.int64) * pool.strides[3]
            )
            stride_k, stride_v = (
                tl.cast(pool.strides[2], tl.int64),
                tl.cast(pool.strides[3], tl.int64),
            )
            store_turned(p_s, stride_k, stride_v, b_S, K, V - at.i_v)


@triton.jit
def load_decays(gamma, o_k, K: tl.constexpr, BV: tl.constexpr):
    """Load the decay of each key channel over a chunk, [BK] fp32.

    With fewer addresses than threads, Triton duplicates the load: 16 copies by each of 8 warps. So
    wide programs load two copies and split them (docs/kernels/hazards.md, "Duplicated loads").
    """
    if BV > 64:
        b_gamma, _ = tl.split(
            tl.load(
                gamma + (o_k[:, None] + 0 * tl.arange(0, 2)[None, :]),
                mask=(o_k < K)[:, None],
                other=0.0,
            )
        )
        return b_gamma
    else:
        return tl.load(gamma + o_k, mask=o_k < K, other=0.0)


@triton.jit
def load_factor(factors, i_tile, ROW: tl.constexpr, COUNT: tl.constexpr):
    """Return row ROW of the COUNT vectors of a tile as factors of columns, [1, 64] fp32.

    It loads four copies of the vector, for the reason that `load_decays` gives.
    """
    b_row = tl.load(factors + i_tile * (COUNT * CHUNK) + (ROW * CHUNK + (tl.arange(0, 256) & 63)))
    b_row, _ = tl.split(tl.permute(tl.reshape(b_row, (2, 2, CHUNK)), (2, 0, 1)))
    b_row, _ = tl.split(b_row)
    return b_row[None, :]


@triton.jit
def load_factors(gamma, factors, i_tile, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Return gamma [1, BK] and beta [1, 64] of a tile of KDA as factors of columns, fp32.

    A wide program of 128 keys loads one copy of both at once. Two copies would exceed shared memory
    by 1 KB.
    """
    if BV > 64 and BK == 128:
        o = tl.arange(0, 256)
        p_x = tl.where(
            o < 128,
            gamma + i_tile * K + o,
            factors + i_tile * (COUNT_KDA * CHUNK) + (BETA_KDA * CHUNK + (o & 63)),
        )
        b_gamma, b_beta = tl.split(
            tl.permute(
                tl.reshape(tl.load(p_x, mask=(o < K) | (o >= 128), other=0.0), (2, 128)), (1, 0)
            )
        )
        b_beta, _ = tl.split(tl.permute(tl.reshape(b_beta, (2, CHUNK)), (1, 0)))
        return b_gamma[None, :], b_beta[None, :]
    else:
        return load_decays(gamma + i_tile * K, tl.arange(0, BK), K, BV)[None, :], load_factor(
            factors, i_tile, BETA_KDA, COUNT_KDA
        )


@triton.jit
def follow(progress, until, patience, c, stop, i_h, H):
    """Return c as soon as the tile of chunk c < stop is written.

    After `patience` looks, set `missed` and return: all that is loaded afterwards is garbage. The
    protocol is drawn in docs/kernels/design.md, "Chunks prepared during the scan".

    Each thread looks for itself, at the first chunk of each group of FOLLOWED chunks. It looks two
    chunks ahead of the chunk that it computes. The loop of assembly does not tell the compiler that
    it reads memory, so the scan's loop is still pipelined. Addresses depend on its result, so no
    load of the tile moves before it.
    """
    if progress.ready is not None:
        behind = c - until
        p_ready, p_missed = (
            progress.ready + ((behind // FOLLOWED).to(tl.int64) * H + i_h),
            progress.missed + tl.program_id(0),
        )
        passed = tl.where(behind >= 0, behind % FOLLOWED, 1)
        count = tl.minimum(stop - c, FOLLOWED)
        if INTERPRETED:
            if (passed == 0) & (tl.load(p_ready, mask=passed == 0, other=0) < count):
                tl.store(p_missed, 1)
        else:
            c += tl.inline_asm_elementwise(
                "{ .reg .pred is; .reg .b32 n, looks; setp.ne.s32 is, $1, 0; @is bra there; "
                "mov.b32 looks, $5; "
                "again: ld.acquire.gpu.global.b32 n, [$2]; setp.ge.s32 is, n, $3; @is bra there; "
                "ld.relaxed.gpu.global.b32 n, [$4]; setp.ne.s32 is, n, 0; @is bra there; "
                "add.s32 looks, looks, -1; setp.gt.s32 is, looks, 0; @is bra again; mov.b32 n, 1; "
                "st.relaxed.gpu.global.b32 [$4], n; "
                "there: mov.b32 $0, 0; }",
                "=r,r,l,r,l,r",
                [passed, p_ready.to(tl.int64), count, p_missed.to(tl.int64), patience],
                tl.int32,
                True,
                1,
            )
    return c


@triton.jit
def takes_part(live, progress):
    """Return whether this program scans.

    In the second scan after a `prepare` that overlapped, only programs that missed a tile do.
    """
    if progress.ready is None and progress.missed is not None:
        live = live & (tl.load(progress.missed + tl.program_id(0)) != 0)
    return live


@triton.jit
def has_followed(live, progress):
    """Return whether the program's state is right: it is live and has missed no tile."""
    if progress.ready is not None:
        tl.debug_barrier()
        live = live & (tl.load(progress.missed + tl.program_id(0), volatile=True) == 0)
    return live


@triton.jit
def begin_scan(
    ends,
    cu_seqlens,
    progress,
    N,
    T,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    RUN: tl.constexpr,
    OPEN: tl.constexpr,
    NULL: tl.constexpr,
):
    """Return where this program is (`runs.Place`), and whether it scans."""
    wait_for_previous()
    at = place(cu_seqlens, ends.slots, ends.maps, N, T, HV, K, V, BV, RUN, False, OPEN, NULL)
    return at, takes_part(at.live, progress)


@triton.jit
def open_scan(
    ends, progress, at, live, o_k, o_v, K: tl.constexpr, V: tl.constexpr, RUN: tl.constexpr, resumed
):
    """Return the state that this program starts from, S^T [BV, BK] fp32 (`fragment.turn`).

    Zero its output if it does not scan.
    """
    o = ends.o
    if o.pointer is not None and progress.missed is None:
        idle = tl.where(live, at.stop, at.start)
        fill_zero(o.pointer, o.strides, at.i_b, at.i_h, at.bos, at.length, idle, at.stop, o_v, V)
    b_S = open_run(ends.initial, ends.slots, ends.maps, at, live, o_k, o_v, K, V, RUN, resumed)
    return turn(b_S)


@triton.jit
def close_scan(ends, progress, at, live, b_S, o_k, o_v, K: tl.constexpr, V: tl.constexpr):
    """Write the state that this program ends with, unless it has missed a tile."""
    live = has_followed(live, progress)
    close_run(ends.final, ends.slots, ends.maps, at, live, turn_back(b_S), o_k, o_v, K, V)


@triton.jit
def store_output(o, at, c, b_o, V: tl.constexpr):
    """Write o of chunk c from o^T [BV, 64] (`fragment.turn`)."""
    store_turned(
        head_at(o.pointer, o.strides, at.i_b, at.i_h, at.bos + c * CHUNK) + at.i_v * o.strides[3],
        o.strides[1],
        o.strides[3],
        b_o,
        at.length - c * CHUNK,
        V - at.i_v,
    )


@triton.jit
def keep_trace(ends, at, i_tile, b_s, b_v, K: tl.constexpr, V: tl.constexpr):
    """Write the state before a chunk and its v_new for backward, if `states` is given."""
    if ends.states is not None:
        store_turned(ends.states + i_tile * (K * V) + at.i_v, V, 1, b_s, K, V - at.i_v)
        store_turned(ends.v_new + i_tile * (CHUNK * V) + at.i_v, V, 1, b_v, CHUNK, V - at.i_v)


@triton.jit(
    do_not_specialize=["N", "T", "HV", "every", "columns", "until", "patience"],
    do_not_specialize_on_alignment=["resumed"],
)
def scan_kda(
    v,
    tile,
    ends,
    cu_seqlens,
    N,
    T,
    progress,
    until,
    patience,
    HV,
    every,
    columns,
    resumed,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
    RUN: tl.constexpr,
    OPEN: tl.constexpr,
    NULL: tl.constexpr,
):
    """Carry BV columns of the state S of one sequence and head through the chunks.

    From prepared tiles (`TileKDA`), for each chunk::

        v_new = A (beta v) - w S   [64, V]        o = qg S + P v_new   [64, V]
        S <- gamma S + kg^T v_new  [K, V] fp32

    o is written at once, so v_new and the states leave the registers only if backward keeps them.
    S is rounded to the operands' dtype once per chunk, as an operand. It has V as its rows
    (`fragment.turn`). So S and v_new are operands from the registers they are in, and a step has no
    barriers but those of the copies from memory.

    beta v is rounded as an operand of A. On A's diagonal, which is one, v_new takes it unrounded.

    With `progress` the scan follows a `prepare` that still runs (`tile.UnfinishedTile`).
    """
    at, live = begin_scan(ends, cu_seqlens, progress, N, T, HV, K, V, BV, RUN, OPEN, NULL)
    o_r, o_k, o_v = tl.arange(0, CHUNK), tl.arange(0, BK), at.i_v + tl.arange(0, BV)
    TYPE: tl.constexpr = tile.w.dtype.element_ty
    b_S = open_scan(ends, progress, at, live, o_k, o_v, K, V, RUN, resumed)
    for c in tl.range(at.start, tl.where(live, at.stop, at.start), num_stages=STAGES):
        c_there = follow(progress, until, patience, c, at.stop, at.i_h, HV)
        i_tile = (at.first + c_there) * HV + at.i_h
        b_w = load_tile(tile.w, i_tile, o_r, o_k, K)
        b_kg = load_tile(tile.kg, i_tile, o_r, o_k, K)
        b_A = load_lower(tile.A, i_tile)
        b_v = turn(
            tl.load(
                rows_at(v.pointer, v.strides, at.i_b, at.i_h, at.bos + c * CHUNK, o_r, o_v),
                mask=(o_r + c * CHUNK < at.length)[:, None] & (o_v < V)[None, :],
                other=0.0,
            )
        )
        b_s = b_S.to(TYPE)
        b_gamma, b_beta = load_factors(tile.gamma, tile.factors, i_tile, K, BK, BV)
        b_S = b_S * b_gamma  # early: b_gamma takes two registers per column until here
        b_v = b_v.to(tl.float32) * b_beta
        b_own = b_v.to(TYPE)
        b_v = tl.dot(b_own, tl.trans(b_A), b_v - widen(b_own), input_precision=PREC)
        b_v = (b_v - over_keys(b_s, b_w, PREC)).to(TYPE)
        if ends.o.pointer is not None:
            b_qg = load_tile(tile.qg, i_tile, o_r, o_k, K)
            b_P = load_lower(tile.P, i_tile)
            b_o = tl.dot(b_v, tl.trans(b_P), over_keys(b_s, b_qg, PREC), input_precision=PREC)
            store_output(ends.o, at, c, b_o, V)
        keep_trace(ends, at, i_tile, b_s, b_v, K, V)
        b_S = tl.dot(b_v, b_kg, b_S, input_precision=PREC)
        snapshot(ends, at, c + 1, b_S, every, columns, K, V, NULL)
    close_scan(ends, progress, at, live, b_S, o_k, o_v, K, V)


@triton.jit(
    do_not_specialize=["N", "T", "until", "patience", "every", "columns"],
    do_not_specialize_on_alignment=["resumed"],
)
def scan_gdn(
    q,
    k,
    v,
    tile,
    ends,
    cu_seqlens,
    N,
    T,
    progress,
    until,
    patience,
    H,
    HV,
    every,
    columns,
    resumed,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
    RUN: tl.constexpr,
    OPEN: tl.constexpr,
    NULL: tl.constexpr,
):
    """Carry the state as `scan_kda` does, for one decay per head; from q, k, v and `TileGDN`::

        v_new = A (beta (v - from_start_k (k S)))   o = from_start_q (q S) + P v_new   [64, V]
        S <- gamma S + k^T (to_end_k v_new)         [K, V] fp32

    The factors are those of the tile (`operands`, "Factors of GDN"). A decay per head is a factor
    per row, which moves past the dot products: q and k go from memory to the tensor cores as they
    are.
    """
    at, live = begin_scan(ends, cu_seqlens, progress, N, T, HV, K, V, BV, RUN, OPEN, NULL)
    i_g = at.i_h // (HV // H)
    o_r, o_k, o_v = tl.arange(0, CHUNK), tl.arange(0, BK), at.i_v + tl.arange(0, BV)
    TYPE: tl.constexpr = tile.A.dtype.element_ty
    m_k, m_v = (o_k < K)[None, :], (o_v < V)[None, :]
    b_S = open_scan(ends, progress, at, live, o_k, o_v, K, V, RUN, resumed)
    for c in tl.range(at.start, tl.where(live, at.stop, at.start), num_stages=STAGES):
        c_there = follow(progress, until, patience, c, at.stop, i_g, H)
        i_tile, t = (at.first + c_there) * HV + at.i_h, at.bos + c * CHUNK
        m_r = (o_r + c * CHUNK < at.length)[:, None]
        p_k = rows_at(k.pointer, k.strides, at.i_b, i_g, t, o_r, o_k)
        b_k = tl.load(p_k, mask=m_r & m_k, other=0.0)
        p_v = rows_at(v.pointer, v.strides, at.i_b, at.i_h, t, o_r, o_v)
        b_v = turn(tl.load(p_v, mask=m_r & m_v, other=0.0))
        b_A = load_lower(tile.A, i_tile)
        b_s = b_S.to(TYPE)
        b_v = b_v.to(tl.float32)
        b_start = load_factor(tile.factors, i_tile, FROM_START_K, COUNT_GDN)
        b_v = b_v - b_start * over_keys(b_s, b_k, PREC)
        b_beta = load_factor(tile.factors, i_tile, BETA, COUNT_GDN)
        b_v = tl.dot((b_v * b_beta).to(TYPE), tl.trans(b_A), input_precision=PREC)
        if ends.o.pointer is not None:
            p_q = rows_at(q.pointer, q.strides, at.i_b, i_g, t, o_r, o_k)
            b_q = tl.load(p_q, mask=m_r & m_k, other=0.0)
            b_o = over_keys(b_s, b_q, PREC)
            b_o = b_o * load_factor(tile.factors, i_tile, FROM_START_Q, COUNT_GDN)
            b_own, b_P = b_v.to(TYPE), load_lower(tile.P, i_tile)
            b_o = tl.dot(b_own, tl.trans(b_P), b_o, input_precision=PREC)
            store_output(ends.o, at, c, b_o, V)
        keep_trace(ends, at, i_tile, b_s, b_v, K, V)
        b_v = (b_v * load_factor(tile.factors, i_tile, TO_END_K, COUNT_GDN)).to(TYPE)
        b_S = tl.dot(b_v, b_k, b_S * tl.load(tile.gamma + i_tile), input_precision=PREC)
        snapshot(ends, at, c + 1, b_S, every, columns, K, V, NULL)
    close_scan(ends, progress, at, live, b_S, o_k, o_v, K, V)


_ALONE = Progress(None, None)  # all tiles are written before the scan begins


def _states(p: Problem, final_state: Tensor | None):
    """Return (initial, final, slots, snapshot slots) for the kernels, with states as S[k, v]."""
    final = None if final_state is None or final_state.numel() == 0 else as_kv(p, final_state)
    initial = None if p.state is None else as_kv(p, p.state)
    return initial, final, p.state_indices, p.snapshot_indices


def _carry(
    p: Problem,
    tile: Tile,
    runs: Runs,
    name: str,
    ends: Ends,
    progress: Progress = _ALONE,
    until: int = 0,
    open_ends: bool = False,
) -> None:
    """Launch the scan, with the options of `name`."""
    device, mapped = p.q.device, ends.maps.pointer is not None
    options = tuning.choose(name, p, tuning.Columns)
    if p.rank:
        parts: dict[str, Any] = dict(
            tile=TileKDA(tile.A, tile.P, tile.w, tile.qg, tile.kg, tile.factors, tile.gamma)
        )
    else:
        parts = dict(
            q=strided(fit(p.q)),
            k=strided(fit(p.k)),
            tile=TileGDN(tile.A, tile.P, tile.factors, tile.gamma),
            H=p.H,
        )
    launch(
        scan_kda if p.rank else scan_gdn,
        runs.programs(p.V + p.K if mapped else p.V, options.block_v),
        device,
        **parts,
        v=strided(fit(p.v)),
        ends=ends,
        cu_seqlens=dense(p.cu_seqlens),
        N=p.N,
        T=p.T,
        progress=progress,
        until=until,
        patience=tuning.patience(),
        HV=p.HV,
        every=1 if ends.into.pointer is None else p.snapshot_every,
        columns=0 if ends.into.pointer is None else ends.into.pointer.shape[1],
        resumed=p.has_initial_state,
        K=p.K,
        V=p.V,
        BK=tuning.width(p.K, p.q.dtype),
        BV=options.block_v,
        STAGES=options.stages,
        PREC="tf32x3" if p.q.dtype is torch.float32 else "tf32",
        RUN=runs.length,
        OPEN=open_ends,
        NULL=p.null_slot,
        **options.launch,
        **tuning.begins_early(device),
    )


def find_maps(
    p: Problem, tile: Tile, runs: Runs, initial: Tensor | None = None, slots: Tensor | None = None
) -> Tensor:
    """Return the maps of runs (`runs`), or of a shard's whole sequences: a scan without outputs."""
    maps, none = runs.new_maps(), strided(None)
    ends = Ends(none, strided(initial), none, dense(slots), none, none, None, None, strided(maps))
    name = "scan_kda_maps" if p.rank else "scan_gdn_maps"
    _carry(p, tile, runs, name, ends, open_ends=p.sharded)
    return maps


def map_shard(p: Problem, tile: Tile) -> tuple[Tensor, Tensor | None]:
    """Return the maps of sequences and runs; see `kda_ops.stages.Backend.map_shard`."""
    runs = Runs(p)
    maps = find_maps(p, tile, runs)
    return (runs.join_shard(maps, False, None, p.V + p.K), maps) if runs.length else (maps, None)


def overlap_scans(p: Problem) -> AbstractContextManager[AbstractContextManager]:
    """Overlap two scans on two streams, if the device has room for both."""
    alone = p.q.device.type != "cuda" or not p.V or not tuning.leaves_room(p)
    return nullcontext(nullcontext()) if alone else overlap_streams(p.q.device)


def scan(
    p: Problem, tile: Tile, o: Tensor | None, final_state: Tensor | None, keep: bool
) -> Trace | None:
    """Carry the state through the chunks of each sequence; see `kda_ops.stages.Backend.scan`."""
    device, NT = p.q.device, count_chunks(p)
    trace = (
        Trace(
            new(p.q, "states", (NT, p.HV, p.K, p.V)),
            new(p.q, "v_new", (NT, p.HV, problem.CHUNK, p.V)),
            o,
        )
        if keep
        else None
    )
    initial, final, slots, into = _states(p, final_state)
    name = "scan_kda" if p.rank else "scan_gdn"
    runs = Runs(p)
    starts = initial
    if runs.length and not p.sharded:
        starts = runs.join(find_maps(p, tile, runs, initial, slots), back=False)
    ends = Ends(
        o=strided(o),
        initial=strided(starts),
        final=strided(final),
        slots=dense(slots),
        pool=strided(None if into is None or final is not None else initial),
        into=strided(into),
        states=None if trace is None else trace.states,
        v_new=None if trace is None else trace.v_new,
        maps=strided(None),
    )
    if isinstance(tile, UnfinishedTile):
        overlapped = name + "_overlapped"
        with overlap_streams(device, early=True) as on_side_stream:
            progress = Progress(tile.ready, tile.missed)
            _carry(p, tile, runs, overlapped, ends, progress, tile.until)
            with on_side_stream:
                tile.rest()
        _carry(p, tile, runs, overlapped, ends, Progress(None, tile.missed))
    else:
        _carry(p, tile, runs, name, ends)
    return trace
