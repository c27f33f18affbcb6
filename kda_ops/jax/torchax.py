"""The operators of torch on tensors of torchax: `register` sends them to the JAX functions.

``import kda_ops`` registers where torchax is, or comes to be, imported. torchax takes a call above
autograd, so a registration brings the gradients with it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import torch

from kda_ops import jax as faces
from kda_ops.private import OpOverload, schema_of
from kda_ops.stages import GRADIENTS


@functools.lru_cache(maxsize=256)
def _jitted(name: str, flags: tuple[tuple[str, object], ...]):
    """Jit the JAX function with the operator's results: a state not asked for is empty."""
    face = getattr(faces, name)

    def operator(*inputs):
        out = face(*inputs, **dict(flags))
        if not isinstance(out, tuple):
            return out
        o, final_state = out
        return o, jnp.zeros(0, jnp.float32) if final_state is None else final_state

    return jax.jit(operator)


def _implementation(operator: OpOverload, name: str):
    from torchax import interop

    names = [a.name for a in schema_of(operator).arguments if not a.kwarg_only]

    def implementation(*inputs, **flags):
        inputs = (*inputs, *(flags.pop(n, None) for n in names[len(inputs) :]))
        f = _jitted(name, tuple(flags.items()))
        offsets = inputs[len(GRADIENTS) :]  # integers, which have no gradient

        def differentiable(*x):
            return interop.call_jax(f, *x, *offsets)

        return interop.j2t_autograd(differentiable)(*inputs[: len(GRADIENTS)])

    return implementation


def register() -> None:
    """Register chunk, recurrent and gate of both variants with torchax."""
    from torchax.ops import ops_registry

    for variant in ("kda", "gdn"):
        for op, name in (
            ("chunk", f"chunk_{variant}"),
            ("recurrent", f"recurrent_{variant}"),
            ("gate", f"{variant}_gate"),
        ):
            operator = getattr(getattr(torch.ops, variant), op).default
            ops_registry.register_torch_dispatch_op(
                operator, _implementation(operator, name), is_jax_function=False
            )
