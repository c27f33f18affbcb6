"""Run the stage `prepare`: what a chunk needs besides the state (docs/maths.md, chunk form)."""

import torch
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.activations import flags_of, gate_of
from kda_ops.backends.triton.device.gate import LOG2E
from kda_ops.backends.triton.device.operands import COUNT_GDN, COUNT_KDA, TileGDN, strided
from kda_ops.backends.triton.device.tile import FOLLOWED, UnfinishedTile, dense, fit
from kda_ops.backends.triton.plans.launch import columns_of, launch, new
from kda_ops.backends.triton.stages.prepare_gdn import prepare_gdn
from kda_ops.backends.triton.stages.prepare_kda import Prepared, prepare_kda
from kda_ops.problem import CHUNK, Problem
from kda_ops.sequences import count_chunks
from kda_ops.stages import Tile


def prepare(
    p: Problem,
    A: Tensor | None = None,
    with_AP: bool = False,
    norms: bool = False,
    overlap: bool = False,
) -> Tile:
    """Compute what the chunks need besides the state; see `kda_ops.stages.Backend.prepare`.

    GDN gets A, P, gamma and seven numbers per row, and `scan` reads q, k and v as well. KDA gets
    all of `operands.TileKDA`, and `scan` reads v as well. KDA uses an A that forward kept only with
    `with_AP`: then that A is a tile of A and P (`prepare_kda.join_AP`).
    """
    q, g, beta, device = fit(p.q), fit(p.g), fit(p.beta), p.q.device
    NT, exact = count_chunks(p), p.q.dtype is torch.float32
    kernel = prepare_kda if p.rank else prepare_gdn
    kept = A if with_AP or not p.rank else None
    P = new(q, "P", (NT, p.HV, CHUNK, CHUNK))
    AP = new(q, "AP", (NT, p.HV, CHUNK, CHUNK)) if with_AP and kept is None else None
    A = new(q, "A", (NT, p.HV, CHUNK, CHUNK)) if kept is None or p.rank else kept
    w, qg, kg = (
        new(q, name, (NT, p.HV, CHUNK, p.K)) if p.rank else None for name in ("w", "qg", "kg")
    )
    gamma = new(q, "gamma", (NT, p.HV, p.K if p.rank else 1), torch.float32)
    count = int(COUNT_KDA if p.rank else COUNT_GDN)
    factors = new(q, "factors", (NT, p.HV, count, CHUNK), torch.float32)
    ahead, ready, missed = tuning.ahead(p) if overlap else None, None, None
    if ahead is not None:
        # one group more, because a scan looks past the end; at most one program per column of V
        groups = (NT - ahead) // FOLLOWED.value + 2
        ready = new(q, "ready", (groups * (p.HV if p.rank else p.H),), torch.int32, zero=True)
        missed = new(q, "missed", (p.HV * p.V,), torch.int32, zero=True)

    # Strides of beta and g depend on T. Inside a tuple Triton would specialise them, and compile
    # again for some T (docs/kernels/hazards.md, "Specialised tuples").
    beta_b, beta_t, beta_h = columns_of(beta)
    options = tuning.choose(kernel.__name__, p, tuning.Rows if p.rank else tuning.Launch)
    common = dict(
        q=strided(q),
        k=strided(fit(p.k)),
        beta=beta,
        beta_b=beta_b,
        beta_t=beta_t,
        beta_h=beta_h,
        gate=gate_of(p),
        cu_seqlens=dense(p.cu_seqlens),
        ready=ready,
        N=p.N,
        T=p.T,
        H=p.H,
        scale=p.scale,
        flags=flags_of(p),
        K=p.K,
        PREC="tf32x3" if exact else "tf32",
        INVERSE=tuning.inverse_precision(p),
        **options.launch,
    )
    if p.rank:
        assert isinstance(options, tuning.Rows)
        share = tuning.anchored_rows(p)
        bound = p.gate.bound if share == 32 else tuning.FLOOR
        own = dict(
            g=strided(g),
            kept=kept,
            out=Prepared(AP, A, P, w, qg, kg, gamma, factors),
            HV=p.HV,
            log2_bound=bound * LOG2E.value,
            BK=options.block_k,
            R=options.group,
            NORMS=norms and (p.l2norm or p.disable_recompute),  # kept rows are written whole
            SHARE=share,
        )
    else:
        g_b, g_t, g_h = columns_of(g)
        own = dict(
            g=g,
            g_b=g_b,
            g_t=g_t,
            g_h=g_h,
            kept_A=kept,
            out=TileGDN(A if kept is None else None, P, factors, gamma),
            BK=tuning.width(p.K, q.dtype),
            GROUP=p.HV // p.H if p.H else 1,
            EXACT=exact,
        )

    def form(begin: int, end: int) -> None:
        heads = p.HV if p.rank else p.H
        launch(kernel, (end - begin) * heads, device, begin=begin, **common, **own)

    end = NT if p.N else 0
    form(0, end if ahead is None else ahead)
    made = dict(A=A, P=P, w=w, qg=qg, kg=kg, gamma=gamma, factors=factors, AP=AP)
    return (
        Tile(**made)
        if ahead is None
        else UnfinishedTile(
            **made, until=ahead, ready=ready, missed=missed, rest=lambda: form(ahead, end)
        )
    )
