"""Describe one decode call as data, and check the laws of every backend's `step`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate, product
from unittest.mock import patch

import torch
from torch import Tensor

from kda_ops import problem
from kda_ops.backends.reference import Reference
from kda_ops.problem import Problem
from kda_ops.stages import Backend
from tests.support.closeness import assert_close, assert_identical

POISON = float("nan")
# kinds of decay; "bare" is the bounded gate without A_log and dt_bias
ACTIVATIONS = ("none", "given", "softplus", "bounded", "bare")
STRIDES = ("contiguous", "heads_first", "fused", "expanded")


@dataclass(frozen=True)
class Step:
    """A call to `Backend.step`.

    `slots` is None (row n), 1 (``[N]``) or S (``[N, S]``, a state per token). `lengths` packs
    sequences; `tail` tokens follow.
    """

    rank: int = 1
    N: int = 2
    T: int = 1
    lengths: tuple[int, ...] | None = None
    tail: int = 0
    H: int = 2
    HV: int = 4
    K: int = 32
    V: int = 32
    dtype: torch.dtype = torch.float32
    pool: torch.dtype = torch.float32
    gate: str = "given"
    beta: str = "given"
    l2norm: bool = True
    scale: float | None = None
    state: bool = True
    final: bool = True
    slots: int | None = None
    accepted: bool = False
    dead: tuple[int, ...] = ()
    transposed: bool = False
    strides: str = "contiguous"
    gap: bool = False  # gaps between the slots of the pool
    index: torch.dtype = torch.int32
    wide: bool = True  # g, beta, A_log and dt_bias in float32 rather than in `dtype`
    seed: int = 0

    @property
    def sequences(self) -> int:
        """Return N, for packed calls too."""
        return self.N if self.lengths is None else len(self.lengths)

    def problem(self, device: torch.device | str = "cpu", double: bool = False) -> Problem:
        """Parse the call on fresh, reproducible tensors; in float64 on the CPU if `double`."""
        gen = torch.Generator().manual_seed(self.seed)
        rows, B = (self.T, self.N) if self.lengths is None else (sum(self.lengths) + self.tail, 1)
        N, H, HV, K, V = self.sequences, self.H, self.HV, self.K, self.V
        wide = torch.float32 if self.wide else self.dtype

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen)

        q, k, v, beta = (
            randn(B, rows, H, K),
            randn(B, rows, H, K),
            randn(B, rows, HV, V),
            torch.rand((B, rows, HV), generator=gen),
        )
        if not self.l2norm:
            q, k = (x / x.norm(dim=-1, keepdim=True).clamp(min=1e-3) for x in (q, k))
        g_shape = (B, rows, HV, K) if self.rank else (B, rows, HV)
        g = (
            randn(*g_shape)
            if self.gate in ("softplus", "bounded", "bare")
            else -2.0 * torch.rand(g_shape, generator=gen)
        )
        if self.gate == "given":
            g = torch.where(torch.rand(g_shape, generator=gen) < 0.05, -torch.inf, g)
        if self.beta in ("sigmoid", "neg_eigval"):
            beta = 4.0 * beta - 2.0
        A_log = dt_bias = None
        if self.gate in ("softplus", "bounded"):
            A_log, dt_bias = (
                (0.5 * randn(HV)).to(wide),
                randn(*((HV, K) if self.rank else (HV,))).to(wide),
            )
        tensors = [
            x.to(t)
            for x, t in ((q, self.dtype), (k, self.dtype), (v, self.dtype), (g, wide), (beta, wide))
        ]
        q, k, v, g, beta = (_place(x, self.strides) for x in tensors)
        shape = (HV, V, K) if self.transposed else (HV, K, V)
        state = indices = accepted = None
        count = N if self.slots is None else N * self.slots + 3
        if self.state or self.slots is not None:
            state = randn(count, *shape).to(self.pool)
            if self.gap:
                spread = torch.full((count, 2, *shape), POISON, dtype=self.pool)
                spread[:, 0] = state
                state = spread[:, 0]
        if self.slots is not None:
            indices = torch.randperm(count, generator=gen)[: N * self.slots].view(N, self.slots)
            for n in self.dead if N else ():
                # cut to 32 bits, the wide one would name a slot
                wide = self.index is torch.int64
                indices[n % N, n % self.slots] = n % count - 2**32 if wide else -1 - n
            indices = (indices[:, 0] if self.slots == 1 else indices).to(self.index)
            if self.accepted:
                accepted = torch.randint(1, self.slots + 1, (N,), generator=gen).to(self.index)
        cu_seqlens = (
            None
            if self.lengths is None
            else torch.tensor([0, *accumulate(self.lengths)]).to(self.index)
        )
        given = [q, k, v, None if self.gate == "none" else g, None if self.beta == "none" else beta]
        rest = [A_log, dt_bias]

        def move(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            if double and x.is_floating_point():
                x = x.double()
            return x if torch.device(device).type == "cpu" else _copy(x, device)

        flags = dict(
            scale=self.scale,
            use_qk_l2norm_in_kernel=self.l2norm,
            use_gate_in_kernel=self.gate in ("softplus", "bounded", "bare"),
            lower_bound=-5.0 if self.gate in ("bounded", "bare") else None,
            use_beta_sigmoid_in_kernel=self.beta in ("sigmoid", "neg_eigval"),
            allow_neg_eigval=self.beta == "neg_eigval",
            transpose_state_layout=self.transposed,
        )
        if self.slots is None:
            return Problem.parse(
                self.rank,
                *map(move, given),
                *map(move, rest),
                move(state),
                move(cu_seqlens),
                output_final_state=self.final,
                **flags,
            )
        with patch.object(problem, "check_columns"):  # a GPU may meet longer sequences
            return Problem.parse_step(
                self.rank,
                *map(move, given),
                move(state),
                move(indices),
                move(accepted),
                *map(move, rest),
                move(cu_seqlens),
                **flags,
            )

    def outputs(self, p: Problem) -> tuple[Tensor, Tensor]:
        """Return the outputs o and final states, filled with NaN, or the pool itself."""
        return p.new_output().fill_(POISON), p.new_final_state().fill_(
            POISON
        ) if self.slots is None else p.state


def _place(x: Tensor, strides: str) -> Tensor:
    """Return x with other strides and the same values; an expanded axis has equal heads."""
    if strides == "heads_first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if strides == "fused":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), POISON, dtype=x.dtype)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    return x[:, :, :1].expand(x.shape) if strides == "expanded" else x


def _copy(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy x to another device and keep its strides."""
    if x.numel() == 0 or x.is_contiguous():
        return x.to(device)
    if 0 in x.stride():
        return x[:, :, :1].to(device).expand(x.shape)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


# Calls without sequences, tokens, heads or values, the narrowest and the widest, and a long one.
EDGES = [
    Step(N=0),
    Step(T=0),
    Step(HV=0, H=0),
    Step(V=0),
    Step(lengths=()),
    Step(lengths=(), tail=20, slots=1),
    Step(lengths=(0, 0), state=False),
    Step(K=1, V=1, H=1, HV=3),
    Step(K=256, V=8, H=1, HV=1, transposed=True),
    Step(T=17, H=1, HV=1, N=1),
]


def random_step(
    seed: int,
    dtypes: tuple[torch.dtype, ...],
    pools=(torch.float32,),
    widths=(7, 16, 24, 33, 64),
    most: int = 6,
) -> Step:
    """Draw a legal call with every option."""
    r = random.Random(seed)
    packed, rank = r.random() < 0.5, r.randrange(2)
    slots = r.choice((None, None, 1, 1, 3, most))
    T = 1 if r.random() < 0.4 else r.randint(0, most)
    lengths = (
        tuple(r.choice((0, 1, 1, 2, most)) for _ in range(r.randint(0, 4))) if packed else None
    )
    if slots is not None and slots > 1:
        T = min(T, slots)
    H = r.choice((1, 2))
    return Step(
        rank=rank,
        N=r.randint(1, 3),
        T=T,
        lengths=lengths,
        tail=r.choice((0, 1, 19)) if packed else 0,
        H=H,
        HV=H * r.choice((1, 2)),
        K=r.choice(widths),
        V=r.choice(widths),
        dtype=r.choice(dtypes),
        pool=torch.float32 if slots is None else r.choice(pools),
        gate=r.choice(ACTIVATIONS),
        beta=r.choice(("none", "given", "sigmoid", "neg_eigval")),
        l2norm=r.random() < 0.5,
        scale=r.choice((None, 1.0, 0.3)),
        state=r.random() < 0.7,
        final=r.random() < 0.7,
        slots=slots,
        accepted=slots is not None and slots > 1 and r.random() < 0.6,
        dead=tuple(r.sample(range(8), r.choice((0, 1, 2)))),
        transposed=r.random() < 0.5,
        strides=r.choice(STRIDES),
        gap=r.random() < 0.3,
        index=r.choice((torch.int32, torch.int64)),
        wide=r.random() < 0.5,
        seed=seed,
    )


def assert_step(case: Step, backend: Backend, device: torch.device | str = "cpu") -> None:
    """Check o and every state against the definition in float64.

    Slots that the call does not name, and the gaps between slots, must keep their bits.
    """
    p = case.problem(device)
    before = None if p.state is None else p.state.clone()
    o, final = case.outputs(p)
    backend.step(p, o, final)
    ref_o, ref_final = _definition(case, double=True)
    twin_o, twin_final = _definition(case, double=False)
    assert_close("o", o, ref_o, twin_o)
    if final.dim() == 4:
        assert_close("final_state", final, ref_final, twin_final)
    if case.slots is not None:
        touched = set(p.state_indices.flatten().tolist())
        idle = [i for i in range(before.shape[0]) if i not in touched]
        assert_identical(
            p.state[idle].cpu(), before[idle].cpu(), "a slot that the call does not name"
        )
    elif before is not None:
        assert_identical(p.state.cpu(), before.cpu(), "the initial state")


def _definition(case: Step, double: bool) -> tuple[Tensor, Tensor]:
    p = case.problem("cpu")
    if double:
        pool = None if p.state is None else p.state
        p = case.problem("cpu", double=True)
        assert pool is None or p.state.shape == pool.shape
    o, final = case.outputs(p)
    Reference().step(p, o, final)
    return o, final


def assert_calls_forget(device: torch.device | str) -> None:
    """Check that similar calls share no tensors through a cache of launches.

    Each must compute on its own tensors at any address, and illegal calls must be refused.
    """
    B, H, K, V = 3, 2, 16, 24

    def call(seed: int, offset: int = 0, **words: object) -> list[Tensor]:
        gen = torch.Generator().manual_seed(seed)
        q, k, v, g, beta = (
            torch.randn(s, generator=gen)
            for s in ((B, 1, H, K), (B, 1, H, K), (B, 1, H, V), (B, 1, H, K), (B, 1, H))
        )
        args = [
            q,
            k,
            v,
            -g.abs(),
            beta,
            torch.randn(5, H, K, V, generator=gen),
            torch.randperm(5, generator=gen)[:B],
        ]
        p = Problem.parse_step(1, *[x.clone() for x in args], use_qk_l2norm_in_kernel=True, **words)
        o = p.new_output()
        Reference().step(p, o, p.state)
        there = [x.to(device) for x in args]
        if offset:  # the same strides at an address that is not a multiple of 16
            flat = torch.empty(args[5].numel() + offset, device=device)
            there[5] = flat[offset:].view_as(args[5]).copy_(args[5])
        got = torch.ops.kda.recurrent_(*there, use_qk_l2norm_in_kernel=True, **words)
        torch.testing.assert_close(got.cpu(), o, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(there[5].cpu(), p.state, rtol=1e-4, atol=1e-5)
        return there

    # kept alive, so that no address repeats
    kept = [
        call(0),
        call(1),
        call(2, offset=1),
        call(3, scale=0.5),
        call(4),
        call(5, offset=3),
        call(6, scale=0.25),
    ]
    args = kept[0]
    wrong = {1: args[1].bfloat16(), 2: args[2][:, :, :1], 5: args[5].mT, 6: args[6].float()}
    for i, x in wrong.items():
        try:
            torch.ops.kda.recurrent_(*args[:i], x, *args[i + 1 :], use_qk_l2norm_in_kernel=True)
        except (TypeError, ValueError):
            continue
        raise AssertionError(f"argument {i} was not refused")


def assert_strides_count(device: torch.device | str) -> None:
    """Check that operators with cached launches still read the strides of states and indices.

    The calls differ only in strides.
    """
    B, S, H, D = 3, 2, 2, 16
    orders = ((0, 1, 2, 3), (1, 0, 2, 3), (0, 1, 3, 2), (0, 3, 1, 2), (2, 0, 1, 3))

    def behind(x: Tensor, order: tuple[int, ...]) -> Tensor:
        """Return x with its axes in this order in memory."""
        back = sorted(range(len(order)), key=order.__getitem__)
        return x.permute(order).contiguous().permute(back)

    def spread(x: Tensor) -> Tensor:
        """Return x as every second column of a table that holds other data between."""
        return torch.stack([x, x.flip(0) + 1], -1)[..., 0]

    for seed, (order, transposed, placed, packed, _again) in enumerate(
        product(orders, (False, True), (Tensor.clone, spread), (False, True), range(2))
    ):
        gen = torch.Generator().manual_seed(seed)
        q, k, v, beta = (
            torch.randn(s, generator=gen)
            for s in ((B, S, H, D), (B, S, H, D), (B, S, H, D), (B, S, H))
        )
        slots, accepted = (
            torch.randperm(2 * B * S, generator=gen)[: B * S].view(B, S),
            torch.randint(1, S + 1, (B,), generator=gen),
        )
        offsets = (
            torch.tensor([0, *torch.randint(0, S + 1, (B,), generator=gen).cumsum(0).tolist()])
            if packed
            else None
        )
        rows = [x.flatten(0, 1)[None] if packed else x for x in (q, k, v)]
        args = [
            *rows,
            None,
            beta.flatten(0, 1)[None] if packed else beta,
            torch.randn(2 * B * S, H, D, D, generator=gen),
            slots,
            accepted,
            None,
            None,
            offsets,
        ]
        words = dict(use_qk_l2norm_in_kernel=True, transpose_state_layout=transposed)
        p = Problem.parse_step(1, *[None if x is None else x.clone() for x in args], **words)
        o = p.new_output()
        Reference().step(p, o, p.state)
        there = [None if x is None else x.to(device) for x in args]
        there[5] = behind(there[5], order)
        for i in (6, 7, 10):
            there[i] = None if there[i] is None else placed(there[i])
        got = torch.ops.kda.recurrent_(*there, **words)
        case = (
            f"states in order {order}, transposed {transposed}, indices by {placed.__name__}, "
            f"packed {packed}"
        )
        torch.testing.assert_close(
            got.cpu(), o, rtol=1e-4, atol=1e-5, msg=lambda m, case=case: f"o, {case}: {m}"
        )
        torch.testing.assert_close(
            there[5].cpu(),
            p.state,
            rtol=1e-4,
            atol=1e-5,
            msg=lambda m, case=case: f"states, {case}: {m}",
        )
