"""The passes that go token by token: short sequences, and decode.

Their backward is that of the chunk form (`kda_ops.chunk.Backward`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_ops.chunk import Whole
from kda_ops.problem import Problem
from kda_ops.stages import AXES, Backend


class Recur(Whole):
    """Forward over whole sequences: o and the final state."""

    def run(self, b: Backend) -> tuple[Tensor, Tensor]:
        """Return o and the final state."""
        p = self.p
        o, final_state = p.new_output(), p.new_final_state()
        if p.HV:
            b.step(p, o, final_state)
        return o, final_state


class Decode:
    """Decode on a state pool: states are read from its slots and written there."""

    names = (
        *("q", "k", "v", "g", "beta", "state", "state_indices", "num_accepted_tokens"),
        *("A_log", "dt_bias", "cu_seqlens"),
    )
    axes = AXES

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        self.p = Problem.parse_step(rank, *args, **flags)

    def run(self, b: Backend) -> tuple[Tensor]:
        """Return o."""
        p = self.p
        o = p.new_output()
        if p.HV:
            b.step(p, o, p.state)
        return (o,)
