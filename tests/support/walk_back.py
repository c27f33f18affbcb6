"""Run KDA's training walk on the emulator, forward and back, with what comes after it.

`finish_back` and `gather_heads`, which are kernels of Triton, are written in torch here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.backends.triton.device.gate import GIVEN
from kda_ops.backends.triton.plans.descriptors import fit_call, fit_state, fit_tokens
from kda_ops.backends.triton.stages import gradient, walk, walk_back
from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS
from tests.support.calls import Results
from tests.support.cases import Case, Tensors
from tests.support.emulated import emulated
from tests.support.reverse_walk import gather_heads
from tests.support.walk_training import ROWS, spans


def trained_back(
    case: Case,
    inputs: Tensors | None = None,
    cotangents: tuple[Tensor, Tensor] | None = None,
    **options,
) -> Results:
    """Return the gradients of a call by name."""
    p = fit_call(Problem.parse(1, *(inputs or case.inputs()).values(), **case.flags()))
    do, dfinal = cotangents or case.cotangents()
    names = {"state" if n == "initial_state" else n: n for n in GRADIENTS}
    need = frozenset(n for field, n in names.items() if getattr(p, field) is not None)
    others = {"finish_back": finish_back, "gather_heads": gather_heads}
    with torch.no_grad(), emulated(walk, walk_back, gradient, others=others, **options):
        kept = walk.walk_training(p, p.new_output(), p.new_final_state())
        dfinal = fit_state(dfinal if case.final else None)
        found = walk_back.walk_back(p, kept, fit_tokens(p, do), dfinal, need)
    return {"d" + n: getattr(found, n) for n in GRADIENTS if n in need}


def finish_back(
    *,
    sums,
    tails,
    ends,
    y,
    g,
    beta,
    gate,
    cu_seqlens,
    dq,
    dk,
    dv,
    dg,
    dbeta,
    dA_log,
    ddt_bias,
    T,
    HV,
    flags,
    D,
    **others,
) -> None:
    """Finish the gradients as the kernel does, but for a given beta that is small, which gets NaN.

    The walk must have written y of their blocks.
    """
    B = len(dq)
    p = type("P", (), dict(cu_seqlens=cu_seqlens, T=T, B=B))
    flat = [x.view(B * T, HV, D) for x in (dq, dk, dv, dg)]
    live, total = torch.zeros(B * T, dtype=torch.bool), torch.zeros(B * T, HV)
    b = None if dbeta is None else beta.pointer.float().reshape(B * T, HV)
    for n, (row, begin, end, _, block) in enumerate(spans(p)):
        first, last = row * T + begin, row * T + end
        live[first:last] = True
        if rest := (end - begin) % ROWS:
            for i, x in enumerate(flat):
                x[last - rest : last] = (ends[n] if i == 3 else tails[n, :, i])[:, :rest].transpose(
                    0, 1
                )
        for i, t in enumerate(range(first, last, ROWS)):
            here = slice(t, min(t + ROWS, last))
            if sums is not None:
                total[here] = sums[block + i, :, : here.stop - t].T
            if y is not None:
                small = b[here].abs() < walk_back.SMALL.value
                assert not y[block + i][small.any(0)].isnan().any()
    for x in flat:
        x[~live] = 0.0
    live = live.view(B, T, 1)
    if gate.kind != GIVEN:
        rate = 1.0 if gate.A_log is None else gate.A_log.double().exp().view(HV, 1)
        bias = 0.0 if gate.dt_bias is None else gate.dt_bias.double().view(HV, D)
        x = torch.where(live[..., None], g.pointer.double(), 0.0) + bias
        s = (rate * x).sigmoid()
        dx = torch.where(live[..., None], dg.double() * (s * (1.0 - s) * rate * gate.bound), 0.0)
        for parts, whole in ((dA_log, (dx * x).sum((0, 1, 3))), (ddt_bias, dx.sum((0, 1)))):
            if parts is not None:
                parts.zero_()
                parts[0] = whole.view(parts[0].shape)
        dg.copy_(dx)
    if dbeta is not None:
        if flags.SIGMOID.value:
            most = 2.0 if flags.NEG_EIGVAL.value else 1.0
            b = b.sigmoid() * most
            db = total / b * (1.0 - b / most)
        else:
            db = total / torch.where(b.abs() < walk_back.SMALL.value, torch.nan, b * b)
        dbeta.copy_(torch.where(live, db.view(B, T, HV), 0.0))
