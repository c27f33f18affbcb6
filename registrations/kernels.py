"""The CPU and CUDA kernels: parse the call, run the stages. Which backend that is,
`kda_ops.dispatch` knows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kda_ops import chunk, dispatch, recurrent
from kda_ops.arguments import check_writable
from kda_ops.problem import Problem, gate_problem
from kda_ops.registrations import schemas
from kda_ops.registrations.opaque import opaque
from kda_ops.stages import GRADIENTS

_BUMP = torch.autograd.graph.increment_version


def _kernels(rank: int) -> dict[schemas.Operator, Callable]:
    def chunk_forward(*args, **flags) -> tuple[Tensor, Tensor]:
        return chunk.infer(Problem.parse(rank, *args, **flags))

    def chunk_fwd(*args, **flags) -> tuple[Tensor, ...]:
        o, final_state, kept = chunk.forward(Problem.parse(rank, *args, **flags))
        return o, final_state, *kept

    def chunk_bwd(do, dfinal_state, *args, need, **flags) -> tuple[Tensor, ...]:
        kept, inputs, o = schemas.split_backward(args)
        p = Problem.parse(rank, *inputs, **flags)
        grads = chunk.backward(
            p,
            o,
            list(kept),
            do,
            dfinal_state,
            frozenset(n for n, wanted in zip(GRADIENTS, need) if wanted),
        )
        return tuple(
            p.q.new_empty((0,)) if d is None else d.contiguous()
            for d in (getattr(grads, n) for n in GRADIENTS)
        )

    def recurrent_forward(*args, **flags) -> tuple[Tensor, Tensor]:
        return recurrent.infer(Problem.parse(rank, *args, **flags))

    def recurrent_in_place(*args, **flags) -> Tensor:
        check_writable("state", args[5])
        o = recurrent.decode(rank, args, flags)
        _BUMP(args[5])
        return o

    def chunk_in_place(*args, **flags) -> Tensor:
        check_writable("state", args[5])
        p = Problem.parse_prefill(rank, *args, **flags)
        o = chunk.prefill(p)
        _BUMP(p.state)
        return o

    def gate(g, A_log, dt_bias=None, *, lower_bound=None) -> Tensor:
        gate_problem(rank, g, A_log, dt_bias, lower_bound)
        return dispatch.backend(g.device).gate(g, A_log, dt_bias, lower_bound, rank).contiguous()

    def gate_bwd(dy, g, A_log, dt_bias, *, lower_bound=None) -> tuple[Tensor, ...]:
        gate_problem(rank, g, A_log, dt_bias, lower_bound)
        grads = dispatch.backend(g.device).gate_backward(dy, g, A_log, dt_bias, lower_bound, rank)
        return tuple(g.new_empty((0,)) if d is None else d.contiguous() for d in grads)

    return {
        schemas.CHUNK: chunk_forward,
        schemas.CHUNK_FWD: chunk_fwd,
        schemas.CHUNK_BWD: chunk_bwd,
        schemas.RECURRENT: recurrent_forward,
        schemas.RECURRENT_: recurrent_in_place,
        schemas.CHUNK_: chunk_in_place,
        schemas.GATE: gate,
        schemas.GATE_BWD: gate_bwd,
    }


for _namespace, _rank in schemas.VARIANTS.items():
    for _operator, _kernel in _kernels(_rank).items():
        for _key in ("CPU", "CUDA"):
            schemas.LIBRARIES[_namespace].impl(_operator.name, opaque(_kernel), _key)
