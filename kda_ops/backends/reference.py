"""Define the operators for readers: the token recurrence and each stage of the chunk form.

`Reference()` computes in the state dtype (float64 for float64 inputs) and is the tests' oracle.

``Reference(torch.float32, operand=torch.bfloat16)`` is the twin of a kernel. It rounds every stored
tensor and every dot operand to `operand`; sums and states stay in the first dtype. Error budgets
are derived from it. Formulas: docs/maths.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kda_ops.backends import activations, convolution, norm
from kda_ops.backends.activations import Activated
from kda_ops.problem import CHUNK, Problem
from kda_ops.sequences import Chunks
from kda_ops.stages import GRADIENTS, Backend, Gradients, Reverse, Tile, Trace, whole

FORGET = -1e4  # clamp for log decays: exp is 0 in every dtype, and -inf would make 0 * inf = NaN


def suffix(g: Tensor) -> Tensor:
    """Sum g over the rows after each row, in dim -2."""
    return (
        torch.cat([g[..., 1:, :], torch.zeros_like(g[..., :1, :])], -2).flip(-2).cumsum(-2).flip(-2)
    )


def pair_decay(g: Tensor) -> Tensor:
    """Return E_ij = exp(sum of g over (j, i]) for i >= j, else 0: [.., C, 1] -> [.., C, C].

    Sum g over each interval: differences of prefix sums would cancel.
    """
    i = torch.arange(g.shape[-2], device=g.device)
    # [i, j, t]
    inside = (i[None, None, :] > i[None, :, None]) & (i[None, None, :] <= i[:, None, None])
    return (
        torch.einsum("ijt,...t->...ij", inside.to(g.dtype), g[..., 0].clamp(min=FORGET))
        .exp()
        .tril()
    )


def levels(g: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each level of a chunk the mask of its pairs and the rows' factors f.

    Each level halves the blocks of the one before. A pair (j, i) belongs to the first level that
    puts j and i into different halves. With a the last row of the earlier half::

        E_ij = f_i f_j,    f_i = exp(sum of g over (a, i]),    f_j = exp(sum of g over (j, a])

    g is [.., C, D], the mask [C, C], f [.., C, D] with 0 <= f <= 1.
    """
    C, g = g.shape[-2], g.clamp(min=FORGET)
    i, half = torch.arange(C, device=g.device), C // 2
    while half:
        blocks = g.unflatten(-2, (C // half, half))
        later = ((i // half) % 2 == 1)[:, None]
        f = torch.where(
            later, blocks.cumsum(-2).flatten(-3, -2), suffix(blocks).flatten(-3, -2)
        ).exp()
        yield (i[:, None] // (2 * half) == i[None, :] // (2 * half)) & later & ~later.T, f
        half //= 2


class Reference(Backend):
    """A backend (`kda_ops.stages.Backend`) for reading and testing.

    It computes in `dtype` (None: the call's state dtype) and rounds operands to `operand` (None:
    not at all).
    """

    def __init__(self, dtype: torch.dtype | None = None, operand: torch.dtype | None = None):
        self.dtype, self.operand = dtype, operand

    uniform = staticmethod(activations.contiguous_call)
    uniform_gradients = staticmethod(activations.contiguous_gradients)
    gate, gate_backward = staticmethod(activations.gate), staticmethod(activations.gate_backward)
    short_conv = staticmethod(convolution.short_conv)
    short_conv_backward = staticmethod(convolution.short_conv_backward)
    short_conv_in_place = staticmethod(convolution.short_conv_in_place)
    gated_norm = staticmethod(norm.gated_norm)
    gated_norm_backward = staticmethod(norm.gated_norm_backward)

    def _round(self, x: Tensor) -> Tensor:
        return x if self.operand is None else x.to(self.operand).to(x.dtype)

    def _dot(self, a: Tensor, b: Tensor) -> Tensor:
        return self._round(a) @ self._round(b)

    def _decay(self, g: Tensor) -> Tensor:
        return g

    def _chunked(
        self, p: Problem
    ) -> tuple[Activated, Chunks, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Split the activated inputs into chunks [NT, HV, C, .]; scale q; beta is [.., C, 1]."""
        x, chunks = Activated(p, self.dtype or p.state_dtype), Chunks(p)
        q, k, v, g, beta = (
            chunks.split(t, t.dtype) for t in (x.q * p.scale, x.k, x.v, x.g, x.beta[..., None])
        )
        group = p.HV // max(p.H, 1)
        return (
            x,
            chunks,
            q.repeat_interleave(group, 1),
            k.repeat_interleave(group, 1),
            v,
            g.clamp(min=FORGET),
            beta,
        )

    # The next three form P or L and the two products of their backward. A decay of rank 0 does not
    # depend on d, so one product replaces the levels.
    def _pairs(self, a: Tensor, k: Tensor, g: Tensor) -> Tensor:
        """Return sum_d a_id k_jd E_ijd."""
        if g.shape[-1] == 1:
            # zero times a product with a later key that overflows is NaN
            return (pair_decay(g) * self._dot(a, k.mT)).tril()
        out = torch.diag_embed((a * k).sum(-1))
        for mask, f in levels(g):
            out = out + torch.where(mask, self._dot(a * f, (k * f).mT), 0.0)
        return out

    def _over_rows(self, d: Tensor, k: Tensor, g: Tensor) -> Tensor:
        """Return sum_j d_ij k_j E_ij; d is lower triangular."""
        if g.shape[-1] == 1:
            return self._dot(d * pair_decay(g), k)
        out = torch.diagonal(d, dim1=-2, dim2=-1)[..., None] * k
        for mask, f in levels(g):
            out = out + f * self._dot(torch.where(mask, d, 0.0), k * f)
        return out

    def _over_columns(self, d: Tensor, a: Tensor, g: Tensor) -> Tensor:
        """Return sum_i d_ij a_i E_ij; d is lower triangular."""
        if g.shape[-1] == 1:
            return self._dot((d * pair_decay(g)).mT, a)
        out = torch.diagonal(d, dim1=-2, dim2=-1)[..., None] * a
        for mask, f in levels(g):
            out = out + f * self._dot(torch.where(mask, d, 0.0).mT, a * f)
        return out

    def prepare(
        self,
        p: Problem,
        A: Tensor | None = None,
        with_AP: bool = False,
        norms: bool = False,
        overlap: bool = False,
    ) -> Tile:
        """Compute everything about the chunks that does not depend on the state."""
        _, _, q, k, v, g, beta = self._chunked(p)
        eye = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
        if A is None:
            L = beta * self._pairs(k, k, g).tril(-1)
            A = torch.linalg.solve_triangular(
                L + eye, eye.expand_as(L), upper=False, unitriangular=True
            ).contiguous()
        decay = g.cumsum(-2).exp()
        tile = Tile(
            A=A,
            P=self._pairs(q, k, g),
            w=self._dot(A, beta * k * decay),
            u=self._dot(A, beta * v),
            qg=q * decay,
            kg=k * suffix(g).exp(),
            # K entries even if g is absent
            gamma=decay[..., -1, :].expand(*decay.shape[:2], p.K if p.rank else 1).contiguous(),
        )
        return Tile(
            **{n: x if x is None or n == "gamma" else self._round(x) for n, x in vars(tile).items()}
        )

    def scan(
        self, p: Problem, tile: Tile, o: Tensor | None, final_state: Tensor | None, keep: bool
    ) -> Trace | None:
        """Run the state update over the chunks of each sequence.

        For each chunk, in order::

            v_new = u - w S
            o     = qg S + P v_new
            S    <- gamma S + kg^T v_new
        """
        made = whole(tile)
        chunks, dtype = Chunks(p), made.A.dtype
        states, v_new, out = (
            made.u.new_zeros((chunks.NT, p.HV, p.K, p.V)),
            torch.zeros_like(made.u),
            torch.zeros_like(made.u),
        )
        pool = _Pool(p, final_state)
        for n, (first, count) in enumerate(zip(chunks.first, chunks.count)):
            S, live = pool.read(n, dtype)
            if not live:
                continue
            for i in range(first, first + count):
                states[i] = S
                v_new[i] = made.u[i] - self._dot(made.w[i], S)
                out[i] = self._dot(made.qg[i], S) + self._dot(made.P[i], v_new[i])
                S = made.gamma[i][..., None] * S + self._dot(made.kg[i].mT, v_new[i])
                pool.snapshot(n, i - first + 1, chunks.offsets[n + 1] - chunks.offsets[n], S)
            pool.write(n, S)
        if o is not None:
            o.copy_(chunks.join(out))
        return Trace(self._round(states), self._round(v_new), o) if keep else None

    def reverse_scan(
        self,
        p: Problem,
        tile: Tile,
        do: Tensor | None,
        dfinal_state: Tensor | None,
        need: frozenset[str],
    ) -> Reverse:
        """Run the gradient of `scan` over the chunks of each sequence.

        For each chunk, from last to first::

            dv_new = P^T do + kg dS
            z      = A^T dv_new
            dS    <- gamma dS + qg^T do - w^T dv_new
        """
        made = whole(tile)
        chunks, dtype = Chunks(p), made.A.dtype
        dstates, z = made.u.new_zeros((chunks.NT, p.HV, p.K, p.V)), torch.zeros_like(made.u)
        b_do = torch.zeros_like(made.u) if do is None else chunks.split(do, dtype)
        dinitial = made.u.new_zeros((p.N, p.HV, p.K, p.V))
        for n, (first, count) in enumerate(zip(chunks.first, chunks.count)):
            dS = dinitial[n] if dfinal_state is None else p.as_kv(dfinal_state)[n].to(dtype)
            for i in reversed(range(first, first + count)):
                dstates[i] = dS
                dv_new = self._dot(made.P[i].mT, b_do[i]) + self._dot(made.kg[i], dS)
                z[i] = self._dot(made.A[i].mT, dv_new)
                dS = (
                    made.gamma[i][..., None] * dS
                    + self._dot(made.qg[i].mT, b_do[i])
                    - self._dot(made.w[i].mT, dv_new)
                )
            dinitial[n] = dS
        dv = self._round(chunks.join(self._chunked(p)[-1] * z))
        return Reverse(
            self._round(dstates), self._round(z), dv, dinitial if "initial_state" in need else None
        )

    def gradient(
        self,
        p: Problem,
        tile: Tile,
        trace: Trace,
        do: Tensor | None,
        reverse: Reverse,
        need: frozenset[str],
    ) -> Gradients:
        """Compute the inputs' gradients from the results of both scans."""
        made = whole(tile)
        x, chunks, q, k, v, g, beta = self._chunked(p)
        b_do = torch.zeros_like(v) if do is None else chunks.split(do, v.dtype)
        S, dS, z = trace.states, reverse.dstates, reverse.z
        assert z is not None  # this backend's reverse scan returns it
        decay, tail = g.cumsum(-2).exp(), suffix(g).exp()
        dqg, dP = self._dot(b_do, S.mT), self._dot(b_do, trace.v_new.mT)
        dkg, Zk = self._dot(trace.v_new, dS.mT), -self._dot(z, S.mT)
        # (I + L) v_new = beta (v - k exp(G) S), and z solves the transposed system
        dL = -self._dot(z, trace.v_new.mT).tril(-1)
        # The pair (i, i) does not decay. Its parts of q dq and k dk are equal and would cancel in
        # dG, whose other terms may be as small as a decay.
        own, dP = torch.diagonal(dP, dim1=-2, dim2=-1)[..., None], dP.tril(-1)
        own = own if p.rank else self._round(own)  # an operand, of the products over all channels
        dq_in, r = self._over_rows(dP, k, g), beta * self._over_rows(dL, k, g)
        col = self._over_columns(dP, q, g) + self._over_columns(dL, beta * k, g)
        dk_w, dk_x = beta * decay * Zk, tail * dkg
        dq = decay * dqg + dq_in  # for scale * q, without the pair (i, i)
        dG = q * dq + k * (dk_w + r - col)
        dq, dk = dq + own * k, dk_x + dk_w + r + col + own * q
        dbeta = ((z * v).sum(-1) + (Zk * k * decay).sum(-1) + (dL * self._pairs(k, k, g)).sum(-1))[
            ..., None
        ]
        # What a row leaves to later chunks decays in the rows after it alone. So what the last
        # token leaves would cancel in dG.
        tokens = chunks.split(q.new_ones(p.B, p.T, 1, 1), q.dtype)
        followed = torch.cat([tokens[..., 1:, :], torch.zeros_like(tokens[..., :1, :])], -2)
        left = torch.where(followed > 0, k * dk_x, 0.0)
        last = made.gamma * (S * dS).sum(-1) + left.sum(-2)
        dG = dG - left
        dG = torch.cat([dG[..., :-1, :], dG[..., -1:, :] + last[..., None, :]], -2)
        dg = dG.flip(-2).cumsum(-2).flip(-2)
        if g.shape[-1] == 1:
            dg = dg.sum(-1, keepdim=True)

        def per_key_head(d: Tensor) -> Tensor:
            joined = chunks.join(d)
            return (
                joined.unflatten(2, (p.H, -1)).sum(3)
                if p.HV
                else joined.new_zeros((p.B, p.T, p.H, p.K))
            )

        dq, dk, dg, dbeta, dA_log, ddt_bias = x.gradients(
            p,
            per_key_head(p.scale * dq),
            per_key_head(dk),
            chunks.join(dg) if p.g is not None else None,
            chunks.join(dbeta)[..., 0],
        )
        dinitial = None if reverse.dinitial_state is None else p.as_kv(reverse.dinitial_state)
        found = (dq, dk, chunks.join(beta * z), dg, dbeta, dA_log, ddt_bias, dinitial)
        return Gradients(
            **{
                n: d.to(t.dtype)
                for n, t, d in zip(GRADIENTS, p.differentiable(), found)
                if n in need and t is not None
            }
        )

    def step(self, p: Problem, o: Tensor, final_state: Tensor | None) -> None:
        """Run the recurrence token by token."""
        x = Activated(p, self.dtype or p.state_dtype)
        group = p.HV // max(p.H, 1)
        q, k = x.q.repeat_interleave(group, 2), x.k.repeat_interleave(group, 2)
        pool, offsets = _Pool(p, final_state), Chunks(p).offsets
        o.zero_()
        rows = [t.flatten(0, 1) for t in (q, k, x.v, self._decay(x.g), x.beta, o)]
        for n, (a, b) in enumerate(zip(offsets, offsets[1:])):
            S, live = pool.read(n, x.v.dtype)
            if not live:
                continue
            for t in range(a, b):
                b_q, b_k, b_v, b_g, b_beta, b_o = (r[t] for r in rows)
                S, out = step_tokens(S, b_q, b_k, b_v, b_g, b_beta, p.scale)
                if pool.write_token(n, t - a, S):
                    b_o.copy_(out)
            pool.write(n, S)


def step_tokens(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Apply one token of the recurrence; return the next S [.., K, V] and o [.., V].

    q, k are [.., K], v [.., V], g [.., D], beta [..].
    """
    S = g.exp().unsqueeze(-1) * S
    u = beta.unsqueeze(-1) * (v - (S.mT @ k.unsqueeze(-1)).squeeze(-1))
    S = S + k.unsqueeze(-1) * u.unsqueeze(-2)
    return S, scale * (S.mT @ q.unsqueeze(-1)).squeeze(-1)


class _Pool:
    """Reads and writes the state of sequence n: row n, or its slots in `p.state_indices`.

    A slot up to `p.null_slot` is neither read nor written.
    """

    def __init__(self, p: Problem, final_state: Tensor | None):
        self.p, self.accepted = p, p.num_accepted_tokens
        self.slots, self.into = (
            None if x is None else p.slots(x) for x in (p.state_indices, p.snapshot_indices)
        )
        initial = p.state if p.source is None else p.source
        self.initial = None if initial is None else p.as_kv(initial)
        self.sources = None if p.source_indices is None else p.slots(p.source_indices)
        # a call without a final state passes an empty tensor, shape [0]
        self.final = None if final_state is None or final_state.dim() == 1 else p.as_kv(final_state)

    def _slot(self, n: int, column: int) -> int:
        if self.slots is None:
            return n
        if self.slots.dim() == 1:
            return int(self.slots[n])
        return int(self.slots[n, column]) if 0 <= column < self.slots.shape[1] else -1

    def _zero(self, dtype: torch.dtype) -> Tensor:
        return self.p.v.new_zeros((self.p.HV, self.p.K, self.p.V), dtype=dtype)

    def read(self, n: int, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """Return sequence n's initial state, and whether its slot is not negative."""
        if self.sources is not None:
            slot = int(self.sources[n])
        else:
            slot = self._slot(n, 0 if self.accepted is None else int(self.accepted[n]) - 1)
        if self.initial is None or slot < 0:
            return self._zero(dtype), slot >= 0
        resumed = self.p.has_initial_state
        if resumed is not None and not resumed[n]:
            return self._zero(dtype), True
        return self.initial[slot].to(dtype), True

    def write(self, n: int, S: Tensor) -> None:
        """Store the state after the last token if sequences have one slot each."""
        if (
            self.final is not None
            and (self.slots is None or self.slots.dim() == 1)
            and self._slot(n, 0) >= 0
        ):
            self.final[self._slot(n, 0)] = S

    def write_token(self, n: int, t: int, S: Tensor) -> bool:
        """Store the state after token t if each token has a slot; return whether t has output."""
        if self.slots is None or self.slots.dim() == 1:
            return True
        slot = self._slot(n, t)
        if slot >= 0:
            assert self.final is not None  # slots belong to a pool
            self.final[slot] = S
        return slot >= 0

    def snapshot(self, n: int, chunk: int, length: int, S: Tensor) -> None:
        """Store the state after `chunk` whole chunks of sequence n if a snapshot is due."""
        every, into = self.p.snapshot_every, self.into
        if (
            into is None
            or chunk % every
            or chunk * CHUNK > length
            or chunk // every > into.shape[1]
        ):
            return
        slot = int(into[n, chunk // every - 1])
        if slot >= 0:
            assert self.initial is not None  # slots belong to a pool
            self.initial[slot] = S


BACKEND = Reference()
