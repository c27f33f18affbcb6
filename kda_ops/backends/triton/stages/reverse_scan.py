"""Carry the gradient of the state back through the chunks of each sequence: the only sequential
part of the backward.
"""

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
    COUNT_GDN,
    FROM_START_K,
    FROM_START_Q,
    TO_END_K,
    Pointer,
    Strided,
    TileGDN,
    TileKDA,
    strided,
)
from kda_ops.backends.triton.device.tile import (
    CHUNK,
    dense,
    fit,
    head_at,
    load_lower,
    load_tile,
    rows_at,
    widen,
)
from kda_ops.backends.triton.plans.launch import as_kv, launch, new
from kda_ops.backends.triton.stages.gradient_small import SMALL
from kda_ops.backends.triton.stages.runs import Runs, close_run, open_run, place
from kda_ops.backends.triton.stages.scan import fill_zero, load_factor, load_factors
from kda_ops.problem import Problem
from kda_ops.sequences import count_chunks
from kda_ops.stages import Reverse, Tile


class ReverseEnds(NamedTuple):
    """What a reverse scan reads and writes besides its tiles; each may be absent."""

    do: Strided  # [B, T, HV, V]
    dfinal: Strided  # [N, HV, K, V], the gradients of the final states
    dstates: Pointer  # [NT, HV, K, V], the gradient of the state that leaves each chunk
    z: Pointer  # [NT, HV, 64, V], the gradient of beta (v - k exp(G) S)
    dv: Strided  # [B, T, HV, V], beta z
    dinitial: Strided  # [N, HV, K, V], the gradients of the initial states
    maps: Strided  # [runs, HV, K, V + K] fp32; given in the pass that computes maps (`runs`)


@triton.jit
def open_reverse(ends, at, o_k, o_v, K: tl.constexpr, V: tl.constexpr, RUN: tl.constexpr):
    """Return the gradient that this program starts from, dS^T [BV, BK] fp32 (`fragment.turn`).

    Zero its dv if it does not scan.
    """
    dv = ends.dv
    if dv.pointer is not None:
        idle = tl.where(at.live, at.stop, at.start)
        fill_zero(dv.pointer, dv.strides, at.i_b, at.i_h, at.bos, at.length, idle, at.stop, o_v, V)
    return turn(open_run(ends.dfinal, None, ends.maps, at, at.live, o_k, o_v, K, V, RUN))


@triton.jit
def keep_state(ends, at, i_tile, b_ds, K: tl.constexpr, V: tl.constexpr):
    """Write the gradient of the state that leaves a chunk, if `dstates` is given."""
    if ends.dstates is not None:
        store_turned(ends.dstates + i_tile * (K * V) + at.i_v, V, 1, b_ds, K, V - at.i_v)


@triton.jit
def load_do(do, at, c, o_r, o_v, V: tl.constexpr):
    """Load do^T of chunk c, [BV, 64] (`fragment.turn`), zero past the last token and past V."""
    m_do = (o_r + c * CHUNK < at.length)[:, None] & (o_v < V)[None, :]
    p_do = rows_at(do.pointer, do.strides, at.i_b, at.i_h, at.bos + c * CHUNK, o_r, o_v)
    return turn(tl.load(p_do, mask=m_do, other=0.0))


@triton.jit
def write_values(ends, at, i_tile, c, b_z, b_beta, V: tl.constexpr, FEW: tl.constexpr = False):
    """Write z and dv = beta z of chunk c from z^T [BV, 64], each if its tensor is given.

    With FEW, write z only where beta is below SMALL.
    """
    if ends.z is not None:
        only = b_beta < SMALL if FEW else None
        store_turned(ends.z + i_tile * (CHUNK * V) + at.i_v, V, 1, b_z, CHUNK, V - at.i_v, only)
    if ends.dv.pointer is not None:
        dv, n_rows = ends.dv, at.length - c * CHUNK
        p_dv = head_at(dv.pointer, dv.strides, at.i_b, at.i_h, at.bos + c * CHUNK) + at.i_v
        store_turned(p_dv, dv.strides[1], 1, b_z * b_beta, n_rows, V - at.i_v)


@triton.jit
def close_reverse(ends, at, b_dS, o_k, o_v, K: tl.constexpr, V: tl.constexpr):
    """Write the gradient of the state that this program ends with."""
    close_run(ends.dinitial, None, ends.maps, at, at.live, turn_back(b_dS), o_k, o_v, K, V)


@triton.jit(do_not_specialize=["N", "T", "HV"])
def reverse_scan_kda(
    tile,
    ends,
    cu_seqlens,
    N,
    T,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
    RUN: tl.constexpr,
    OPEN: tl.constexpr,
    FEW: tl.constexpr,
):
    """Carry BV columns of dS, the gradient of the state of one sequence and head, back.

    From prepared tiles (`TileKDA`), for each chunk, the last one first::

        dv_new = P^T do + kg dS [64, V]               z = A^T dv_new [64, V]
        dS <- gamma dS + qg^T do - w^T dv_new [K, V] fp32

    `gradient` needs dS, the gradient of the state that leaves the chunk. It also needs z, the
    gradient of beta (v - k exp(G) S), or dv = beta z. With FEW it needs dv, and z where beta is
    small (`reads_few`). Of the tile it reads `factors` alone.

    dS has V as its rows (`fragment.turn`), as S has in `scan_kda`. Every transpose is of a tile
    from memory, never of a product. The operand dv_new is rounded. On A's diagonal, which is one, z
    takes it unrounded.
    """
    at = place(cu_seqlens, None, ends.maps, N, T, HV, K, V, BV, RUN, True, OPEN)
    o_r, o_k, o_v = tl.arange(0, CHUNK), tl.arange(0, BK), at.i_v + tl.arange(0, BV)
    TYPE: tl.constexpr = tile.w.dtype.element_ty
    b_dS = open_reverse(ends, at, o_k, o_v, K, V, RUN)
    for step in tl.range(at.start, tl.where(at.live, at.stop, at.start), num_stages=STAGES):
        c = at.start + at.stop - 1 - step
        i_tile = (at.first + c) * HV + at.i_h
        b_kg = load_tile(tile.kg, i_tile, o_r, o_k, K)
        b_w = load_tile(tile.w, i_tile, o_r, o_k, K)
        b_ds = b_dS.to(TYPE)
        keep_state(ends, at, i_tile, b_ds, K, V)
        b_dv = over_keys(b_ds, b_kg, PREC)
        b_gamma, b_beta = load_factors(tile.gamma, tile.factors, i_tile, K, BK, BV)
        b_dS = b_dS * b_gamma
        if ends.do.pointer is not None:
            b_do = load_do(ends.do, at, c, o_r, o_v, V)
            b_dv = tl.dot(b_do, load_lower(tile.P, i_tile), b_dv, input_precision=PREC)
            b_qg = load_tile(tile.qg, i_tile, o_r, o_k, K)
            b_dS = tl.dot(b_do, b_qg, b_dS, input_precision=PREC)
        b_dv = -b_dv
        b_less = b_dv.to(TYPE)
        b_dS = tl.dot(b_less, b_w, b_dS, input_precision=PREC)
        if ends.dv.pointer is not None or ends.z is not None:
            b_A = load_lower(tile.A, i_tile)
            b_z = -tl.dot(b_less, b_A, b_dv - widen(b_less), input_precision=PREC)
            write_values(ends, at, i_tile, c, b_z, b_beta, V, FEW)
    close_reverse(ends, at, b_dS, o_k, o_v, K, V)


@triton.jit(do_not_specialize=["N", "T"])
def reverse_scan_gdn(
    q,
    k,
    tile,
    ends,
    cu_seqlens,
    N,
    T,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
    RUN: tl.constexpr,
    OPEN: tl.constexpr,
):
    """Carry dS back as `reverse_scan_kda` does, for one decay per head; from q, k and `TileGDN`::

        dv_new = P^T do + to_end_k (k dS)             z = A^T dv_new         [64, V]
        dS <- gamma dS + q^T (from_start_q do) - k^T (from_start_k beta z)   [K, V] fp32

    The factors are those of the tile (`operands`, "Factors of GDN"). They move past the products. w
    is not needed, because w^T dv_new = (beta k exp G)^T z.
    """
    at = place(cu_seqlens, None, ends.maps, N, T, HV, K, V, BV, RUN, True, OPEN)
    i_g = at.i_h // (HV // H)
    o_r, o_k, o_v = tl.arange(0, CHUNK), tl.arange(0, BK), at.i_v + tl.arange(0, BV)
    TYPE: tl.constexpr = tile.A.dtype.element_ty
    b_dS = open_reverse(ends, at, o_k, o_v, K, V, RUN)
    m_k = (o_k < K)[None, :]
    for step in tl.range(at.start, tl.where(at.live, at.stop, at.start), num_stages=STAGES):
        c = at.start + at.stop - 1 - step
        i_tile, t = (at.first + c) * HV + at.i_h, at.bos + c * CHUNK
        m_r = (o_r + c * CHUNK < at.length)[:, None]
        m_x = m_r & m_k
        b_k = tl.load(rows_at(k.pointer, k.strides, at.i_b, i_g, t, o_r, o_k), mask=m_x, other=0.0)
        b_A = load_lower(tile.A, i_tile)
        b_ds = b_dS.to(TYPE)
        keep_state(ends, at, i_tile, b_ds, K, V)
        b_dv = over_keys(b_ds, b_k, PREC) * load_factor(tile.factors, i_tile, TO_END_K, COUNT_GDN)
        b_dS = b_dS * tl.load(tile.gamma + i_tile)
        if ends.do.pointer is not None:
            b_do = load_do(ends.do, at, c, o_r, o_v, V)
            b_dv = tl.dot(b_do, load_lower(tile.P, i_tile), b_dv, input_precision=PREC)
            b_q = tl.load(
                rows_at(q.pointer, q.strides, at.i_b, i_g, t, o_r, o_k), mask=m_x, other=0.0
            )
            b_do = b_do.to(tl.float32) * load_factor(tile.factors, i_tile, FROM_START_Q, COUNT_GDN)
            b_dS = tl.dot(b_do.to(TYPE), b_q, b_dS, input_precision=PREC)
        b_own = b_dv.to(TYPE)
        b_z = tl.dot(b_own, b_A, b_dv - widen(b_own), input_precision=PREC)
        b_beta = load_factor(tile.factors, i_tile, BETA, COUNT_GDN)
        write_values(ends, at, i_tile, c, b_z, b_beta, V)
        b_start = load_factor(tile.factors, i_tile, FROM_START_K, COUNT_GDN)
        b_less = (b_z * -(b_start * b_beta)).to(TYPE)
        b_dS = tl.dot(b_less, b_k, b_dS, input_precision=PREC)
    close_reverse(ends, at, b_dS, o_k, o_v, K, V)


def reads_few(p: Problem) -> bool:
    """Return whether `gradient` reads dv = beta z, and z where beta is small (`gradient_small`).

    It does for KDA in bf16, if beta is given with `safe_beta`. Without the promise it reads z.
    """
    given = p.beta is not None and not p.sigmoid_beta
    return bool(p.rank and given and p.safe_beta and p.q.dtype is torch.bfloat16)


def reads_z(p: Problem) -> bool:
    """Return whether `gradient` takes z itself, not dv = beta z.

    It does if beta is given, because the gradient of beta is a sum over z, and beta may be zero. It
    does for float16, where beta z underflows for a small beta.
    """
    given = p.beta is not None and not p.sigmoid_beta
    return p.beta is not None and (given or p.q.dtype is torch.float16) and not reads_few(p)


def _new_dinitial(p: Problem) -> Tensor:
    """Allocate the gradient of the initial state, in the caller's layout; return it as [k, v]."""
    shape = (p.N, p.HV, p.V, p.K) if p.transposed else (p.N, p.HV, p.K, p.V)
    return as_kv(p, new(p.q, "dinitial_state", shape, torch.float32))


def carry(p: Problem, tile: Tile, runs: Runs, ends: ReverseEnds, open_ends: bool = False) -> None:
    """Launch the reverse scan, or with `ends.maps` the pass that finds the maps of runs."""
    q, mapped = p.q, ends.maps.pointer is not None
    name = f"reverse_scan_{'kda' if p.rank else 'gdn'}" + "_maps" * mapped
    options = tuning.choose(name, p, tuning.Columns, runs.length)
    if p.rank:
        parts: dict[str, Any] = dict(
            tile=TileKDA(tile.A, tile.P, tile.w, tile.qg, tile.kg, tile.factors, tile.gamma),
            FEW=ends.z is not None and reads_few(p),
        )
    else:
        parts = dict(
            q=strided(fit(q)),
            k=strided(fit(p.k)),
            tile=TileGDN(tile.A, tile.P, tile.factors, tile.gamma),
            H=p.H,
        )
    launch(
        reverse_scan_kda if p.rank else reverse_scan_gdn,
        runs.programs(p.V + p.K if mapped else p.V, options.block_v),
        q.device,
        **parts,
        ends=ends,
        cu_seqlens=dense(p.cu_seqlens),
        N=p.N,
        T=p.T,
        HV=p.HV,
        K=p.K,
        V=p.V,
        BK=tuning.width(p.K, q.dtype),
        BV=options.block_v,
        STAGES=options.stages,
        PREC="tf32x3" if q.dtype is torch.float32 else "tf32",
        RUN=runs.length,
        OPEN=open_ends,
        **options.launch,
    )


def find_maps_back(
    p: Problem, tile: Tile, runs: Runs, do: Tensor | None, dfinal: Tensor | None
) -> Tensor:
    """Return the maps of runs, or of a shard's whole sequences: a reverse scan without outputs."""
    maps, none = runs.new_maps(), strided(None)
    ends = ReverseEnds(strided(fit(do)), strided(dfinal), None, None, none, none, strided(maps))
    carry(p, tile, runs, ends, open_ends=p.sharded)
    return maps


def enter_runs(
    p: Problem, tile: Tile, runs: Runs, do: Tensor | None, dfinal: Tensor | None
) -> Tensor:
    """Return the gradient of the state that leaves each run, [runs, HV, K, V] fp32.

    `dfinal` is seen as S[k, v].
    """
    return runs.join(find_maps_back(p, tile, runs, do, dfinal), back=True)


def _kv(p: Problem, dfinal_state: Tensor | None) -> Tensor | None:
    """Return the gradient of the final state as S[k, v], None where there is none."""
    if dfinal_state is None or dfinal_state.numel() == 0:
        return None
    return as_kv(p, dfinal_state)


def map_shard_back(
    p: Problem, tile: Tile, do: Tensor | None, dfinal_state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of the initial state, and the maps of runs; see
    `kda_ops.stages.Backend.map_shard_back`.
    """
    runs, dfinal = Runs(p), _kv(p, dfinal_state)
    if runs.length:
        maps = find_maps_back(p, tile, runs, do, dfinal)
        return runs.join_shard(maps, True, dfinal, p.V), maps
    none, dinitial = strided(None), _new_dinitial(p)
    ends = ReverseEnds(strided(fit(do)), strided(dfinal), None, None, none, strided(dinitial), none)
    carry(p, tile, runs, ends)
    return dinitial, None


def reverse_scan(
    p: Problem, tile: Tile, do: Tensor | None, dfinal_state: Tensor | None, need: frozenset[str]
) -> Reverse:
    """Carry the gradient of the state back; see `kda_ops.stages.Backend.reverse_scan`."""
    q, NT, tiled = p.q, count_chunks(p), reads_z(p)
    dstates = new(q, "dstates", (NT, p.HV, p.K, p.V))
    few = reads_few(p) and "beta" in need
    z = new(q, "z", (NT, p.HV, problem.CHUNK, p.V)) if tiled or few else None
    dv = None if tiled and "v" not in need else new(q, "dv", p.v.shape)
    dinitial = _new_dinitial(p) if "initial_state" in need else None
    starts, runs = _kv(p, dfinal_state), Runs(p)
    if runs.length and not p.sharded:
        starts = enter_runs(p, tile, runs, do, starts)
    ends = ReverseEnds(
        do=strided(fit(do)),
        dfinal=strided(starts),
        dstates=dstates,
        z=z,
        dv=strided(dv),
        dinitial=strided(dinitial),
        maps=strided(None),
    )
    carry(p, tile, runs, ends)
    return Reverse(dstates, z, dv, dinitial)
