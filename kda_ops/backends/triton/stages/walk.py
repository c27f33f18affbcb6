"""Run KDA's prepare and scan as one kernel, the walk over the chunks of each head.

Here are the condition under which it runs and its launch. The walk itself is `walk_kda`.
"""

from __future__ import annotations

import os

import torch
import triton
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.gate import flags_of
from kda_ops.backends.triton.device.operands import GateWeights, strided
from kda_ops.backends.triton.device.tile import dense
from kda_ops.backends.triton.plans.descriptors import WIDTH, is_copied, is_near, kernels, tokens
from kda_ops.backends.triton.plans.launch import as_kv, columns_of, launch, shape_of, strides_of
from kda_ops.problem import Problem

KERNEL = kernels("walk_kda")


def _least_heads() -> int:
    """Return KDA_OPS_WALK_HEADS, or 64."""
    given = os.environ.get("KDA_OPS_WALK_HEADS", "64")
    if not given.isdecimal():
        raise ValueError(
            f"KDA_OPS_WALK_HEADS must be the least number of value heads to walk, got {given!r}."
        )
    return int(given)


# The least number of value heads for which one sequence is walked faster than the kernels that the
# walk replaces: a step takes 4.3 to 4.9 us, and few programs do not hide that. The number of
# sequences must not count, because a sequence's bits do not depend on its batch. Who always has
# several sequences can choose a smaller number.
LEAST_HEADS = _least_heads()


def walks_forward(p: Problem, final_state: Tensor | None) -> bool:
    """Return whether the walk serves a call.

    Nothing here depends on values, nor on B, N or T of calls with tokens.
    """
    if KERNEL is None or not p.rank or tuning.FORCED_WALK is False:
        return False
    return bool(
        tuning.is_hopper(p.q.device)
        and p.q.dtype is torch.bfloat16
        and p.K == p.V == WIDTH
        and p.g is not None
        and p.g.dtype in (torch.bfloat16, torch.float32)
        and tuning.centred(p)
        and p.bounded_inverse
        and (tuning.FORCED_WALK or p.HV >= LEAST_HEADS)
        and all(is_copied(p, x) for x in (p.q, p.k, p.v, p.g))
        and all(x is None or x.dim() == 1 or is_near(strides_of(x)) for x in (p.state, final_state))
        # a descriptor has at least one row, and coordinates have 32 bits
        and 0 < p.B * p.T < 2**30
        and p.HV * 128 * 64 < 2**31
    )


def path(device: torch.device) -> str:
    """Describe which kernels run KDA's forward on a device, and why."""
    if KERNEL is None:
        return f"prepare and scan, because triton {triton.__version__} has no known Gluon"
    if not tuning.is_hopper(device):
        return "prepare and scan, because the walk needs compute capability 9.0"
    return f"one walk (Gluon) from {LEAST_HEADS} heads on, in bf16 at width 128 with bounded decays"


def registers(p: Problem) -> int:
    """Return how many registers a thread of the scan gets; `prepare` gets what it leaves.

    With 144, ptxas serialises all products of the kernel. Norm and gate need more in `prepare`
    (docs/kernels/hazards.md, "Serialised products").
    """
    return 152 if p.l2norm or p.activate_gate else 160


def walk(p: Problem, o: Tensor, final_state: Tensor | None) -> None:
    """Write o and the final state, as `kda_ops.stages.Backend.scan` does."""
    assert KERNEL is not None and p.g is not None  # as `walks_forward` has checked
    final = None if final_state is None or final_state.numel() == 0 else as_kv(p, final_state)
    initial = None if p.state is None else as_kv(p, p.state)
    into = p.snapshot_indices
    beta_b, beta_t, beta_h = columns_of(p.beta)
    launch(
        KERNEL.walk_kda,
        (p.N + (p.cu_seqlens is not None)) * p.HV,
        p.q.device,
        q_d=tokens(p, p.q),
        k_d=tokens(p, p.k),
        v_d=tokens(p, p.v),
        g_d=tokens(p, p.g),
        o_d=tokens(p, o),
        o=o,
        beta=p.beta,
        gate=GateWeights(dense(p.A_log), dense(p.dt_bias)),
        initial=strided(initial),
        final=strided(final),
        slots=dense(p.state_indices),
        into=strided(into),
        cu_seqlens=dense(p.cu_seqlens),
        beta_b=beta_b,
        beta_t=beta_t,
        beta_h=beta_h,
        q_h=strides_of(p.q)[2],
        k_h=strides_of(p.k)[2],
        v_h=strides_of(p.v)[2],
        g_h=strides_of(p.g)[2],
        N=p.N,
        T=p.T,
        H=p.H,
        HV=p.HV,
        every=1 if into is None else p.snapshot_every,
        columns=0 if into is None else shape_of(into)[1],
        scale=p.scale,
        lower=p.lower_bound or 0.0,
        flags=flags_of(p),
        REGISTERS=registers(p),
        num_warps=4,
    )
