"""What KDA's walk keeps in training, by definition: A' and P, states and u of each 32 rows."""

import torch
from torch import Tensor

from kda_ops.backends.triton.stages import walk
from kda_ops.problem import Problem
from kda_ops.sequences import count_chunks

ROWS = 32
LIMIT = 2e-2  # of the largest entry of a tensor; operands are bf16, which rounds by 2^-9
RMS = 6e-3  # ours is 2 to 4e-3, of the root of the mean square


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


def define(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return A' and P [.., 32, 64], states and u of the blocks of `kept_blocks`, in float64."""
    q, k, v, g = (x.double().cpu() for x in (p.q, p.k, p.v, p.g))
    beta = torch.ones(v.shape[:3], dtype=torch.float64) if p.beta is None else p.beta.double().cpu()
    if p.l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if p.sigmoid_beta:
        beta = beta.sigmoid() * (2.0 if p.neg_eigval else 1.0)
    if p.activate_gate:
        bias = 0.0 if p.dt_bias is None else p.dt_bias.double().cpu().view(p.HV, -1)
        rate = 1.0 if p.A_log is None else p.A_log.double().cpu().view(-1, 1).exp()
        g = p.lower_bound * (rate * (g + bias)).sigmoid()
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
            i = torch.arange(ROWS)
            later = (i[:, None] >= i)[..., None]
            E = torch.where(later, G[:, :, None] - G[:, None], -torch.inf).exp()
            P = p.scale * torch.einsum("hid,hjd,hijd->hij", b_q, b_k, E)
            L = b_b * torch.einsum("hid,hjd,hijd->hij", b_k, b_k, E).tril(-1)
            A = torch.linalg.solve_triangular(
                torch.eye(ROWS, dtype=L.dtype) + L, torch.diag_embed(b_b[..., 0]), upper=False
            )
            states.append(S.mT)
            u = A @ (b_v - (b_k * G.exp()) @ S)
            last = G[:, -1:]
            S = last.exp().mT * S + (b_k * (last - G).exp()).mT @ u
            APs.append(torch.cat([A, P], -1))
            us.append(u)
    empty = torch.zeros(0, p.HV, 1, 1)
    return tuple(torch.stack(x) if x else empty for x in (APs, states, us))


def assert_kept(p: Problem, AP: Tensor, S: Tensor, u: Tensor) -> None:
    """Hold what the walk keeps, and what is made again of it, to the definition."""
    blocks = kept_blocks(p)
    assert AP.shape == (count_chunks(p), p.HV, 64, 64)
    assert S.shape == (count_chunks(p, ROWS), p.HV, p.V, p.K)
    assert u.shape == (count_chunks(p, ROWS), p.HV, ROWS, p.V)
    if not blocks:
        return
    firsts = {block: first for *_, first in spans(p) for block in range(first, S.shape[0])}
    half = [(block - firsts[block]) % 2 for _, block in blocks]
    numbers = [block for _, block in blocks]
    tiles = torch.stack([AP[c, :, h * ROWS : h * ROWS + ROWS] for (c, _), h in zip(blocks, half)])
    want_AP, want_S, want_u = define(p)
    pairs = {
        "A'": (tiles[..., :ROWS], want_AP[..., :ROWS]),
        "P": (tiles[..., ROWS:].double() * walk.factor_of_P(p), want_AP[..., ROWS:]),
        "states": (S[numbers], want_S),
        "u": (u[numbers], want_u),
    }
    for name, (got, want) in pairs.items():
        wrong = got.double().cpu() - want
        size = want.square().mean().sqrt()
        assert wrong.square().mean().sqrt() <= RMS * size, (
            name,
            wrong.square().mean().sqrt() / size,
        )
        assert wrong.abs().max() <= LIMIT * want.abs().max(), name
