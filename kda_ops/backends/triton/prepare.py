"""What a chunk needs besides the state that enters it: one program per chunk and head (MATHS.md, chunk form)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.decay import by_group, from_blocks, half_decay, pair_decay, row_decay, score_levels
from kda_ops.backends.triton.gate import LOG2E, decay_column, load_rate, log2_decay, strength_column
from kda_ops.backends.triton.inverse import inverse
from kda_ops.backends.triton.scan import rows_at
from kda_ops.backends.triton.tile import (
    RowTile,
    columns_of,
    dense,
    fit,
    inverse_norm,
    launch,
    load_rows,
    load_tile,
    locate_chunk,
    store_rows,
    store_tile,
    strides_of,
)
from kda_ops.problem import Problem
from kda_ops.sequences import count_chunks
from kda_ops.stages import Tile


@triton.jit
def row_norms(q, q_s, k, k_s, i_b, i_h, first, n_rows, D: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, L2NORM: tl.constexpr):
    """1 / sqrt(sum of squares + 1e-6) of each row of q and of k, [64] fp32, or ones; slice by slice, so that no more than a slice is held."""
    b_q_norm = tl.full((64,), 1.0, tl.float32)
    b_k_norm = b_q_norm
    if L2NORM:
        b_q_sum = tl.zeros((64,), tl.float32)
        b_k_sum = b_q_sum
        for i in tl.range((D + BLOCK - 1) // BLOCK, num_stages=1):
            o_d = i * BLOCK + tl.arange(0, BLOCK)
            b_q = load_rows(q, q_s, i_b, i_h, first, n_rows, o_d, D, R).to(tl.float32)
            b_k = load_rows(k, k_s, i_b, i_h, first, n_rows, o_d, D, R).to(tl.float32)
            b_q_sum += tl.sum(b_q * b_q, 1)
            b_k_sum += tl.sum(b_k * b_k, 1)
        b_q_norm, b_k_norm = tl.rsqrt(b_q_sum + 1e-6), tl.rsqrt(b_k_sum + 1e-6)
    return b_q_norm, b_k_norm


@triton.jit
def load_decay(
    g, strides, A_log, dt_bias, lower_bound, i_b, i_h, first, n_rows, o_k,
    K: tl.constexpr, R: tl.constexpr, ACTIVATE: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """The decay of each token in base 2, [64, width] fp32; 0 for rows that are no tokens."""
    if g is None:
        b_g = tl.zeros((64, o_k.shape[0]), tl.float32)
    else:
        b_g = load_rows(g, strides, i_b, i_h, first, n_rows, o_k, K, R).to(tl.float32)
        b_bias = tl.zeros((o_k.shape[0],), tl.float32)
        if ACTIVATE:
            if dt_bias is not None:
                b_bias = tl.load(dt_bias + i_h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        b_g = log2_decay(b_g, b_bias[None, :], load_rate(A_log, i_h), lower_bound, ACTIVATE, BOUNDED)
        if ACTIVATE:
            b_g = tl.where((tl.arange(0, 64) < n_rows)[:, None], b_g, 0.0)
    return b_g


@triton.jit(do_not_specialize=["N", "T", "scale", "lower_bound", "log2_bound", "beta_b", "beta_t", "beta_h"])
def prepare_kda(
    q, q_s, k, k_s, v, v_s, g, g_s, beta, beta_b, beta_t, beta_h, A_log, dt_bias, cu_seqlens, kept_A, A, P, w, u, qg, kg, gamma,
    N, T, H, HV, scale, lower_bound, log2_bound,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, L2NORM: tl.constexpr, ACTIVATE: tl.constexpr,
    BOUNDED: tl.constexpr, CENTRED: tl.constexpr, LINEAR: tl.constexpr, SIGMOID: tl.constexpr, NEG_EIGVAL: tl.constexpr, PREC: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """One chunk of one head; E_ij is the decay from row j to row i::

        P = tril(scale q k^T o E)   [64, 64]      A = (I + strict_tril(beta k k^T o E))^-1   [64, 64]
        w = A (beta k exp G)        [64, K]       u = A (beta v)                             [64, V]
        qg = scale q exp G,  kg = k exp(sum of g over the later rows)   [64, K]              gamma = exp(sum of g)   [K] fp32

    K is worked through in slices of BK columns: the scores of all slices add up, and no more than one slice of fp32 tiles is alive, so that
    several programs share a multiprocessor. q, k, v, g and beta are read once from memory (the row norms read q and k again from the cache).
    """
    i_h, i_t = tl.program_id(0) % HV, tl.program_id(0) // HV
    i_b, first, n_rows = locate_chunk(cu_seqlens, i_t, N, T)
    i_g = i_h // (HV // H)  # the query and key head
    i_tile = tl.program_id(0).to(tl.int64)
    o_r = tl.arange(0, 64)
    TYPE: tl.constexpr = qg.dtype.element_ty

    b_q_norm, b_k_norm = row_norms(q, q_s, k, k_s, i_b, i_g, first, n_rows, K, BK, R, L2NORM)
    b_q_norm = b_q_norm * scale
    b_beta = strength_column(beta, (beta_b, beta_t, beta_h), i_b, i_h, first, n_rows, SIGMOID, NEG_EIGVAL)

    shift = tl.exp2(16.0 * log2_bound)
    across = (o_r >= 32)[:, None] & (o_r < 32)[None, :]
    b_P = tl.zeros((64, 64), tl.float32)
    b_L = tl.zeros((64, 64), tl.float32)
    b_P16 = tl.zeros((4, 16, 16), tl.float32)
    b_L16 = tl.zeros((4, 16, 16), tl.float32)
    b_diagonal = tl.zeros((64,), tl.float32)
    for i in tl.range((K + BK - 1) // BK, num_stages=1):
        o_k = i * BK + tl.arange(0, BK)
        b_x = load_decay(g, g_s, A_log, dt_bias, lower_bound, i_b, i_h, first, n_rows, o_k, K, R, ACTIVATE, BOUNDED)
        if CENTRED:
            b_row, b_col, half_end, half_before, half_after, b_gamma = half_decay(b_x, log2_bound, R)
            b_k = load_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K, R).to(tl.float32) * b_k_norm[:, None]
            b_kr, b_kc = b_k * b_row, b_k * b_col
            b_Y = by_group(b_kc, half_end, True)
            store_rows(kg, i_tile, by_group(b_Y, half_after, True), o_k, K, R)
            store_rows(w, i_tile, by_group(b_kr * (shift * b_beta)[:, None], half_before, True), o_k, K, R)
            b_kr, b_kc, b_Y = b_kr.to(TYPE), tl.trans(b_kc.to(TYPE)), tl.trans(b_Y.to(TYPE))
            b_L += tl.where(across, tl.dot(b_kr, b_Y), tl.dot(b_kr, b_kc))
            b_q = load_rows(q, q_s, i_b, i_g, first, n_rows, o_k, K, R).to(tl.float32) * b_q_norm[:, None]
            b_qr = b_q * b_row
            store_rows(qg, i_tile, by_group(b_qr * shift, half_before, True), o_k, K, R)
            b_qr = b_qr.to(TYPE)
            b_P += tl.where(across, tl.dot(b_qr, b_Y), tl.dot(b_qr, b_kc))
        else:
            if LINEAR:
                b_x = tl.exp2(b_x)
            b_k = load_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K, R).to(tl.float32) * b_k_norm[:, None]
            b_q = load_rows(q, q_s, i_b, i_g, first, n_rows, o_k, K, R).to(tl.float32) * b_q_norm[:, None]
            b_diagonal += tl.sum(b_q * b_k, 1)
            b_P, b_L, b_P16, b_L16, b_start, b_end, b_gamma = score_levels(b_P, b_L, b_P16, b_L16, b_q, b_k, b_x, R, LINEAR, PREC, TYPE)
            store_rows(kg, i_tile, b_k * b_end, o_k, K, R)
            store_rows(w, i_tile, b_k * b_start * b_beta[:, None], o_k, K, R)
            store_rows(qg, i_tile, b_q * b_start, o_k, K, R)
        tl.store(gamma + i_tile * K + o_k, b_gamma, mask=o_k < K)
    if CENTRED:
        b_P, b_L = tl.where(across, b_P * shift, b_P), tl.where(across, b_L * shift, b_L)
    else:
        b_P += from_blocks(b_P16) + tl.where(o_r[:, None] == o_r[None, :], b_diagonal[:, None], 0.0)
        b_L += from_blocks(b_L16)

    store_tile(P, i_tile, tl.where(o_r[:, None] >= o_r[None, :], b_P, 0.0), o_r, o_r, 64)
    if kept_A is not None:
        b_A = load_tile(kept_A, i_tile, o_r, o_r, 64)
    else:
        b_A = inverse(tl.where(o_r[:, None] > o_r[None, :], b_L * -b_beta[:, None], 0.0), INVERSE).to(TYPE)
        if A is not None:
            store_tile(A, i_tile, b_A, o_r, o_r, 64)
    tl.debug_barrier()  # w holds beta k exp G so far, written by other threads
    for i in tl.range((K + BK - 1) // BK, num_stages=1):
        o_k = i * BK + tl.arange(0, BK)
        store_tile(w, i_tile, tl.dot(b_A, load_tile(w, i_tile, o_r, o_k, K), input_precision=PREC), o_r, o_k, K)
    for i in range((V + BV - 1) // BV):
        o_v = i * BV + tl.arange(0, BV)
        b_v = load_rows(v, v_s, i_b, i_h, first, n_rows, o_v, V, R).to(tl.float32) * b_beta[:, None]
        store_tile(u, i_tile, tl.dot(b_A, b_v.to(TYPE), input_precision=PREC), o_r, o_v, V)


@triton.jit(do_not_specialize=["N", "T", "scale", "lower_bound", "g_b", "g_t", "g_h", "beta_b", "beta_t", "beta_h"])
def prepare_gdn(
    q, q_s, k, k_s, g, g_b, g_t, g_h, beta, beta_b, beta_t, beta_h, A_log, dt_bias, cu_seqlens, kept_A, A, P, rows, gamma,
    N, T, H, scale, lower_bound,
    K: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, L2NORM: tl.constexpr, ACTIVATE: tl.constexpr, BOUNDED: tl.constexpr, SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr, EXACT: tl.constexpr, PREC: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """One chunk, for the value heads of one key head, which share q k^T and k k^T; n are the row norms, D_ij the decay from row j to row i::

        A = (I + strict_tril(beta n n k k^T o D))^-1,   P = scale tril(n n q k^T o D)   [64, 64]
        rows = (n_k exp G, n_k exp(sum of g over the later rows), beta, scale n_q exp G, n_k, n_q, G)   [7, 64] fp32

    G in base 2, or g for operands of 32 bits: what `pair_decay` takes. The scans read the first four rows, the gradients all of them.

    One decay per head is a factor per row, which moves past the dot products together with the norms: q and k go from memory to the tensor
    cores as they are, here and in the scan. The decay stays inside the inverse: inverting without it and multiplying afterwards is the same
    on paper and overflows for long keys.
    """
    i_g, i_t = tl.program_id(0) % H, tl.program_id(0) // H
    i_b, first, n_rows = locate_chunk(cu_seqlens, i_t, N, T)
    o_r, o_k = tl.arange(0, 64), tl.arange(0, BK)
    m_x = (o_r < n_rows)[:, None] & (o_k < K)[None, :]
    b_k = tl.load(rows_at(k, k_s, i_b, i_g, first, o_r, o_k), mask=m_x, other=0.0)
    b_q = tl.load(rows_at(q, q_s, i_b, i_g, first, o_r, o_k), mask=m_x, other=0.0)
    b_q_norm, b_k_norm = inverse_norm(b_q, L2NORM), inverse_norm(b_k, L2NORM)
    b_qk = tl.dot(b_q, tl.trans(b_k), input_precision=PREC) * (b_q_norm * scale)[:, None] * b_k_norm[None, :]
    b_kk = tl.dot(b_k, tl.trans(b_k), input_precision=PREC) * -b_k_norm[:, None] * b_k_norm[None, :]
    for i in tl.range(GROUP, num_stages=1):
        i_h = i_g * GROUP + i
        i_tile = i_t.to(tl.int64) * (H * GROUP) + i_h
        b_x = decay_column(g, (g_b, g_t, g_h), A_log, dt_bias, lower_bound, i_b, i_h, first, n_rows, ACTIVATE, BOUNDED)
        b_beta = strength_column(beta, (beta_b, beta_t, beta_h), i_b, i_h, first, n_rows, SIGMOID, NEG_EIGVAL)
        b_start, b_end, b_gamma, b_x = row_decay(b_x, EXACT)
        p_row = rows + i_tile * 448 + o_r
        tl.store(p_row, b_k_norm * b_start)
        tl.store(p_row + 64, b_k_norm * b_end)
        tl.store(p_row + 128, b_beta)
        tl.store(p_row + 192, b_q_norm * scale * b_start)
        tl.store(p_row + 256, b_k_norm)
        tl.store(p_row + 320, b_q_norm)
        tl.store(p_row + 384, b_x)
        tl.store(gamma + i_tile, b_gamma)
        b_D = pair_decay(b_x, EXACT)
        store_tile(P, i_tile, b_qk * b_D, o_r, o_r, 64)
        if kept_A is None:
            b_L = tl.where(o_r[:, None] > o_r[None, :], b_kk * b_D * b_beta[:, None], 0.0)
            store_tile(A, i_tile, inverse(b_L, INVERSE), o_r, o_r, 64)


def _inverse_precision(p: Problem) -> str:
    """Of the operands of the inverse, from flags alone: fp16 holds it where keys are unit and beta is at most 1, for then no entry exceeds one."""
    if p.q.dtype is torch.float32:
        return "tf32x3"
    if p.l2norm and p.sigmoid_beta and not p.neg_eigval:
        return "fp16"
    return "tf32x3" if triton.knobs.runtime.interpret else "bf16x3"  # the interpreter computes either in fp32, but knows only one name


def prepare(p: Problem, A: Tensor | None = None, keep_A: bool = True) -> Tile:
    """Everything about the chunks that does not depend on the state; see `kda_ops.stages.Backend.prepare`.

    For GDN these are A, P and seven numbers per row, and `scan` reads q, k and v themselves. For KDA, A is written only if `keep_A`, for a
    backward that follows.
    """
    q, k, v, device, NT, exact = fit(p.q), fit(p.k), fit(p.v), p.q.device, count_chunks(p), p.q.dtype is torch.float32
    inverse_precision, precision = _inverse_precision(p), "tf32x3" if exact else "tf32"
    programs = NT if p.N else 0
    g, beta = fit(p.g), fit(p.beta)
    # One number per token: its strides follow T, and a kernel that took them apart by divisibility would compile again for some T.
    gates = (g, *([strides_of(g)] if p.rank else columns_of(g)), beta, *columns_of(beta), dense(p.A_log), dense(p.dt_bias), dense(p.cu_seqlens))
    flags = (p.l2norm, p.activate_gate, p.lower_bound is not None)
    if p.rank == 0:
        options = tuning.choose("prepare_gdn", p)
        kept, made = A, q.new_empty((NT, p.HV, 64, 64)) if A is None else None
        P = q.new_empty((NT, p.HV, 64, 64))
        rows, gamma = (q.new_empty((NT, p.HV, *shape), dtype=torch.float32) for shape in ((7, 64), (1,)))
        launch(
            prepare_gdn, programs * p.H, device, q, q.stride(), k, k.stride(), *gates, kept, made, P, rows, gamma,
            p.N, p.T, p.H, p.scale, p.lower_bound or 0.0,
            p.K, tuning.width(p.K, q.dtype), p.HV // p.H if p.H else 1, *flags, p.sigmoid_beta, p.neg_eigval, exact, precision, inverse_precision,
            **options.launch,
        )  # fmt: skip
        return RowTile(made if kept is None else kept, P, gamma=gamma, rows=rows)
    options = tuning.choose("prepare_kda", p)
    kept, made = A, q.new_empty((NT, p.HV, 64, 64)) if A is None and keep_A else None
    P, w, u, qg, kg = (q.new_empty((NT, p.HV, 64, width)) for width in (64, p.K, p.V, p.K, p.K))
    gamma = q.new_empty((NT, p.HV, p.K), dtype=torch.float32)
    centred = tuning.centred(p)
    launch(
        prepare_kda, programs * p.HV, device, q, q.stride(), k, k.stride(), v, v.stride(), *gates, kept, made, P, w, u, qg, kg, gamma,
        p.N, p.T, p.H, p.HV, p.scale, p.lower_bound or 0.0, (p.gate_bound if centred else 0.0) * LOG2E.value,
        p.K, p.V, options.block_k, options.block_v, options.group, *flags, centred, not exact, p.sigmoid_beta, p.neg_eigval, precision, inverse_precision,
        **options.launch,
    )  # fmt: skip
    return Tile(made if kept is None else kept, P, w, u, qg, kg, gamma)
