"""The passes of the gate alone: the log decay from raw logits, and its gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_ops.checks import shape_error
from kda_ops.problem import gate_problem
from kda_ops.stages import AXES, Backend


class GatePass:
    """The log decay from raw logits."""

    names: tuple[str, ...] = ("g", "A_log", "dt_bias")
    axes = AXES

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        given = dict(zip(self.names, args))
        self.g = given["g"]
        self.gate = (given["A_log"], given.get("dt_bias"), flags.get("lower_bound"))
        self.rank = rank
        gate_problem(rank, self.g, *self.gate)

    def run(self, b: Backend) -> tuple[Tensor | None, ...]:
        """Return the log decay."""
        return (b.gate(self.g, *self.gate, self.rank),)


class GateBackwardPass(GatePass):
    """Gradients of g, A_log and dt_bias."""

    names = ("dy", "g", "A_log", "dt_bias")

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        super().__init__(rank, args, flags)
        self.dy = args[0]
        if self.dy.shape != self.g.shape:
            letters = "[B, T, HV, K]" if rank else "[B, T, HV]"
            shape_error("dy", letters, tuple(self.g.shape), self.dy, " (as g has)")

    def run(self, b: Backend) -> tuple[Tensor | None, ...]:
        """Return the gradients, None of what is absent."""
        return b.gate_backward(self.dy, self.g, *self.gate, self.rank)
