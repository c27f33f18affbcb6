"""Reduce a call to what plans need of it: a key, its tensors, and its numbers.

The key holds what decides which kernels run: the pass, its flags, the widths and the heads. Of each
tensor it holds dtype, device and alignment, and whether it is absent or contiguous. The numbers are
B, T, N, the columns of a table of slots, and the strides of tensors that are not contiguous. A plan
is stored under the key. It serves all numbers for which its guards hold (`plan.Plan`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from kda_ops import chunk, convolution, norm, recurrent
from kda_ops.backends.triton import tuning
from kda_ops.backends.triton.device.tile import spans
from kda_ops.checks import check_no_overlap
from kda_ops.gate import GateBackwardPass, GatePass
from kda_ops.stages import KEPT, Pass

# kernels read these with stride 1, so others are copied
DENSE = frozenset(
    (
        *("A_log", "dt_bias", "cu_seqlens", "state_indices", "num_accepted_tokens"),
        *("bias", "tail_indices"),
    )
)
# passes that write an argument
POOLS = {chunk.Prefill: "state", recurrent.Decode: "state", convolution.ConvolveInPlace: "tail"}


class CallKey(NamedTuple):
    """A call as plans see it: the key of its plans, its tensors in order, and its numbers."""

    key: tuple
    tensors: tuple[Tensor | None, ...]
    pointers: list[int]
    numbers: tuple[int, ...]


def call_key(kind: type[Pass], rank: int, args: tuple, flags: dict[str, Any]) -> CallKey | None:
    """Return a call as key, tensors and numbers; None without tokens, or if shapes do not fit."""
    names = kind.operator.names
    args += (None,) * (len(names) - len(args))
    if kind is chunk.Backward:  # an absent tensor may be an empty one of one dimension
        given = (None if x is None or x.dim() == 1 else x for x in args[_GIVEN])
        args = (*args[: _GIVEN.start], *given, *args[_GIVEN.stop :])
    sizes = _SIZES[kind](rank, *args)
    if sizes is None:
        return None
    numbers, static = sizes
    forced = tuning.FORCED_RUN, tuning.FORCED_AHEAD, tuning.FORCED_WALK
    key: list[Any] = [kind, rank, static, *flags.items(), *forced]
    pointers = []
    for i, x in enumerate(args):
        if x is None:
            key.append(None)
            pointers.append(0)
            continue
        if not x.is_contiguous():
            pool = POOLS.get(kind) == names[i]
            if pool:  # it is written in place: writes to a copy would be lost
                check_no_overlap(names[i], x)
            if names[i] in DENSE or not (pool or spans(x)):
                x = x.contiguous()
                args = (*args[:i], x, *args[i + 1 :])
            else:
                key.append("strided")
                numbers += x.stride()
        pointer = x.data_ptr()
        pointers.append(pointer)
        key += x.dtype, x.get_device(), pointer & 15
    return CallKey(tuple(key), args, pointers, numbers)


def exact(kind: type[Pass], rank: int, args: tuple, flags: dict) -> tuple[tuple, tuple, list]:
    """Return a key of all that `call_key` reads, the tensors in order, and their pointers.

    The key contains B, T and N, so it serves one size. It costs less Python than `call_key`, for
    decode, which meets the same few sizes thousands of times.
    """
    args += (None,) * (len(kind.operator.names) - len(args))
    key: list[Any] = [kind, rank, *flags.items()]
    pointers = []
    for x in args:
        if x is None:
            key.append(None)
            pointers.append(0)
        else:
            pointer = x.data_ptr()
            pointers.append(pointer)
            strides = x.is_contiguous() or x.stride()
            key += x.shape, strides, x.dtype, x.get_device(), pointer & 15
    return tuple(key), args, pointers


_GIVEN = slice(1, 2 + len(KEPT))  # among the arguments of `Backward`: dfinal_state, what was kept


def named(kind: type[Pass], seen: CallKey) -> dict[str, int]:
    """Return the numbers of a call by name."""
    names = ["B", "T", "N", "S"]  # S: columns of a table of slots
    for name, x in zip(kind.operator.names, seen.tensors):
        if x is not None and not x.is_contiguous():
            names += (f"{name}_{i}" for i in range(x.dim()))
    return dict(zip(names, seen.numbers))


def _sizes(
    rank: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    slots: Tensor | None = None,
    columns: int = 1,
) -> tuple[tuple[int, ...], tuple] | None:
    """Return the numbers of a call and its other sizes, or None if shapes do not fit q and v."""
    if q is None or k is None or v is None or q.dim() != 4 or v.dim() != 4:
        return None
    shape, v_shape = q.shape, v.shape
    B, T, H, K = shape
    HV, V = v_shape[2], v_shape[3]
    each = (B, T, HV)
    N = B
    if cu_seqlens is not None:
        N = cu_seqlens.shape[0] - 1 if cu_seqlens.dim() == B == 1 else 0
    if (
        k.shape != shape
        or v_shape[0] != B
        or v_shape[1] != T
        or (g is not None and g.shape != ((*each, K) if rank else each))
        or (beta is not None and beta.shape != each)
        or (state is not None and slots is None and state.shape[:1] != (N,))
        or (slots is not None and slots.shape[:1] != (N,))
        or not (B and T and N > 0 and HV and V and columns)
    ):
        return None
    static = (
        *(H, HV, K, V),
        A_log if A_log is None else A_log.shape,
        dt_bias if dt_bias is None else dt_bias.shape,
        state if state is None else state.shape[1:],
        slots if slots is None else slots.dim(),
    )
    return (B, T, N, columns), static


def _backward(rank: int, do, dfinal_state, *args):
    inputs = args[len(KEPT) : -1]
    found, v = _sizes(rank, *inputs), inputs[chunk.INPUTS.index("v")]
    if found is None or do is not None and do.shape != v.shape:
        return None
    numbers, static = found
    if dfinal_state is None:
        return numbers, (*static, None)
    _, _, N, _ = numbers
    rows, *shape = dfinal_state.shape
    return (numbers, (*static, *shape)) if rows == N else None


def _prefill(rank: int, q, k, v, g, beta, state, slots, into, A_log, dt_bias, cu_seqlens):
    columns = 1 if into is None else into.shape[1] if into.dim() == 2 else 0
    if state is None:
        return None
    if into is not None and into.shape[:1] != (state if slots is None else slots).shape[:1]:
        return None
    return _sizes(rank, q, k, v, g, beta, A_log, dt_bias, state, cu_seqlens, slots, columns)


def _decode(rank: int, q, k, v, g, beta, state, slots, accepted, A_log, dt_bias, cu_seqlens):
    columns = 1 if slots is None or slots.dim() < 2 else slots.shape[1]
    if accepted is not None and (slots is None or accepted.shape != slots.shape[:1]):
        return None
    if slots is not None and slots.dim() == 2 and cu_seqlens is None and v.shape[1:2] > (columns,):
        return None
    return _sizes(rank, q, k, v, g, beta, A_log, dt_bias, state, cu_seqlens, slots, columns)


def _gate(rank: int, g, A_log, dt_bias):
    if g is None or g.dim() != 3 + rank or not g.numel():
        return None
    return (g.shape[0], g.shape[1], 1, 1), (*g.shape[2:], *_shapes(A_log, dt_bias))


def _gate_backward(rank: int, dy, g, A_log, dt_bias):
    return (
        None if g is None or dy is None or dy.shape != g.shape else _gate(rank, g, A_log, dt_bias)
    )


def _shapes(*tensors: Tensor | None) -> tuple:
    return tuple(None if x is None else x.shape for x in tensors)


def _convolve(rank: int, x, weight, bias, tail, cu_seqlens, slots=None):
    """Return the sizes of a convolution; `tail` is a pool if there are `slots`."""
    if x is None or weight is None or x.dim() != 3 or not x.numel():
        return None
    B, T, D = x.shape
    N = B
    if cu_seqlens is not None:
        N = cu_seqlens.shape[0] - 1 if cu_seqlens.dim() == B == 1 else 0
    rows = tail if slots is None else slots
    if N < 1 or weight.dim() != 2 or (rows is not None and rows.shape[:1] != (N,)):
        return None
    inner = None if tail is None else tail.shape[1:]
    return (B, T, N, 1), (D, *_shapes(weight, bias), inner, slots if slots is None else slots.dim())


def _convolve_backward(rank: int, dy, dfinal_tail, x, *args):
    found = _convolve(rank, x, *args)
    if found is None or dy is not None and dy.shape != x.shape:
        return None
    numbers, static = found
    if dfinal_tail is None or dfinal_tail.dim() == 1:
        return numbers, (*static, None)
    rows, *shape = dfinal_tail.shape
    return (numbers, (*static, *shape)) if rows == numbers[2] else None


def _convolve_in_place(rank: int, x, weight, bias, tail, slots, cu_seqlens):
    return None if tail is None else _convolve(rank, x, weight, bias, tail, cu_seqlens, slots)


def _norm(rank: int, x, weight, gate):
    if x is None or x.dim() != 4 or not x.numel() or gate is not None and gate.shape != x.shape:
        return None
    return (x.shape[0], x.shape[1], 1, 1), (*x.shape[2:], *_shapes(weight))


def _norm_backward(rank: int, dy, x, *args):
    return None if dy is None or x is None or dy.shape != x.shape else _norm(rank, x, *args)


_SIZES: dict[type, Callable[..., tuple[tuple[int, ...], tuple] | None]] = {
    chunk.Infer: _sizes,
    chunk.Forward: _sizes,
    chunk.Backward: _backward,
    chunk.Prefill: _prefill,
    recurrent.Recur: _sizes,
    recurrent.Decode: _decode,
    GatePass: _gate,
    GateBackwardPass: _gate_backward,
    convolution.Convolve: _convolve,
    convolution.ConvolveBackward: _convolve_backward,
    convolution.ConvolveInPlace: _convolve_in_place,
    norm.NormPass: _norm,
    norm.NormBackwardPass: _norm_backward,
}
