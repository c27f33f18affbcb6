"""Run GDN's walk over the chunks in reverse on the emulator, with what comes before and after it.

A twin of the kernels makes the tile, the trace and what enters runs. `finish_walk` and
`gather_heads`, which are kernels of Triton with tests of their own, are written in torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from kda_ops.backends.reference import Reference
from kda_ops.backends.triton.stages import gradient, reverse_walk
from kda_ops.backends.triton.stages.runs import Runs
from kda_ops.problem import CHUNK, Problem
from kda_ops.sequences import Chunks
from kda_ops.stages import GRADIENTS, Tile, Trace
from tests.support.calls import Results
from tests.support.cases import Case, Tensors
from tests.support.emulated import emulated

EPSILON = 1e-6  # of the norm


def walked(
    case: Case,
    inputs: Tensors | None = None,
    cotangents: tuple[Tensor, Tensor] | None = None,
    **options,
) -> Results:
    """Return the gradients of a call whose backward walks, by name."""
    p = Problem.parse(0, *(inputs or case.inputs()).values(), **case.flags())
    twin = Reference(torch.float32, case.dtype)
    tile = twin.prepare(p)
    trace = twin.scan(p, tile, None, None, keep=True)
    assert trace is not None and tile.A is not None and tile.P is not None
    # the twin has rounded them, but keeps them in fp32
    A, P, states, v_new = (x.to(case.dtype) for x in (tile.A, tile.P, trace.states, trace.v_new))
    runs = partial(enter_runs, whole=tile)
    tile = Tile(A, P, gamma=tile.gamma[..., :1].contiguous(), factors=factors_of(p, twin))
    trace = Trace(states, v_new)
    do, dfinal = cotangents or case.cotangents()
    names = {"state" if n == "initial_state" else n: n for n in GRADIENTS}
    need = frozenset(n for field, n in names.items() if getattr(p, field) is not None)
    others = {"finish_walk": finish_walk, "gather_heads": gather_heads}
    with (
        patch.object(reverse_walk, "enter_runs", runs),
        emulated(reverse_walk, gradient, others=others, **options),
    ):
        found = reverse_walk.reverse_walk(p, tile, trace, do, dfinal if case.final else None, need)
    return {"d" + n: getattr(found, n) for n in GRADIENTS if n in need}


def enter_runs(
    p: Problem, tile: Tile, runs: Runs, do: Tensor, dfinal: Tensor | None, *, whole: Tile
) -> Tensor:
    """Return the gradient of the state that leaves each run, NaN where there is no run."""
    given = None if dfinal is None else p.as_kv(dfinal)  # in the caller's layout
    exact = Reference(torch.float32)  # the states between runs are not rounded
    dstates, chunks = exact.reverse_scan(p, whole, do, given, frozenset()).dstates, Chunks(p)
    found = torch.full((runs.pieces, p.HV, p.K, p.V), torch.nan)
    tokens = runs.length * CHUNK
    for n, (begin, count) in enumerate(zip(chunks.offsets, chunks.count)):
        run = n * -(-p.T // tokens) if p.cu_seqlens is None else begin // tokens + n
        found[run] = 0.0 if dfinal is None else dfinal[n]  # of an empty sequence
        for i, start in enumerate(range(0, count, runs.length)):
            last = min(start + runs.length, count) - 1
            found[run + i] = dstates[chunks.first[n] + last]
    return found


def factors_of(p: Problem, twin: Reference) -> Tensor:
    """Return the factors of each row [NT, HV, 7, C], as `operands` lists them."""
    _, _, _, _, _, g, beta = twin._chunked(p)
    G, after = g[..., 0].cumsum(-1), g[..., 0].flip(-1).cumsum(-1).flip(-1) - g[..., 0]
    n_q, n_k = (norms(p, x) for x in (p.q, p.k))
    to_start, to_end = G.exp(), after.exp()
    rows = n_k * to_start, n_k * to_end, beta[..., 0], p.scale * n_q * to_start, n_k, n_q
    return torch.stack((*rows, G / torch.log(torch.tensor(2.0))), 2).contiguous()


def norms(p: Problem, x: Tensor) -> Tensor:
    """Return the inverse norm of each row of q or k [NT, HV, C], 1 without l2norm."""
    squares = Chunks(p).split(x.float().square().sum(-1), torch.float32)
    inverse = torch.rsqrt(squares + EPSILON) if p.l2norm else torch.ones_like(squares)
    return inverse.repeat_interleave(p.HV // p.H, 1)


def chunks_of(cu_seqlens: Tensor | None, N: int, T: int) -> Iterator[tuple[int, int, slice]]:
    """Yield the sequence, the tile and the tokens of each chunk."""
    ends = [T * n for n in range(N + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    for n, (begin, end) in enumerate(zip(ends, ends[1:])):
        tile = n * -(-T // CHUNK) if cu_seqlens is None else begin // CHUNK + n
        for first in range(begin, end, CHUNK):
            yield n, tile + (first - begin) // CHUNK, slice(first, min(first + CHUNK, end))


def finish_walk(
    *, sums, tails, factors, gamma, v, grads, dv, cu_seqlens, N, T, HV, flags, D, GROUPED, **forms
) -> None:
    """Make dg and dbeta of the walk's sums, and bring the rows of last chunks to their place."""
    walked = [x.view(-1, HV, D) for x in (grads.dq, grads.dk, dv)]
    tails, given_v = tails.view(N, HV, -1, CHUNK, D), v.pointer.reshape(-1, HV, D).float()
    dg, dbeta = (None if x is None else x.view(-1, HV).zero_() for x in (grads.dg, grads.dbeta))
    sums, live = sums.view(-1, HV, CHUNK * CHUNK // 2), torch.zeros(len(given_v), dtype=torch.bool)
    for n, i, tokens in chunks_of(cu_seqlens, N, T):
        live[tokens] = True
        count = tokens.stop - tokens.start
        for h in range(HV):
            x, beta = sums[i, h], factors[i, h, 2, :count]
            if count < CHUNK:
                for y, tail in zip(walked[2:] if GROUPED else walked, tails[n, h]):
                    y[tokens, h] = tail[:count]
            z = walked[2][tokens, h].float()
            if dbeta is not None:
                zv = (z * given_v[tokens, h]).sum(1)
                dbeta[tokens, h] = dbeta_of(x, zv, beta, count, flags, **forms)
            walked[2][tokens, h] = z * dv_over_z(beta, **forms)[:, None]
            if dg is not None:
                whole = x[128 : 126 + 2 * count].sum() + gamma[i, h, 0] * x[256:384].sum()
                dg[tokens, h] = x[:CHUNK].flip(0).cumsum(0).flip(0)[:count] + whole
    for y in walked:
        y[~live] = 0.0


def dv_over_z(beta: Tensor, TILED: bool, GIVEN: bool, LEAST: float, **others) -> Tensor:
    """Return what the walk has left out of dv."""
    if TILED:
        return beta
    small = beta / LEAST if GIVEN else beta
    return torch.where(beta.abs() < LEAST, small, 1.0) if GIVEN else torch.ones_like(beta)


def dbeta_of(
    x: Tensor, zv: Tensor, beta: Tensor, count: int, flags, TILED, GIVEN, LEAST, **others
) -> Tensor:
    """Return the gradient of beta, or of its logit, from the walk's sums x."""
    by_v_new = x[CHUNK : CHUNK + count]
    if GIVEN:
        small = (zv + x[384 : 384 + count]) / beta.clamp(min=LEAST)
        far = by_v_new / beta**2
        return torch.where(beta < reverse_walk.SMALL.value, small, far)
    strength = by_v_new if TILED else by_v_new / beta
    return strength * (1.0 - beta / 2 if flags.NEG_EIGVAL.value else 1.0 - beta)


def gather_heads(*, dy: Tensor, dx: Tensor, H: int, HV: int, K: int, **sizes) -> None:
    """Sum the gradients of the value heads of each key head."""
    dx.copy_(dy.view(*dx.shape[:2], H, HV // H, K).sum(3))
