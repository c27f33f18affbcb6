"""Form what KDA's gradients need from tensors with V channels: dP, dL, dbeta and two dot products.

`gradient_keys`, which reads the tensors with K channels, takes them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kda_ops.backends.triton.device.activations import reciprocal
from kda_ops.backends.triton.device.fragment import as_vectors
from kda_ops.backends.triton.device.gradient_chunk import (
    SQUARE,
    VECTOR,
    load_row,
    locate,
    read_rows,
    read_values,
    write_column,
)
from kda_ops.backends.triton.device.operands import BETA_KDA
from kda_ops.backends.triton.device.tile import CHUNK, load_tile, on_diagonal, widen


class Scores(NamedTuple):
    """P and L, or their gradients: [NT, HV, 64, 64] each."""

    P: Any
    L: Any


class Dots(NamedTuple):
    """Dot products of unit q and k with their gradients, [NT, HV, 64] fp32 each, or None."""

    q: Any
    k: Any


@triton.jit
def strength_gradient(b_zvn, b_beta, NEG_EIGVAL: tl.constexpr):
    """Return the gradient of the logit of beta from sum_v z v_new, which is beta dbeta.

    With s = sigmoid(x), beta = s has the slope beta (1 - beta), and 2 s has beta (1 - beta / 2).
    """
    return b_zvn * (1.0 - b_beta * (0.5 if NEG_EIGVAL else 1.0))


@triton.jit
def pair_gradients(
    v,
    do,
    o,
    v_new,
    z,
    at,
    i_tile,
    i_h,
    HV,
    scale,
    V: tl.constexpr,
    BV: tl.constexpr,
    TILED: tl.constexpr,
    SUMS: tl.constexpr,
    PREC: tl.constexpr,
):
    """Return the gradients of the scores and the sums over V::

        tril(scale do v_new^T), its transpose above the diagonal     [64, 64] fp32
        -tril(z v_new^T), likewise                                   [64, 64] fp32
        sum_v z v [64], if SUMS;   sum_v do o [64], if there is an o

    If `z` is dv = beta z, the second and the third contain beta. Each triangle is a product of its
    own, because a product is never transposed (docs/kernels/hazards.md, "Transposed results").
    """
    o_r = tl.arange(0, CHUNK)
    lower = o_r[:, None] >= o_r[None, :]
    b_P = tl.zeros((CHUNK, CHUNK), tl.float32)
    b_PT, b_L, b_LT = b_P, b_P, b_P
    b_zv = tl.zeros((CHUNK,), tl.float32)
    b_doo = b_zv
    for i in range((V + BV - 1) // BV):
        o_v = i * BV + tl.arange(0, BV)
        b_vn = load_tile(v_new, i_tile, o_r, o_v, V)
        b_z = read_values(z, at, i_tile, i_h, HV, o_v, V, TILED)
        if SUMS:
            b_zv += tl.sum(widen(read_rows(v, at, i_h, o_v, V)) * widen(b_z), 1)
        if do.pointer is not None:
            b_do = read_rows(do, at, i_h, o_v, V)
            if o.pointer is not None:
                b_doo += tl.sum(widen(b_do) * widen(read_rows(o, at, i_h, o_v, V)), 1)
            b_P = tl.dot(b_do, tl.trans(b_vn), b_P, input_precision=PREC)
            b_PT = tl.dot(b_vn, tl.trans(b_do), b_PT, input_precision=PREC)
        b_L = tl.dot(b_z, tl.trans(b_vn), b_L, input_precision=PREC)
        b_LT = tl.dot(b_vn, tl.trans(b_z), b_LT, input_precision=PREC)
    b_P = tl.where(lower, b_P, b_PT) * scale
    return b_P, -tl.where(lower, b_L, b_LT), b_zv, b_doo


@triton.jit(do_not_specialize=["N", "T", "scale"])
def gradient_pairs(
    v,
    factors,
    do,
    o,
    v_new,
    z,
    cu_seqlens,
    dscores,
    dbeta,
    dots,
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
    """Write all that one chunk and value head of KDA's gradient needs from V::

        dscores.P = tril(scale do v_new^T)   dscores.L = -strict_tril(z v_new^T)   [64, 64]
            each with its transpose above the diagonal, in the order of `fragment.as_vectors`
        dots.q = sum_v do o              dots.k = sum_v z (2 v_new - beta v)  [64] fp32
        dbeta = sum_v z v_new / beta; its part sum_v z v if TILED without SIGMOID      [64]

    With SIGMOID, dbeta goes through the sigmoid, to the logit (`strength_gradient`). With neither
    SIGMOID nor TILED, `gradient_small` overwrites dbeta where beta is small. dots are the dot
    products of unit q and k with their gradients, which are sums over V too (docs/maths.md).
    `z` is z if TILED, else dv = beta z. In the latter case dscores.L is beta dL, as the gradients
    of q and k need it.

    One kernel with `gradient_keys` would spill. All slices of K share the scores. In 16 bits, the
    scores of a chunk and head take 16 KB, written here and read by every slice.
    """
    i_h, i_t = tl.program_id(0) % HV, tl.program_id(0) // HV
    at = locate(cu_seqlens, i_t, N, T)
    i_tile = tl.program_id(0).to(tl.int64)
    if (at.n_rows <= 0) | (at.live == 0):
        if dbeta is not None:
            write_column(dbeta, at, i_h, HV, tl.zeros((CHUNK,), tl.float32))
        return
    o_r = tl.arange(0, CHUNK)
    SUMS: tl.constexpr = dbeta is not None and not SIGMOID and TILED or dots.k is not None
    b_beta = load_row(factors, i_tile, BETA_KDA)
    b_P, b_L, b_zv, b_doo = pair_gradients(
        v, do, o, v_new, z, at, i_tile, i_h, HV, scale, V, BV, TILED, SUMS, PREC
    )
    b_zvn = -on_diagonal(b_L)
    if not TILED:
        b_zvn *= reciprocal(b_beta)
    if dots.q is not None:
        tl.store(dots.q + i_tile * CHUNK + o_r, b_doo)
    if dots.k is not None:
        tl.store(dots.k + i_tile * CHUNK + o_r, 2.0 * b_zvn - (b_zv * b_beta if TILED else b_zv))
    if dbeta is not None:
        if SIGMOID:
            b_dbeta = strength_gradient(b_zvn, b_beta, NEG_EIGVAL)
        else:
            b_dbeta = b_zv if TILED else b_zvn * reciprocal(b_beta)
        write_column(dbeta, at, i_h, HV, b_dbeta)
    o_pair = i_tile * SQUARE + tl.arange(0, SQUARE // VECTOR)[:, None] * VECTOR
    o_pair += tl.arange(0, VECTOR)[None, :]
    tl.store(dscores.P + o_pair, as_vectors(b_P).to(dscores.P.dtype.element_ty))
    tl.store(dscores.L + o_pair, as_vectors(b_L).to(dscores.L.dtype.element_ty))
