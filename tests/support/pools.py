"""Describe calls on a pool of states as data: `recurrent_` and `chunk_` with every kind of slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import kda_ops
from tests.support.calls import overload
from tests.support.cases import TOKENS, Case, Tensors, cases, on
from tests.support.closeness import assert_identical
from tests.support.target import TARGET

SPARE = 3  # slots of a pool that no sequence uses


def pool_arguments(
    x: Tensors,
    state: Tensor,
    slots: Tensor | None,
    extra: Tensor | None,
    resumed: Tensor | None = None,
) -> list[Tensor | None]:
    """Return the tensors of a call on a pool, in the order of the schema.

    `extra` is num_accepted_tokens of `recurrent_`, or snapshot_indices of `chunk_`; `resumed` is
    has_initial_state of `chunk_`.
    """
    args = [*(x[n] for n in TOKENS), state, slots, extra]
    args += [x["A_log"], x["dt_bias"], x["cu_seqlens"]]
    return args if resumed is None else [*args, resumed]


@dataclass(frozen=True)
class Pool:
    """A call of `case` on a pool.

    Sequence n has a random slot, or a negative one if `dead`. `columns` > 0 gives each of that many
    tokens its own slot (`recurrent_`); `accepted` starts each sequence from one of them.
    `snapshots` > 0 gives each sequence that many snapshot slots (`chunk_`), every `every` chunks.
    `indexed` False: sequence n has slot n. Slots up to `null` are nobody's, and dead sequences name
    some of them. A sequence that is `fresh` begins anew, from a slot of NaN (`chunk_`). With
    `final` False the first slots are only read, and the last snapshot takes that slot (`chunk_`).
    """

    case: Case
    op: str = "chunk_"
    indexed: bool = True
    dead: tuple[bool, ...] = ()
    columns: int = 0
    accepted: bool = False
    snapshots: int = 0
    every: int = 1
    dtype: torch.dtype | None = None  # of the pool; None: the state dtype of the case
    null: int = -1
    fresh: tuple[bool, ...] = ()
    final: bool = True

    @property
    def slots(self) -> int:
        """Return the size of the pool."""
        return (
            self.null + 1 + self.case.N * (max(self.columns, 1) + self.snapshots) + SPARE
            if self.indexed
            else self.case.N
        )

    def _gen(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.case.seed + 2)

    def is_dead(self, n: int) -> bool:
        """Return whether sequence n has no slot."""
        return self.indexed and n < len(self.dead) and self.dead[n]

    def is_fresh(self, n: int) -> bool:
        """Return whether sequence n begins anew."""
        return n < len(self.fresh) and self.fresh[n]

    def resumed(self) -> Tensor | None:
        """Return has_initial_state on the CPU, None if no sequence begins anew."""
        if not any(self.fresh):
            return None
        return torch.tensor([not self.is_fresh(n) for n in range(self.case.N)])

    def initial(self, n: int) -> Tensor:
        """Return the state that sequence n starts from, [1, ...], zero if it begins anew."""
        start = int(self.start()[n])
        initial = self.state()[start : start + 1]
        return torch.zeros_like(initial) if self.is_fresh(n) else initial

    def indices(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return state_indices, num_accepted_tokens and snapshot_indices, on the CPU."""
        if not self.indexed:
            return None, None, None
        N, dtype, gen = self.case.N, torch.int32 if self.case.seed % 2 else torch.int64, self._gen()
        first = self.null + 1
        order = torch.randperm(self.slots - first, generator=gen) + first
        width = max(self.columns, 1)
        state = order[: N * width].reshape(N, width).clone()
        snapshots = (
            order[N * width : N * (width + self.snapshots)].reshape(N, self.snapshots).clone()
            if self.snapshots
            else None
        )
        # negative numbers of 64 bits: cut to 32 bits, they would name slots
        below = -1 if dtype is torch.int32 else -(2**32) + N
        for n in range(N):
            if self.is_dead(n):
                state[n] = below - n if n % 2 or self.null < 0 else self.null - n % first
        if snapshots is not None and N:
            snapshots[0, 0] = below
            if self.null >= 0:  # where a snapshot is most likely to be due
                lengths = self.case.lengths or (self.case.T,)
                snapshots[lengths.index(max(lengths)), 0] = self.null
        if snapshots is not None and not self.final:
            snapshots[:, -1] = state[:, 0]
        accepted = (
            torch.randint(1, width + 1, (N,), generator=gen).to(dtype) if self.accepted else None
        )
        state = state if self.columns else state[:, 0]
        return state.to(dtype), accepted, None if snapshots is None else snapshots.to(dtype)

    def flags(self) -> dict[str, object]:
        """Return the keyword arguments of the operator."""
        flags = self.case.flags(self.op)
        if not self.final:
            flags |= {"output_final_state": False}
        if self.null >= 0:
            flags |= {"null_slot": self.null}
        return flags | {"snapshot_every": self.every} if self.indexed and self.snapshots else flags

    def start(self) -> Tensor:
        """Return the slot that each sequence starts from, at most `null` for none."""
        state, accepted, _ = self.indices()
        if state is None:
            return torch.arange(self.case.N)
        if state.dim() == 1:
            return state.long()
        return state.long().gather(
            1,
            (torch.zeros(self.case.N).long() if accepted is None else accepted.long() - 1)[:, None],
        )[:, 0]

    def state(self) -> Tensor:
        """Return the pool before the call, in the layout of the case."""
        case = self.case
        states = torch.randn((self.slots, case.HV, case.K, case.V), generator=self._gen())
        if case.transposed:  # the same states in both layouts
            states = states.mT.contiguous()
        start = self.start()
        for n in range(case.N):
            if self.is_fresh(n) and not self.is_dead(n):
                states[start[n]] = torch.nan
        return states.to(self.dtype or case.state_dtype).to(TARGET.device)

    def arguments(self, state: Tensor, **changed: Tensor | None) -> list[Tensor | None]:
        """Return the tensors of the call, in the order of the schema."""
        x = self.case.inputs(TARGET.device) | changed
        names = ("state_indices", "num_accepted_tokens", "snapshot_indices")
        x = on(dict(zip(names, self.indices())), TARGET.device) | x
        resumed = self.resumed()
        extra = x["num_accepted_tokens" if self.op == "recurrent_" else "snapshot_indices"]
        resumed = None if resumed is None else resumed.to(TARGET.device)
        return pool_arguments(x, state, x["state_indices"], extra, resumed)

    def run(self, state: Tensor | None = None, **changed: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return o and the pool after the call; `state` replaces the pool, `changed` inputs."""
        state = self.state() if state is None else state
        with torch.no_grad():
            o = overload(self.case.variant, self.op)(
                *self.arguments(state, **changed), **self.flags()
            )
        return o, state


@st.composite
def pools(draw, op: str | None = None, **fixed: object) -> Pool:
    """Draw a legal call on a pool."""
    op = op or draw(st.sampled_from(("recurrent_", "chunk_")))
    lengths = (0, 1, 2, 3, 5) if op == "recurrent_" else (0, 1, 63, 64, 65, 37, 130)
    if "lengths" not in fixed:
        packed = draw(st.booleans())
        fixed["lengths"] = (
            tuple(draw(st.lists(st.sampled_from(lengths), min_size=1, max_size=4)))
            if packed
            else None
        )
        if not packed:
            fixed |= {
                "B": draw(st.sampled_from((1, 2, 3))),
                "T": draw(st.sampled_from(lengths[1:])),
            }
    case = draw(
        cases(
            state=False,
            final=False,
            disable_recompute=False,
            **({"safe_gate": False} if op == "recurrent_" else {}),
            **fixed,
        )
    )
    indexed = draw(st.booleans()) or draw(st.booleans())
    dead = tuple(draw(st.lists(st.booleans(), min_size=case.N, max_size=case.N))) if indexed else ()
    columns = (
        max(case.lengths or (case.T,)) + draw(st.sampled_from((0, 2)))
        if indexed and op == "recurrent_" and draw(st.booleans())
        else 0
    )
    snapshots = draw(st.sampled_from((0, 1, 2))) if indexed and op == "chunk_" else 0
    dtype = (
        draw(st.sampled_from((None, torch.bfloat16)))
        if case.dtype is not torch.float64 and not TARGET.slow
        else None
    )
    fresh = tuple(draw(st.lists(st.booleans(), max_size=case.N))) if op == "chunk_" else ()
    return Pool(
        case,
        op,
        indexed,
        dead,
        columns,
        bool(columns) and draw(st.booleans()),
        snapshots,
        draw(st.sampled_from((1, 2))) if snapshots else 1,
        dtype,
        draw(st.sampled_from((-1, 0, 2))) if indexed else -1,
        fresh,
        op != "chunk_" or any(fresh) or draw(st.booleans()),
    )


OUTS = ("contiguous", "columns", "heads first", "every second", "row of a buffer")


def out_like(o: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return a tensor of NaN for o, and all memory of which it is a part."""
    B, T, H, V = o.shape
    shape, view = {
        "contiguous": ((B, T, H, V), lambda x: x),
        "columns": ((B, T, H, V + 8), lambda x: x[..., 3 : V + 3]),
        "heads first": ((B, H, T, V), lambda x: x.transpose(1, 2)),
        "every second": ((B, T, H, V, 2), lambda x: x[..., 1]),
        "row of a buffer": ((3, B, T, H, V), lambda x: x[1]),
    }[layout]
    around = torch.full(shape, torch.nan, dtype=o.dtype, device=o.device)
    return view(around), around


def assert_out(pool: Pool, layout: str) -> None:
    """Check that a call with `out` writes there what the call returns without it, to the bit."""
    want, after = pool.run()
    state = pool.state()
    args, flags = pool.arguments(state), pool.flags()
    out, around = out_like(want, layout)
    before = state._version, out._version
    with torch.no_grad():
        assert overload(pool.case.variant, f"{pool.op}.out")(*args, **flags, out=out) is None
    assert state._version > before[0] and out._version > before[1]
    assert_identical(out.contiguous(), want, "out")
    assert_identical(state, after, "the pool")
    assert int(around.isnan().sum()) == around.numel() - want.numel(), "more than out was written"
    function = getattr(kda_ops, f"{pool.op}{pool.case.variant}_")
    names = [a.name for a in overload(pool.case.variant, pool.op)._schema.arguments]
    with torch.no_grad():
        args = pool.arguments(pool.state())
        assert function(**dict(zip(names, args)), **flags, out=out) is out
    assert_identical(out.contiguous(), want, "out of the function")


def assert_source(pool: Pool) -> None:
    """Check that a decode from a second pool writes what one from the same states writes.

    It leaves the second pool, and the slots of the first that it does not write.
    """
    before = pool.state()
    want, after = pool.run(state=before.clone())
    source, state = before.clone(), torch.full_like(before, torch.nan)
    x = dict(source=source, source_indices=pool.start().to(before.device))
    args = pool.arguments(state, num_accepted_tokens=None)
    with torch.no_grad():
        o = overload(pool.case.variant, "recurrent_")(*args, *x.values(), **pool.flags())
    assert_identical(o, want, "o")
    assert_identical(source, before, "the second pool")
    written = ~state.isnan().flatten(1).all(1)
    assert_identical(state[written], after[written], "what is written")
    assert_identical(after[~written], before[~written], "slots that only the first call writes")


def same(got: Tensor, want: Tensor, name: str, dtype: torch.dtype) -> None:
    """Assert equality up to a few roundings: got and want take two paths through one operator."""
    eps = torch.finfo(dtype).eps
    scale = want.double().abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(
        got.double(),
        want.double(),
        rtol=0.0,
        atol=64 * eps * max(scale, 1e-30),
        msg=lambda m: f"{name}: {m}",
    )
