"""Which sequence a chunk or a run belongs to. Kernels of Gluon call this too."""

import triton
import triton.language as tl

from kda_ops import problem
from kda_ops.backends.triton.device.operands import constant

CHUNK = constant(problem.CHUNK)


@triton.jit
def find_sequence(cu_seqlens, i_t, N, TOKENS: tl.constexpr = CHUNK):
    """Return the sequence that chunk number i_t belongs to.

    That is the greatest n < N with cu_seqlens[n] // TOKENS + n <= i_t (sequences.py). For runs,
    TOKENS is the length of a run.
    """
    lo = i_t * 0
    hi = lo + N - 1
    while lo < hi:
        mid = (lo + hi + 1) // 2
        first = (tl.load(cu_seqlens + mid) // TOKENS).to(tl.int32) + mid
        lo = tl.where(first <= i_t, mid, lo)
        hi = tl.where(first <= i_t, hi, mid - 1)
    return lo
