"""Describe one decode call as data, and check the laws of every backend's `step`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from kda_ops import problem
from kda_ops.backends.reference import Reference
from kda_ops.problem import Problem
from kda_ops.stages import Backend
from tests.support.cases import BARE, STRIDES, Case, Tensors, double, on
from tests.support.closeness import assert_close, assert_identical
from tests.support.pools import pool_arguments

POISON = float("nan")


@dataclass(frozen=True)
class Step(Case):
    """A call to `Backend.step`.

    `slots` is None (row n), 1 (``[N]``) or S (``[N, S]``, a state per token).
    """

    B: int = 2
    T: int = 1
    H: int = 2
    HV: int = 4
    K: int = 32
    V: int = 32
    gate: str = "forget"
    l2norm: bool = True
    slots: int | None = None
    accepted: bool = False
    dead: tuple[int, ...] = ()  # entries of the table that name no slot
    pool: torch.dtype = torch.float32
    gap: bool = False  # gaps between the slots of the pool

    def problem(self, device: torch.device | str = "cpu", exact: bool = False) -> Problem:
        """Parse the call on fresh, reproducible tensors; in float64 if `exact`."""
        x = self.inputs() | (self._pool() if self.slots is not None else {})
        x = on(double(x) if exact else x, device)
        if self.slots is None:
            return Problem.parse(self.rank, *x.values(), **self.flags("recurrent"))
        args = pool_arguments(x, x["initial_state"], x["indices"], x["accepted"])
        with patch.object(problem, "check_columns"):  # a GPU may meet longer sequences
            return Problem.parse_step(self.rank, *args, **self.flags("recurrent_"))

    def _pool(self) -> Tensors:
        """Draw the pool, with slots that no sequence names, and its tables."""
        gen = torch.Generator().manual_seed(self.seed + 2)
        N, S, count = self.N, self.slots, self.N * self.slots + 3
        shape = (count, 1 + self.gap, *self.state_shape[1:])
        pool = torch.full(shape, POISON, dtype=self.pool)
        pool[:, 0] = torch.randn(shape[:1] + shape[2:], generator=gen)
        index = torch.int64 if self.seed % 2 else torch.int32
        table = torch.randperm(count, generator=gen)[: N * S].view(N, S)
        for n in self.dead if N else ():
            # cut to 32 bits, the wide one would name a slot
            table[n % N, n % S] = n % count - 2**32 if index is torch.int64 else -1 - n
        accepted = torch.randint(1, S + 1, (N,), generator=gen).to(index)
        return {
            "initial_state": pool[:, 0],
            "indices": (table[:, 0] if S == 1 else table).to(index),
            "accepted": accepted if self.accepted else None,
        }

    def outputs(self, p: Problem) -> tuple[Tensor, Tensor]:
        """Return the outputs o and final states, filled with NaN, or the pool itself."""
        final = p.new_final_state().fill_(POISON) if self.slots is None else p.state
        return p.new_output().fill_(POISON), final


# Calls without sequences, tokens, heads or values, the narrowest and the widest, and a long one.
EDGES = [
    Step(B=0),
    Step(T=0),
    Step(HV=0, H=0),
    Step(V=0),
    Step(lengths=()),
    Step(lengths=(), tail=20, slots=1),
    Step(lengths=(0, 0), state=False),
    Step(K=1, V=1, H=1, HV=3),
    Step(K=256, V=8, H=1, HV=1, transposed=True),
    Step(T=17, H=1, HV=1, B=1),
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
    packed, H = r.random() < 0.5, r.choice((1, 2))
    slots = r.choice((None, None, 1, 1, 3, most))
    T = 1 if r.random() < 0.4 else r.randint(0, most)
    lengths = tuple(r.choice((0, 1, 1, 2, most)) for _ in range(r.randint(0, 4)))
    return Step(
        variant=r.choice(("kda", "gdn")),
        B=r.randint(1, 3),
        T=T if slots in (None, 1) else min(T, slots),
        lengths=lengths if packed else None,
        tail=r.choice((0, 1, 19)) if packed else 0,
        H=H,
        HV=H * r.choice((1, 2)),
        K=r.choice(widths),
        V=r.choice(widths),
        dtype=r.choice(dtypes),
        pool=torch.float32 if slots is None else r.choice(pools),
        gate=r.choice(("none", "strong", "forget", "softplus", "bounded", BARE)),
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
        narrow=r.random() < 0.5,
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
    (ref_o, ref_final), (twin_o, twin_final) = (_definition(case, d) for d in (True, False))
    assert_close("o", o, ref_o, twin_o)
    if final.dim() == 4:
        assert_close("final_state", final, ref_final, twin_final)
    if case.slots is not None:
        touched = set(p.state_indices.flatten().tolist())
        idle = [i for i in range(before.shape[0]) if i not in touched]
        assert_identical(p.state[idle], before[idle], "a slot that the call does not name")
    elif before is not None:
        assert_identical(p.state, before, "the initial state")


def _definition(case: Step, exact: bool) -> tuple[Tensor, Tensor]:
    p = case.problem("cpu", exact)
    o, final = case.outputs(p)
    Reference().step(p, o, final)
    return o, final
