"""Run KDA's prepare and scan as one kernel, the walk over the chunks of each head.

Here are the conditions under which it runs and its launch. The walk itself is `walk_kda`. If
decays have a bound, training keeps A' and P, and in backward `states_kda` makes the states and u
again from A'. With `disable_recompute` the walk writes the states and u itself.
"""

from __future__ import annotations

from importlib import import_module
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.activations import flags_of, gate_of
from kda_ops.backends.triton.device.operands import States, strided
from kda_ops.backends.triton.device.tile import dense
from kda_ops.backends.triton.plans.descriptors import (
    copied,
    fit_call,
    has_gluon,
    is_copied,
    is_near,
    tokens,
)
from kda_ops.backends.triton.plans.launch import as_kv, columns_of, launch, new, strides_of
from kda_ops.backends.triton.stages.prepare import prepare
from kda_ops.backends.triton.stages.scan import scan
from kda_ops.problem import CHUNK, Problem
from kda_ops.sequences import count_chunks
from kda_ops.stages import Walked

KERNEL = import_module("kda_ops.backends.triton.stages.walk_kda") if has_gluon() else None
APART = import_module("kda_ops.backends.triton.stages.walk_kda_apart") if has_gluon() else None
STATES = import_module("kda_ops.backends.triton.stages.states_kda") if has_gluon() else None
HALF = CHUNK // 2  # rows of a half of a chunk, which the walk treats as a chunk of its own


def walks_forward(p: Problem, final_state: Tensor | None) -> bool:
    """Return whether the walk serves a call.

    Nothing here depends on values, nor on B, N or T of calls with tokens.
    """
    near = all(x is None or x.dim() == 1 or is_near(strides_of(x)) for x in (p.state, final_state))
    if p.invariant and not near and tuning.walks(p):
        raise ValueError(
            "state must reach the entries of a head by offsets below 2^31 elements with "
            "invariant=True on a Hopper GPU, got strides beyond: pass states whose last two "
            "dimensions are contiguous."
        )
    return (
        tuning.walks(p)
        and all(x is not None and is_copied(p, x) for x in (p.q, p.k, p.v, p.g))
        and near
        # a descriptor has at least one row, and coordinates have 32 bits
        and 0 < p.B * p.T < 2**30
    )


def path(device: torch.device) -> str:
    """Describe which kernels run KDA's forward on a device, and why."""
    if KERNEL is None:
        return f"prepare and scan, because triton {triton.__version__} has no known Gluon"
    if not tuning.is_hopper(device):
        return "prepare and scan, because the walk needs compute capability 9.0"
    count = tuning.processors(device)
    return (
        f"Gluon walks from {count // 6 + 1} value heads on, in bf16 at width 128 with bounded "
        f"decays; as two kernels up to {count // 3} sequences times value heads, if they have 512 "
        f"tokens each; back from {-(-2 * count // 5)} sequences times value heads on"
    )


def registers(p: Problem) -> int:
    """Return how many registers a thread of the scan gets; `prepare` gets what it leaves.

    With 144, ptxas serialises all products of the kernel (docs/kernels/hazards.md, "Serialised
    products"). A norm, a gate, and decays without a bound need more registers in `prepare`.
    """
    return 152 if p.l2norm or p.gate.inside or not tuning.centred(p) else 160


def walk(p: Problem, o: Tensor, final_state: Tensor | None, keep: Walked | None = None) -> None:
    """Write o and the final state, as `kda_ops.stages.Backend.scan` does.

    Training passes `keep`, whose tensors are written too. `keep.A` is [NT, HV, 32, 128], seen as
    [NT, HV, 2, 32, 64]. Columns 0 to 31 of a half get its A', and columns 32 to 63 its P
    (`walk_kda`), which `factor_of_P` completes.

    With few sequences and heads, one kernel prepares and another scans; the bits are the same.
    """
    assert KERNEL is not None and p.g is not None  # as `tuning.walks` has checked
    keep = keep or Walked()
    final = None if final_state is None or final_state.numel() == 0 else as_kv(p, final_state)
    initial = None if p.state is None else as_kv(p, p.state)
    into, slots = p.snapshot_indices, dense(p.state_indices)
    beta_b, beta_t, beta_h = columns_of(p.beta)
    common: dict[str, Any] = dict(
        device=p.q.device,
        beta=p.beta,
        cu_seqlens=dense(p.cu_seqlens),
        beta_b=beta_b,
        beta_t=beta_t,
        beta_h=beta_h,
        N=p.N,
        T=p.T,
        HV=p.HV,
        flags=flags_of(p),
        NULL=p.null_slot,
        num_warps=4,
    )
    prepares: dict[str, Any] = dict(
        q_d=tokens(p, p.q),
        k_d=tokens(p, p.k),
        g_d=tokens(p, p.g),
        gate=gate_of(p),
        q_h=strides_of(p.q)[2],
        k_h=strides_of(p.k)[2],
        g_h=strides_of(p.g)[2],
        H=p.H,
        INVERSE=tuning.inverse_precision(p),
        SHARE=32 if tuning.centred(p) else 8,  # rows that share an anchor
    )
    scans: dict[str, Any] = dict(
        programs=(p.N + (p.cu_seqlens is not None)) * p.HV,
        v_d=tokens(p, p.v),
        o_d=tokens(p, o),
        S=keep.states,
        u_d=None if keep.v_new is None else tiles(keep.v_new, HALF, 64),
        o=o,
        states=States(strided(initial), strided(final), slots, strided(into)),
        resumed=p.has_initial_state,
        v_h=strides_of(p.v)[2],
        every=1 if into is None else p.snapshot_every,
        columns=0 if into is None else into.shape[1],
        scale=factor_of_P(p),
    )
    shares = tuning.shares(p)
    if not shares:
        AP_d = None if keep.A is None else scores(p, keep.A, CHUNK)
        launch(KERNEL.walk_kda, AP_d=AP_d, REGISTERS=registers(p), **common, **prepares, **scans)
        return
    assert APART is not None  # it comes with KERNEL
    count, AP = count_chunks(p), keep.A
    if AP is None:
        AP = new(p.q, "AP", (count, p.HV, HALF, 2 * CHUNK))
    wqk = new(p.q, "wqk", (count, p.HV, 3 * CHUNK, p.K))
    # both launches name all of it, so that a plan gives no place to two of these while both run
    left: dict[str, Any] = dict(
        AP_d=scores(p, AP, CHUNK),
        wqk_d=tiles(wqk, CHUNK, p.K),
        gamma=new(p.q, "gamma", (count, p.HV, 2, p.K), torch.float32),
        ready=new(p.q, "ready", (count, p.HV), torch.int32, zero=True),
    )
    launch(
        APART.prepare_walk,
        programs=p.N * p.HV * shares,
        SHARES=shares,
        slots=slots,
        **common,
        **prepares,
        **left,
    )
    launch(APART.scan_walk, **common, **scans, **left, **tuning.begins_early(p.q.device))


def walk_training(p: Problem, o: Tensor, final_state: Tensor | None) -> Walked:
    """Write o and the final state, and return what backward reads, as `walk` writes it.

    Without a bound on decays that is nothing: backward does not walk there, and its other kernels
    cannot read what is kept of half chunks.
    """
    keep = Walked()
    if tuning.centred(p):
        keep.A = new(p.q, "AP", (count_chunks(p), p.HV, HALF, 2 * CHUNK))
        if p.disable_recompute:
            keep.states, keep.v_new = new_states(p)
    if p.B * p.T > 0:
        # without sequences there may be no chunk
        walk(fit_call(p), o, final_state, keep if p.N > 0 else None)
    else:  # a descriptor has at least one row
        scan(p, prepare(p), o, final_state, keep=False)
    return keep


def new_states(p: Problem) -> tuple[Tensor, Tensor]:
    """Allocate the transposed state that enters each half of a chunk, and u, in q's dtype.

    They are [count_chunks(p, 32), HV, V, K] and [.., HV, 32, V]. Halves are numbered as chunks of
    32 tokens (`kda_ops.sequences`).
    """
    count = count_chunks(p, HALF)
    return (new(p.q, "states", (count, p.HV, p.V, p.K)), new(p.q, "u", (count, p.HV, HALF, p.V)))


def factor_of_P(p: Problem) -> float:
    """Return what the kept P lacks: the scale, and what keeps long queries in range."""
    assert KERNEL is not None
    return p.scale if p.l2norm else p.scale / KERNEL.SMALLER.value


def states(p: Problem, AP: Tensor) -> tuple[Tensor, Tensor]:
    """Make what `new_states` allocates again, from the A' that forward has kept, and return it."""
    assert STATES is not None and p.g is not None  # as `tuning.walks` has checked
    S, u = new_states(p)
    if p.N == 0 or p.B * p.T == 0:
        return S, u
    p = fit_call(p)
    assert p.g is not None  # as before
    beta_b, beta_t, beta_h = columns_of(p.beta)
    launch(
        STATES.states_kda,
        p.N * p.HV,
        p.q.device,
        k_d=tokens(p, p.k, HALF),
        v_d=tokens(p, p.v, HALF),
        g_d=tokens(p, p.g, HALF),
        AP_d=scores(p, AP, HALF),
        S_d=tiles(S, p.V // 2, p.K),
        u_d=tiles(u, HALF, p.V // 2),
        beta=p.beta,
        gate=gate_of(p),
        initial=strided(None if p.state is None else as_kv(p, p.state)),
        cu_seqlens=dense(p.cu_seqlens),
        beta_b=beta_b,
        beta_t=beta_t,
        beta_h=beta_h,
        k_h=strides_of(p.k)[2],
        v_h=strides_of(p.v)[2],
        g_h=strides_of(p.g)[2],
        N=p.N,
        T=p.T,
        H=p.H,
        HV=p.HV,
        flags=flags_of(p),
        REGISTERS=160,
        num_warps=4,
    )
    return S, u


def scores(p: Problem, AP: Tensor, rows: int) -> Any:
    """Return the descriptor of A' and P that `walk_training` keeps, in blocks of rows."""
    return copied(AP, (count_chunks(p) * p.HV * CHUNK, CHUNK), (CHUNK, 1), (rows, CHUNK))


def tiles(x: Tensor, rows: int, columns: int) -> Any:
    """Return the descriptor of scratch [.., D], seen as rows, in blocks."""
    *outer, width = x.shape
    return copied(x, (prod(outer), width), (width, 1), (rows, columns))
