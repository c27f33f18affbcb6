"""The state carried through the chunks of each sequence: the only sequential part of the
forward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.fragment import over_keys, store_turned, turn, turn_back
from kda_ops.backends.triton.launch import as_kv, beside, launch, new, shape_of, strides_of
from kda_ops.backends.triton.runs import Runs, close_run, open_run, place
from kda_ops.backends.triton.tile import (
    FOLLOWED,
    INTERPRETED,
    Begun,
    dense,
    fit,
    load_lower,
    load_tile,
    wait_for_previous,
    widen,
)
from kda_ops.problem import Problem
from kda_ops.sequences import count_chunks
from kda_ops.stages import Tile, Trace


@triton.jit
def head_at(x, strides, i_b, i_h, first):
    """Pointer to row `first` of one head of a [B, T, X, D] tensor."""
    return x + (i_b * strides[0] + first * strides[1] + i_h.to(tl.int64) * strides[2])


@triton.jit
def rows_at(x, strides, i_b, i_h, first, o_r, o_d):
    """Pointers to rows of one head of a [B, T, X, D] tensor, [64, width]."""
    return head_at(x, strides, i_b, i_h, first) + (
        (o_r * strides[1])[:, None] + (o_d * strides[3])[None, :]
    )


@triton.jit
def fill_zero(o, strides, i_b, i_h, bos, length, start, stop, o_v, V: tl.constexpr):
    """Zero the output of chunks start to stop."""
    o_r = tl.arange(0, 64)
    b_zero = tl.zeros((64, o_v.shape[0]), o.dtype.element_ty)
    for c in range(start, stop):
        m_o = (c * 64 + o_r < length)[:, None] & (o_v < V)[None, :]
        tl.store(rows_at(o, strides, i_b, i_h, bos + c * 64, o_r, o_v), b_zero, mask=m_o)


@triton.jit
def snapshot(
    state,
    strides,
    into,
    into_s,
    EVERY,
    i_n,
    i_h,
    chunk,
    length,
    b_S,
    i_v,
    columns,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Write the state after `chunk` whole chunks to the slot that is due for it, if one is."""
    due = (chunk % EVERY == 0) & (chunk * 64 <= length) & (chunk // EVERY <= columns)
    slot = tl.load(
        into + i_n.to(tl.int64) * into_s[0] + (chunk // EVERY - 1).to(tl.int64) * into_s[1],
        mask=due,
        other=-1,
    )
    if slot >= 0:
        p_s = state + (
            slot.to(tl.int64) * strides[0]
            + i_h.to(tl.int64) * strides[1]
            + i_v.to(tl.int64) * strides[3]
        )
        store_turned(
            p_s, tl.cast(strides[2], tl.int64), tl.cast(strides[3], tl.int64), b_S, K, V - i_v
        )


@triton.jit
def load_decays(gamma, o_k, K: tl.constexpr, BV: tl.constexpr):
    """The decay of each key channel over a chunk.

    The compiler lets every thread load what it needs where there are fewer addresses than threads:
    16 copies by each of 8 warps. So two of each then.
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
def load_factor(rows, i_tile, ROW: tl.constexpr, COUNT: tl.constexpr):
    """One of the COUNT numbers per row of a tile as factors of columns, [1, 64]; for the reason of
    `load_decays` there are four copies of it.
    """
    b_row = tl.load(rows + i_tile * (COUNT * 64) + (ROW * 64 + (tl.arange(0, 256) & 63)))
    b_row, _ = tl.split(tl.permute(tl.reshape(b_row, (2, 2, 64)), (2, 0, 1)))
    b_row, _ = tl.split(b_row)
    return b_row[None, :]


@triton.jit
def load_factors(gamma, rows, i_tile, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """(the decay of each key channel over a chunk [1, BK], beta of its rows [1, 64]) as
    `prepare_kda` left them, as factors of columns.

    In one copy, where there are threads for both: two would be 1 KB more of shared memory than
    there is.
    """
    if BV > 64 and BK == 128:
        o = tl.arange(0, 256)
        p_x = tl.where(o < 128, gamma + i_tile * K + o, rows + i_tile * 192 + (o & 63))
        b_gamma, b_beta = tl.split(
            tl.permute(
                tl.reshape(tl.load(p_x, mask=(o < K) | (o >= 128), other=0.0), (2, 128)), (1, 0)
            )
        )
        b_beta, _ = tl.split(tl.permute(tl.reshape(b_beta, (2, 64)), (1, 0)))
        return b_gamma[None, :], b_beta[None, :]
    else:
        return load_decays(gamma + i_tile * K, tl.arange(0, BK), K, BV)[None, :], load_factor(
            rows, i_tile, 0, 3
        )


@triton.jit
def follow(ready, missed, until, c, stop, i_h, H, patience):
    """c, once the tile of chunk c < stop is there, or a little patience has ended, which is noted
    in `missed`: all that is loaded after that is garbage.

    By assembly, and without a word to the compiler that it reads memory: addresses made from what
    it returns cannot be used before, and the loop around it is pipelined as it is. Each thread
    looks for itself, at the first chunk of those that are counted together, two chunks ahead of the
    one it computes.
    """
    if ready is not None:
        behind = c - until
        p_ready, p_missed = (
            ready + ((behind // FOLLOWED).to(tl.int64) * H + i_h),
            missed + tl.program_id(0),
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
def take_part(live, ready, missed):
    """Whether this program scans: behind a scan that has followed `prepare`, only if that one
    missed a tile.
    """
    if ready is None and missed is not None:
        live = live & (tl.load(missed + tl.program_id(0)) != 0)
    return live


@triton.jit
def has_followed(live, ready, missed):
    """Whether what this program has carried is right."""
    if ready is not None:
        tl.debug_barrier()
        live = live & (tl.load(missed + tl.program_id(0), volatile=True) == 0)
    return live


@triton.jit(do_not_specialize=["N", "T", "HV", "every", "columns", "until", "patience"])
def scan_tiles(
    v,
    v_s,
    A,
    P,
    w,
    qg,
    kg,
    rows,
    gamma,
    o,
    o_s,
    state,
    state_s,
    final,
    final_s,
    slots,
    into,
    into_s,
    states,
    v_new,
    maps,
    maps_s,
    cu_seqlens,
    N,
    T,
    ready,
    missed,
    until,
    patience,
    HV,
    every,
    columns,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
    RUN: tl.constexpr,
):
    """One head of one sequence and BV columns of its state, chunk after chunk, from prepared
    tiles::

        v_new = A (beta v) - w S [64, V];   o = qg S + P v_new [64, V];
        S <- gamma S + kg^T v_new [K, V] fp32

    beta v is rounded as an operand; where A is one, on its diagonal, v_new takes it as it was. o is
    written here and now, so that neither v_new nor the states travel unless they are kept for
    backward. S stays in registers and is rounded to the operands' dtype once per chunk, as an
    operand. It is there with V as its rows (`fragment.turn`), so that S and v_new are operands
    where they are: the only barriers of a step are those of the copies from memory.

    With `ready` and `missed` it follows a `prepare` that is still at work, as `Begun` has it.
    """
    wait_for_previous()
    i_n, i_h, i_v, live, i_b, bos, length, first, start, stop, run = place(
        cu_seqlens, slots, maps, N, T, HV, K, V, BV, RUN, False
    )
    live = take_part(live, ready, missed)
    o_r, o_k, o_v = tl.arange(0, 64), tl.arange(0, BK), i_v + tl.arange(0, BV)
    TYPE: tl.constexpr = w.dtype.element_ty
    if o is not None and missed is None:
        fill_zero(o, o_s, i_b, i_h, bos, length, tl.where(live, stop, start), stop, o_v, V)
    b_S = turn(
        open_run(state, state_s, slots, maps, maps_s, i_n, i_h, run, o_k, o_v, live, K, V, RUN)
    )
    for c in tl.range(start, tl.where(live, stop, start), num_stages=STAGES):
        i_tile = (first + follow(ready, missed, until, c, stop, i_h, HV, patience)) * HV + i_h
        b_w = load_tile(w, i_tile, o_r, o_k, K)
        b_kg = load_tile(kg, i_tile, o_r, o_k, K)
        b_A = load_lower(A, i_tile)
        b_v = turn(
            tl.load(
                rows_at(v, v_s, i_b, i_h, bos + c * 64, o_r, o_v),
                mask=(c * 64 + o_r < length)[:, None] & (o_v < V)[None, :],
                other=0.0,
            )
        )
        b_s = b_S.to(TYPE)
        b_gamma, b_beta = load_factors(gamma, rows, i_tile, K, BK, BV)
        b_S = b_S * b_gamma  # now, for they are two registers per column
        b_v = b_v.to(tl.float32) * b_beta
        b_own = b_v.to(TYPE)
        b_v = tl.dot(b_own, tl.trans(b_A), b_v - widen(b_own), input_precision=PREC)
        b_v = (b_v - over_keys(b_s, b_w, PREC)).to(TYPE)
        if o is not None:
            b_qg = load_tile(qg, i_tile, o_r, o_k, K)
            b_P = load_lower(P, i_tile)
            b_o = tl.dot(b_v, tl.trans(b_P), over_keys(b_s, b_qg, PREC), input_precision=PREC)
            store_turned(
                head_at(o, o_s, i_b, i_h, bos + c * 64) + i_v * o_s[3],
                o_s[1],
                o_s[3],
                b_o,
                length - c * 64,
                V - i_v,
            )
        if states is not None:
            store_turned(states + i_tile * (K * V) + i_v, V, 1, b_s, K, V - i_v)
            store_turned(v_new + i_tile * (64 * V) + i_v, V, 1, b_v, 64, V - i_v)
        b_S = tl.dot(b_v, b_kg, b_S, input_precision=PREC)
        if into is not None:
            snapshot(
                final,
                final_s,
                into,
                into_s,
                every,
                i_n,
                i_h,
                c + 1,
                length,
                b_S,
                i_v,
                columns,
                K,
                V,
            )
    live = has_followed(live, ready, missed)
    close_run(
        final,
        final_s,
        slots,
        maps,
        maps_s,
        i_n,
        i_h,
        run,
        turn_back(b_S),
        o_k,
        o_v,
        live,
        K,
        V,
        False,
    )


@triton.jit(do_not_specialize=["N", "T", "until", "patience", "every", "columns"])
def scan_rows(
    q,
    q_s,
    k,
    k_s,
    v,
    v_s,
    A,
    P,
    rows,
    gamma,
    o,
    o_s,
    state,
    state_s,
    final,
    final_s,
    slots,
    into,
    into_s,
    states,
    v_new,
    maps,
    maps_s,
    cu_seqlens,
    N,
    T,
    ready,
    missed,
    until,
    patience,
    H,
    HV,
    every,
    columns,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
    RUN: tl.constexpr,
):
    """The same for one decay per head, from q, k and v as they are and the four rows of
    `prepare_gdn`::

        v_new = A (beta (v - rows_0 (k S)));   o = rows_3 (q S) + P v_new;
        S <- gamma S + k^T (rows_1 v_new)

    A decay per head is a factor per row, which moves past the dot products: q and k go from memory
    to the tensor cores as they are.
    """
    wait_for_previous()
    i_n, i_h, i_v, live, i_b, bos, length, first, start, stop, run = place(
        cu_seqlens, slots, maps, N, T, HV, K, V, BV, RUN, False
    )
    live = take_part(live, ready, missed)
    i_g = i_h // (HV // H)
    o_r, o_k, o_v = tl.arange(0, 64), tl.arange(0, BK), i_v + tl.arange(0, BV)
    TYPE: tl.constexpr = A.dtype.element_ty
    m_k, m_v = (o_k < K)[None, :], (o_v < V)[None, :]
    if o is not None and missed is None:
        fill_zero(o, o_s, i_b, i_h, bos, length, tl.where(live, stop, start), stop, o_v, V)
    b_S = turn(
        open_run(state, state_s, slots, maps, maps_s, i_n, i_h, run, o_k, o_v, live, K, V, RUN)
    )
    for c in tl.range(start, tl.where(live, stop, start), num_stages=STAGES):
        i_tile, t = (
            (first + follow(ready, missed, until, c, stop, i_g, H, patience)) * HV + i_h,
            bos + c * 64,
        )
        m_r = (c * 64 + o_r < length)[:, None]
        b_k = tl.load(rows_at(k, k_s, i_b, i_g, t, o_r, o_k), mask=m_r & m_k, other=0.0)
        b_v = turn(tl.load(rows_at(v, v_s, i_b, i_h, t, o_r, o_v), mask=m_r & m_v, other=0.0))
        b_A = load_lower(A, i_tile)
        b_s = b_S.to(TYPE)
        b_v = b_v.to(tl.float32) - load_factor(rows, i_tile, 0, 7) * over_keys(b_s, b_k, PREC)
        b_v = tl.dot(
            (b_v * load_factor(rows, i_tile, 2, 7)).to(TYPE), tl.trans(b_A), input_precision=PREC
        )
        if o is not None:
            b_q = tl.load(rows_at(q, q_s, i_b, i_g, t, o_r, o_k), mask=m_r & m_k, other=0.0)
            b_o = over_keys(b_s, b_q, PREC) * load_factor(rows, i_tile, 3, 7)
            b_o = tl.dot(b_v.to(TYPE), tl.trans(load_lower(P, i_tile)), b_o, input_precision=PREC)
            store_turned(
                head_at(o, o_s, i_b, i_h, t) + i_v * o_s[3],
                o_s[1],
                o_s[3],
                b_o,
                length - c * 64,
                V - i_v,
            )
        if states is not None:
            store_turned(states + i_tile * (K * V) + i_v, V, 1, b_s, K, V - i_v)
            store_turned(v_new + i_tile * (64 * V) + i_v, V, 1, b_v, 64, V - i_v)
        b_v = (b_v * load_factor(rows, i_tile, 1, 7)).to(TYPE)
        b_S = tl.dot(b_v, b_k, b_S * tl.load(gamma + i_tile), input_precision=PREC)
        if into is not None:
            snapshot(
                final,
                final_s,
                into,
                into_s,
                every,
                i_n,
                i_h,
                c + 1,
                length,
                b_S,
                i_v,
                columns,
                K,
                V,
            )
    live = has_followed(live, ready, missed)
    close_run(
        final,
        final_s,
        slots,
        maps,
        maps_s,
        i_n,
        i_h,
        run,
        turn_back(b_S),
        o_k,
        o_v,
        live,
        K,
        V,
        False,
    )


def _states(p: Problem, final_state: Tensor | None):
    """(initial, final, slots, snapshot slots) as the kernels take them, states seen as S[k, v]."""
    final = None if final_state is None or final_state.numel() == 0 else as_kv(p, final_state)
    initial = None if p.state is None else as_kv(p, p.state)
    return initial, final, p.state_indices, p.snapshot_indices


def scan(
    p: Problem, tile: Tile, o: Tensor | None, final_state: Tensor | None, keep: bool
) -> Trace | None:
    """Carry the state through the chunks of each sequence; see `kda_ops.stages.Backend.scan`."""
    device, NT, v = p.q.device, count_chunks(p), fit(p.v)
    trace = (
        Trace(new(p.q, "states", (NT, p.HV, p.K, p.V)), new(p.q, "v_new", (NT, p.HV, 64, p.V)), o)
        if keep
        else None
    )
    initial, final, slots, into = _states(p, final_state)
    name = "scan_tiles" if p.rank else "scan_rows"
    runs = Runs(p)
    BK, precision = tuning.width(p.K, p.q.dtype), "tf32x3" if p.q.dtype is torch.float32 else "tf32"

    def carry(
        options,
        o,
        initial,
        final,
        into,
        trace,
        maps,
        ready: Tensor | None = None,
        missed: Tensor | None = None,
        until: int = 0,
    ) -> None:
        ends = (
            o,
            strides_of(o),
            initial,
            strides_of(initial),
            final,
            strides_of(final),
            dense(slots),
            into,
            strides_of(into),
            trace and trace.states,
            trace and trace.v_new,
            maps,
            strides_of(maps),
            dense(p.cu_seqlens),
            p.N,
            p.T,
            ready,
            missed,
            until,
            tuning.PATIENCE,
        )
        columns, every = (0, 1) if into is None else (shape_of(into)[1], p.snapshot_every)
        programs = runs.programs(p.V if maps is None else p.V + p.K, options.block_v)
        sizes = (
            p.HV,
            every,
            columns,
            p.K,
            p.V,
            BK,
            options.block_v,
            options.stages,
            precision,
            runs.length,
        )
        if p.rank:
            launch(
                scan_tiles,
                programs,
                device,
                v,
                strides_of(v),
                tile.A,
                tile.P,
                tile.w,
                tile.qg,
                tile.kg,
                tile.rows,
                tile.gamma,
                *ends,
                *sizes,
                **options.launch,
                **tuning.begins_early(device),
            )
        else:
            q, k = fit(p.q), fit(p.k)
            launch(
                scan_rows,
                programs,
                device,
                q,
                strides_of(q),
                k,
                strides_of(k),
                v,
                strides_of(v),
                tile.A,
                tile.P,
                tile.rows,
                tile.gamma,
                *ends,
                p.H,
                *sizes,
                **options.launch,
                **tuning.begins_early(device),
            )

    if runs.length:
        carry(tuning.choose(name + "_maps", p), None, initial, None, None, None, runs.maps)
        initial = runs.join(back=False)
    if isinstance(tile, Begun):
        options = tuning.choose(name + "_beside", p)
        with beside(device, early=True) as elsewhere:
            carry(
                options, o, initial, final, into, trace, None, tile.ready, tile.missed, tile.until
            )
            with elsewhere:
                tile.rest()
        carry(options, o, initial, final, into, trace, None, None, tile.missed)
    else:
        carry(tuning.choose(name, p), o, initial, final, into, trace, None)
    return trace
