"""Chunks of h rows, a few at a time: their decays, the scores of their pairs, and the backward of
those.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kda_ops.problem import CHUNK

SMALLEST = {torch.float32: -87.0, torch.float64: -708.0}  # exp of it is still a normal number
_ABOVE = torch.full((CHUNK, CHUNK), -torch.inf).triu_(1)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, elementwise where a has one row or one column."""
    if a.shape[-2] == 1:
        return (a.mT * b).sum(-2, keepdim=True)
    return a * b if a.shape[-1] == 1 else a @ b


def add_product(x: Tensor, a: Tensor, b: Tensor, alpha: int = 1) -> Tensor:
    """Return x + alpha a @ b, in place of x ``[n, ., .]``."""
    if 1 in a.shape[-2:]:
        return x.add_(product(a, b), alpha=alpha)
    return x.baddbmm_(a, b, alpha=alpha)


def _exp(x: Tensor) -> Tensor:
    """exp(x) in place for x <= 0, with 0 for what could only be a denormal number: those cost a CPU
    a hundred times the time.
    """
    return torch.threshold_(x, SMALLEST[x.dtype], -torch.inf).exp_()


class Slab:
    """Some chunks: q (scaled), k, v, beta, their decays exp(G) and exp(G_n - G), [.., h, D], and
    gamma = exp(G_n).

    Decays are formed by sums of g alone, never by differences, so any gate is exact, -inf included.
    `levels` holds the sums that pairs of rows are made of: at the level of a half of 1, 2, 4 .. h /
    2 rows, ``[.., h / (2 half), 2, half, D]``, with a the end of the earlier half of a block of 2
    half rows, sum (j, a] for the earlier rows j and sum (a, i] for the later rows i. No row after i
    is read.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor):
        self.q, self.k, self.v, self.beta, self.rank = q, k, v, beta, int(g.shape[-1] > 1)
        # inside blocks of `half` rows: the sum up to each row, and the sum of the rows after it
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
    """E_ij = exp(sum of g over (j, i]) for i >= j, else 0, for a decay of rank 0: [.., h, h]."""
    h = c.k.shape[-2]
    between = torch.diag_embed(c.k.new_zeros(c.k.shape[:-1])).add_(_ABOVE[:h, :h].to(c.k.dtype))
    for sums in c.levels:
        half = sums.shape[-2]
        _diagonal_blocks(between, 2 * half)[..., half:, :half] = (
            sums[..., 1, :, :] + sums[..., 0, :, :].mT
        )
    return _exp(between)


def _factors(c: Slab) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each level of the chunk: the size m of the diagonal blocks that hold its pairs, their
    mask [m, m], and the factor f [.., h, K].

    A pair (j, i) belongs to the level where i is in the later and j in the earlier half of one
    block: E_ij = f_i f_j, both at most 1.
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
    """[.., h, K] as a batch of m-row blocks."""
    return x.reshape(-1, m, x.shape[-1])


def _diagonal_blocks(x: Tensor, m: int) -> Tensor:
    """[M, h, h] as its diagonal m x m blocks [M, h // m, m, m], a view."""
    return (
        x.unflatten(-1, (-1, m)).unflatten(-3, (-1, m)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    )


def scores(c: Slab) -> tuple[Tensor, Tensor]:
    """sum_d q_id k_jd E_ijd for j <= i, and sum_d k_id k_jd E_ijd for j < i."""
    q, k, own = c.q, c.k, (c.q * c.k).sum(-1)  # a sum whose bits the height does not change
    if not c.rank and k.shape[-2] > 1:
        E = _pair_decay(c)
        qk = (q @ k.mT).mul_(E)
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
    """sum_j dP_ij k_j E_ij and sum_j dL_ij k_j E_ij for the rows, sum_i (dP_ij q_i + dL_ij beta_i
    k_i) E_ij for the columns; only j < i.
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
