"""The CPU backend: the chunk form as batched products over all chunks and heads, with a
hand-written backward, in plain torch.

Inputs of 16 bits are widened once and everything is summed in float32 (float64 for float64 inputs),
so nothing here has a 16-bit operand. Formulas: MATHS.md; contracts: `kda_ops.stages`; each stage is
tested against its twin in `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kda_ops.backends.activations import Activated, gate, gate_backward  # noqa: F401  (stages of this backend)
from kda_ops.problem import CHUNK, Problem
from kda_ops.sequences import Chunks
from kda_ops.stages import GRADIENTS, Gradients, Reverse, Tile, Trace, whole

SMALLEST = {torch.float32: -87.0, torch.float64: -708.0}  # exp of it is still a normal number
SLAB = 1 << 18  # elements of one operand worked on at a time: 1 MB in float32
_EYE = torch.eye(CHUNK)
_ABOVE = torch.full((CHUNK, CHUNK), -torch.inf).triu_(1)


def _once(p: Problem, name: str, make: Callable[[], Any]) -> Any:
    """make(), kept in the call's scratch if it has one."""
    if p.scratch is None:
        return make()
    if name not in p.scratch:
        p.scratch[name] = make()
    return p.scratch[name]


def _exp(x: Tensor) -> Tensor:
    """exp(x) in place for x <= 0, with 0 for what could only be a denormal number: those cost a CPU
    a hundred times the time.
    """
    return torch.threshold_(x, SMALLEST[x.dtype], -torch.inf).exp_()


class _Chunked:
    """The activated inputs per chunk: q (scaled), k, v, beta [NT, HV, C, .], and g [NT, HV, C,
    D].
    """

    def __init__(self, p: Problem):
        self.x, self.chunks, dtype = Activated(p, p.state_dtype), Chunks(p), p.state_dtype
        split = self.chunks.split
        q, k, v, beta, g = (
            split(t, dtype)
            for t in (self.x.q, self.x.k, self.x.v, self.x.beta[..., None], self.x.g)
        )
        if p.HV > p.H:
            q, k = (t.repeat_interleave(p.HV // p.H, 1) for t in (q, k))
        self.tensors = (q * p.scale, k, v, beta, g)

    def slabs(self) -> Iterator[tuple[slice, _Slab]]:
        """A few chunks at a time, so that what is computed between reading and writing them stays
        in cache.
        """
        NT, HV, C, K = self.tensors[0].shape
        size = max(1, SLAB // max(1, HV * C * K))
        for start in range(0, NT, size):
            s = slice(start, min(start + size, NT))
            yield s, _Slab(*(t[s] for t in self.tensors))


class _Slab:
    """Some chunks: q (scaled), k, v, beta, their decays exp(G) and exp(G_n - G), [.., C, D], and
    gamma = exp(G_n).

    Decays are formed by sums of g alone, never by differences, so any gate is exact, -inf included.
    `levels` holds the sums that pairs of rows are made of: at the level of a half of 1, 2, 4 .. C /
    2 rows, ``[.., C / (2 half), 2, half, D]``, with a the end of the earlier half of a block of 2
    half rows, sum (j, a] for the earlier rows j and sum (a, i] for the later rows i. No row after i
    is read.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor):
        self.q, self.k, self.v, self.beta, self.rank = q, k, v, beta, int(g.shape[-1] > 1)
        # inside blocks of `half` rows: the sum up to each row, and the sum of the rows after it
        upto, after = g.clone(), torch.zeros_like(g)
        self.levels, half = [], 1
        while half < CHUNK:
            halves_upto, halves_after = (
                upto.unflatten(-2, (-1, 2, half)),
                after.unflatten(-2, (-1, 2, half)),
            )
            self.levels.append(
                torch.stack([halves_after[..., 0, :, :], halves_upto[..., 1, :, :]], -3)
            )
            halves_after[..., 0, :, :] += halves_upto[..., 1, -1:, :]
            halves_upto[..., 1, :, :] += halves_upto[..., 0, -1:, :]
            half *= 2
        self.decay, self.tail = _exp(upto), _exp(after)
        self.gamma = self.decay[..., -1, :]


def _pair_decay(c: _Slab) -> Tensor:
    """E_ij = exp(sum of g over (j, i]) for i >= j, else 0, for a decay of rank 0: [.., C, C]."""
    between = torch.diag_embed(c.k.new_zeros(c.k.shape[:-1])).add_(_ABOVE.to(c.k.dtype))
    for sums in c.levels:
        half = sums.shape[-2]
        _diagonal_blocks(between, 2 * half)[..., half:, :half] = (
            sums[..., 1, :, :] + sums[..., 0, :, :].mT
        )
    return _exp(between)


def _factors(c: _Slab) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each level of the chunk: the size m of the diagonal blocks that hold its pairs, their
    mask [m, m], and the factor f [.., C, K].

    A pair (j, i) belongs to the level where i is in the later and j in the earlier half of one
    block: E_ij = f_i f_j, both at most 1.
    """
    for sums in c.levels:
        half = sums.shape[-2]
        m = max(2 * half, 8)
        row = torch.arange(m)
        later = (row // half) % 2 == 1
        mask = (
            (row[:, None] // (2 * half) == row[None, :] // (2 * half))
            & later[:, None]
            & ~later[None, :]
        )
        yield m, mask, _exp(sums).flatten(-4, -2)


def _blocks(x: Tensor, m: int) -> Tensor:
    """[.., C, K] as a batch of m-row blocks."""
    return x.reshape(-1, m, x.shape[-1])


def _diagonal_blocks(x: Tensor, m: int) -> Tensor:
    """[M, C, C] as its diagonal m x m blocks [M, C // m, m, m], a view."""
    return (
        x.unflatten(-1, (-1, m)).unflatten(-3, (-1, m)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    )


def _scores(c: _Slab) -> tuple[Tensor, Tensor]:
    """sum_d q_id k_jd E_ijd for j <= i, and sum_d k_id k_jd E_ijd for j < i."""
    q, k = c.q, c.k
    if not c.rank:
        E = _pair_decay(c)
        return (q @ k.mT).mul_(E), (k @ k.mT).mul_(E).tril_(-1)
    qk, kk = torch.diag_embed((q * k).sum(-1)), k.new_zeros((*k.shape[:-1], CHUNK))
    for m, mask, f in _factors(c):
        kf = _blocks(k * f, m)
        both = torch.cat([_blocks(q * f, m), kf], 1) @ kf.mT
        shape = (*k.shape[:2], -1, m, m)
        _diagonal_blocks(qk, m).add_(both[:, :m].where(mask, 0.0).view(shape))
        _diagonal_blocks(kk, m).add_(both[:, m:].where(mask, 0.0).view(shape))
    return qk, kk


def _scores_backward(c: _Slab, dP: Tensor, dL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """sum_j dP_ij k_j E_ij and sum_j dL_ij k_j E_ij for the rows, sum_i (dP_ij q_i + dL_ij beta_i
    k_i) E_ij for the columns; only j < i.
    """
    q, k = c.q, c.k
    if not c.rank:
        E = _pair_decay(c)
        dP, dL = dP * E, dL * E
        return dP @ k, dL @ k, (dP.mT @ q).add_(dL.mT @ (c.beta * k))
    rows_q, rows_k, columns = torch.zeros_like(k), torch.zeros_like(k), torch.zeros_like(k)
    for m, mask, f in _factors(c):
        kf, qf = k * f, q * f
        d = (
            torch.cat([_diagonal_blocks(dP, m), _diagonal_blocks(dL, m)], -2)
            .where(mask.repeat(2, 1), 0.0)
            .reshape(-1, 2 * m, m)
        )
        rows = d @ _blocks(kf, m)
        rows_q.addcmul_(rows[:, :m].reshape(k.shape), f)
        rows_k.addcmul_(rows[:, m:].reshape(k.shape), f)
        columns.addcmul_(
            (d.mT @ torch.cat([_blocks(qf, m), _blocks(kf.mul_(c.beta), m)], 1)).view(k.shape), f
        )
    return rows_q, rows_k, columns


def prepare(
    p: Problem,
    A: Tensor | None = None,
    pack: bool = False,
    norms: bool = False,
    overlap: bool = False,
) -> Tile:
    """Everything about the chunks that does not depend on the state."""
    chunked, eye = _once(p, "chunked", lambda: _Chunked(p)), _EYE.to(p.state_dtype)
    q, _, v, _, _ = chunked.tensors
    shape = q.shape[:2]
    square = (*shape, CHUNK, CHUNK)
    tile = Tile(
        A=q.new_empty(square) if A is None else A,
        P=q.new_empty(square),
        w=torch.empty_like(q),
        u=torch.empty_like(v),
        qg=torch.empty_like(q),
        kg=torch.empty_like(q),
        gamma=q.new_empty((*shape, p.K if p.rank else 1)),  # without g too
    )
    made = whole(tile)
    for s, c in chunked.slabs():
        made.P[s], kk = _scores(c)
        if A is None:
            made.A[s] = torch.linalg.solve_triangular(
                (c.beta * kk).add_(eye), eye.expand_as(kk), upper=False, unitriangular=True
            )
        torch.matmul(made.A[s], (c.k * c.decay).mul_(c.beta), out=made.w[s])
        torch.matmul(made.A[s], c.v * c.beta, out=made.u[s])
        torch.mul(c.q, c.decay, out=made.qg[s])
        torch.mul(c.k, c.tail, out=made.kg[s])
        made.gamma[s] = c.gamma
    return tile


class _Running:
    """The states of all sequences, longest first, so that those still running at a scan step are a
    prefix: [N, HV, K, V].

    Rows are eight numbers apart or a multiple: the bits of a small product depend on how the lines
    of its result are aligned.
    """

    def __init__(self, p: Problem, initial: Tensor | None, slots: Tensor | None):
        self.chunks, self.HV = Chunks(p), p.HV
        self.order = self.chunks.order
        self.S = torch.zeros((p.N, p.HV, p.K, p.V + -p.V % 8), dtype=p.state_dtype)[..., : p.V]
        if initial is not None and initial.shape[0]:
            rows = self.order if slots is None else slots[self.order].clamp(min=0)
            self.S.copy_(p.as_kv(initial).index_select(0, rows))
            if slots is not None:
                self.S[slots[self.order] < 0] = 0.0

    @staticmethod
    def at(x: Tensor, chunk: Tensor | slice) -> Tensor:
        """The rows of these chunks as one batch [n * HV, ., .]; a view of a single chunk."""
        return (x[chunk] if isinstance(chunk, slice) else x.index_select(0, chunk)).flatten(0, 1)

    @property
    def steps(self) -> list[tuple[Tensor, Tensor | slice]]:
        """`Chunks.steps`, a single chunk as a slice."""
        return [
            (live, slice(int(chunk), int(chunk) + 1) if len(chunk) == 1 else chunk)
            for live, chunk in self.chunks.steps()
        ]


def scan(
    p: Problem, tile: Tile, o: Tensor | None, final_state: Tensor | None, keep: bool
) -> Trace | None:
    """v_new = u - w S;   o = qg S + P v_new;   S <- gamma S + kg^T v_new."""
    made = whole(tile)
    slots, into = p.state_indices, p.snapshot_indices
    run = _Running(p, p.state, slots)
    new = run.chunks.new
    states = new(made.u, p.K, p.V) if keep else None
    v_all, out = (
        new(made.u, CHUNK, p.V) if keep else None,
        None if o is None else new(made.u, CHUNK, p.V),
    )
    for step, (live, chunk) in enumerate(run.steps):
        S = run.S[: len(live)].flatten(0, 1)
        if states is not None:
            states[chunk] = run.S[: len(live)]
        v_new = torch.baddbmm(run.at(made.u, chunk), run.at(made.w, chunk), S, alpha=-1)
        if v_all is not None:
            v_all[chunk] = v_new.unflatten(0, (-1, p.HV))
        if out is not None:
            out[chunk] = (
                torch.bmm(run.at(made.qg, chunk), S)
                .baddbmm_(run.at(made.P, chunk), v_new)
                .unflatten(0, (-1, p.HV))
            )
        S.mul_(run.at(made.gamma, chunk)[..., None]).baddbmm_(run.at(made.kg, chunk).mT, v_new)
        if into is not None:
            assert final_state is not None  # snapshots go to its pool
            _snapshot(p, into, run, live, step + 1, final_state)
    if slots is not None and out is not None:
        _silence(run, slots, out)
    if o is not None and out is not None:
        o.copy_(run.chunks.join(out))
    if final_state is not None and final_state.numel():
        _write(p.as_kv(final_state), run.order if slots is None else slots[run.order], run.S)
    return None if states is None or v_all is None else Trace(states, v_all, o)


def _snapshot(
    p: Problem, into: Tensor, run: _Running, live: Tensor, chunk: int, pool: Tensor
) -> None:
    """Write the states after `chunk` whole chunks of the live sequences to their snapshot slots,
    where one is due.
    """
    column = chunk // p.snapshot_every - 1
    if chunk % p.snapshot_every or column >= into.shape[1]:
        return
    length = torch.tensor(run.chunks.offsets).diff()[live]
    due = length >= chunk * CHUNK
    if p.state_indices is not None:
        due &= p.state_indices[live] >= 0
    _write(p.as_kv(pool), into[live, column].where(due, -1), run.S[: len(live)])


def _silence(run: _Running, slots: Tensor, out: Tensor) -> None:
    """Sequences without a slot give zero output."""
    for n in torch.nonzero(slots < 0).flatten().tolist():
        out[run.chunks.first[n] : run.chunks.first[n] + run.chunks.count[n]] = 0.0


def reverse_scan(
    p: Problem, tile: Tile, do: Tensor | None, dfinal_state: Tensor | None, need: frozenset[str]
) -> Reverse:
    """dv_new = P^T do + kg dS;   z = A^T dv_new;   dS <- gamma dS + qg^T do - w^T dv_new."""
    made = whole(tile)
    run = _Running(p, dfinal_state, None)
    dstates, z, d_o = (
        run.chunks.new(made.u, p.K, p.V),
        run.chunks.new(made.u, CHUNK, p.V),
        _split_do(p, run.chunks, do),
    )
    for live, chunk in reversed(run.steps):
        dS = run.S[: len(live)].flatten(0, 1)
        dstates[chunk] = run.S[: len(live)]
        b_do = run.at(d_o, chunk)
        dv_new = torch.bmm(run.at(made.P, chunk).mT, b_do).baddbmm_(run.at(made.kg, chunk), dS)
        z[chunk] = torch.bmm(run.at(made.A, chunk).mT, dv_new).unflatten(0, (-1, p.HV))
        dS.mul_(run.at(made.gamma, chunk)[..., None]).baddbmm_(
            run.at(made.qg, chunk).mT, b_do
        ).baddbmm_(run.at(made.w, chunk).mT, dv_new, alpha=-1)
    dinitial = (
        torch.empty_like(run.S).index_copy_(0, run.order, run.S)
        if "initial_state" in need
        else None
    )
    return Reverse(dstates, z, None, dinitial)


def _split_do(p: Problem, chunks: Chunks, do: Tensor | None) -> Tensor:
    """The gradient of o per chunk, [NT, HV, C, V]."""
    return _once(
        p,
        "do",
        lambda: chunks.split(
            p.v.new_zeros(()).expand(p.B, p.T, p.HV, p.V) if do is None else do, p.state_dtype
        ),
    )


def gradient(
    p: Problem, tile: Tile, trace: Trace, do: Tensor | None, reverse: Reverse, need: frozenset[str]
) -> Gradients:
    """Every input's gradient from what the two scans left."""
    chunked: _Chunked = _once(p, "chunked", lambda: _Chunked(p))
    join, x = chunked.chunks.join, chunked.x
    q, k, v, beta, g = chunked.tensors
    dq, dk, dv, dbeta, dg = (
        torch.empty_like(q),
        torch.empty_like(k),
        torch.empty_like(v),
        torch.empty_like(beta),
        torch.empty_like(g),
    )
    d_o, z = _split_do(p, chunked.chunks, do), reverse.z
    assert z is not None  # as this backend's reverse scan leaves it
    for s, c in chunked.slabs():
        dq[s], dk[s], dv[s], dg[s], dbeta[s] = _gradient(
            c, trace.states[s], trace.v_new[s], d_o[s], reverse.dstates[s], z[s]
        )

    # such a decay is 0, and what the sums leave there is rounding, which A_log takes times g
    dg.masked_fill_(g < SMALLEST[g.dtype], 0.0)

    def per_key_head(d: Tensor) -> Tensor:
        return join(d).unflatten(2, (p.H, p.HV // p.H)).sum(3) if p.HV > p.H else join(d)

    gates = need & {"g", "A_log", "dt_bias"}
    dq, dk, dg, dbeta, dA_log, ddt_bias = x.gradients(
        p,
        per_key_head(dq.mul_(p.scale)),
        per_key_head(dk),
        join(dg) if gates else None,
        join(dbeta)[..., 0] if "beta" in need else None,
    )
    dinitial = None if reverse.dinitial_state is None else p.as_kv(reverse.dinitial_state)
    found = (dq, dk, join(dv), dg, dbeta, dA_log, ddt_bias, dinitial)
    return Gradients(
        **{
            n: d.to(x.dtype)
            for n, x, d in zip(GRADIENTS, p.differentiable(), found)
            if n in need and x is not None
        }
    )


def _gradient(
    c: _Slab, S: Tensor, v_new: Tensor, d_o: Tensor, dS: Tensor, z: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of scale q, k, v, g and beta of some chunks; letters as in MATHS.md, "Backward"."""
    q, k, v, beta, decay = c.q, c.k, c.v, c.beta, c.decay
    dP = d_o @ v_new.mT
    on_diagonal = torch.diagonal(dP, dim1=-2, dim2=-1)[..., None].clone()
    # v_new solves (I + L) v_new = beta (v - k exp(G) S), and z the transposed system
    dL = (z @ v_new.mT).neg_().tril_(-1)
    dkg, Zk = (v_new @ dS.mT).mul_(c.tail), (z @ S.mT).neg_()
    dq, r, col = _scores_backward(c, dP.tril_(-1), dL)
    dq.add_((d_o @ S.mT).mul_(decay))
    r.add_(Zk.mul_(decay))
    dbeta = (z * v).sum(-1, keepdim=True).add_((r * k).sum(-1, keepdim=True))
    # The same is z v_new / beta, which cancels less, where beta leaves v_new the digits.
    dbeta = torch.where(
        beta.abs() > torch.finfo(beta.dtype).tiny ** 0.5,
        (z * v_new).sum(-1, keepdim=True) / beta,
        dbeta,
    )
    early = r.mul_(beta)  # where row i reads k_i itself; the columns and kg read it later
    dG = (early - col).mul_(k).addcmul_(q, dq)
    # A row's own score has no decay: its share of q dq is that of k col, so both join only here and
    # need not cancel.
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
    """The token recurrence over all sequences at once: S <- exp(g) S; u = beta (v - S^T k); S <-
    S + k u^T; o = scale S^T q.
    """
    x, slots = Activated(p, p.state_dtype), p.state_indices
    offsets = p.cu_seqlens
    per_token = slots is not None and slots.dim() == 2
    S, live = _start(p, slots, per_token)
    v = x.v
    # a vector by a matrix has the bits of its alignment, which would differ from head to head
    if p.V % 8:
        S, v = (torch.nn.functional.pad(t, (0, -p.V % 8)) for t in (S, v))
    begin = None if offsets is None else offsets[:-1].long()
    count = None if offsets is None else offsets.diff()
    group = p.HV // max(p.H, 1)
    q, k = (t.repeat_interleave(group, 2) if group > 1 else t for t in (x.q, x.k))
    rows = (q * p.scale, k, v, x.g.exp()[..., None], x.beta[..., None, None])
    if offsets is not None or slots is not None:
        o.zero_()  # tokens of no sequence, and of sequences without a slot
    kv_out = None if final_state is None or final_state.dim() == 1 else p.as_kv(final_state)
    for t in range(p.T if count is None else int(count.max()) if p.N else 0):
        # the sequences with a token t, None for all
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
            assert kv_out is not None  # slots are those of a pool
            slot = slots[each, t] if t < slots.shape[1] else slots.new_full((len(b_o),), -1)
            b_o.masked_fill_((slot < 0)[:, None, None], 0.0)
            _write(kv_out, slot, b_S[..., : p.V])
        o[token] = b_o
    if kv_out is not None and not per_token:
        if slots is None:
            kv_out.copy_(S[..., : p.V])
        else:
            _write(kv_out, slots, S[..., : p.V])


def _write(pool: Tensor, slot: Tensor, S: Tensor) -> None:
    """Each state to its slot; a negative slot is nowhere."""
    kept = slot >= 0
    if bool(kept.all()):
        pool[slot] = S.to(pool.dtype)
    else:
        pool[slot[kept]] = S[kept].to(pool.dtype)


def _intersect(live: Tensor | None, has: Tensor) -> Tensor | None:
    if live is None:
        return None if bool(has.all()) else torch.nonzero(has).flatten()
    return live[has[live]]


def _start(p: Problem, slots: Tensor | None, per_token: bool) -> tuple[Tensor, Tensor | None]:
    """The states the sequences start from [N, HV, K, V], and which sequences are live (None:
    all).
    """
    if p.state is None:
        return torch.zeros((p.N, p.HV, p.K, p.V), dtype=p.state_dtype), None
    kv = p.as_kv(p.state)
    if slots is None:
        return kv.to(p.state_dtype).contiguous(), None
    if per_token and p.num_accepted_tokens is None:
        slots = slots[:, 0]
    elif per_token and p.num_accepted_tokens is not None:
        column = p.num_accepted_tokens.long() - 1
        # a row of padding may have accepted anything
        inside = (column >= 0) & (column < slots.shape[1])
        slots = slots.gather(1, column.where(inside, 0)[:, None])[:, 0].where(inside, -1)
    live = None if bool((slots >= 0).all()) else torch.nonzero(slots >= 0).flatten()
    if not kv.shape[0]:
        return torch.zeros((p.N, p.HV, p.K, p.V), dtype=p.state_dtype), live
    return kv.index_select(0, slots.clamp(min=0).long()).to(p.state_dtype), live
