"""Compute decays and scores of a few chunks of h rows, and the backward of the scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kda_ops.problem import CHUNK

SMALLEST = {torch.float32: -87.0, torch.float64: -708.0}  # exp of these is still normal
_ABOVE = torch.full((CHUNK, CHUNK), -torch.inf, device="cpu").triu_(1)


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, elementwise where a has one row or one column."""
    if a.shape[-2] == 1:
        return (a.mT * b).sum(-2, keepdim=True)
    return a * b if a.shape[-1] == 1 else a @ b


def add_batched_product(x: Tensor, a: Tensor, b: Tensor, alpha: int = 1) -> Tensor:
    """Return x + alpha a @ b, in place of x ``[n, ., .]``."""
    if 1 in a.shape[-2:]:
        return x.add_(batched_product(a, b), alpha=alpha)
    return x.baddbmm_(a, b, alpha=alpha)


def _exp(x: Tensor) -> Tensor:
    """Compute exp(x) in place for x <= 0, with 0 instead of denormal results.

    Arithmetic with denormal numbers takes a CPU about 100 times as long.
    """
    return torch.threshold_(x, SMALLEST[x.dtype], -torch.inf).exp_()


class Slab:
    """Some chunks: q (scaled), k, v, beta, and their decays.

    `decay` is exp(G) and `tail` exp(G_n - G), [.., h, D]; `gamma` is exp(G_n). Each decay is the
    exponential of a sum of g, never of a difference of sums, so any gate is exact, -inf included.

    `levels` holds the partial sums for pairs of rows, one entry for each half = 1, 2, 4 .. h / 2,
    of shape ``[.., h / (2 half), 2, half, D]``. A block has 2 half rows; a is the last row of its
    first half. Rows j of the first half have the sum over (j, a], rows i of the second half the sum
    over (a, i]. Nothing reads a row after i.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor):
        self.q, self.k, self.v, self.beta, self.rank = q, k, v, beta, int(g.shape[-1] > 1)
        # in blocks of `half` rows: the sum up to each row, and the sum over the rows after it
        upto, after = g.clone(), torch.zeros_like(g)
        self.levels, half = [], 1
        while half < g.shape[-2]:
            halves_upto, halves_after = (
                upto.unflatten(-2, (-1, 2, half)),
                after.unflatten(-2, (-1, 2, half)),
            )
            self.levels.append(
                torch.stack([halves_after[..., 0, :, :], halves_upto[..., 1, :, :]], -3)
            )
            halves_after[..., 0, :, :] += halves_upto[..., 1, -1:, :]
            halves_upto[..., 1, :, :] += halves_upto[..., 0, -1:, :]
            half *= 2
        self.decay, self.tail = _exp(upto), _exp(after)
        self.gamma = self.decay[..., -1, :]


def _pair_decay(c: Slab) -> Tensor:
    """Return E_ij = exp(sum of g over (j, i]) for i >= j, else 0, as [.., h, h].

    Only for a decay of rank 0.
    """
    h = c.k.shape[-2]
    between = torch.diag_embed(c.k.new_zeros(c.k.shape[:-1])).add_(_ABOVE[:h, :h].to(c.k.dtype))
    for sums in c.levels:
        half = sums.shape[-2]
        _diagonal_blocks(between, 2 * half)[..., half:, :half] = (
            sums[..., 1, :, :] + sums[..., 0, :, :].mT
        )
    return _exp(between)


def _factors(c: Slab) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield for each level of the chunk: block size m, mask [m, m], factor f [.., h, K].

    A pair (j, i) belongs to the level at which j is in the first and i in the second half of one
    block. Then E_ij = f_i f_j, and both factors are at most 1. The diagonal m x m blocks hold all
    pairs of the level, and the mask selects them.
    """
    for sums in c.levels:
        half = sums.shape[-2]
        m = min(max(2 * half, 8), c.k.shape[-2])
        row = torch.arange(m)
        later = (row // half) % 2 == 1
        mask = (
            (row[:, None] // (2 * half) == row[None, :] // (2 * half))
            & later[:, None]
            & ~later[None, :]
        )
        yield m, mask, _exp(sums).flatten(-4, -2)


def _blocks(x: Tensor, m: int) -> Tensor:
    """View [.., h, K] as a batch of blocks of m rows."""
    return x.reshape(-1, m, x.shape[-1])


def _diagonal_blocks(x: Tensor, m: int) -> Tensor:
    """View the diagonal m x m blocks of [M, h, h], as [M, h // m, m, m]."""
    return (
        x.unflatten(-1, (-1, m)).unflatten(-3, (-1, m)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    )


def scores(c: Slab) -> tuple[Tensor, Tensor]:
    """Return the decayed scores of q with k for j <= i, and of k with k for j < i::

        qk_ij = sum_d q_id k_jd E_ijd;   kk_ij = sum_d k_id k_jd E_ijd

    Both are [.., h, h], zero elsewhere.
    """
    q, k, own = c.q, c.k, (c.q * c.k).sum(-1)  # the bits of this sum do not depend on h
    if not c.rank and k.shape[-2] > 1:
        E = _pair_decay(c)
        qk = (q @ k.mT).mul_(E).tril_(-1)  # zero times a product that overflows is NaN
        qk.diagonal(dim1=-2, dim2=-1).copy_(own)
        return qk, (k @ k.mT).mul_(E).tril_(-1)
    qk, kk = torch.diag_embed(own), k.new_zeros((*k.shape[:-1], k.shape[-2]))
    for m, mask, f in _factors(c):
        kf = _blocks(k * f, m)
        both = torch.cat([_blocks(q * f, m), kf], 1) @ kf.mT
        shape = (*k.shape[:2], -1, m, m)
        _diagonal_blocks(qk, m).add_(both[:, :m].where(mask, 0.0).view(shape))
        _diagonal_blocks(kk, m).add_(both[:, m:].where(mask, 0.0).view(shape))
    return qk, kk


def scores_backward(c: Slab, dP: Tensor, dL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the pairs j < i: two for the rows, one for the columns::

        sum_j dP_ij k_j E_ij;   sum_j dL_ij k_j E_ij;   sum_i (dP_ij q_i + dL_ij beta_i k_i) E_ij

    Each is [.., h, K].
    """
    q, k = c.q, c.k
    if not c.rank and k.shape[-2] > 1:
        E = _pair_decay(c)
        dP, dL = dP * E, dL * E
        return dP @ k, dL @ k, (dP.mT @ q).add_(dL.mT @ (c.beta * k))
    rows_q, rows_k, columns = torch.zeros_like(k), torch.zeros_like(k), torch.zeros_like(k)
    for m, mask, f in _factors(c):
        kf, qf = k * f, q * f
        d = (
            torch.cat([_diagonal_blocks(dP, m), _diagonal_blocks(dL, m)], -2)
            .where(mask.repeat(2, 1), 0.0)
            .reshape(-1, 2 * m, m)
        )
        rows = d @ _blocks(kf, m)
        rows_q.addcmul_(rows[:, :m].reshape(k.shape), f)
        rows_k.addcmul_(rows[:, m:].reshape(k.shape), f)
        columns.addcmul_(
            (d.mT @ torch.cat([_blocks(qf, m), _blocks(kf.mul_(c.beta), m)], 1)).view(k.shape), f
        )
    return rows_q, rows_k, columns
