"""What finishes GDN's walk: dg, dbeta and the rows of last chunks, from sums that are made up."""

import pytest
import torch
import triton.language as tl

from kda_ops.backends.triton.device.activations import Flags
from kda_ops.backends.triton.device.gate import GIVEN
from kda_ops.backends.triton.device.operands import Gate, strided
from kda_ops.backends.triton.plans.launch import launch
from kda_ops.backends.triton.stages.gradient_gdn import HeadGradients
from kda_ops.backends.triton.stages.reverse_walk import SMALL, finish_walk

D, HV, FLOATS, LEAST = 128, 2, 2048, 2.0**-64
LENGTHS = (70, 0, 64, 5)
TAIL = 9  # tokens of no sequence


@pytest.mark.parametrize("tiled, given", ((False, False), (True, False), (False, True)))
def test_sums_and_last_rows_become_gradients(tiled, given):
    T, N = sum(LENGTHS) + TAIL, len(LENGTHS)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    visited = T // 64 + N + 1
    gen = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=gen)

    sums, rows, gamma = randn(visited, HV, FLOATS), randn(visited, HV, 7, 64), randn(visited, HV, 1)
    rows[:, :, 2] = torch.rand(visited, HV, 64, generator=gen)
    if given:
        # zero, below LEAST, below SMALL, just below SMALL, and SMALL itself
        for i, small in enumerate((0.0, 2.0**-70, 2.0**-30, 2.0**-10 - 2.0**-20, 2.0**-10)):
            rows[:, 0, 2, i::7] = small
    tails, v = randn(N, HV, 3, 64, D), randn(1, T, HV, D)
    walked = [randn(1, T, HV, D) for _ in range(3)]
    dq, dk, dv = (x.clone() for x in walked)
    dg, dbeta = (torch.full((1, T, HV), torch.nan) for _ in range(2))
    launch(
        finish_walk,
        visited * HV,
        v.device,
        **dict(sums=sums, tails=tails, factors=rows, gamma=gamma, v=strided(v), dv=dv),
        **dict(g=None, g_b=0, g_t=0, g_h=0, gate=Gate(None, None, 0.0, GIVEN)),
        grads=HeadGradients(dq, dk, None, None, dg, dbeta, None, None),
        cu_seqlens=ends,
        flags=Flags(*[tl.constexpr(False)] * 3),
        **dict(N=N, T=T, HV=HV, D=D, TILED=tiled, GIVEN=given, GROUPED=False),
        LEAST=LEAST,
    )
    for n, (begin, end) in enumerate(zip(ends.tolist(), ends[1:].tolist())):
        for h in range(HV):
            for c in range(-(-(end - begin) // 64)):
                first = begin + 64 * c
                count, i = min(64, end - first), begin // 64 + n + c
                here = slice(first, first + count)
                dq_x, dk_x, z = (
                    (walked[j][0, here, h] if count == 64 else tails[n, h, j, :count])
                    for j in range(3)
                )
                beta, x = rows[i, h, 2, :count], sums[i, h]
                torch.testing.assert_close(dq[0, here, h], dq_x, rtol=0, atol=0)
                torch.testing.assert_close(dk[0, here, h], dk_x, rtol=0, atol=0)
                want, least = z * beta[:, None] if tiled else z, beta.clamp(min=LEAST)
                if given:  # the walk wrote max(beta, LEAST) z
                    want = z * (beta / least)[:, None]
                torch.testing.assert_close(dv[0, here, h], want, atol=0, rtol=1e-6)
                if given:
                    small = (z * v[0, here, h]).sum(1) + x[384 : 384 + count]
                    far = x[64 : 64 + count] / beta**2
                    want = torch.where(beta < SMALL.value, small / least, far)
                else:
                    want = x[64 : 64 + count] * (1 - beta) / (1.0 if tiled else beta)
                torch.testing.assert_close(dbeta[0, here, h], want, rtol=1e-5, atol=1e-5)
                want = x[:64].flip(0).cumsum(0).flip(0)[:count]
                want = want + x[128 : 126 + 2 * count].sum() + gamma[i, h] * x[256:384].sum()
                torch.testing.assert_close(dg[0, here, h], want, rtol=1e-5, atol=1e-4)
    for x in (dq, dk, dv, dg, dbeta):
        assert not x[0, ends[-1] :].any()
