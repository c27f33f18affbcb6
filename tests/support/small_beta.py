"""Make a float16 call whose beta is so small that beta * dv is subnormal."""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.backends.reference import Reference
from kda_ops.problem import Problem
from tests.support.calls import Results, run_stages
from tests.support.cases import Case, Tensors, double

LIMIT = 4 * 2**-11  # 4 roundings of float16; a subnormal product costs 22 to 80


def small_beta(
    variant: str, neg_eigval: bool, **sizes: object
) -> tuple[Case, Tensors, list[Tensor | None], Results]:
    """Return the case, its inputs and cotangents on the CPU, and the stages' results in float64.

    Tokens outside any sequence have a beta of NaN.
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
    p = Problem.parse(case.rank, *double(inputs).values(), **case.flags())
    exact = run_stages(Reference(), p, [None if x is None else x.double() for x in cotangents])
    return case, inputs, cotangents, exact


def error(got: Results, want: Results, name: str) -> float:
    """Return the relative error of the whole tensor."""
    return ((got[name].double().cpu() - want[name]).norm() / want[name].norm()).item()
