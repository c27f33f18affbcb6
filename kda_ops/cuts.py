"""Tell at which tokens a sequence may be cut into calls without a change of bits."""

from __future__ import annotations

import torch

from kda_ops import dispatch
from kda_ops.checks import MAX_K, dtype_error

__all__ = ["cut_length"]

_OPS = ("chunk_kda", "chunk_kda_", "chunk_gdn", "chunk_gdn_")


def cut_length(
    op: str, HV: int, K: int, V: int, dtype: torch.dtype, device: torch.device | str
) -> int | None:
    """Return L: calls on pieces of a sequence, cut at multiples of L tokens, give one call's bits.

    Each call starts from the state that the call before left. Outputs, states and snapshots then
    have the bits of one call on the whole sequence, if states are fp32 (fp64 for fp64 inputs). The
    conditions are in docs/numerics.md, "Sequences in pieces". With ``invariant=True`` L is 64 for
    every call.

    Args:
        op: ``"chunk_kda"``, ``"chunk_kda_"``, ``"chunk_gdn"`` or ``"chunk_gdn_"``.
        HV: the value heads of the call, of one rank if heads are sharded.
        K, V: the widths of keys (up to 256) and values.
        dtype: that of q, k and v.
        device: where the tensors are: a CPU, or a GPU of this machine.

    Returns:
        64 where sequences stay whole: on a CPU, and on a GPU from some number of heads on. None
        where long sequences are cut into runs that are scanned at once, because there no cut keeps
        the bits.

    Raises:
        ValueError: there is no such operator, or a size is out of range.
        TypeError: an argument has another Python type, or dtype or device is not supported.
        RuntimeError: the machine has no such GPU.

    Example:
        >>> import torch, kda_ops
        >>> L = kda_ops.cut_length("chunk_gdn", 4, 32, 32, torch.float32, "cpu")
        >>> L
        64
        >>> q, k, v = (torch.randn(1, 200, 4, 32) for _ in range(3))
        >>> def run(a, b, state):
        ...     x = (t[:, a:b] for t in (q, k, v))
        ...     return kda_ops.chunk_gdn(
        ...         *x, None, None, initial_state=state, output_final_state=True,
        ...         use_qk_l2norm_in_kernel=True)
        >>> whole, _ = run(0, 200, None)
        >>> first, state = run(0, 2 * L, None)
        >>> rest, _ = run(2 * L, 200, state)
        >>> torch.equal(torch.cat([first, rest], 1), whole)
        True
    """
    if not isinstance(op, str):
        raise TypeError(f"op must be the name of a function, got {type(op).__name__}.")
    if op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(_OPS)}, got {op!r}.")
    for name, size, most in (("HV", HV, None), ("K", K, MAX_K), ("V", V, None)):
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name} must be a whole number, got {type(size).__name__}.")
        if size < 1 or (most is not None and size > most):
            bound = "" if most is None else f" and at most {most}"
            raise ValueError(f"{name} must be at least 1{bound}, got {size}.")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {type(dtype).__name__}.")
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a device or its name, got {type(device).__name__}.")
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise TypeError(f"device must be a CPU or a CUDA device, got {where}.")
    floats = (torch.float16, torch.bfloat16, torch.float32)
    if dtype not in floats and not (dtype is torch.float64 and where.type == "cpu"):
        dtype_error("dtype", "float16, bfloat16, float32 or (on CPU) float64", dtype)
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise RuntimeError(
            f"device must be a GPU of this machine, got {where}: it has "
            f"{torch.cuda.device_count()}, and the answer depends on the GPU."
        )
    return dispatch.backend(where).cut_length(HV, K, V, dtype, where)
