"""Describe decode calls whose sequences share slots as data, and check them against each alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from tests.support.calls import overload
from tests.support.cases import RANK, TOKENS, Case
from tests.support.closeness import assert_identical
from tests.support.pools import same
from tests.support.target import TARGET

SHARED = (0, 1)  # slots that any number of sequences may read, and none writes
# runs a call by (variant, tensors in the order of the schema, flags)
Run = Callable[[str, list, dict], Tensor]


@dataclass(frozen=True)
class Fork:
    """A call of `recurrent_` with a row of `table` for each sequence.

    `packed` puts the sequences into one row of tokens; otherwise all lengths are equal.
    """

    table: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    accepted: tuple[int, ...] | None
    slots: int
    packed: bool = False
    variant: str = "kda"
    gate: str = "weak"
    dtype: torch.dtype = torch.float32
    pool: torch.dtype | None = None  # None: the state dtype of `dtype`
    transposed: bool = False
    wide: bool = False  # int64 tables in place of int32
    seed: int = 0
    H: int = 1
    HV: int = 2
    K: int = 16
    V: int = 24

    @property
    def case(self) -> Case:
        """Return the same call without slots."""
        N, lengths = len(self.lengths), self.lengths
        return Case(
            self.variant,
            dtype=self.dtype,
            gate=self.gate,
            transposed=self.transposed,
            l2norm=True,
            state=False,
            final=False,
            seed=self.seed,
            H=self.H,
            HV=self.HV,
            K=self.K,
            V=self.V,
            **(dict(lengths=lengths) if self.packed else dict(B=N, T=lengths[0] if N else 0)),
        )

    def read(self, n: int) -> int:
        """Return the slot that sequence n reads, or -1."""
        column = 0 if self.accepted is None else self.accepted[n] - 1
        return max(self.table[n][column], -1) if self.lengths[n] else -1

    def written(self, n: int) -> set[int]:
        """Return the slots that sequence n writes."""
        live = self.read(n) >= 0
        return {slot for slot in self.table[n][: self.lengths[n]] if live and slot >= 0}

    @property
    def legal(self) -> bool:
        """Whether every written slot belongs to one sequence, and the pool has all slots."""
        N = range(len(self.lengths))
        return max(s for row in self.table for s in row) < self.slots and not any(
            {self.read(m), *self.written(m)} & self.written(n) for n in N for m in N if m != n
        )

    @property
    def forks(self) -> bool:
        """Whether two sequences read one slot."""
        read = [self.read(n) for n in range(len(self.lengths)) if self.read(n) >= 0]
        return len(set(read)) < len(read)

    def state(self, device: torch.device) -> Tensor:
        """Return the pool before the call."""
        gen = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.slots, *self.case.state_shape[1:])
        return torch.randn(shape, generator=gen).to(device, self.pool or self.case.state_dtype)

    def arguments(self, state: Tensor) -> dict[str, Tensor | None]:
        """Return the tensors of the call on a copy of `state`, in the order of the schema."""
        x, index = self.case.inputs(state.device), torch.int64 if self.wide else torch.int32
        tables = {"state_indices": self.table, "num_accepted_tokens": self.accepted}
        return (
            {n: x[n] for n in TOKENS}
            | {"state": state.clone()}
            | {
                n: None if t is None else torch.tensor(t).to(state.device, index)
                for n, t in tables.items()
            }
            | {n: x[n] for n in ("A_log", "dt_bias", "cu_seqlens")}
        )

    def alone(self, x: dict[str, Tensor | None], n: int) -> dict[str, Tensor | None]:
        """Return the arguments of sequence n without the other sequences."""
        begin = sum(self.lengths[:n])
        tokens = (slice(None), slice(begin, begin + self.lengths[n]))
        mine = {name: x[name] for name in (*TOKENS, "state_indices", "num_accepted_tokens")}
        for name, t in mine.items():
            if t is not None:
                packed = self.packed and name in TOKENS
                mine[name] = t[tokens] if packed else t[n : n + 1]
        if self.packed:
            mine["cu_seqlens"] = x["cu_seqlens"].new_tensor([0, self.lengths[n]])
        return x | mine

    def copied(self, x: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return arguments by which each sequence reads a copy in a slot that no other names."""
        N, state = len(self.lengths), x["state"]
        read = torch.tensor([self.read(n) for n in range(N)], device=state.device)
        own = torch.arange(self.slots, self.slots + N, device=state.device).where(read >= 0, -1)
        table = torch.cat([x["state_indices"], own.to(x["state_indices"].dtype)[:, None]], 1)
        return x | {
            "state": torch.cat([state, state[read.clamp(min=0)]]),
            "state_indices": table,
            "num_accepted_tokens": torch.full_like(table[:, 0], table.shape[1]),
        }


def by_operator(variant: str, args: list, flags: dict) -> Tensor:
    """Run the operator."""
    with torch.no_grad():
        return overload(variant, "recurrent_")(*args, **flags)


def by_backend(backend) -> Run:
    """Return a function that runs a backend's stage."""
    from kda_ops.problem import Problem

    def run(variant: str, args: list, flags: dict) -> Tensor:
        p = Problem.parse_step(RANK[variant], *args, **flags)
        o = p.new_output()
        backend.step(p, o, p.state)
        return o

    return run


def assert_fork(
    fork: Fork, device: torch.device, bits: bool, run: Run = by_operator
) -> tuple[Tensor, Tensor]:
    """Check a legal call, and return o and its pool.

    It gives the bits of a call whose sequences read copies, and what each sequence gives alone, to
    the bit if `bits`. It keeps every slot that no token writes.
    """
    start, flags, N = fork.state(device), fork.case.flags("recurrent_"), len(fork.lengths)
    x = fork.arguments(start)
    copied, each = fork.copied(x), [fork.alone(x, n) for n in range(N)]

    def call(x: dict[str, Tensor | None]) -> Tensor:
        return run(fork.variant, list(x.values()), flags)

    o, after = call(x), x["state"]
    assert_identical(call(copied), o, "o of sequences that read copies")
    assert_identical(copied["state"][: fork.slots], after, "the pool of such sequences")
    want_o, want = torch.zeros_like(o), start.clone()
    for n, one in enumerate(each):
        one["state"], begin = start.clone(), sum(fork.lengths[:n])
        rows = (0, slice(begin, begin + fork.lengths[n])) if fork.packed else n
        want_o[rows] = call(one)[0]
        written = list(fork.written(n))
        want[written] = one["state"][written]
    idle = [*set(range(fork.slots)).difference(*map(fork.written, range(N)))]
    assert_identical(after[idle], start[idle], "slots that no token writes")
    for name, got, alone in (("o", o, want_o), ("the pool", after, want)):
        if bits:
            assert_identical(got, alone, name)
        else:
            same(got, alone, name, got.dtype)
    return o, after


def assert_null_slots(fork: Fork, null: int, device: torch.device) -> None:
    """Check that slots up to `null` count as negative ones in a legal table.

    Its other slots move up, to make room for slots that nobody may read or write.
    """
    flags, before = fork.case.flags("recurrent_"), fork.state(device)
    x = fork.arguments(before)
    want = by_operator(fork.variant, list(x.values()), flags)
    table = x["state_indices"]
    room = torch.full_like(before[:1], torch.nan).expand(null + 1, *before.shape[1:])
    nobody = torch.arange(table.numel(), device=device).view(table.shape) % (null + 2) - 1
    moved = fork.arguments(torch.cat([room, before]))
    moved["state_indices"] = torch.where(table < 0, nobody.to(table.dtype), table + null + 1)
    got = by_operator(fork.variant, list(moved.values()), flags | {"null_slot": null})
    assert_identical(got, want, "o")
    assert_identical(moved["state"][null + 1 :], x["state"], "the pool")
    assert moved["state"][: null + 1].isnan().all(), "a slot that is nobody's was written"


@st.composite
def forks(draw, **fixed: object) -> Fork:
    """Draw a legal call: sequences read shared slots, or slots of their own, and write their own.

    Columns that a call neither reads nor writes hold anything.
    """
    N, packed = draw(st.integers(1, 4)), draw(st.booleans())
    length = st.integers(0, 3) if packed else st.just(draw(st.integers(1, 3)))
    lengths = tuple(draw(length) for _ in range(N))
    S = max(1, *lengths) + draw(st.sampled_from((1, 2, 0)))
    slots = len(SHARED) + N * S + 1
    order = iter(range(len(SHARED), slots))  # own slots
    counted, counts, table = draw(st.sampled_from((True, True, False))), [], []
    prompt = draw(st.booleans())  # all sequences that can read the same slot do
    anything = st.integers(-2, slots - 1)
    for length in lengths:
        own = [next(order) for _ in range(S)]
        start = S if prompt else draw(st.integers(1, S))
        start = start if counted else 1
        dead = not draw(st.integers(0, 5))
        row = [
            draw(anything if dead or t >= length else st.sampled_from([-1, *own])) for t in range(S)
        ]
        read = own if start <= length else SHARED[:1] if prompt else [*SHARED, own[0]]
        row[start - 1] = -1 if dead else draw(st.sampled_from(read))
        counts.append(start)
        table.append(tuple(row))
    dtype = draw(st.sampled_from(TARGET.dtypes))
    pools = (None,) if dtype is torch.float64 else (None, torch.bfloat16)
    return replace(
        Fork(
            tuple(table),
            lengths,
            tuple(counts) if counted else None,
            slots,
            packed,
            draw(st.sampled_from(("kda", "gdn"))),
            draw(st.sampled_from(("weak", "softplus"))),
            dtype,
            draw(st.sampled_from(pools)),
            draw(st.booleans()),
            draw(st.booleans()),
            draw(st.integers(0, 99)),
        ),
        **fixed,
    )


@st.composite
def broken(draw, **fixed: object) -> Fork:
    """Draw a call that breaks the rule by one entry of its table."""
    fork = draw(forks(**fixed))
    n = draw(st.integers(0, len(fork.table) - 1))
    taken = {s for m in range(len(fork.table)) if m != n for s in (*fork.written(m), fork.read(m))}
    slot = draw(st.sampled_from([*sorted(taken - {-1}), fork.slots]))
    row, column = list(fork.table[n]), draw(st.integers(0, len(fork.table[n]) - 1))
    row[column] = slot
    fork = replace(fork, table=(*fork.table[:n], tuple(row), *fork.table[n + 1 :]))
    assume(not fork.legal)
    return fork
