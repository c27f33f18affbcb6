"""The part of the gradients that reads V alone, and the gradients of the scores for the kernels
that read K.
"""

import triton
import triton.language as tl

from kda_ops.backends.triton.fragment import pack
from kda_ops.backends.triton.gate import reciprocal
from kda_ops.backends.triton.gradient_tile import (
    load_row,
    locate_rows,
    read_rows,
    read_values,
    write_column,
)
from kda_ops.backends.triton.tile import load_tile, on_diagonal, widen


@triton.jit
def strength_gradient(b_zvn, b_beta, NEG_EIGVAL: tl.constexpr):
    """The gradient of the logit of beta from sum_v z v_new, which is beta times that of beta."""
    return b_zvn * (1.0 - b_beta * (0.5 if NEG_EIGVAL else 1.0))


@triton.jit
def pair_gradients(
    do,
    do_s,
    o,
    o_s,
    v,
    v_s,
    v_new,
    z,
    i_tile,
    i_b,
    i_h,
    first,
    n_rows,
    token,
    HV,
    scale,
    V: tl.constexpr,
    BV: tl.constexpr,
    TILED: tl.constexpr,
    SUMS: tl.constexpr,
    PREC: tl.constexpr,
):
    """Gradients of the scores and the part of v, all that reads V alone::

        scale dP on and below the diagonal, its transpose above it;   dL, likewise     [64, 64] fp32
        sum over V of z v [64], if SUMS, and of do o [64], if there is an o

    all of it times beta, but for dP and do o, if `z` is dv.
    Each triangle is a product of its own: a product is never transposed.
    """
    o_r = tl.arange(0, 64)
    lower = o_r[:, None] >= o_r[None, :]
    b_P = tl.zeros((64, 64), tl.float32)
    b_PT, b_L, b_LT = b_P, b_P, b_P
    b_zv = tl.zeros((64,), tl.float32)
    b_doo = b_zv
    for i in range((V + BV - 1) // BV):
        o_v = i * BV + tl.arange(0, BV)
        b_vn, b_z = (
            load_tile(v_new, i_tile, o_r, o_v, V),
            read_values(z, i_tile, token, i_h, HV, n_rows, o_v, V, TILED),
        )
        if SUMS:
            b_zv += tl.sum(
                widen(read_rows(v, v_s, i_b, i_h, first, n_rows, o_v, V)) * widen(b_z), 1
            )
        if do is not None:
            b_do = read_rows(do, do_s, i_b, i_h, first, n_rows, o_v, V)
            if o is not None:
                b_doo += tl.sum(
                    widen(b_do) * widen(read_rows(o, o_s, i_b, i_h, first, n_rows, o_v, V)), 1
                )
            b_P = tl.dot(b_do, tl.trans(b_vn), b_P, input_precision=PREC)
            b_PT = tl.dot(b_vn, tl.trans(b_do), b_PT, input_precision=PREC)
        b_L = tl.dot(b_z, tl.trans(b_vn), b_L, input_precision=PREC)
        b_LT = tl.dot(b_vn, tl.trans(b_z), b_LT, input_precision=PREC)
    b_P = tl.where(lower, b_P, b_PT) * scale
    return b_P, -tl.where(lower, b_L, b_LT), b_zv, b_doo


@triton.jit(do_not_specialize=["N", "T", "scale"])
def gradient_pairs(
    v,
    v_s,
    rows,
    do,
    do_s,
    o,
    o_s,
    v_new,
    z,
    cu_seqlens,
    dP,
    dL,
    dbeta,
    q_dot,
    k_dot,
    N,
    T,
    HV,
    scale,
    V: tl.constexpr,
    BV: tl.constexpr,
    TILED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    PREC: tl.constexpr,
):
    """Everything of one chunk and value head that reads V alone::

        dP = tril(scale do v_new^T)      dL = -strict_tril(z v_new^T)
            each with its transpose above the diagonal, [64, 64], packed
        q_dot = sum_v do o               k_dot = sum_v z (2 v_new - beta v)
            the products of unit q and k with their gradients [64]
        dbeta = sum_v z v_new / beta for a sigmoid, else its part sum_v z v [64]

    `z` is z if TILED; else it is dv = beta z, and dL is beta dL, which is what the gradients of q
    and k take. Apart from the kernel that reads K because the two need different registers, and so
    that slices of K find the pairs ready; that is 16 KB more to move.
    """
    i_h, i_t = tl.program_id(0) % HV, tl.program_id(0) // HV
    i_b, first, n_rows, live = locate_rows(cu_seqlens, i_t, N, T)
    i_tile, token = tl.program_id(0).to(tl.int64), i_b * T + first
    if (n_rows <= 0) | (live == 0):
        if dbeta is not None:
            write_column(dbeta, token, i_h, HV, n_rows, tl.zeros((64,), tl.float32))
        return
    o_r = tl.arange(0, 64)
    SUMS: tl.constexpr = dbeta is not None and not SIGMOID or k_dot is not None
    b_beta = load_row(rows, i_tile, 0)
    b_P, b_L, b_zv, b_doo = pair_gradients(
        do,
        do_s,
        o,
        o_s,
        v,
        v_s,
        v_new,
        z,
        i_tile,
        i_b,
        i_h,
        first,
        n_rows,
        token,
        HV,
        scale,
        V,
        BV,
        TILED,
        SUMS,
        PREC,
    )
    b_zvn = -on_diagonal(b_L)
    if not TILED:
        b_zvn *= reciprocal(b_beta)
    if q_dot is not None:
        tl.store(q_dot + i_tile * 64 + o_r, b_doo)
    if k_dot is not None:
        tl.store(k_dot + i_tile * 64 + o_r, 2.0 * b_zvn - (b_zv * b_beta if TILED else b_zv))
    if dbeta is not None:
        write_column(
            dbeta,
            token,
            i_h,
            HV,
            n_rows,
            strength_gradient(b_zvn, b_beta, NEG_EIGVAL) if SIGMOID else b_zv,
        )
    p_pair = i_tile * 4096 + tl.arange(0, 512)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(dP + p_pair, pack(b_P).to(dP.dtype.element_ty))
    tl.store(dL + p_pair, pack(b_L).to(dL.dtype.element_ty))
