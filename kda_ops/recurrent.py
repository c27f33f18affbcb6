"""Token by token: decode, and short sequences. Backward goes through the chunk formulas
(`kda_ops.chunk.backward`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda_ops import dispatch, problem
from kda_ops.problem import Problem, new_output
from kda_ops.stages import Backend


def infer(p: Problem) -> tuple[Tensor, Tensor]:
    """o and the final state."""
    o, final_state = p.new_output(), p.new_final_state()
    if p.HV:
        dispatch.backend(p.q.device).step(p, o, final_state)
    return o, final_state


def decode(rank: int, args: tuple[Tensor | None, ...], flags: dict[str, Any]) -> Tensor:
    """Tokens on a state pool, from the arguments of `recurrent_`: the states are read from and
    written to its slots in place.

    A token is decoded by thousands of calls whose tensors look the same, and parsing one costs
    Python more than the kernel costs the GPU. What shapes, strides, dtypes, devices and flags
    decide, that the call is legal and how it is launched, is therefore kept; never anything of a
    tensor's data or address. Contiguous tensors of a shape differ in the strides of axes of length
    one, by which nothing is ever addressed. Devices differ by number: a kernel for CUDA is called
    where q is on one of its devices, and the first such call has refused tensors elsewhere.
    """
    if args[0] is not None and args[0].is_cpu:  # its backends need have no plans
        b = dispatch.backend(args[0].device)
        if not hasattr(b, "plan_step"):
            return _step(Problem.parse_step(rank, *args, **flags), b)
    look = (
        rank,
        *flags.items(),
        *[
            None
            if x is None
            else (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.get_device())
            for x in args
        ],
    )
    plan = _PLANS.get(look)
    if plan is None:
        p = Problem.parse_step(rank, *args, **flags)
        b = dispatch.backend(p.q.device)
        o = _step(p, b)
        # what a parsed call makes contiguous, a plan reads
        as_they_lie = all(x is None or x.is_contiguous() for x in (*args[7:8], *args[10:]))
        reads = p.cu_seqlens is not None or p.state_indices is not None
        checked = problem.CHECK_VALUES or (reads and p.q.device.type == "cpu")  # at every call
        if p.HV and hasattr(b, "plan_step") and as_they_lie and not checked:
            if len(_PLANS) >= 1024:  # a program that calls with ever new sizes
                _PLANS.clear()
            _PLANS[look] = b.plan_step(p, p.state)
        return o
    v, state = args[2], args[5]
    assert v is not None and state is not None  # else there were no plan
    # which a contiguous v says without a keyword: half a microsecond in the dispatcher
    o = torch.empty_like(v) if v.is_contiguous() else new_output(v)
    plan(o, state, args + (None,) * (11 - len(args)))
    return o


def _step(p: Problem, b: Backend) -> Tensor:
    o = p.new_output()
    if p.HV:
        b.step(p, o, p.state)
    return o


_PLANS: dict[tuple, Callable[[Tensor, Tensor, tuple[Tensor | None, ...]], None]] = {}
