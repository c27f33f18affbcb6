"""Split sequences on a pool into pieces for `chunk_` and `recurrent_`, equal to one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from kda_ops import dispatch
from kda_ops.backends.reference import Reference
from kda_ops.problem import Problem
from kda_ops.stages import Backend
from tests.support.calls import Results, overload
from tests.support.cases import Case, double, take
from tests.support.closeness import assert_all_close, assert_identical, channels, drawn
from tests.support.pools import pool_arguments

LENGTHS = (1, 2, 5, 16, 37, 63, 64, 65, 128)
MOST = 16  # tokens per call of `recurrent_`

Pieces = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Split:
    """The `case.B` sequences of a case, cut into `pieces` (operator, tokens), on a pool of `dtype`.

    Sequence 1 has no slot.
    """

    case: Case
    pieces: Pieces
    dtype: torch.dtype

    @property
    def slots(self) -> Tensor:
        """Return the slot of each sequence, on the CPU."""
        N = self.case.B
        order = torch.randperm(N + 2, generator=torch.Generator().manual_seed(self.case.seed))[:N]
        return torch.where(torch.arange(N) == 1, -1, order).to(torch.int32)

    def pool(self) -> Tensor:
        """Return the pool before the first piece, on the CPU."""
        shape = (self.case.B + 2, *self.case.state_shape[1:])
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.case.seed + 1)).to(
            self.dtype
        )

    def run(self, device: torch.device, pieces: Pieces | None = None) -> tuple[Tensor, Tensor]:
        """Return o and the pool after the operators."""
        case, outs, t = self.case, [], 0
        x, slots, pool = case.inputs(device), self.slots.to(device), self.pool().to(device)
        for op, n in self.pieces if pieces is None else pieces:
            args = pool_arguments(take(x, t, t + n), pool, slots, None)
            with torch.inference_mode():
                outs.append(overload(case.variant, op)(*args, **case.flags(op)))
            t += n
        return torch.cat(outs, 1), pool

    def stages(
        self, backend: Backend, pieces: Pieces, exact: bool = False, draw: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the results of `run` by the definition, with the stages of `backend`.

        Compute in float64 if `exact`. Draw `draw` of a twin permutes channels.
        """
        case, outs, t = self.case, list[Tensor](), 0
        there, back = channels(case, draw)
        pool = there("initial_state", self.pool()).contiguous()
        x = {n: y if y is None else there(n, y) for n, y in case.inputs().items()}
        if exact:
            pool, x = pool.double(), double(x)
        for op, n in pieces:
            args = pool_arguments(take(x, t, t + n), pool, self.slots, None)
            parse = Problem.parse_prefill if op == "chunk_" else Problem.parse_step
            p = parse(case.rank, *args, **case.flags(op))
            o = p.new_output()
            if op == "chunk_":
                backend.scan(p, backend.prepare(p), o, pool, keep=False)
            else:
                backend.step(p, o, pool)
            outs.append(o)
            t += n
        return back("v", torch.cat(outs, 1)), back("initial_state", pool)


@st.composite
def splits(
    draw, dtypes: tuple[torch.dtype, ...], pools: tuple[torch.dtype, ...], **fixed: object
) -> Split:
    """Draw pieces of sequences of up to a few chunks."""
    parts = draw(
        st.lists(
            st.tuples(st.sampled_from(("chunk_", "recurrent_")), st.sampled_from(LENGTHS)),
            min_size=1,
            max_size=5,
        )
    )
    pieces = tuple((op, n if op == "chunk_" else min(n, MOST)) for op, n in parts)
    options = dict(
        variant=("kda", "gdn"),
        transposed=(False, True),
        gate=("softplus", "bounded", "weak"),
        dtype=dtypes,
    ) | {n: (x,) for n, x in fixed.items()}
    chosen = {name: draw(st.sampled_from(values)) for name, values in options.items()}
    inside = chosen["gate"] != "weak"
    chosen |= dict(
        B=3,
        T=sum(n for _, n in pieces),
        l2norm=inside,
        beta="sigmoid" if inside else "given",
        seed=draw(st.integers(0, 999)),
    )
    chosen |= dict(state=False, final=False)
    return Split(Case(**chosen), pieces, draw(st.sampled_from(pools)))


def assert_split(split: Split, device: torch.device) -> None:
    """Check the pieces, and one chunk call instead of them, against the recurrence in float64.

    The rest of the pool must stay untouched.
    """
    whole: Pieces = (("recurrent_", split.case.T),)
    ref_o, ref_pool = split.stages(Reference(), whole, exact=True)
    operand = split.case.dtype if dispatch.backend_name(device) == "triton" else None
    live = split.slots[split.slots >= 0].long()
    idle = [i for i in range(split.case.B + 2) if i not in live.tolist()]
    for pieces in (split.pieces, (("chunk_", split.case.T),)):
        o, pool = split.run(device, pieces)

        def twin(draw: int, pieces: Pieces = pieces) -> Results:
            found = split.stages(drawn(draw, torch.float32, operand), pieces, draw=draw)
            return {"o": found[0], "the states": found[1][live]}

        got = {"o": o, "the states": pool.cpu()[live]}
        assert_all_close(got, {"o": ref_o, "the states": ref_pool[live]}, twin)
        assert_identical(pool.cpu()[idle], split.pool()[idle], "slots that no sequence has")
        assert not o[1].any(), "a sequence without a slot has an output"
