"""The gradient of the state carried back through the chunks of each sequence: the only sequential
part of the backward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.fragment import over_keys, store_turned, turn, turn_back
from kda_ops.backends.triton.launch import as_kv, launch, new, shape_of, strides_of
from kda_ops.backends.triton.operands import Strided
from kda_ops.backends.triton.runs import Runs, close_run, open_run, place
from kda_ops.backends.triton.scan import fill_zero, head_at, load_factor, load_factors, rows_at
from kda_ops.backends.triton.tile import dense, fit, load_lower, load_tile, widen
from kda_ops.problem import Problem
from kda_ops.sequences import count_chunks
from kda_ops.stages import Reverse, Tile


@triton.jit
def write_values(z, dv, dv_s, i_tile, i_b, i_h, first, n_rows, i_v, b_z, b_beta, V: tl.constexpr):
    """Leave z [BV, 64], turned, and what it is to v."""
    if z is not None:
        store_turned(z + i_tile * (64 * V) + i_v, V, 1, b_z, 64, V - i_v)
    if dv is not None:
        store_turned(
            head_at(dv, dv_s, i_b, i_h, first) + i_v, dv_s[1], 1, b_z * b_beta, n_rows, V - i_v
        )


@triton.jit(do_not_specialize=["N", "T", "HV"])
def reverse_scan_tiles(
    A,
    P,
    w,
    qg,
    kg,
    rows,
    gamma,
    do,
    do_s,
    dfinal,
    dfinal_s,
    dstates,
    z,
    dv,
    dv_s,
    dinitial,
    dinitial_s,
    maps,
    maps_s,
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
):
    """One head of one sequence and BV columns of its state's gradient, last chunk first, from
    prepared tiles::

        dv_new = P^T do + kg dS [64, V];   z = A^T dv_new [64, V];
        dS <- gamma dS + qg^T do - w^T dv_new [K, V] fp32

    dS, the gradient of the state that leaves the chunk, and z, that of beta (v - k exp(G) S), or
    dv = beta z, are all that `gradient` needs from here: with them it reads neither A nor any other
    part of the tile. Every transpose is of a tile from memory, never of a product. dv_new is
    rounded as an operand; where A is one, on its diagonal, z takes it as it was.
    """
    maps, dfinal, dinitial = (
        Strided(maps, maps_s),
        Strided(dfinal, dfinal_s),
        Strided(dinitial, dinitial_s),
    )
    at = place(cu_seqlens, None, maps, N, T, HV, K, V, BV, RUN, True)
    i_n, i_h, i_v, live, i_b, bos, length, first, start, stop, run = at
    o_r, o_k, o_v = tl.arange(0, 64), tl.arange(0, BK), i_v + tl.arange(0, BV)
    if dv is not None:
        fill_zero(dv, dv_s, i_b, i_h, bos, length, tl.where(live, stop, start), stop, o_v, V)
    TYPE: tl.constexpr = w.dtype.element_ty
    m_v = (o_v < V)[None, :]
    b_dS = turn(open_run(dfinal, None, maps, at, live, o_k, o_v, K, V, RUN))
    for step in tl.range(start, tl.where(live, stop, start), num_stages=STAGES):
        c = start + stop - 1 - step
        i_tile = (first + c) * HV + i_h
        b_kg = load_tile(kg, i_tile, o_r, o_k, K)
        b_w = load_tile(w, i_tile, o_r, o_k, K)
        b_ds = b_dS.to(TYPE)
        if dstates is not None:
            store_turned(dstates + i_tile * (K * V) + i_v, V, 1, b_ds, K, V - i_v)
        b_dv = over_keys(b_ds, b_kg, PREC)
        b_gamma, b_beta = load_factors(gamma, rows, i_tile, K, BK, BV)
        b_dS = b_dS * b_gamma
        if do is not None:
            b_do = turn(
                tl.load(
                    rows_at(do, do_s, i_b, i_h, bos + c * 64, o_r, o_v),
                    mask=(c * 64 + o_r < length)[:, None] & m_v,
                    other=0.0,
                )
            )
            b_dv = tl.dot(b_do, load_lower(P, i_tile), b_dv, input_precision=PREC)
            b_dS = tl.dot(b_do, load_tile(qg, i_tile, o_r, o_k, K), b_dS, input_precision=PREC)
        b_dv = -b_dv
        b_less = b_dv.to(TYPE)
        b_dS = tl.dot(b_less, b_w, b_dS, input_precision=PREC)
        if dv is not None or z is not None:
            b_z = -tl.dot(b_less, load_lower(A, i_tile), b_dv - widen(b_less), input_precision=PREC)
            write_values(
                z, dv, dv_s, i_tile, i_b, i_h, bos + c * 64, length - c * 64, i_v, b_z, b_beta, V
            )
    close_run(dinitial, None, maps, at, live, turn_back(b_dS), o_k, o_v, K, V, True)


@triton.jit(do_not_specialize=["N", "T"])
def reverse_scan_rows(
    q,
    q_s,
    k,
    k_s,
    A,
    P,
    rows,
    gamma,
    do,
    do_s,
    dfinal,
    dfinal_s,
    dstates,
    z,
    dv,
    dv_s,
    dinitial,
    dinitial_s,
    maps,
    maps_s,
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
):
    """The same for one decay per head, from q and k as they are and the four rows of
    `prepare_gdn`::

        dv_new = P^T do + rows_1 (k dS);   z = A^T dv_new;
        dS <- gamma dS + q^T (rows_3 do) - k^T (rows_0 rows_2 z)

    Decays, norms and beta are factors per row and move past the products; w is not needed, for w^T
    dv_new = (beta k exp G)^T z.
    """
    maps, dfinal, dinitial = (
        Strided(maps, maps_s),
        Strided(dfinal, dfinal_s),
        Strided(dinitial, dinitial_s),
    )
    at = place(cu_seqlens, None, maps, N, T, HV, K, V, BV, RUN, True)
    i_n, i_h, i_v, live, i_b, bos, length, first, start, stop, run = at
    i_g = i_h // (HV // H)
    o_r, o_k, o_v = tl.arange(0, 64), tl.arange(0, BK), i_v + tl.arange(0, BV)
    if dv is not None:
        fill_zero(dv, dv_s, i_b, i_h, bos, length, tl.where(live, stop, start), stop, o_v, V)
    TYPE: tl.constexpr = A.dtype.element_ty
    m_k, m_v = (o_k < K)[None, :], (o_v < V)[None, :]
    b_dS = turn(open_run(dfinal, None, maps, at, live, o_k, o_v, K, V, RUN))
    for step in tl.range(start, tl.where(live, stop, start), num_stages=STAGES):
        c = start + stop - 1 - step
        i_tile, t = (first + c) * HV + i_h, bos + c * 64
        m_r = (c * 64 + o_r < length)[:, None]
        b_k = tl.load(rows_at(k, k_s, i_b, i_g, t, o_r, o_k), mask=m_r & m_k, other=0.0)
        b_A = load_lower(A, i_tile)
        b_ds = b_dS.to(TYPE)
        if dstates is not None:
            store_turned(dstates + i_tile * (K * V) + i_v, V, 1, b_ds, K, V - i_v)
        b_dv = over_keys(b_ds, b_k, PREC) * load_factor(rows, i_tile, 1, 7)
        b_dS = b_dS * tl.load(gamma + i_tile)
        if do is not None:
            b_do = turn(
                tl.load(rows_at(do, do_s, i_b, i_h, t, o_r, o_v), mask=m_r & m_v, other=0.0)
            )
            b_dv = tl.dot(b_do, load_lower(P, i_tile), b_dv, input_precision=PREC)
            b_q = tl.load(rows_at(q, q_s, i_b, i_g, t, o_r, o_k), mask=m_r & m_k, other=0.0)
            b_do = (b_do.to(tl.float32) * load_factor(rows, i_tile, 3, 7)).to(TYPE)
            b_dS = tl.dot(b_do, b_q, b_dS, input_precision=PREC)
        b_own = b_dv.to(TYPE)
        b_z, b_beta = (
            tl.dot(b_own, b_A, b_dv - widen(b_own), input_precision=PREC),
            load_factor(rows, i_tile, 2, 7),
        )
        write_values(z, dv, dv_s, i_tile, i_b, i_h, t, length - c * 64, i_v, b_z, b_beta, V)
        b_less = (b_z * -(load_factor(rows, i_tile, 0, 7) * b_beta)).to(TYPE)
        b_dS = tl.dot(b_less, b_k, b_dS, input_precision=PREC)
    close_run(dinitial, None, maps, at, live, turn_back(b_dS), o_k, o_v, K, V, True)


def reads_z(p: Problem) -> bool:
    """Whether `gradient` takes z itself: the gradient of a beta that was given, which may be zero,
    is a sum over z, and float16 does not hold beta z for a small beta. For all else, dv says as
    much.
    """
    return p.beta is not None and (not p.sigmoid_beta or p.q.dtype is torch.float16)


def reverse_scan(
    p: Problem, tile: Tile, do: Tensor | None, dfinal_state: Tensor | None, need: frozenset[str]
) -> Reverse:
    """Carry the gradient of the state back; see `kda_ops.stages.Backend.reverse_scan`."""
    q, device, NT, tiled = p.q, p.q.device, count_chunks(p), reads_z(p)
    dstates = new(q, "dstates", (NT, p.HV, p.K, p.V))
    z = new(q, "z", (NT, p.HV, 64, p.V)) if tiled else None
    dv = None if tiled and "v" not in need else new(q, "dv", shape_of(p.v))
    dinitial = None
    if "initial_state" in need:
        shape = (p.N, p.HV, p.V, p.K) if p.transposed else (p.N, p.HV, p.K, p.V)
        dinitial = as_kv(p, new(q, "dinitial_state", shape, torch.float32))
    dfinal = None if dfinal_state is None or dfinal_state.numel() == 0 else as_kv(p, dfinal_state)
    name = "reverse_scan_tiles" if p.rank else "reverse_scan_rows"
    whole, BK, exact = tuning.choose(name, p), tuning.width(p.K, q.dtype), q.dtype is torch.float32
    do, runs = fit(do), Runs(p)

    def carry(options, dfinal, dstates, z, dv, dinitial, maps) -> None:
        ends = (
            do,
            strides_of(do),
            dfinal,
            strides_of(dfinal),
            dstates,
            z,
            dv,
            strides_of(dv),
            dinitial,
            strides_of(dinitial),
            maps,
            strides_of(maps),
            dense(p.cu_seqlens),
        )
        sizes = (
            p.K,
            p.V,
            BK,
            options.block_v,
            options.stages,
            "tf32x3" if exact else "tf32",
            runs.length,
        )
        programs = runs.programs(p.V if maps is None else p.V + p.K, options.block_v)
        if p.rank:
            launch(
                reverse_scan_tiles,
                programs,
                device,
                tile.A,
                tile.P,
                tile.w,
                tile.qg,
                tile.kg,
                tile.rows,
                tile.gamma,
                *ends,
                p.N,
                p.T,
                p.HV,
                *sizes,
                **options.launch,
            )
        else:
            launch(
                reverse_scan_rows,
                programs,
                device,
                fit(q),
                strides_of(fit(q)),
                fit(p.k),
                strides_of(fit(p.k)),
                tile.A,
                tile.P,
                tile.rows,
                tile.gamma,
                *ends,
                p.N,
                p.T,
                p.H,
                p.HV,
                *sizes,
                **options.launch,
            )

    if runs.length:
        carry(tuning.choose(name + "_maps", p), dfinal, None, None, None, None, runs.maps)
        dfinal = runs.join(back=True)
    carry(whole, dfinal, dstates, z, dv, dinitial, None)
    return Reverse(dstates, z, dv, dinitial)
