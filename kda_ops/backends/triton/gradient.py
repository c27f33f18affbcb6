"""From the two scans to the gradients of the inputs, chunk by chunk: what reads V alone, what reads
K, and the sums over heads (docs/maths.md, backward).

What the reverse scan leaves, z = A^T dv_new, is the gradient of ``beta (v - k exp(G) S)``, which
v_new = A (..) solves for, and dv = beta z that of v. The adjoint of a linear solve is another
solve, so the inverse needs no backward of its own::

    dL = -strict_tril(z v_new^T)      dZk = -z S^T      dP = tril(do v_new^T)
    dqg = do S^T                      dkg = v_new dS^T
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.gate import flags_of
from kda_ops.backends.triton.gradient_chunk import Kept
from kda_ops.backends.triton.gradient_decay import sum_decays, sum_gradients
from kda_ops.backends.triton.gradient_gdn import HeadGradients, gradient_gdn
from kda_ops.backends.triton.gradient_keys import KeyGradients, gradient_keys
from kda_ops.backends.triton.gradient_loads import pair_masks
from kda_ops.backends.triton.gradient_pairs import Dots, Scores, gradient_pairs
from kda_ops.backends.triton.launch import (
    as_kv,
    columns_of,
    lasting,
    launch,
    new,
    row_of,
    shape_of,
    total,
)
from kda_ops.backends.triton.operands import GateWeights, strided
from kda_ops.backends.triton.reverse_scan import reads_z
from kda_ops.backends.triton.tile import dense, fit
from kda_ops.problem import CHUNK, Problem
from kda_ops.sequences import count_chunks
from kda_ops.stages import Gradients, Reverse, Tile, Trace


@triton.jit
def gather_heads(dy, dx, H, HV, rows, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr):
    """dx [B T, H, K] = the sum of dy [B T, HV, K] fp32 over the value heads of a key head, in
    order.
    """
    o_i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, BK)
    m_x = (o_i < rows)[:, None] & (o_k < K)[None, :]
    i_token, i_g = o_i // H, o_i % H
    group = HV // H
    p_y = dy + (i_token * HV + i_g * group)[:, None] * K + o_k[None, :]
    b_sum = tl.zeros((ROWS, BK), tl.float32)
    for i in range(group):
        b_sum += tl.load(p_y + i * K, mask=m_x, other=0.0)
    tl.store(dx + o_i[:, None] * K + o_k[None, :], b_sum.to(dx.dtype.element_ty), mask=m_x)


def _count(p: Problem):
    """Chunks to visit: the tail of a packed row may need one more."""
    return count_chunks(p) + (p.cu_seqlens is not None)


def _like(p: Problem, name: str, need: frozenset[str]) -> Tensor | None:
    """Where to write a gradient, if it is needed: contiguous."""
    x = getattr(p, name)
    return new(p.q, "d" + name, shape_of(x), x.dtype) if x is not None and name in need else None


def _per_chunk(p: Problem, name: str, width: int, need: frozenset[str]) -> Tensor | None:
    """The parts that chunks add to the gradient of a parameter."""
    return (
        new(p.q, f"d{name}_parts", (_count(p), p.HV, width), torch.float32)
        if getattr(p, name) is not None and name in need
        else None
    )


def _gather(p: Problem, name: str, x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of q or k from those per value head."""
    dx, rows, BK = new(x, "d" + name, shape_of(x)), p.B * p.T * p.H, tuning.width(p.K, x.dtype)
    per_program = max(1, 4096 // BK)
    launch(
        gather_heads,
        (rows + per_program - 1) // per_program,
        x.device,
        dy,
        dx,
        p.H,
        p.HV,
        rows,
        p.K,
        BK,
        per_program,
        num_warps=4,
    )
    return dx


def _gradient_gdn(
    p: Problem, tile: Tile, trace: Trace, do: Tensor | None, reverse: Reverse, need: frozenset[str]
) -> Gradients:
    """`gradient` for one decay per head: one kernel."""
    q, options, exact = p.q, tuning.choose("gradient_gdn", p), p.q.dtype is torch.float32
    dq, dk = (
        new(q, name, shape_of(q)) if "q" in need or "k" in need else None for name in ("dq", "dk")
    )
    group, dq_sum, dk_sum = p.HV // p.H if p.H else 1, None, None
    # fp32, where heads and slices add up
    if dq is not None and (group > 1 or p.K > options.block_k):
        dq_sum, dk_sum = (
            (dq, dk) if exact else (new(q, f"d{x}_sum", shape_of(q), torch.float32) for x in "qk")
        )
    dbeta, dg = (
        _like(p, "beta", need),
        _like(p, "g", need | {"g"}) if need & {"g", "A_log", "dt_bias"} else None,
    )
    dA_log, ddt_bias, g = (
        _per_chunk(p, "A_log", 1, need),
        _per_chunk(p, "dt_bias", 1, need),
        fit(p.g),
    )
    g_b, g_t, g_h = columns_of(g)
    launch(
        gradient_gdn,
        _count(p) * p.H,
        q.device,
        q=strided(fit(q)),
        k=strided(fit(p.k)),
        v=strided(fit(p.v)),
        g=g,
        g_b=g_b,
        g_t=g_t,
        g_h=g_h,
        weights=GateWeights(dense(p.A_log), dense(p.dt_bias)),
        rows=tile.rows,
        gamma=tile.gamma,
        do=strided(fit(do)),
        kept=Kept(
            trace.states, trace.v_new, reverse.dstates, reverse.z if reads_z(p) else reverse.dv
        ),
        cu_seqlens=dense(p.cu_seqlens),
        grads=HeadGradients(dq, dk, dq_sum, dk_sum, dg, dbeta, dA_log, ddt_bias),
        N=p.N,
        T=p.T,
        H=p.H,
        scale=p.scale,
        lower_bound=p.lower_bound or 0.0,
        flags=flags_of(p),
        K=p.K,
        V=p.V,
        BK=options.block_k,
        BV=options.block_v,
        GROUP=group,
        TILED=reads_z(p),
        EXACT=exact,
        PREC="tf32x3" if exact else "tf32",
        num_stages=options.stages,
        **options.launch,
    )
    return Gradients(
        dq if "q" in need else None,
        dk if "k" in need else None,
        reverse.dv if "v" in need else None,
        dg if "g" in need else None,
        dbeta,
        total(dA_log, p.A_log),
        total(ddt_bias, p.dt_bias),
        as_kv(p, reverse.dinitial_state)
        if "initial_state" in need and reverse.dinitial_state is not None
        else None,
    )


def gradient(
    p: Problem, tile: Tile, trace: Trace, do: Tensor | None, reverse: Reverse, need: frozenset[str]
) -> Gradients:
    """Gradients of the inputs named in `need`; see `kda_ops.stages.Backend.gradient`."""
    if p.rank == 0:
        return _gradient_gdn(p, tile, trace, do, reverse, need)
    q, device, NT, exact = p.q, p.q.device, _count(p), p.q.dtype is torch.float32
    options, values, wide = (
        tuning.choose("gradient_keys", p),
        tuning.choose("gradient_pairs", p),
        tuning.width(p.K, q.dtype),
    )
    slices, precision = (
        (p.K + options.block_k - 1) // options.block_k,
        "tf32x3" if exact else "tf32",
    )
    gates, gather = need & {"g", "A_log", "dt_bias"}, p.HV > p.H
    dq = dk = dbeta = None
    if "q" in need or "k" in need:
        dq, dk = (
            new(
                q,
                f"d{x}_heads" if gather else f"d{x}",
                (p.B, p.T, p.HV, p.K),
                torch.float32 if gather else q.dtype,
            )
            for x in "qk"
        )
    dg = _like(p, "g", need | {"g"}) if gates else None
    dA_log, ddt_bias = _per_chunk(p, "A_log", 1, need), _per_chunk(p, "dt_bias", p.K, need)
    tiled = reads_z(p)
    z, sums = (
        reverse.z if tiled else reverse.dv,
        p.beta is not None and not p.sigmoid_beta and "beta" in need,
    )
    if p.beta is not None and "beta" in need:
        dbeta = (
            new(q, "dbeta_parts", (slices + 1, p.B, p.T, p.HV), torch.float32)
            if sums
            else _like(p, "beta", need)
        )
    dscores = Scores(*(new(q, name, (NT, p.HV, CHUNK, CHUNK)) for name in ("dP", "dL")))
    # of unit q and k with their gradients; without a do that of q is zero
    dots = Dots(
        *(
            new(q, f"{name}_dot", (NT, p.HV, CHUNK), torch.float32) if p.l2norm and there else None
            for name, there in (("q", "q" in need and do is not None), ("k", "k" in need))
        )
    )
    o = strided(None if dots.q is None else fit(trace.o))
    programs = NT * p.HV if p.H else 0
    given, cu_seqlens = strided(fit(do)), dense(p.cu_seqlens)
    logits, weights = strided(fit(p.g)), GateWeights(dense(p.A_log), dense(p.dt_bias))
    activation = {
        "ACTIVATE": p.activate_gate,
        "BOUNDED": p.lower_bound is not None,
        "FAST": not exact,
    }
    N, T, H, HV, K, V, scale, bound = p.N, p.T, p.H, p.HV, p.K, p.V, p.scale, p.lower_bound or 0.0
    launch(
        gradient_pairs,
        programs,
        device,
        v=strided(fit(p.v)),
        rows=tile.rows,
        do=given,
        o=o,
        v_new=trace.v_new,
        z=z,
        cu_seqlens=cu_seqlens,
        dscores=dscores,
        dbeta=row_of(dbeta, slices) if sums and dbeta is not None else dbeta,
        dots=dots,
        N=N,
        T=T,
        HV=HV,
        scale=scale,
        V=V,
        BV=values.block_v,
        TILED=tiled,
        SIGMOID=p.sigmoid_beta,
        NEG_EIGVAL=p.neg_eigval,
        PREC=precision,
        num_stages=values.stages,
        **values.launch,
    )
    if dq is not None or gates or sums:
        G = new(q, "G", (NT, HV, 64, K), torch.float64 if exact else torch.float32)
        anchored = new(q, "anchored", (NT, HV), torch.int32) if tuning.anchored(p) else None
        launch(
            sum_decays,
            programs,
            device,
            g=logits,
            weights=weights,
            cu_seqlens=cu_seqlens,
            G=G,
            anchored=anchored,
            N=N,
            T=T,
            HV=HV,
            lower_bound=bound,
            K=K,
            WIDE=wide,
            **activation,
            num_warps=1,
        )
        launch(
            gradient_keys,
            programs * slices,
            device,
            q=strided(fit(q)),
            k=strided(fit(p.k)),
            do=given,
            kept=Kept(trace.states, trace.v_new, reverse.dstates, z),
            dscores=dscores,
            rows=tile.rows,
            dots=dots,
            G=G,
            anchored=anchored,
            masks=lasting(pair_masks(device)),
            cu_seqlens=cu_seqlens,
            grads=KeyGradients(dq, dk, dbeta if sums else None),
            dbeta_slice=p.B * T * HV,
            N=N,
            T=T,
            H=H,
            HV=HV,
            scale=scale,
            K=K,
            V=V,
            BK=options.block_k,
            BV=options.block_v,
            TILED=tiled,
            L2NORM=p.l2norm,
            PREC=precision,
            num_stages=options.stages,
            **options.launch,
        )
        if dg is not None:
            launch(
                sum_gradients,
                programs,
                device,
                dG=G,
                g=logits,
                weights=weights,
                cu_seqlens=cu_seqlens,
                dg=dg,
                dA_log=dA_log,
                ddt_bias=ddt_bias,
                N=N,
                T=T,
                HV=HV,
                lower_bound=bound,
                K=K,
                WIDE=wide,
                **activation,
                num_warps=1,
            )
        del G
    if gather and dq is not None:
        dq, dk = (
            _gather(p, name, x, d) if d is not None and name in need else None
            for name, x, d in (("q", q, dq), ("k", p.k, dk))
        )
    return Gradients(
        dq if "q" in need else None,
        dk if "k" in need else None,
        reverse.dv if "v" in need else None,
        dg if "g" in need else None,
        total(dbeta, p.beta) if sums else dbeta,
        total(dA_log, p.A_log),
        total(ddt_bias, p.dt_bias),
        as_kv(p, reverse.dinitial_state)
        if "initial_state" in need and reverse.dinitial_state is not None
        else None,
    )
