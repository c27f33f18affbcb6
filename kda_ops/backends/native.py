"""Compute on CPUs: the chunk form in plain torch, with a hand-written backward.

Each step is a batched product over all chunks and heads. 16-bit inputs are widened once, and all
sums are float32 (float64 for float64 inputs), so no operand has 16 bits. Formulas: docs/maths.md;
contracts: `kda_ops.stages`. Each stage is tested against the same stage of `reference`.

Short sequences lie in chunks of fewer rows (`kda_ops.backends.parts`). If a call has a scratch, a
stage leaves its results there, one per part, and the fields of the returned object are None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_ops.backends import convolution, norm
from kda_ops.backends.activations import (
    Activated,
    contiguous_call,
    contiguous_gradients,
    gate,
    gate_backward,
)
from kda_ops.backends.parts import Part, gather, join, parts, scatter
from kda_ops.backends.slab import (
    SMALLEST,
    Slab,
    add_batched_product,
    batched_product,
    scores,
    scores_backward,
)
from kda_ops.problem import CHUNK, Problem
from kda_ops.stages import GRADIENTS, Backend, Gradients, Reverse, Tile, Trace

SLAB = 1 << 18  # elements of one operand per iteration: 1 MB in float32
ROWS = 16  # a product of so many rows with a state is faster than one row elementwise
_EYE = torch.eye(CHUNK, device="cpu")


def _once(p: Problem, name: str, make: Callable[[], Any]) -> Any:
    """Return make(), computed once if the call has a scratch to keep it in."""
    if p.scratch is None:
        return make()
    if name not in p.scratch:
        p.scratch[name] = make()
    return p.scratch[name]


def _parts(p: Problem) -> list[Part]:
    return _once(p, "parts", lambda: parts(p))


def _leave(p: Problem, kind: type, made: list[dict[str, Tensor]], **rest: Tensor | None) -> Any:
    """Return a `Tile`, `Trace` or `Reverse` from the tensors of each part.

    If the call has a scratch, the parts stay there and the tensor fields are None.
    """
    if p.scratch is not None:
        p.scratch[kind.__name__] = made
        return kind(**dict.fromkeys(made[0]), **rest)
    each = {n: gather(p, _parts(p), n, [x[n] for x in made]) for n in made[0]}
    return kind(**each, **rest)


def _take(p: Problem, stage: Tile | Trace | Reverse) -> list[dict[str, Tensor]]:
    """Return the parts of a stage's result, from the scratch or split from whole tensors."""
    left = None if p.scratch is None else p.scratch.get(type(stage).__name__)
    if left is not None:
        return left
    ps = _parts(p)
    names = [
        f.name for f in fields(stage) if f.name in _PARTED and getattr(stage, f.name) is not None
    ]
    split = {n: scatter(ps, n, getattr(stage, n)) for n in names}
    return [{n: split[n][i] for n in names} for i in range(len(ps))]


_PARTED = frozenset(("A", "P", "w", "u", "qg", "kg", "gamma", "states", "v_new", "dstates", "z"))


class _Chunked:
    """The activated inputs of each part, in chunks.

    q (scaled), k, v, beta are [NT, HV, h, .] and g is [NT, HV, h, D].
    """

    def __init__(self, p: Problem):
        x = self.x = Activated(p, p.state_dtype)
        per_token, group = (x.q, x.k, x.v, x.beta[..., None], x.g), p.HV // max(p.H, 1)
        self.tensors = []
        for part in _parts(p):
            q, k, v, beta, g = (part.split(t, p.state_dtype) for t in per_token)
            if group > 1:
                q, k = (t.repeat_interleave(group, 1) for t in (q, k))
            self.tensors.append((q * p.scale, k, v, beta, g))


def _slabs(tensors: tuple[Tensor, ...]) -> Iterator[tuple[slice, Slab]]:
    """Yield a few chunks at a time.

    Their intermediate results then stay in cache between writing and reading.
    """
    NT, HV, h, K = tensors[0].shape
    size = max(1, SLAB // max(1, HV * h * K))
    for start in range(0, NT, size):
        s = slice(start, min(start + size, NT))
        yield s, Slab(*(t[s] for t in tensors))


def prepare(
    p: Problem,
    A: Tensor | None = None,
    with_AP: bool = False,
    norms: bool = False,
    overlap: bool = False,
) -> Tile:
    """Compute what the chunks need apart from the entering state."""
    if overlap and not norms:  # `scan` follows, and no caller keeps the tile
        p.scratch = {}
    chunked: _Chunked = _once(p, "chunked", lambda: _Chunked(p))
    kept = [None] * len(chunked.tensors) if A is None else scatter(_parts(p), "A", A)
    return _leave(p, Tile, [_prepare(p, tensors, A) for tensors, A in zip(chunked.tensors, kept)])


def _prepare(p: Problem, tensors: tuple[Tensor, ...], A: Tensor | None) -> dict[str, Tensor]:
    """Return the tile of one part."""
    q, _, v, _, _ = tensors
    h = q.shape[2]
    square, eye = (*q.shape[:3], h), _EYE[:h, :h].to(p.state_dtype)
    tile = {
        "A": q.new_empty(square) if A is None else A,
        "P": q.new_empty(square),
        "w": torch.empty_like(q),
        "u": torch.empty_like(v),
        "qg": torch.empty_like(q),
        "kg": torch.empty_like(q),
        "gamma": q.new_empty((*q.shape[:2], p.K if p.rank else 1)),  # also without g
    }
    for s, c in _slabs(tensors):
        tile["P"][s], kk = scores(c)
        if A is None and h == 1:
            tile["A"][s] = 1.0
        elif A is None:
            tile["A"][s] = torch.linalg.solve_triangular(
                (c.beta * kk).add_(eye), eye.expand_as(kk), upper=False, unitriangular=True
            )
        for name, x in (("w", (c.k * c.decay).mul_(c.beta)), ("u", c.v * c.beta)):
            if h == 1:
                tile[name][s] = x
            else:
                torch.matmul(tile["A"][s], x, out=tile[name][s])
        torch.mul(c.q, c.decay, out=tile["qg"][s])
        torch.mul(c.k, c.tail, out=tile["kg"][s])
        tile["gamma"][s] = c.gamma
    return tile


def _slots(p: Problem) -> Tensor | None:
    """Return the table of slots, with -1 for every slot that is nobody's."""
    return None if p.state_indices is None else p.slots(p.state_indices)


def _start(p: Problem, part: Part, initial: Tensor | None, slots: Tensor | None) -> Tensor:
    """Return the initial states of a part's sequences, [n, HV, K, V].

    Rows start at multiples of 8 elements: the bits of a small product depend on the alignment of
    the rows of its result.
    """
    n = part.sequences
    S = torch.zeros((len(n), p.HV, p.K, p.V + -p.V % 8), dtype=p.state_dtype)[..., : p.V]
    if initial is not None and initial.shape[0]:
        S.copy_(p.as_kv(initial).index_select(0, n if slots is None else slots[n].clamp(min=0)))
        if slots is not None:
            S[slots[n] < 0] = 0.0
        if p.has_initial_state is not None:
            S[~p.has_initial_state[n]] = 0.0
    return S


def scan(
    p: Problem, tile: Tile, o: Tensor | None, final_state: Tensor | None, keep: bool
) -> Trace | None:
    """Carry the state through the chunks of each sequence::

        v_new = u - w S;   o = qg S + P v_new;   S <- gamma S + kg^T v_new

    Contract: `stages.Backend.scan`.
    """
    made: list[dict[str, Tensor]] = []
    outs: list[Tensor] = []
    for part, x in zip(_parts(p), _take(p, tile)):
        out, trace = _scan(p, part, x, o is not None, final_state, keep)
        if out is not None:
            outs.append(out)
        made.append(trace)
    if o is not None:
        o.copy_(join(p, _parts(p), outs))
    if keep:
        return _leave(p, Trace, made, o=o)
    p.scratch = None  # free the tile, which the caller may otherwise keep alive through p
    return None


def _scan(
    p: Problem,
    part: Part,
    x: dict[str, Tensor],
    asked: bool,
    final_state: Tensor | None,
    keep: bool,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return o of one part per chunk, and its trace.

    A single row that meets a state is padded with zero rows.
    """
    pad = 0 if p.state is None else max(ROWS - part.height, 0)
    slots, into = _slots(p), p.snapshot_indices
    S_all = _start(p, part, p.state, slots)
    states = x["u"].new_empty((part.NT, p.HV, p.K, p.V)) if keep else None
    v_all, out = (
        torch.empty_like(x["u"]) if keep else None,
        torch.empty_like(x["u"]) if asked else None,
    )
    wanted = final_state is not None and final_state.numel() > 0
    for step, (live, chunk) in enumerate(part.steps):
        u, w, qg, kg, P = (x[n][chunk].flatten(0, 1) for n in ("u", "w", "qg", "kg", "P"))
        if pad:
            u, w, qg, kg = (F.pad(y, (0, 0, 0, pad)) for y in (u, w, qg, kg))
            P = F.pad(P, (0, pad, 0, pad))
        S, gamma = S_all[:live].flatten(0, 1), x["gamma"][chunk].flatten(0, 1)
        if states is not None:
            states[chunk] = S_all[:live]
        v_new = add_batched_product(u.clone(), w, S, alpha=-1)
        if v_all is not None:
            v_all[chunk] = v_new[:, : part.height].unflatten(0, (-1, p.HV))
        if out is not None:
            b_o = add_batched_product(batched_product(qg, S), P, v_new)
            out[chunk] = b_o[:, : part.height].unflatten(0, (-1, p.HV))
        if wanted or into is not None or step + 1 < len(part.steps):
            add_batched_product(S.mul_(gamma[..., None]), kg.mT, v_new)
        if into is not None and part.height == CHUNK:
            _snapshot(p, part, into, live, step + 1, S_all)
    if slots is not None and out is not None:
        out[(slots[part.sequences] < 0)[part.owner]] = 0.0  # sequences without a slot
    if wanted and final_state is not None:
        _write(
            p.as_kv(final_state), part.sequences if slots is None else slots[part.sequences], S_all
        )
    if states is None or v_all is None:
        return out, {}
    return out, {"states": states, "v_new": v_all}


def _snapshot(p: Problem, part: Part, into: Tensor, live: int, chunk: int, S: Tensor) -> None:
    """Write the live states after `chunk` whole chunks to their snapshot slots, if any is due."""
    column = chunk // p.snapshot_every - 1
    if chunk % p.snapshot_every or column >= into.shape[1]:
        return
    n, slots = part.sequences[:live], _slots(p)
    due = part.length[:live] >= chunk * CHUNK
    if slots is not None:
        due &= slots[n] >= 0
    assert p.state is not None  # the pool
    _write(p.as_kv(p.state), p.slots(into[n, column]).where(due, -1), S[:live])


def reverse_scan(
    p: Problem, tile: Tile, do: Tensor | None, dfinal_state: Tensor | None, need: frozenset[str]
) -> Reverse:
    """Carry the gradient of the state back through the chunks of each sequence::

        dv_new = P^T do + kg dS;   z = A^T dv_new;   dS <- gamma dS + qg^T do - w^T dv_new

    Contract: `stages.Backend.reverse_scan`.
    """
    dinitial = (
        torch.empty((p.N, p.HV, p.K, p.V), dtype=p.state_dtype) if "initial_state" in need else None
    )
    made, tiles, d_o = [], _take(p, tile), _split_do(p, do)
    for part, x, b_do in zip(_parts(p), tiles, d_o):
        dS, reverse = _reverse_scan(p, part, x, b_do, dfinal_state, dinitial is not None)
        made.append(reverse)
        if dinitial is not None:
            dinitial[part.sequences] = dS
        if p.scratch is not None:
            x.clear()  # frees memory that `gradient` needs
    return _leave(p, Reverse, made, dv=None, dinitial_state=dinitial)


def _reverse_scan(
    p: Problem,
    part: Part,
    x: dict[str, Tensor],
    d_o: Tensor,
    dfinal_state: Tensor | None,
    wanted: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gradient of one part's initial states, and the tensors for `gradient`."""
    dS_all = _start(p, part, dfinal_state, None)
    dstates, z = x["u"].new_empty((part.NT, p.HV, p.K, p.V)), torch.empty_like(x["u"])
    for step, (live, chunk) in reversed([*enumerate(part.steps)]):
        A, w, qg, kg, P, gamma = (
            x[n][chunk].flatten(0, 1) for n in ("A", "w", "qg", "kg", "P", "gamma")
        )
        b_do, dS = d_o[chunk].flatten(0, 1), dS_all[:live].flatten(0, 1)
        dstates[chunk] = dS_all[:live]
        dv_new = add_batched_product(batched_product(P.mT, b_do), kg, dS)
        z[chunk] = batched_product(A.mT, dv_new).unflatten(0, (-1, p.HV))
        if wanted or step:
            add_batched_product(dS.mul_(gamma[..., None]), qg.mT, b_do)
            add_batched_product(dS, w.mT, dv_new, alpha=-1)
    return dS_all, {"dstates": dstates, "z": z}


def _split_do(p: Problem, do: Tensor | None) -> list[Tensor]:
    """Return the gradient of o per chunk, [NT, HV, h, V], for each part."""
    if do is None:
        do = p.v.new_zeros(()).expand(p.B, p.T, p.HV, p.V)
    return _once(p, "do", lambda: [part.split(do, p.state_dtype) for part in _parts(p)])


def gradient(
    p: Problem, tile: Tile, trace: Trace, do: Tensor | None, reverse: Reverse, need: frozenset[str]
) -> Gradients:
    """Compute the gradient of every input from the results of the two scans."""
    chunked: _Chunked = _once(p, "chunked", lambda: _Chunked(p))
    each = []
    for tensors, t, d_o, r in zip(
        chunked.tensors, _take(p, trace), _split_do(p, do), _take(p, reverse)
    ):
        dq, dk, dv, dbeta, dg = grads = tuple(torch.empty_like(x) for x in tensors)
        for s, c in _slabs(tensors):
            dq[s], dk[s], dv[s], dg[s], dbeta[s] = _gradient(
                c, t["states"][s], t["v_new"][s], d_o[s], r["dstates"][s], r["z"][s]
            )
        g = tensors[-1]
        # exp(g) is 0 there, so dg is rounding error only; A_log's gradient would multiply it by g
        dg.masked_fill_(g < SMALLEST[g.dtype], 0.0)
        dq.mul_(p.scale)
        each.append(grads)
    dq, dk, dv, dbeta, dg = (join(p, _parts(p), d) for d in zip(*each))
    if p.HV > p.H:
        dq, dk = (d.unflatten(2, (p.H, p.HV // p.H)).sum(3) for d in (dq, dk))
    gates = need & {"g", "A_log", "dt_bias"}
    dq, dk, dg, dbeta, dA_log, ddt_bias = chunked.x.gradients(
        p, dq, dk, dg if gates else None, dbeta[..., 0] if "beta" in need else None
    )
    dinitial = None if reverse.dinitial_state is None else p.as_kv(reverse.dinitial_state)
    found = (dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dinitial)
    return Gradients(
        **{
            n: d.to(x.dtype)
            for n, x, d in zip(GRADIENTS, p.differentiable(), found)
            if n in need and x is not None
        }
    )


def _gradient(
    c: Slab, S: Tensor, v_new: Tensor, d_o: Tensor, dS: Tensor, z: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of scale q, k, v, g and beta of some chunks.

    Letters are those of docs/maths.md, section 3.
    """
    q, k, v, beta, decay = c.q, c.k, c.v, c.beta, c.decay
    dP = batched_product(d_o, v_new.mT)
    on_diagonal = torch.diagonal(dP, dim1=-2, dim2=-1)[..., None].clone()
    # v_new solves (I + L) v_new = beta (v - k exp(G) S); z solves the transposed system
    dL = batched_product(z, v_new.mT).neg_().tril_(-1)
    dkg, Zk = batched_product(v_new, dS.mT).mul_(c.tail), batched_product(z, S.mT).neg_()
    dq, r, col = scores_backward(c, dP.tril_(-1), dL)
    dq.add_(batched_product(d_o, S.mT).mul_(decay))
    r.add_(Zk.mul_(decay))
    dbeta = (z * v).sum(-1, keepdim=True).add_((r * k).sum(-1, keepdim=True))
    # z v_new / beta equals that and cancels less, unless beta is so small that v_new underflows.
    dbeta = torch.where(
        beta.abs() > torch.finfo(beta.dtype).tiny ** 0.5,
        (z * v_new).sum(-1, keepdim=True) / beta,
        dbeta,
    )
    early = r.mul_(beta)  # row i as reader of k_i; columns and kg read k_i in later rows
    dG = (early - col).mul_(k).addcmul_(q, dq)
    # The score of row i with itself has no decay. Its shares of q dq and k col are equal and would
    # cancel in dG, so add them after dG.
    dq.addcmul_(on_diagonal, k)
    col.addcmul_(on_diagonal, q)
    dG[..., -1, :] += c.gamma * (S * dS).sum(-1)
    x = k * dkg
    if not c.rank:
        dG = dG.sum(-1, keepdim=True)
        x = x.sum(-1, keepdim=True)
    dg = dG.flip(-2).cumsum_(-2).flip(-2)
    dg[..., 1:, :] += x.cumsum(-2)[..., :-1, :]
    return dq, early.add_(col).add_(dkg), z * beta, dg, dbeta


def step(p: Problem, o: Tensor, final_state: Tensor | None) -> None:
    """Run the token recurrence over all sequences at once::

        S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = scale S^T q

    Contract: `stages.Backend.step`.
    """
    x, slots = Activated(p, p.state_dtype), _slots(p)
    offsets = p.cu_seqlens
    per_token = slots is not None and slots.dim() == 2
    S, live = _start_step(p, slots, per_token)
    v = x.v
    # the bits of a vector-matrix product depend on its alignment, which would differ by head
    if p.V % 8:
        S, v = (torch.nn.functional.pad(t, (0, -p.V % 8)) for t in (S, v))
    begin = None if offsets is None else offsets[:-1].long()
    count = None if offsets is None else offsets.diff()
    group = p.HV // max(p.H, 1)
    q, k = (t.repeat_interleave(group, 2) if group > 1 else t for t in (x.q, x.k))
    rows = (q * p.scale, k, v, x.g.exp()[..., None], x.beta[..., None, None])
    if offsets is not None or live is not None:
        o.zero_()  # tokens of no sequence or of one without a slot
    kv_out = None if final_state is None or final_state.dim() == 1 else p.as_kv(final_state)
    for t in range(p.T if count is None else int(count.max()) if p.N else 0):
        # n: the sequences that have a token t; None: all
        n = live if count is None else _intersect(live, count > t)
        each = slice(None) if n is None else n
        token: tuple = (each, t) if begin is None else (0, begin[each] + t)
        b_q, b_k, b_v, b_decay, b_beta = (r[token] for r in rows)
        b_S = (S if n is None else S[n]) * b_decay
        u = b_beta * (b_v.unsqueeze(-2) - b_k.unsqueeze(-2) @ b_S)  # [n, HV, 1, V]
        b_S = torch.addcmul(b_S, b_k.unsqueeze(-1), u)
        b_o = (b_q.unsqueeze(-2) @ b_S).squeeze(-2)[..., : p.V].to(o.dtype)
        S = b_S if n is None else S.index_copy(0, n, b_S)
        if slots is not None and per_token:
            assert kv_out is not None  # a call with slots has a pool
            slot = slots[each, t] if t < slots.shape[1] else slots.new_full((len(b_o),), -1)
            b_o.masked_fill_((slot < 0)[:, None, None], 0.0)
            _write(kv_out, slot, b_S[..., : p.V])
        o[token] = b_o
    if kv_out is not None and not per_token:
        if slots is None and live is None:
            kv_out.copy_(S[..., : p.V])
        else:
            ends = torch.arange(p.N) if slots is None else slots
            if live is not None:
                ends, S = ends[live], S[live]
            _write(kv_out, ends, S[..., : p.V])


def _write(pool: Tensor, slot: Tensor, S: Tensor) -> None:
    """Write each state to its slot; skip negative slots."""
    kept = slot >= 0
    if bool(kept.all()):
        pool[slot] = S.to(pool.dtype)
    else:
        pool[slot[kept]] = S[kept].to(pool.dtype)


def _intersect(live: Tensor | None, has: Tensor) -> Tensor | None:
    if live is None:
        return None if bool(has.all()) else torch.nonzero(has).flatten()
    return live[has[live]]


def _start_step(p: Problem, slots: Tensor | None, per_token: bool) -> tuple[Tensor, Tensor | None]:
    """Return the initial states [N, HV, K, V], and which sequences are live.

    None instead of the live sequences means all.
    """
    if p.state is None:
        return torch.zeros((p.N, p.HV, p.K, p.V), dtype=p.state_dtype), None
    kv = p.as_kv(p.state if p.source is None else p.source)
    if p.source_indices is not None:
        slots = p.slots(p.source_indices)
    elif slots is None:
        return kv.to(p.state_dtype).contiguous(), None
    elif per_token and p.num_accepted_tokens is None:
        slots = slots[:, 0]
    elif per_token and p.num_accepted_tokens is not None:
        column = p.num_accepted_tokens.long() - 1
        # rows of padding may hold any count
        inside = (column >= 0) & (column < slots.shape[1])
        slots = slots.gather(1, column.where(inside, 0)[:, None])[:, 0].where(inside, -1)
    live = None if bool((slots >= 0).all()) else torch.nonzero(slots >= 0).flatten()
    if not kv.shape[0]:
        return torch.zeros((p.N, p.HV, p.K, p.V), dtype=p.state_dtype), live
    return kv.index_select(0, slots.clamp(min=0).long()).to(p.state_dtype), live


class Native(Backend):
    """The stages above."""

    uniform = staticmethod(contiguous_call)
    uniform_gradients = staticmethod(contiguous_gradients)
    prepare, scan = staticmethod(prepare), staticmethod(scan)
    reverse_scan = staticmethod(reverse_scan)
    gradient, step = staticmethod(gradient), staticmethod(step)
    gate, gate_backward = staticmethod(gate), staticmethod(gate_backward)
    short_conv = staticmethod(convolution.short_conv)
    short_conv_backward = staticmethod(convolution.short_conv_backward)
    short_conv_in_place = staticmethod(convolution.short_conv_in_place)
    gated_norm = staticmethod(norm.gated_norm)
    gated_norm_backward = staticmethod(norm.gated_norm_backward)


BACKEND = Native()
