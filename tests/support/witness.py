"""Compare each backward call of an operator in a program with float64 on the same inputs.

It shows whether an error of the program comes from the operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kda_ops import operators
from kda_ops.chunk import INPUTS, Backward
from kda_ops.registrations import schemas
from kda_ops.stages import GRADIENTS
from tests.support.calls import overload

_OPERATORS = {operators.CHUNK_BWD.overload(variant): variant for variant in schemas.VARIANTS}


class _Backwards(TorchDispatchMode):
    """Copies each backward call's inputs and results to the CPU at once.

    A program may reuse their memory afterwards.
    """

    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in _OPERATORS:
            return func(*args, **(kwargs or {}))
        given = [_exact(x) for x in args]
        out = func(*args, **kwargs)
        self.calls.append((_OPERATORS[func], given, kwargs, [_exact(x) for x in out]))
        return out


def _exact(x: Tensor | None) -> Tensor | None:
    return (
        None
        if x is None
        else x.detach().to("cpu", torch.float64 if x.is_floating_point() else x.dtype, copy=True)
    )


@contextmanager
def backward_errors() -> Iterator[list[dict[str, float]]]:
    """Yield a list; on exit it holds each backward call's errors by gradient name.

    An error is relative to the gradient's largest entry.
    """
    errors: list[dict[str, float]] = []
    with _Backwards() as seen:
        yield errors
    for variant, args, flags, got in seen.calls:
        given = dict(zip(Backward.operator.names, args))
        do, dfinal_state = given["do"], given["dfinal_state"]
        leaves = [
            x if x is None else x.requires_grad_(x.is_floating_point())
            for x in map(given.get, INPUTS)
        ]
        o, final_state = overload(variant, "chunk")(
            *leaves, **{n: x for n, x in flags.items() if n != "need"}
        )
        needed = [
            (n, x, d)
            for i, (n, x, d) in enumerate(zip(GRADIENTS, leaves, got))
            if flags["need"] >> i & 1
        ]
        outs = [
            (y, dy)
            for y, dy in ((o, do), (final_state, dfinal_state))
            if dy is not None and dy.numel()
        ]
        exact = torch.autograd.grad(
            [y for y, _ in outs], [x for _, x, _ in needed], [dy for _, dy in outs]
        )
        errors.append(
            {
                "d" + n: ((d - want).abs().max() / want.abs().max().clamp(min=1e-300)).item()
                for (n, _, d), want in zip(needed, exact)
            }
        )
