"""Compute the twin of a sharded call, whose chunks restart in each shard.

The start of a chunk matters: in the gates' gradients, terms cancel within a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.problem import Problem
from kda_ops.stages import GRADIENTS
from tests.support.calls import Results, run_stages
from tests.support.cases import TOKENS, Case, Tensors, take
from tests.support.closeness import drawn, permuted

PARAMETERS = ("dA_log", "ddt_bias")


def _shard(
    case: Case, backend, inputs: Tensors, a: int, b: int, state: Tensor, do: Tensor, dstate: Tensor
) -> Results:
    """Return outputs and gradients of tokens a to b of all sequences.

    A sequence without tokens there passes its state through.
    """
    x = take(inputs, a, b) | {"initial_state": state}
    if x["cu_seqlens"] is not None:
        x["cu_seqlens"] = x["cu_seqlens"].clamp(a, b) - a
    p = Problem.parse(case.rank, *x.values(), **(case.flags() | {"output_final_state": True}))
    return run_stages(backend, p, (do[:, a:b], dstate), GRADIENTS)


def cut_twin(case: Case, cuts: tuple[int, ...], operand: torch.dtype, draw: int = 0) -> Results:
    """Return results and gradients of a call sharded at `cuts`; round operands to `operand`."""
    reference = drawn(draw, case.state_dtype, None if operand is case.state_dtype else operand)
    (inputs, (do, dstate), back), spans = permuted(case, draw), list(zip(cuts, cuts[1:]))
    nothing = torch.zeros(case.state_shape, dtype=case.state_dtype)
    states, parts = [nothing if inputs["initial_state"] is None else inputs["initial_state"]], []
    for a, b in spans[:-1]:
        states.append(_shard(case, reference, inputs, a, b, states[-1], do, nothing)["final_state"])
    dstate = dstate if case.final else nothing
    for state, (a, b) in reversed(list(zip(states, spans))):
        parts.insert(0, _shard(case, reference, inputs, a, b, state, do, dstate))
        dstate = parts[0]["dinitial_state"]
    found = {
        n: torch.cat([p[n] for p in parts], 1) for n in parts[0] if n == "o" or n[1:] in TOKENS
    }
    found |= {n: sum(p[n] for p in parts) for n in PARAMETERS if n in parts[0]}
    if case.final:
        found["final_state"] = parts[-1]["final_state"]
    if case.state:
        found["dinitial_state"] = parts[0]["dinitial_state"]
    return back(found)
