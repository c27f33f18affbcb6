"""Number the sequences of packed calls in programs that ``torch.export`` makes."""

from __future__ import annotations

import torch
from torch import Tensor


def count_results(N, cu_seqlens: Tensor | None, given: Tensor | None):
    """Return the first size of the states or tails of N sequences that a call returns.

    It is N. In an exported program of packed sequences it is a size of its own, which may be 1, or
    that of the states or tails that are `given`.
    """
    if cu_seqlens is None or isinstance(N, int) or not torch.compiler.is_exporting():
        return N
    return _any_size(N) if given is None else given.shape[0]


def _any_size(N: torch.SymInt) -> torch.SymInt:
    """Return a new symbol that equals N, for a fake implementation under ``torch.export``.

    torch guards every size against 1, and N is one less than the number of offsets. That guard
    would refuse a single sequence. Two inequalities express the equality, because with ``==`` torch
    would replace the symbol by N again. The second is quadratic on purpose. torch assumes at least
    2 offsets, so from ``size >= N`` it would deduce size >= 1 and refuse an empty batch.
    """
    size = torch.library.get_ctx().new_dynamic_size()
    torch._check(size <= N)
    torch._check((N - size) * (N - size) <= 0)
    return size


def is_any_size(size: int | torch.SymInt) -> bool:
    """Return whether a size comes from `_any_size` or otherwise depends on data."""
    if isinstance(size, int) or not torch.compiler.is_exporting():
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))
