"""Everything of the gradients for one decay per head: one chunk, and all value heads of a key head,
per program.
"""

import triton
import triton.language as tl

from kda_ops.backends.triton.decay import pair_decay, pair_decay_transposed
from kda_ops.backends.triton.gate import load_rate, reciprocal
from kda_ops.backends.triton.gradient_pairs import strength_gradient
from kda_ops.backends.triton.gradient_tile import (
    clear_keys,
    gate_gradient,
    load_state,
    locate_rows,
    read_rows,
    read_values,
    write_column,
    write_rows,
)
from kda_ops.backends.triton.tile import (
    INTERPRETED,
    add_two,
    load_column,
    load_tile,
    on_diagonal,
    prefetch_tile,
)


@triton.jit
def along(b_dx, b_x, b_r, b_along, K: tl.constexpr, L2NORM: tl.constexpr):
    """Through y = r x, r = 1 / |x|: dx - r^2 x (x . dx), for a dx that has its factor r, and x . dx
    [64].
    """
    if L2NORM and K == 1:
        b_dx *= (1e-6 * b_r * b_r)[:, None]
    elif L2NORM:
        b_dx -= b_x * (b_r * b_r * b_along)[:, None]
    return b_dx


@triton.jit
def split_power(b_x):
    """Write x as m p, |m| in [1, 2) and p a power of two, exactly; 1 and 0 for zero."""
    b_bits = b_x.to(tl.uint32, bitcast=True)
    b_power = (b_bits & 0x7F800000).to(tl.float32, bitcast=True)
    return ((b_bits & 0x807FFFFF) | 0x3F800000).to(tl.float32, bitcast=True), b_power


@triton.jit
def read_sources(
    v_new,
    z,
    do,
    do_s,
    i_tile,
    token,
    i_b,
    i_h,
    first,
    n_rows,
    o_v,
    HV,
    V: tl.constexpr,
    TILED: tl.constexpr,
):
    """Load columns o_v of v_new, z and do, [64, width] each; None for a do that is absent."""
    b_do = None
    if do is not None:
        b_do = read_rows(do, do_s, i_b, i_h, first, n_rows, o_v, V)
    b_vn = load_tile(v_new, i_tile, tl.arange(0, 64), o_v, V)
    return b_vn, read_values(z, i_tile, token, i_h, HV, n_rows, o_v, V, TILED), b_do


@triton.jit
def form_here(b_x):
    """Return x, an operand of products further down, and keep the compiler from forming it there.

    Moved down to its product, an operand keeps what it is made of in registers: two or three tiles
    of fp32 in place of one of 16 bits (docs/kernels/hazards.md, "Operands formed late").
    """
    if INTERPRETED:
        return b_x
    else:
        PACK: tl.constexpr = 32 // b_x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], b_x.dtype, False, PACK)


@triton.jit(do_not_specialize=["N", "T", "scale", "lower_bound", "g_b", "g_t", "g_h"])
def gradient_rows(
    q,
    q_s,
    k,
    k_s,
    v,
    v_s,
    g,
    g_b,
    g_t,
    g_h,
    A_log,
    dt_bias,
    rows,
    gamma,
    do,
    do_s,
    states,
    v_new,
    dstates,
    z,
    cu_seqlens,
    dq,
    dk,
    dq_sum,
    dk_sum,
    dg,
    dbeta,
    dA_log,
    ddt_bias,
    N,
    T,
    H,
    scale,
    lower_bound,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    TILED: tl.constexpr,
    L2NORM: tl.constexpr,
    ACTIVATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    EXACT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Compute one chunk and the GROUP value heads of one key head; E_ij is the decay from row j to
    row i, n_q and n_k the norms, r the rows of `prepare_gdn`::

        M    = scale tril(n_q n_k do v_new^T o E)                             [64, 64]
        N    = -beta strict_tril(n_k n_k z v_new^T o E)                       [64, 64]
        dq   = r_3 (do S^T) + M k                                             [64, K]
        part = N k - r_0 beta (z S^T)                                         [64, K]
        rest = r_1 (v_new dS^T) + N^T k + M^T q                               [64, K]
        dk   = part + rest
        dG   = q . dq + k . part - k . rest                                   [64]
        dbeta = sum_v z v_new / beta for a sigmoid, else sum_v z v + (k . part) / beta

    `z` is z if TILED; else it is dv = beta z, and beta is one but in dbeta. A given beta may be
    zero: it is digits times a power of two (`split_power`), N and part take the digits, and the
    power, which rounds nothing, follows behind the sum over k.

    Norms, decays and beta are factors of rows and of the [64, 64] tiles, so that q and k go from
    memory to the tensor cores as they are, and dq and dk leave through the norm, which needs
    q . dq and k . dk anyway. What pairs of rows add to dG cancels in a sum over a chunk, and does
    so here too: q . M k and k . M^T q are sums of the same rounded M, and N likewise.

    In phases, so that few tiles are alive: M^T and N^T, then M and N, then dk, then dq. Two
    programs of four warps share a multiprocessor, whose shared memory holds five tiles of rows and
    one state each: S is read twice. Where K takes several slices or a key head has several value
    heads, dq and dk add up in dq_sum and dk_sum, fp32.
    """
    i_g, i_t = tl.program_id(0) % H, tl.program_id(0) // H
    i_b, first, n_rows, live = locate_rows(cu_seqlens, i_t, N, T)
    token = i_b * T + first
    slices: tl.constexpr = (K + BK - 1) // BK
    o_r, HV = tl.arange(0, 64), H * GROUP
    if (n_rows <= 0) | (live == 0):
        for i in range(slices):
            clear_keys(
                dq,
                dk,
                None,
                None,
                None,
                None,
                token,
                token,
                i_g,
                H,
                n_rows,
                i * BK + tl.arange(0, BK),
                i,
                1,
                K,
            )
        for i in range(GROUP):
            i_h = i_g * GROUP + i
            clear_keys(
                None,
                None,
                dg,
                None,
                dA_log,
                ddt_bias,
                i_t.to(tl.int64) * HV + i_h,
                token,
                i_h,
                HV,
                n_rows,
                tl.arange(0, 1),
                0,
                1,
                1,
            )
            if dbeta is not None:
                write_column(dbeta, token, i_h, HV, n_rows, tl.zeros((64,), tl.float32))
        return
    TYPE: tl.constexpr = states.dtype.element_ty
    SUMS: tl.constexpr = dbeta is not None and not SIGMOID
    HELD: tl.constexpr = dq_sum is None
    values: tl.constexpr = (V + BV - 1) // BV
    lower, diagonal, upper = (
        o_r[:, None] > o_r[None, :],
        o_r[:, None] == o_r[None, :],
        o_r[:, None] < o_r[None, :],
    )
    b_zero, b_square, b_wide = (
        tl.zeros((64,), tl.float32),
        tl.zeros((64, 64), tl.float32),
        tl.zeros((64, BK), tl.float32),
    )
    b_along_q, b_along_k = b_zero, b_zero
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_q, b_k = (
        read_rows(q, q_s, i_b, i_g, first, n_rows, o_k, K),
        read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K),
    )
    for i_head in tl.range(GROUP, num_stages=1):
        i_h = i_g * GROUP + i_head
        i_tile = i_t.to(tl.int64) * HV + i_h
        p_row = rows + i_tile * 448 + o_r
        b_q_dq, b_k_part, b_k_rest, b_k_late, b_zv = b_zero, b_zero, b_zero, b_zero, b_zero
        both = 0.0
        prefetch_tile(states, i_tile, K * V)
        prefetch_tile(dstates, i_tile, K * V)
        b_vn, b_z, b_do = read_sources(
            v_new, z, do, do_s, i_tile, token, i_b, i_h, first, n_rows, o_v, HV, V, TILED
        )

        b_strength, b_k_norm, b_q_norm, b_decay = (
            tl.load(p_row + 128),
            tl.load(p_row + 256),
            tl.load(p_row + 320),
            tl.load(p_row + 384),
        )
        b_beta = b_strength if TILED else tl.full((64,), 1.0, tl.float32)
        b_M, b_MT, b_N, b_NT = b_square, b_square, b_square, b_square
        b_digits, b_power = split_power(b_beta)
        for j in tl.range(values, num_stages=1):
            if values > 1:
                o_v = j * BV + tl.arange(0, BV)
                b_vn, b_z, b_do = read_sources(
                    v_new, z, do, do_s, i_tile, token, i_b, i_h, first, n_rows, o_v, HV, V, TILED
                )
            if do is not None:
                b_MT = tl.dot(b_vn, tl.trans(b_do), b_MT, input_precision=PREC)
            b_NT = tl.dot(b_vn, tl.trans(b_z), b_NT, input_precision=PREC)
        b_E = pair_decay_transposed(b_decay, EXACT) * b_k_norm[:, None]
        b_MT = form_here((b_MT * b_E * (b_q_norm * scale)[None, :]).to(TYPE))
        b_NT = form_here(tl.where(upper, b_NT * b_E * -(b_k_norm * b_beta)[None, :], 0.0).to(TYPE))
        for j in tl.range(values, num_stages=1):
            if values > 1:
                o_v = j * BV + tl.arange(0, BV)
                b_vn, b_z, b_do = read_sources(
                    v_new, z, do, do_s, i_tile, token, i_b, i_h, first, n_rows, o_v, HV, V, TILED
                )
            if SUMS:
                b_zv += tl.sum(
                    read_rows(v, v_s, i_b, i_h, first, n_rows, o_v, V).to(tl.float32)
                    * b_z.to(tl.float32),
                    1,
                )
            if do is not None:
                b_M = tl.dot(b_do, tl.trans(b_vn), b_M, input_precision=PREC)
            b_N = tl.dot(b_z, tl.trans(b_vn), b_N, input_precision=PREC)
        b_E = pair_decay(b_decay, EXACT) * b_k_norm[None, :]
        b_zvn = on_diagonal(b_N)
        # One, so that a product brings k and q from shared memory into the layout of a result; by
        # way of a product, or it would lie in shared memory too.
        b_eye = tl.where(diagonal | (b_N < -float("inf")), 1.0, 0.0).to(TYPE)
        b_N = form_here(tl.where(lower, b_N * b_E * -(b_k_norm * b_digits)[:, None], 0.0).to(TYPE))
        b_M = form_here((b_M * b_E * (b_q_norm * scale)[:, None]).to(TYPE))

        if T > 0:  # always: a block of its own, before which nothing of it is loaded
            b_start, b_end, b_read = tl.load(p_row), tl.load(p_row + 64), tl.load(p_row + 192)
            for i in tl.range(slices, num_stages=1):
                if slices > 1:
                    o_k = i * BK + tl.arange(0, BK)
                    b_q, b_k = (
                        read_rows(q, q_s, i_b, i_g, first, n_rows, o_k, K),
                        read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K),
                    )
                b_dk, b_part, b_dq = b_wide, b_wide, b_wide
                for j in tl.range(values, num_stages=1):
                    if values > 1:
                        o_v = j * BV + tl.arange(0, BV)
                        b_vn = load_tile(v_new, i_tile, o_r, o_v, V)
                    b_S, b_dS = (
                        load_state(states, i_tile, o_k, o_v, K, V),
                        load_state(dstates, i_tile, o_k, o_v, K, V),
                    )
                    both += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32))
                    b_dk = tl.dot(b_vn, tl.trans(b_dS), b_dk, input_precision=PREC)
                # S is read again: kept, it would take registers while dS is used
                tl.debug_barrier()
                b_x = tl.dot(b_eye, b_k, input_precision=PREC)
                b_dk *= b_end[:, None]
                b_k_late += tl.sum(b_x * b_dk, 1)
                b_dk = tl.dot(b_NT, b_k, b_dk, input_precision=PREC)
                if do is not None:
                    b_dk = tl.dot(b_MT, b_q, b_dk, input_precision=PREC)
                b_k_rest += tl.sum(b_x * b_dk, 1)
                b_S = load_state(states, i_tile, o_k, o_v, K, V)
                for j in tl.range(values, num_stages=1):
                    if values > 1:
                        o_v = j * BV + tl.arange(0, BV)
                        b_z, b_S = (
                            read_values(z, i_tile, token, i_h, HV, n_rows, o_v, V, TILED),
                            load_state(states, i_tile, o_k, o_v, K, V),
                        )
                    b_part = tl.dot(b_z, tl.trans(b_S), b_part, input_precision=PREC)
                b_part *= -(b_start * b_digits)[:, None]
                b_part = tl.dot(b_N, b_k, b_part, input_precision=PREC)
                b_k_part += tl.sum(b_x * b_part, 1)
                if dq is not None:
                    b_dk += b_part * b_power[:, None]
                    if HELD:
                        b_along_k = b_k_rest + b_k_part * b_power
                        write_rows(
                            dk,
                            token,
                            i_g,
                            H,
                            n_rows,
                            along(b_dk, b_x, b_k_norm, b_along_k, K, L2NORM),
                            o_k,
                            K,
                        )
                    else:
                        if i_head > 0:
                            b_dk += read_rows(
                                dk_sum, (0, H * K, K, 1), 0, i_g, token, n_rows, o_k, K
                            )
                        write_rows(dk_sum, token, i_g, H, n_rows, b_dk, o_k, K)
                b_x = tl.dot(b_eye, b_q, input_precision=PREC)
                if do is not None:
                    for j in tl.range(values, num_stages=1):
                        if values > 1:
                            o_v = j * BV + tl.arange(0, BV)
                            b_do, b_S = (
                                read_rows(do, do_s, i_b, i_h, first, n_rows, o_v, V),
                                load_state(states, i_tile, o_k, o_v, K, V),
                            )
                        b_dq = tl.dot(b_do, tl.trans(b_S), b_dq, input_precision=PREC)
                    b_dq = tl.dot(b_M, b_k, b_dq * b_read[:, None], input_precision=PREC)
                    b_q_dq += tl.sum(b_x * b_dq, 1)
                if dq is not None:
                    if HELD:
                        write_rows(
                            dq,
                            token,
                            i_g,
                            H,
                            n_rows,
                            along(b_dq, b_x, b_q_norm, b_q_dq, K, L2NORM),
                            o_k,
                            K,
                        )
                    else:
                        if i_head > 0:
                            b_dq += read_rows(
                                dq_sum, (0, H * K, K, 1), 0, i_g, token, n_rows, o_k, K
                            )
                        write_rows(dq_sum, token, i_g, H, n_rows, b_dq, o_k, K)
        if not HELD:
            b_along_q += b_q_dq
            b_along_k += b_k_rest + b_k_part * b_power
        if dbeta is not None:
            if SUMS:
                b_dbeta = b_zv + b_k_part / b_digits
            else:
                if not TILED:
                    b_zvn *= reciprocal(b_strength)
                b_dbeta = strength_gradient(b_zvn, b_strength, NEG_EIGVAL)
            write_column(dbeta, token, i_h, HV, n_rows, b_dbeta)
        if dg is not None:
            gamma_here = tl.load(gamma + i_tile)
            b_dG = b_q_dq + b_k_part * b_power - b_k_rest
            b_dg = tl.cumsum(b_dG, 0, reverse=True) + (tl.sum(b_k_late, 0) + gamma_here * both)
            if ACTIVATE:
                b_logit = load_column(g, (g_b, g_t, g_h), i_b, i_h, first, n_rows, o_r)
                bias = 0.0
                if dt_bias is not None:
                    bias = tl.load(dt_bias + i_h).to(tl.float32)
                b_dg, b_log = gate_gradient(
                    b_dg,
                    b_logit,
                    bias,
                    load_rate(A_log, i_h),
                    tl.full((), lower_bound, tl.float32),
                    BOUNDED,
                )
                b_log, b_bias = tl.reduce(
                    (tl.where(o_r < n_rows, b_log, 0.0), tl.where(o_r < n_rows, b_dg, 0.0)),
                    0,
                    add_two,
                )
                if dA_log is not None:
                    tl.store(dA_log + i_tile, b_log)
                if ddt_bias is not None:
                    tl.store(ddt_bias + i_tile, b_bias)
            write_column(dg, token, i_h, HV, n_rows, b_dg)
    if not HELD:
        tl.debug_barrier()  # written by other threads
        p_row = rows + (i_t.to(tl.int64) * H + i_g) * (GROUP * 448) + o_r
        for i in tl.range(slices, num_stages=1):
            o_k = i * BK + tl.arange(0, BK)
            b_q, b_k = (
                read_rows(q, q_s, i_b, i_g, first, n_rows, o_k, K),
                read_rows(k, k_s, i_b, i_g, first, n_rows, o_k, K),
            )
            b_dq = read_rows(dq_sum, (0, H * K, K, 1), 0, i_g, token, n_rows, o_k, K)
            b_dk = read_rows(dk_sum, (0, H * K, K, 1), 0, i_g, token, n_rows, o_k, K)
            write_rows(
                dq,
                token,
                i_g,
                H,
                n_rows,
                along(b_dq, b_q.to(tl.float32), tl.load(p_row + 320), b_along_q, K, L2NORM),
                o_k,
                K,
            )
            write_rows(
                dk,
                token,
                i_g,
                H,
                n_rows,
                along(b_dk, b_k.to(tl.float32), tl.load(p_row + 256), b_along_k, K, L2NORM),
                o_k,
                K,
            )
