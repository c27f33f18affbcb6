"""What KDA's walk keeps in training, by definition: A' and P, states and u of each 32 rows."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kda_ops.backends.triton.stages import walk
from kda_ops.problem import Problem
from kda_ops.sequences import count_chunks
from tests.support.closeness import NORMS

ROWS = 32
CENTRE = 115.0  # factors of rows lie around 2^-115, so that bf16 holds them and their inverses


def spans(p: Problem) -> list[tuple[int, int, int, int, int]]:
    """Return batch row, first token, end, first chunk of 64 and first block of 32 per sequence."""
    if p.cu_seqlens is None:
        chunks, blocks = -(-p.T // 64), -(-p.T // ROWS)
        return [(n, 0, p.T, n * chunks, n * blocks) for n in range(p.B)]
    at = p.cu_seqlens.tolist()
    return [(0, a, b, a // 64 + n, a // ROWS + n) for n, (a, b) in enumerate(zip(at, at[1:]))]


def kept_blocks(p: Problem) -> list[tuple[int, int]]:
    """Return the chunk and the number of each 32 rows that have a token."""
    return [
        (chunk + i // 2, block + i)
        for _, a, b, chunk, block in spans(p)
        for i in range(-(-(b - a) // ROWS))
    ]


def define(p: Problem, narrow: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return A' and P [.., 32, 64], states and u of the blocks of `kept_blocks`, in float64.

    `narrow` rounds each operand of a product and each result as the kernels do. If it rounds
    nothing, this is the definition.
    """
    q, k, v, g = (x.double().cpu() for x in (p.q, p.k, p.v, p.g))
    beta = torch.ones(v.shape[:3], dtype=torch.float64) if p.beta is None else p.beta.double().cpu()
    if p.l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if p.sigmoid_beta:
        beta = beta.sigmoid() * (2.0 if p.neg_eigval else 1.0)
    if p.gate.inside:
        bias = 0.0 if p.dt_bias is None else p.dt_bias.double().cpu().view(p.HV, -1)
        rate = 1.0 if p.A_log is None else p.A_log.double().cpu().view(-1, 1).exp()
        g = p.gate.bound * (rate * (g + bias)).sigmoid()
    q, k = (x.repeat_interleave(p.HV // p.H, 2) for x in (q, k))
    APs, states, us = [], [], []
    for n, (row, a, b, _, _) in enumerate(spans(p)):
        S = torch.zeros(p.HV, p.K, p.V, dtype=torch.float64)
        if p.state is not None:
            S = (p.state[n].mT if p.transposed else p.state[n]).double().cpu()
        for t in range(a, b, ROWS):
            # [HV, rows, .], with zeros for rows past the end
            x = [
                y[row, t : min(t + ROWS, b)].transpose(0, 1) for y in (q, k, v, g, beta[..., None])
            ]
            missing = ROWS - x[0].shape[1]
            x = [torch.nn.functional.pad(y, (0, 0, 0, missing)) for y in x]
            b_q, b_k, b_v, b_g, b_b = x
            G = b_g.cumsum(1)
            D = G / math.log(2.0)
            early = narrow(b_k * torch.exp2(-CENTRE - D)).mT
            late_q, late_k = (narrow(x * torch.exp2(D + CENTRE)) for x in (b_q, b_k))
            P = p.scale * narrow(late_q @ early).tril()
            L = b_b * (late_k @ early).tril(-1)
            A = torch.linalg.solve_triangular(
                torch.eye(ROWS, dtype=L.dtype) + L, torch.diag_embed(b_b[..., 0]), upper=False
            )
            lost, A = b_b - narrow(b_b), narrow(A)  # of beta on the diagonal, given back to u
            states.append(narrow(S).mT)
            w = narrow(A @ late_k * 2.0**-CENTRE)
            u = narrow(A @ b_v + lost * b_v - w @ narrow(S))
            last = G[:, -1:]
            S = last.exp().mT * S + narrow(b_k * (last - G).exp()).mT @ u
            APs.append(torch.cat([A, P], -1))
            us.append(u)
    empty = torch.zeros(0, p.HV, 1, 1)
    return tuple(torch.stack(x) if x else empty for x in (APs, states, us))


def assert_kept(p: Problem, AP: Tensor, S: Tensor, u: Tensor, rms: float = 2.0) -> None:
    """Hold what the walk keeps, and what is made again of it, to twice the error of the twin.

    The emulator rounds what the twin rounds, so there the root mean square needs no factor of two.
    """
    blocks = kept_blocks(p)
    assert AP.shape == (count_chunks(p), p.HV, ROWS, 128)
    AP = AP.view(*AP.shape[:2], 2, ROWS, 64)
    assert S.shape == (count_chunks(p, ROWS), p.HV, p.V, p.K)
    assert u.shape == (count_chunks(p, ROWS), p.HV, ROWS, p.V)
    if not blocks:
        return
    firsts = {block: first for *_, first in spans(p) for block in range(first, S.shape[0])}
    half = [(block - firsts[block]) % 2 for _, block in blocks]
    numbers = [block for _, block in blocks]
    tiles = torch.stack([AP[c, :, h] for (c, _), h in zip(blocks, half)])
    exact = parts(*define(p, lambda x: x))
    twin = parts(*define(p, lambda x: x.bfloat16().double()))
    got = parts(tiles.double().cpu(), S[numbers].double().cpu(), u[numbers].double().cpu())
    got["P"] = got["P"] * walk.factor_of_P(p)
    for name, want in exact.items():
        for norm, size in NORMS.items():
            error, share = size(got[name] - want), size(twin[name] - want)
            assert error <= (rms if norm == "rms" else 2.0) * share, (name, norm, error / share)


def parts(AP: Tensor, S: Tensor, u: Tensor) -> dict[str, Tensor]:
    """Return the tensors by name, A' and P apart."""
    return {"A'": AP[..., :ROWS], "P": AP[..., ROWS:], "states": S, "u": u}
