"""How the suite calls `kda_ops.jax`: a case's tensors in, the dictionary of `calls.run` out."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

import kda_ops.jax
from kda_ops.stages import GRADIENTS
from tests.support.calls import Results
from tests.support.cases import Case

# compiling an interpreted kernel takes seconds, running it almost none
QUICK = {"xla_backend_optimization_level": 0}


def to_jax(x: Tensor | None) -> jax.Array | None:
    """Return the same numbers as an array."""
    if x is None:
        return None
    if x.dtype is torch.bfloat16:
        return jnp.asarray(x.float().numpy()).astype(jnp.bfloat16)
    return jnp.asarray(x.numpy())


def to_torch(x: jax.Array) -> Tensor:
    """Return the same numbers as a tensor."""
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(x.astype(jnp.float32))).bfloat16()
    return torch.from_numpy(np.array(x))


def face(case: Case, op: str = "chunk") -> Callable:
    """Return the function of `kda_ops.jax` that a case calls."""
    return getattr(kda_ops.jax, f"{op}_{case.variant}")


def arrays(case: Case) -> dict[str, jax.Array | None]:
    """Return the case's inputs, by name."""
    return {n: to_jax(x) for n, x in case.inputs().items()}


@lru_cache(maxsize=64)
def _both(variant: str, op: str, flags: tuple[tuple[str, object], ...]) -> Callable:
    # one function per program, so that cases of equal shapes compile once
    f = getattr(kda_ops.jax, f"{op}_{variant}")

    def both(leaves, rest, cotangents):
        def call(leaves):
            return f(**leaves, **rest, **dict(flags))

        out, pull = jax.vjp(call, leaves)
        wanted = tuple(None if x is None else d for x, d in zip(out, cotangents))
        return out, pull(wanted)[0]

    return jax.jit(both, compiler_options=QUICK)


def run(case: Case, op: str = "chunk", **more: object) -> Results:
    """o, final_state where the case asks for it, and ``d`` + name for every input."""
    inputs = arrays(case)
    need = [n for n in GRADIENTS if inputs[n] is not None]
    leaves = {n: inputs[n] for n in need}
    rest = {n: x for n, x in inputs.items() if n not in need}
    both = _both(case.variant, op, tuple((case.flags(op) | more).items()))
    out, grads = both(leaves, rest, [to_jax(x) for x in case.cotangents()])
    found = {n: to_torch(x) for n, x in zip(("o", "final_state"), out) if x is not None}
    return found | {"d" + n: to_torch(grads[n]) for n in need}


def errors(got: Results, want: Results) -> dict[str, float]:
    """Return the largest error of each tensor over its largest entry; nan if it is not finite."""
    assert got.keys() == want.keys()
    return {
        n: ((got[n].double() - x.double()).abs().max() / x.abs().max().clamp(min=1e-30)).item()
        for n, x in want.items()
        if x.numel()
    }
