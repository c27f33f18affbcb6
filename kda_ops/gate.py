"""The passes of the gate alone: the log decay from raw logits, and its gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_ops.checks import shape_error
from kda_ops.gates import gate_of
from kda_ops.problem import gate_problem
from kda_ops.stages import Backend, Pass, new_like


class GatePass(Pass):
    """The log decay from raw logits."""

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        self.given = self.named(args)
        self.g = self.given["g"]
        self.gate = (self.given["A_log"], self.given.get("dt_bias"), gate_of(True, **flags))
        self.rank = rank
        self.dtype = gate_problem(rank, self.g, *self.gate)

    def outputs(self) -> tuple[Tensor | None, ...]:
        """Allocate the log decay."""
        return (new_like(self.g, self.dtype),)

    def run(self, b: Backend) -> tuple[Tensor | None, ...]:
        """Return the log decay."""
        return (b.gate(self.g, *self.gate, self.rank),)


class GateBackwardPass(GatePass):
    """Gradients of g, A_log and dt_bias."""

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        super().__init__(rank, args, flags)
        self.dy = self.given["dy"]
        if self.dy is None or self.dy.shape != self.g.shape:
            letters = "[B, T, HV, K]" if rank else "[B, T, HV]"
            shape_error("dy", letters, tuple(self.g.shape), self.dy, " (as g has)")

    def outputs(self) -> tuple[Tensor | None, ...]:
        """Allocate the gradients, None of what is absent."""
        return tuple(map(new_like, (self.g, *self.gate[:2])))

    def run(self, b: Backend) -> tuple[Tensor | None, ...]:
        """Return the gradients, None of what is absent."""
        return b.gate_backward(self.dy, self.g, *self.gate, self.rank)
