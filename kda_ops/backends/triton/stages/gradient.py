"""Form the gradients of the inputs from the two scans, chunk by chunk (docs/maths.md, backward).

The reverse scan leaves z = A^T dv_new, the gradient of ``x = beta (v - k exp(G) S)``, and dv =
beta z. The scan's v_new = A x solves a linear system, and the adjoint of a solve is another solve.
So the inverse needs no backward of its own. Per chunk and value head, with the letters of
docs/maths.md::

    dL = -strict_tril(z v_new^T)    dP = tril(do v_new^T)                       [64, 64]
    d(beta k exp G) = -z S^T        dqg = do S^T          dkg = v_new dS^T      [64, K]
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.activations import flags_of, gate_of
from kda_ops.backends.triton.device.gradient_chunk import Kept
from kda_ops.backends.triton.device.gradient_loads import pair_masks
from kda_ops.backends.triton.device.operands import Strided, strided
from kda_ops.backends.triton.device.tile import dense, fit
from kda_ops.backends.triton.plans.launch import (
    as_kv,
    columns_of,
    launch,
    new,
    shared_constant,
    total,
)
from kda_ops.backends.triton.stages.gradient_decay import sum_decays, sum_gradients
from kda_ops.backends.triton.stages.gradient_gdn import HeadGradients, gradient_gdn
from kda_ops.backends.triton.stages.gradient_keys import KeyGradients, gradient_keys
from kda_ops.backends.triton.stages.gradient_pairs import Dots, Scores, gradient_pairs
from kda_ops.backends.triton.stages.gradient_small import gradient_small
from kda_ops.backends.triton.stages.reverse_scan import reads_few, reads_z
from kda_ops.problem import CHUNK, Problem
from kda_ops.sequences import count_chunks
from kda_ops.stages import Gradients, Reverse, Tile, Trace

GATES = frozenset(("g", "A_log", "dt_bias"))  # the gradients that come through the decay
ADDED, COLUMNS = 64, 128  # rows that a program of `add_parts` adds up, and their entries


@triton.jit
def gather_heads(dy, dx, H, HV, tokens, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr):
    """Sum dy [B T, HV, K] fp32 over the value heads of each key head, to dx [B T, H, K].

    The order of the sum is fixed. `tokens` is B T H, the rows of dx; a program takes ROWS of them.
    """
    o_i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, BK)
    m_x = (o_i < tokens)[:, None] & (o_k < K)[None, :]
    i_token, i_g = o_i // H, o_i % H
    group = HV // H
    p_y = dy + (i_token * HV + i_g * group)[:, None] * K + o_k[None, :]
    b_sum = tl.zeros((ROWS, BK), tl.float32)
    for i in range(group):
        b_sum += tl.load(p_y + i * K, mask=m_x, other=0.0)
    tl.store(dx + o_i[:, None] * K + o_k[None, :], b_sum.to(dx.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["count", "columns"])
def add_parts(parts, out, count, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up ROWS rows of parts [count, columns] fp32, one after another, to a row of out."""
    blocks = tl.cdiv(columns, COLUMNS)
    i_r = tl.program_id(0) // blocks
    o_c = (tl.program_id(0) % blocks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    b_sum = tl.zeros((COLUMNS,), tl.float32)
    p_row = parts + (i_r * ROWS).to(tl.int64) * columns + o_c
    for _ in range(tl.minimum(count - i_r * ROWS, ROWS)):
        b_sum += tl.load(p_row, mask=o_c < columns, other=0.0)
        p_row += columns
    p_out = out + i_r.to(tl.int64) * columns + o_c
    tl.store(p_out, b_sum.to(out.dtype.element_ty), mask=o_c < columns)


def gradient(
    p: Problem, tile: Tile, trace: Trace, do: Tensor | None, reverse: Reverse, need: frozenset[str]
) -> Gradients:
    """Return the gradients named in `need`; see `kda_ops.stages.Backend.gradient`."""
    form = _gradient_kda if p.rank else _gradient_gdn
    grads = form(p, tile, trace, do, reverse, need)
    initial = reverse.dinitial_state
    grads.v = reverse.dv if "v" in need else None
    grads.initial_state = None
    if "initial_state" in need and initial is not None:
        grads.initial_state = as_kv(p, initial)
    return grads


def _gradient_gdn(
    p: Problem, tile: Tile, trace: Trace, do: Tensor | None, reverse: Reverse, need: frozenset[str]
) -> Gradients:
    """Return all gradients of GDN but those of v and the initial state, from one kernel."""
    q, options, exact = (
        p.q,
        tuning.choose("gradient_gdn", p, tuning.Blocks),
        p.q.dtype is torch.float32,
    )
    group, dq, dk, dq_sum, dk_sum = p.HV // p.H if p.H else 1, None, None, None, None
    if need & {"q", "k"}:
        dq, dk = (new(q, name, q.shape) for name in ("dq", "dk"))
        # fp32, because value heads or slices of K add up
        if group > 1 or p.K > options.block_k:
            dq_sum, dk_sum = dq, dk
            if not exact:
                dq_sum, dk_sum = (new(q, f"d{x}_sum", q.shape, torch.float32) for x in "qk")
    dbeta, dg = (
        gradient_like(p, "beta", need),
        gradient_like(p, "g", need | {"g"}) if need & GATES else None,
    )
    dA_log, ddt_bias = parts_of(p, "A_log", 1, need), parts_of(p, "dt_bias", 1, need)
    g = fit(p.g)
    g_b, g_t, g_h = columns_of(g)
    launch(
        gradient_gdn,
        visited_chunks(p) * p.H,
        q.device,
        q=strided(fit(q)),
        k=strided(fit(p.k)),
        v=strided(fit(p.v)),
        g=g,
        g_b=g_b,
        g_t=g_t,
        g_h=g_h,
        gate=gate_of(p),
        factors=tile.factors,
        gamma=tile.gamma,
        do=strided(fit(do)),
        kept=_kept(p, trace, reverse),
        cu_seqlens=dense(p.cu_seqlens),
        grads=HeadGradients(dq, dk, dq_sum, dk_sum, dg, dbeta, dA_log, ddt_bias),
        flags=flags_of(p),
        **_numbers(p, "N", "T", "H", "scale", "K", "V"),
        GROUP=group,
        TILED=reads_z(p),
        EXACT=exact,
        **_blocks(options, exact),
    )
    return gradients_of(p, need, dq, dk, dg, dbeta, dA_log, ddt_bias)


def _gradient_kda(
    p: Problem, tile: Tile, trace: Trace, do: Tensor | None, reverse: Reverse, need: frozenset[str]
) -> Gradients:
    """Return all gradients of KDA but those of v and the initial state: first what reads V alone,
    then what reads K, then sums over rows and heads.
    """
    q, NT, gather = p.q, visited_chunks(p), p.HV > p.H
    slices = triton.cdiv(p.K, tuning.choose("gradient_keys", p, tuning.Blocks).block_k)
    dq = dk = dbeta = parts = None
    if need & {"q", "k"}:
        shape, dtype = (p.B, p.T, p.HV, p.K), torch.float32 if gather else q.dtype
        dq, dk = (new(q, f"d{x}_heads" if gather else f"d{x}", shape, dtype) for x in "qk")
    dg = gradient_like(p, "g", need | {"g"}) if need & GATES else None
    dA_log, ddt_bias = parts_of(p, "A_log", 1, need), parts_of(p, "dt_bias", p.K, need)
    if p.beta is not None and "beta" in need:
        if p.sigmoid_beta or reads_few(p):
            dbeta = gradient_like(p, "beta", need)
        else:  # one part per slice of K, the last from V
            parts = new(q, "dbeta_parts", (slices + 1, p.B, p.T, p.HV), torch.float32)
    dscores = Scores(*(new(q, name, (NT, p.HV, CHUNK, CHUNK)) for name in ("dP", "dL")))
    # without a do, the product of unit q with its gradient is zero
    wanted = {"q": "q" in need and do is not None, "k": "k" in need}
    size = (NT, p.HV, CHUNK)
    dots = Dots(
        *(
            new(q, f"{name}_dot", size, torch.float32) if p.l2norm and wanted[name] else None
            for name in "qk"
        )
    )
    given, kept = strided(fit(do)), _kept(p, trace, reverse)
    own = dbeta if parts is None else parts[slices]
    _launch_pairs(p, tile, trace, given, kept, dscores, own, dots)
    few = None if p.sigmoid_beta or parts is not None else dbeta
    if dq is not None or dg is not None or parts is not None or few is not None:
        exact = q.dtype is torch.float32
        G = new(q, "G", (NT, p.HV, CHUNK, p.K), torch.float64 if exact else torch.float32)
        _sum_decays(p, G, anchored := _anchored(p))
        if few is not None:
            _launch_small(p, tile, kept, reverse.z, G, few)
        grads = KeyGradients(dq, dk, parts)
        _launch_keys(p, tile, given, kept, dscores, dots, G, anchored, grads)
        if dg is not None:
            shares: dict[str, Any] = dict(dG=G, dg=dg, dA_log=dA_log, ddt_bias=ddt_bias)
            launch(sum_gradients, _programs(p), q.device, **shares, **_gate(p))
    if gather and dq is not None:
        dq = gather_gradient(p, "q", q, dq) if "q" in need else None
        dk = gather_gradient(p, "k", p.k, dk) if "k" in need else None
    dbeta = dbeta if parts is None else sum_parts(p, "beta", parts, p.beta)
    return gradients_of(p, need, dq, dk, dg, dbeta, dA_log, ddt_bias)


def _launch_pairs(
    p: Problem,
    tile: Tile,
    trace: Trace,
    do: Strided,
    kept: Kept,
    dscores: Scores,
    dbeta: Tensor | None,
    dots: Dots,
) -> None:
    """Launch `gradient_pairs`: all that needs no K, but v, do, o, v_new and z."""
    options, exact = tuning.choose("gradient_pairs", p, tuning.Columns), p.q.dtype is torch.float32
    launch(
        gradient_pairs,
        _programs(p),
        p.q.device,
        v=strided(fit(p.v)),
        factors=tile.factors,
        do=do,
        o=strided(None if dots.q is None else fit(trace.o)),
        v_new=kept.v_new,
        z=kept.z,
        cu_seqlens=dense(p.cu_seqlens),
        dscores=dscores,
        dbeta=dbeta,
        dots=dots,
        **_numbers(p, "N", "T", "HV", "scale", "V"),
        TILED=reads_z(p),
        SIGMOID=p.sigmoid_beta,
        NEG_EIGVAL=p.neg_eigval,
        **_blocks(options, exact),
    )


def _launch_keys(
    p: Problem,
    tile: Tile,
    do: Strided,
    kept: Kept,
    dscores: Scores,
    dots: Dots,
    G: Tensor,
    anchored: Tensor | None,
    grads: KeyGradients,
) -> None:
    """Launch `gradient_keys`, which writes the gradients of q and k, and dG in place of G."""
    options, exact = tuning.choose("gradient_keys", p, tuning.Blocks), p.q.dtype is torch.float32
    launch(
        gradient_keys,
        _programs(p) * triton.cdiv(p.K, options.block_k),
        p.q.device,
        q=strided(fit(p.q)),
        k=strided(fit(p.k)),
        do=do,
        kept=kept,
        dscores=dscores,
        factors=tile.factors,
        dots=dots,
        G=G,
        anchored=anchored,
        masks=shared_constant(pair_masks(p.q.device)),
        cu_seqlens=dense(p.cu_seqlens),
        grads=grads,
        dbeta_slice=p.B * p.T * p.HV,
        **_numbers(p, "N", "T", "H", "HV", "scale", "K", "V"),
        TILED=reads_z(p),
        L2NORM=p.l2norm,
        **_blocks(options, exact),
    )


def _anchored(p: Problem) -> Tensor | None:
    """Allocate `anchored` of `sum_decays`; None where no rows may share an anchor."""
    size = (visited_chunks(p), p.HV)
    return new(p.q, "anchored", size, torch.int32) if tuning.anchored(p) else None


def _sum_decays(p: Problem, G: Tensor, anchored: Tensor | None) -> None:
    """Launch `sum_decays`, which writes G and `anchored`."""
    launch(sum_decays, _programs(p), p.q.device, G=G, anchored=anchored, **_gate(p))


def _launch_small(
    p: Problem, tile: Tile, kept: Kept, z: Tensor | None, G: Tensor, dbeta: Tensor
) -> None:
    """Launch `gradient_small`: dbeta where beta is small."""
    options = tuning.choose("gradient_small", p, tuning.Tile)
    launch(
        gradient_small,
        _programs(p),
        p.q.device,
        k=strided(fit(p.k)),
        v=strided(fit(p.v)),
        factors=tile.factors,
        kept=kept,
        z=z,
        G=G,
        cu_seqlens=dense(p.cu_seqlens),
        dbeta=dbeta,
        **_numbers(p, "N", "T", "H", "HV", "K", "V"),
        BK=options.block_k,
        BV=options.block_v,
        L2NORM=p.l2norm,
        **options.launch,
    )


def gather_gradient(p: Problem, name: str, x: Tensor, dy: Tensor | None) -> Tensor:
    """Return the gradient of x, which is q or k, summed from those per value head, dy."""
    assert dy is not None  # dq and dk are made together
    dx, tokens, BK = new(x, "d" + name, x.shape), p.B * p.T * p.H, tuning.width(p.K, x.dtype)
    options = tuning.choose("gather_heads", p, tuning.Entries)
    ROWS = max(1, options.entries // BK)
    sizes: dict[str, Any] = dict(H=p.H, HV=p.HV, tokens=tokens, K=p.K, BK=BK, ROWS=ROWS)
    programs = (tokens + ROWS - 1) // ROWS
    launch(gather_heads, programs, x.device, dy=dy, dx=dx, **sizes, **options.launch)
    return dx


def visited_chunks(p: Problem) -> int:
    """Return how many chunks to visit: the tail of a packed row may need one more."""
    return count_chunks(p) + (p.cu_seqlens is not None)


def _programs(p: Problem) -> int:
    """Return how many programs take one chunk and value head each."""
    return visited_chunks(p) * p.HV if p.H else 0


def _numbers(p: Problem, *names: str) -> dict[str, Any]:
    """Return numbers of a call by their names."""
    return {name: getattr(p, name) for name in names}


def _blocks(options: tuning.Columns, exact: bool) -> dict[str, Any]:
    """Return how a kernel is cut, and the precision of its products."""
    cut = {"BK": options.block_k} if isinstance(options, tuning.Blocks) else {}
    cut |= {"BV": options.block_v, "num_stages": options.stages}
    return cut | {"PREC": "tf32x3" if exact else "tf32"} | options.launch


def _gate(p: Problem) -> dict[str, Any]:
    """Return the arguments that `sum_decays` and `sum_gradients` share; both run on one warp."""
    return dict(
        g=strided(fit(p.g)),
        gate=gate_of(p),
        cu_seqlens=dense(p.cu_seqlens),
        **_numbers(p, "N", "T", "HV", "K"),
        WIDE=tuning.width(p.K, p.q.dtype),
        FAST=p.q.dtype is not torch.float32,
        num_warps=1,
    )


def _kept(p: Problem, trace: Trace, reverse: Reverse) -> Kept:
    """Return what the scans left for the kernels, with z or dv as `reads_z` says."""
    z = reverse.z if reads_z(p) else reverse.dv
    return Kept(trace.states, trace.v_new, reverse.dstates, z)


def gradient_like(p: Problem, name: str, need: frozenset[str]) -> Tensor | None:
    """Allocate the contiguous gradient of an input, if it is needed."""
    x = getattr(p, name)
    return new(p.q, "d" + name, x.shape, x.dtype) if x is not None and name in need else None


def parts_of(p: Problem, name: str, width: int, need: frozenset[str]) -> Tensor | None:
    """Allocate the shares of chunks [NT, HV, width] of a gate weight's gradient, if needed."""
    if getattr(p, name) is None or name not in need:
        return None
    return new(p.q, f"d{name}_parts", (visited_chunks(p), p.HV, width), torch.float32)


def gradients_of(
    p: Problem,
    need: frozenset[str],
    dq: Tensor | None,
    dk: Tensor | None,
    dg: Tensor | None,
    dbeta: Tensor | None,
    dA_log: Tensor | None,
    ddt_bias: Tensor | None,
) -> Gradients:
    """Return the needed gradients, those of the gate's weights summed over chunks."""
    return Gradients(
        q=dq if "q" in need else None,
        k=dk if "k" in need else None,
        g=dg if "g" in need else None,
        beta=dbeta,
        A_log=sum_parts(p, "A_log", dA_log, p.A_log),
        dt_bias=sum_parts(p, "dt_bias", ddt_bias, p.dt_bias),
    )


def sum_parts(p: Problem, name: str, parts: Tensor | None, x: Tensor | None) -> Tensor | None:
    """Return the gradient of x, the sum of parts over their first axis.

    torch chooses the order of the sum by the shape of parts. With `invariant` the order follows
    from the number of parts alone.
    """
    if parts is None or x is None:
        return None
    if not p.invariant:
        return total(parts, x)
    count, *rest = parts.shape
    columns, last = math.prod(rest), False
    while not last:
        rows = (count + ADDED - 1) // ADDED
        last = rows <= 1
        if last:  # without parts the sum is zero
            rows, out = 1, new(x, "d" + name, x.shape)
        else:
            out = new(parts, f"d{name}_sums", (rows, columns))
        programs = rows * ((columns + COLUMNS - 1) // COLUMNS)
        sizes: dict[str, Any] = dict(count=count, columns=columns, ROWS=ADDED, COLUMNS=COLUMNS)
        launch(add_parts, programs, p.q.device, parts=parts, out=out, **sizes, num_warps=4)
        parts, count = out, rows
    return parts
