"""The passes that go token by token: short sequences, and decode.

Their backward is that of the chunk form (`kda_ops.chunk.Backward`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_ops.chunk import Into, Prefill, Whole
from kda_ops.problem import Problem
from kda_ops.stages import Backend


class Recur(Whole):
    """Forward over whole sequences: o and the final state."""

    def run(self, b: Backend) -> tuple[Tensor, Tensor]:
        """Return o and the final state."""
        o, final_state = self.outputs()
        if self.p.HV:
            b.step(self.p, o, final_state)
        return o, final_state


class Decode(Prefill):
    """Decode on a state pool: states are read from its slots and written there."""

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        self.p = Problem.parse_step(rank, **self.named(args), **flags)

    def write(self, b: Backend, o: Tensor) -> None:
        """Write o and the pool."""
        if self.p.HV:
            b.step(self.p, o, self.p.state)


class DecodeInto(Into, Decode):
    """`Decode` to the caller's `out`."""

    write = Decode.write
