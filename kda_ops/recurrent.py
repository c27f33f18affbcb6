"""Token by token: decode, and short sequences. Backward goes through the chunk formulas (`kda_ops.chunk.backward`)."""

from __future__ import annotations

from torch import Tensor

from kda_ops import dispatch
from kda_ops.problem import Problem


def infer(p: Problem) -> tuple[Tensor, Tensor]:
    """o and the final state."""
    o, final_state = p.new_output(), p.new_final_state()
    if p.HV:
        dispatch.backend(p.q.device).step(p, o, final_state)
    return o, final_state


def decode(p: Problem) -> Tensor:
    """Tokens on a state pool: the states are read from and written to its slots in place."""
    o = p.new_output()
    if p.HV:
        dispatch.backend(p.q.device).step(p, o, p.state)
    return o
