"""A call in float16 whose beta is so small that its product with the gradient of a token's values
is no normal number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.backends.reference import Reference
from kda_ops.problem import Problem
from tests.support.calls import Results, run_stages
from tests.support.cases import Case, Tensors

LIMIT = 4 * 2**-11  # a few roundings of float16; by way of that product it is 22 to 80 of them


def small_beta(
    variant: str, neg_eigval: bool, **sizes: object
) -> tuple[Case, Tensors, list[Tensor | None], Results]:
    """The case, its inputs and cotangents on the CPU, and the stages' results in float64. Tokens of
    no sequence have a beta that is no number.
    """
    case = Case(
        variant,
        dtype=torch.float16,
        gate="weak",
        beta="neg_eigval" if neg_eigval else "sigmoid",
        l2norm=True,
        **sizes,
    )
    inputs, cotangents = case.inputs(), [None if x is None else 1e-2 * x for x in case.cotangents()]
    inputs["beta"] -= 10.0
    inputs["beta"][:, inputs["beta"].shape[1] - case.tail :] = torch.nan
    p = Problem.parse(
        case.rank,
        *(x if x is None or not x.is_floating_point() else x.double() for x in inputs.values()),
        **case.flags(),
    )
    return (
        case,
        inputs,
        cotangents,
        run_stages(Reference(), p, [None if x is None else x.double() for x in cotangents]),
    )


def error(got: Results, want: Results, name: str) -> float:
    """Relative, of the whole tensor."""
    return ((got[name].double().cpu() - want[name]).norm() / want[name].norm()).item()
