"""The faces: the torch functions' names, arguments and checks, for arrays of JAX.

A face takes its signature from the torch function of its name, so the two cannot differ.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch

from kda_ops import functional
from kda_ops.arguments import check_types
from kda_ops.gates import gate_of
from kda_ops.jax import activations, problem
from kda_ops.jax.chunk import Inputs, JaxCall, chunk
from kda_ops.jax.recurrent import recurrent
from kda_ops.problem import Problem


def _face(like: Callable, **own: object) -> Callable[[Callable], Callable]:
    """Give a function of (inputs, flags) the signature of `like`, and the keywords `own`."""
    signature = inspect.signature(like)
    parameters = [  # arrays are checked by `problem.parse`, the rest by `check_types`
        p.replace(annotation=p.empty) if str(p.annotation).startswith("Tensor") else p
        for p in signature.parameters.values()
    ]
    parameters += [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=x) for n, x in own.items()
    ]
    signature = inspect.Signature(parameters)
    flags = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

    def wrap(body: Callable) -> Callable:
        @functools.wraps(body)
        def face(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            for name in flags:
                _refuse_traced(name, given[name])
            return body(
                tuple(x for n, x in given.items() if n not in flags), {n: given[n] for n in flags}
            )

        face.__signature__ = signature  # type: ignore[attr-defined]
        return check_types(face)

    return wrap


def _refuse_traced(name: str, x: object) -> None:
    """Refuse a flag or number whose value is not known while JAX traces the call."""
    if isinstance(x, jax.core.Tracer):
        other = "multiply o by it, or " if name == "scale" else ""
        raise TypeError(
            f"{name} must be known when the call is traced, got a traced array: {other}name it in "
            "static_argnames of jax.jit, or pass a constant."
        )


def _nothing(p: Problem, inputs: tuple):
    """Return the result of a call without tokens, heads or values: zeros, and the states pass."""
    *_, v, _, _, _, _, state, _ = inputs
    dtype = jnp.float64 if p.state_dtype is torch.float64 else jnp.float32
    shape = (p.N, p.HV, p.V, p.K) if p.transposed else (p.N, p.HV, p.K, p.V)
    return jnp.zeros_like(v), jnp.zeros(shape, dtype) if state is None else state


def _prepared(rank: int, inputs: tuple, flags: dict):
    p = problem.parse(rank, inputs, **flags)
    inputs = tuple(None if x is None else jnp.asarray(x) for x in inputs)
    return p, inputs, jnp.float64 if p.state_dtype is torch.float64 else jnp.float32


def _is_empty(p: Problem) -> bool:
    return 0 in (p.B, p.T, p.N, p.HV, p.V)


def _chunk(rank: int, inputs: tuple, flags: dict):
    interpret = flags.pop("interpret")
    if flags.pop("invariant"):
        raise ValueError(
            "invariant must be False in JAX, got True: these kernels promise no bits. Call the "
            "torch function."
        )
    p, inputs, sums = _prepared(rank, inputs, flags)
    on_tpu = jax.default_backend() == "tpu"
    if interpret is None:
        interpret = not on_tpu
    if sums == jnp.float64 and not interpret:
        raise TypeError(
            "q must be float16, bfloat16 or float32 on a TPU, got torch.float64: float64 runs "
            "in interpret mode only."
        )
    if _is_empty(p):
        o, final_state = _nothing(p, inputs)
    else:
        *x, cu_seqlens = inputs
        # float16 is not for a TPU: its operands are float32
        dtype = jnp.bfloat16 if p.q.dtype is torch.bfloat16 else sums
        o, final_state = chunk(JaxCall.of(p, dtype, sums, interpret), Inputs(*x), cu_seqlens)
    return o, final_state if p.output_final_state else None


def _recurrent(rank: int, inputs: tuple, flags: dict):
    p, inputs, dtype = _prepared(rank, inputs, flags)
    if _is_empty(p):
        o, final_state = _nothing(p, inputs)
    else:
        *x, state, cu_seqlens = inputs
        if state is not None and p.transposed:
            state = state.swapaxes(2, 3)
        o, final_state = recurrent(p, tuple(x), state, cu_seqlens, dtype)
        final_state = final_state.swapaxes(2, 3) if p.transposed else final_state
    return o, final_state if p.output_final_state else None


@_face(functional.chunk_kda, interpret=None)
def chunk_kda(inputs, flags):
    """Run Kimi Delta Attention over whole sequences, as Pallas TPU kernels; differentiable once, in
    reverse mode.

    Equation, arguments, result and errors are those of `kda_ops.chunk_kda`, on arrays of JAX.
    The promises and ``disable_recompute`` are accepted and change nothing; ``invariant=True`` is
    refused. K and V are padded to multiples of 128, so K = 64 costs what K = 128 does. fp16 runs as
    fp32. fp64 needs ``jax_enable_x64`` and runs in interpret mode only.

    Args:
        cu_seqlens: values are read by the kernels only; inside ``jax.jit`` they may change from
            call to call. The grid has ``T // 64 + N`` chunks, however many are used.
        interpret: run the kernels in Pallas's interpret mode; None: where the default backend of
            JAX is no TPU.

    Example:
        >>> import jax, kda_ops.jax
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 100, 2, 32)) for i in range(3))
        >>> g, beta = -jax.numpy.ones((1, 100, 2, 32)), jax.numpy.ones((1, 100, 2))
        >>> o, state = kda_ops.jax.chunk_kda(
        ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> o.shape, state.shape
        ((1, 100, 2, 32), (1, 2, 32, 32))

    Source: Kimi Linear technical report, arXiv:2510.26692 (chunkwise form).
    """
    return _chunk(1, inputs, flags)


@_face(functional.chunk_gdn, interpret=None)
def chunk_gdn(inputs, flags):
    """Run Gated DeltaNet over whole sequences, as Pallas TPU kernels; differentiable once, in
    reverse mode.

    Equation, arguments, result and errors are those of `kda_ops.chunk_gdn`; the rest as for
    `chunk_kda`.

    Example:
        >>> import jax, kda_ops.jax
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 100, 2, 32)) for i in range(3))
        >>> o, state = kda_ops.jax.chunk_gdn(q, k, v, None, None, use_qk_l2norm_in_kernel=True)
        >>> o.shape, state
        ((1, 100, 2, 32), None)

    Source: Gated Delta Networks, arXiv:2412.06464 (chunkwise form).
    """
    return _chunk(0, inputs, flags)


@_face(functional.recurrent_kda)
def recurrent_kda(inputs, flags):
    """Run Kimi Delta Attention token by token, as a ``lax.scan`` on every platform.

    Equation, arguments, result and errors are those of `kda_ops.recurrent_kda`. JAX differentiates
    the scan, in both modes and as often as you like; backward keeps a state per token.

    Example:
        >>> import jax, kda_ops.jax
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 3, 2, 32)) for i in range(3))
        >>> o, state = kda_ops.jax.recurrent_kda(q, k, v, None, None, output_final_state=True)
        >>> o.shape, state.shape
        ((1, 3, 2, 32), (1, 2, 32, 32))

    Source: Kimi Linear technical report, arXiv:2510.26692 (recurrent form).
    """
    return _recurrent(1, inputs, flags)


@_face(functional.recurrent_gdn)
def recurrent_gdn(inputs, flags):
    """Run Gated DeltaNet token by token, as a ``lax.scan`` on every platform.

    Equation, arguments, result and errors are those of `kda_ops.recurrent_gdn`; the rest as for
    `recurrent_kda`.

    Example:
        >>> import jax, kda_ops.jax
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 3, 2, 32)) for i in range(3))
        >>> kda_ops.jax.recurrent_gdn(q, k, v, None, None)[0].shape
        (1, 3, 2, 32)

    Source: Gated Delta Networks, arXiv:2412.06464 (recurrent form).
    """
    return _recurrent(0, inputs, flags)


def _gate(rank: int, inputs: tuple, flags: dict):
    which = gate_of(True, **flags)
    problem.parse_gate(rank, which, *inputs)
    g, A_log, dt_bias = (None if x is None else jnp.asarray(x) for x in inputs)
    return activations.gate(which, rank, g, A_log, dt_bias)


@_face(functional.kda_gate)
def kda_gate(inputs, flags):
    """Compute KDA's log decay from raw logits; differentiable once, in reverse mode.

    Equation, arguments, result and errors are those of `kda_ops.kda_gate`.

    Example:
        >>> import jax.numpy as jnp, kda_ops.jax
        >>> kda_ops.jax.kda_gate(jnp.zeros((1, 1, 2, 4)), None, lower_bound=-5.0)[0, 0, 0].tolist()
        [-2.5, -2.5, -2.5, -2.5]

    Source: Kimi Linear technical report, arXiv:2510.26692 (gate).
    """
    return _gate(1, inputs, flags)


@_face(functional.gdn_gate)
def gdn_gate(inputs, flags):
    """Compute GDN's log decay from raw logits; differentiable once, in reverse mode.

    Equation, arguments, result and errors are those of `kda_ops.gdn_gate`.

    Example:
        >>> import jax.numpy as jnp, kda_ops.jax
        >>> kda_ops.jax.gdn_gate(jnp.zeros((1, 1, 2)), None, lower_bound=-5.0)[0, 0].tolist()
        [-2.5, -2.5]

    Source: Gated Delta Networks, arXiv:2412.06464 (gate).
    """
    return _gate(0, inputs, flags)
