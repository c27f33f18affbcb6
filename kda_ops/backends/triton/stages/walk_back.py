"""Run KDA's backward as two walks: forward again for the states, then back for the gradients.

Here is the launch of the second, `reverse_walk_kda`; the first is `walk.states`.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from kda_ops.backends.triton.device.gate import flags_of
from kda_ops.backends.triton.device.operands import GateWeights, strided
from kda_ops.backends.triton.device.tile import dense
from kda_ops.backends.triton.plans.descriptors import has_gluon, tokens
from kda_ops.backends.triton.plans.launch import (
    as_kv,
    columns_of,
    launch,
    new,
    shape_of,
    strides_of,
    total,
)
from kda_ops.backends.triton.stages.gradient import gather_gradient, gradient_like
from kda_ops.backends.triton.stages.walk import HALF, factor_of_P, states, tiles
from kda_ops.problem import CHUNK, Problem
from kda_ops.stages import Gradients

KERNEL = import_module("kda_ops.backends.triton.stages.reverse_walk_kda") if has_gluon() else None


def walk_back(
    p: Problem, AP: Tensor, do: Tensor, dfinal_state: Tensor | None, need: frozenset[str]
) -> Gradients:
    """Return the gradients named in `need`, from what `walk.walk_training` kept."""
    assert KERNEL is not None and p.g is not None  # as `walk.trains` has checked
    q, grouped = p.q, p.HV > p.H
    S, u = states(p, AP)
    dv, dg = new(q, "dv", shape_of(p.v)), gradient_like(p, "g", need | {"g"})
    # Value heads of one key head are summed afterwards.
    heads, name = (p.B, p.T, p.HV, p.K), "_heads" if grouped else ""
    dq, dk = new(q, "dq" + name, heads), new(q, "dk" + name, heads)
    dbeta = gradient_like(p, "beta", need)
    # the sums of each sequence and each half of its steps
    dA_log = ddt_bias = None
    if p.A_log is not None and "A_log" in need:
        dA_log = new(q, "dA_log_parts", (2 * p.N * p.K, p.HV), torch.float32)
    if p.dt_bias is not None and "dt_bias" in need:
        ddt_bias = new(q, "ddt_bias_parts", (2 * p.N, p.HV, p.K), torch.float32)
    dinitial = None
    if p.state is not None and "initial_state" in need:
        wide = (p.V, p.K) if p.transposed else (p.K, p.V)
        dinitial = as_kv(p, new(q, "dinitial_state", (p.N, p.HV, *wide), torch.float32))
    dfinal = None if dfinal_state is None or dfinal_state.dim() == 1 else as_kv(p, dfinal_state)
    beta_b, beta_t, beta_h = columns_of(p.beta)
    launch(
        KERNEL.reverse_walk_kda,
        (p.N + (p.cu_seqlens is not None)) * p.HV,
        q.device,
        q_d=tokens(p, q, HALF),
        k_d=tokens(p, p.k, HALF),
        g_d=tokens(p, p.g, HALF),
        do_d=tokens(p, do, HALF, 64),
        u_d=tiles(u, HALF, p.V),
        S_d=tiles(S, p.V, p.K),
        AP_d=tiles(AP, HALF, CHUNK),
        dq_d=tokens(p, dq, HALF, 64),
        dk_d=tokens(p, dk, HALF, 64),
        dg_d=tokens(p, dg, HALF, 128 if p.activate_gate else 64),
        dv_d=tokens(p, dv, HALF, 64),
        dq=dq,
        dk=dk,
        dg=dg,
        dv=dv,
        beta=p.beta,
        dbeta=dbeta,
        gate=GateWeights(dense(p.A_log), dense(p.dt_bias)),
        dA_log=dA_log,
        ddt_bias=ddt_bias,
        dfinal=strided(dfinal),
        dinitial=strided(dinitial),
        cu_seqlens=dense(p.cu_seqlens),
        beta_b=beta_b,
        beta_t=beta_t,
        beta_h=beta_h,
        q_h=strides_of(q)[2],
        k_h=strides_of(p.k)[2],
        g_h=strides_of(p.g)[2],
        do_h=strides_of(do)[2],
        N=p.N,
        T=p.T,
        H=p.H,
        HV=p.HV,
        scale=p.scale,
        factor=factor_of_P(p),
        lower=p.lower_bound or 0.0,
        flags=flags_of(p),
        REGISTERS=192,
        num_warps=4,
    )
    if grouped:
        dq = gather_gradient(p, "q", q, dq) if "q" in need else dq
        dk = gather_gradient(p, "k", p.k, dk) if "k" in need else dk
    return Gradients(
        q=dq if "q" in need else None,
        k=dk if "k" in need else None,
        v=dv if "v" in need else None,
        g=dg if "g" in need else None,
        beta=dbeta,
        A_log=total(dA_log, p.A_log),
        dt_bias=total(ddt_bias, p.dt_bias),
        initial_state=None if dinitial is None else as_kv(p, dinitial),
    )
