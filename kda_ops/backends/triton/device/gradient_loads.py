"""Read and write tiles for `gradient_keys`, in the register layout of its products (`fragment`).

Each level loads its tiles again. Level h takes the pairs of rows that lie in different halves of a
block of 2^(h + 1) rows.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_ops import problem
from kda_ops.backends.triton.device.fragment import (
    as_entries,
    as_tile,
    as_vectors_on_host,
    fragment,
    from_vectors,
)
from kda_ops.backends.triton.device.gradient_chunk import SQUARE, VECTOR
from kda_ops.backends.triton.device.tile import INTERPRETED, narrow, widen

LEVELS = tl.constexpr(6)  # log2 of the rows of a chunk
PARTED = tl.constexpr(8)  # the first mask of `pair_masks` that picks a level
LOAD = tl.constexpr(128)  # bits that a thread loads at once


class Sources(NamedTuple):
    """What a program loads again at every level; tensors begin at the chunk's first row."""

    q: Any  # Strided, rows of the key head
    k: Any  # Strided, likewise
    G: Any  # [64, K], sums of log decays from the start of the chunk
    dscores: Any  # Scores, of `gradient_pairs`
    masks: Any  # of `pair_masks`
    last: Any  # the last row that is a token
    i_s: Any  # number of the slice of K


@lru_cache(None)
def pair_masks(device: torch.device) -> Tensor:
    """Return the masks of `load_pairs`, [14, 64, 64] int16 of zeros or all bits, in the order of
    `fragment.as_vectors`.

    Masks 0 to 7: in blocks of 8, 16, 32 and 64 rows, the pairs below the diagonal, then those above
    it. From PARTED on: the pairs of level 0 to 5, whose rows first fall into different halves of a
    block of 2^(level + 1) rows.

    Another thread copies them, on a stream of its own. The calling thread may be allocating in the
    memory pool of a CUDA graph (``mode="reduce-overhead"``), where no tensor may outlive the call.
    """
    i = torch.arange(problem.CHUNK, device="cpu")
    parting, below = i[:, None] ^ i[None, :], i[:, None] > i[None, :]
    pairs = [(parting < m) & side for m in (8, 16, 32, 64) for side in (below, below.T)] + [
        parting >> h == 1 for h in range(LEVELS.value)
    ]
    masks = as_vectors_on_host(-torch.stack(pairs).to(torch.int16))

    def bring() -> Tensor:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            on_device = masks.to(device)
            torch.cuda.current_stream(device).synchronize()
            return on_device

    if device.type != "cuda":
        return masks.to(device)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(bring).result()


@triton.jit
def load_pairs(x, masks, i):
    """Load a tile [64, 64], written `as_vectors`, with zeros where mask i does not pick."""
    o = tl.arange(0, SQUARE // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    b_x, b_m = tl.load(x + o), tl.load(masks + i * SQUARE + o)
    if b_x.dtype == tl.float32:
        return from_vectors(tl.where(b_m != 0, b_x, 0.0))
    elif not INTERPRETED:  # two entries at once; the compiler would mask them one by one
        return from_vectors(
            tl.inline_asm_elementwise(
                "and.b32 $0, $1, $2;", "=r,r,r", [b_x, b_m], b_x.dtype, True, 2
            )
        )
    else:
        return from_vectors((b_x.to(tl.int16, bitcast=True) & b_m).to(b_x.dtype, bitcast=True))


@triton.jit
def load_entries(p_x, column, m_row, K: tl.constexpr, BK: tl.constexpr):
    """Load a tile [64, BK] by pointers in the order of `fragment`.

    Entries are zero past K, and where m_row is false. Callers add the column to a pointer last.
    Then the entries of a row differ by constants, which cost no address register.
    """
    if K % BK == 0:
        if m_row is None:
            return as_tile(tl.load(p_x))
        else:
            return as_tile(tl.load(p_x, mask=m_row & (column >= 0), other=0.0))
    else:
        m = column < K
        if m_row is not None:
            m = m & m_row
        return as_tile(tl.load(p_x, mask=m, other=0.0))


@triton.jit
def entries(x, i_s, BK: tl.constexpr):
    """Return (row, column) of the entries of slice i_s in the order in which x is loaded."""
    row, column = fragment(BK, LOAD // x.dtype.element_ty.primitive_bitwidth)
    column += i_s * BK
    return row, column


@triton.jit
def load_operand(x, at, K: tl.constexpr, BK: tl.constexpr):
    """Load rows of q or k, [64, BK] fp32.

    Rows that are no tokens repeat the last token. They get no gradient, so any finite number does.
    """
    row, column = entries(x.pointer, at.i_s, BK)
    p_x = x.pointer + tl.minimum(row, at.last) * x.strides[1] + column * x.strides[3]
    return widen(load_entries(p_x, column, None, K, BK))


@triton.jit
def load_later(at, h, K: tl.constexpr, BK: tl.constexpr):
    """Load q for rows in the later half of their block of level h, else k; [64, BK] fp32."""
    q, k = at.q, at.k
    row, column = entries(q.pointer, at.i_s, BK)
    later, row = ((row >> h) & 1) == 1, tl.minimum(row, at.last)
    p_q = q.pointer + row * q.strides[1] + column * q.strides[3]
    p_k = k.pointer + row * k.strides[1] + column * k.strides[3]
    return widen(load_entries(tl.where(later, p_q, p_k), column, None, K, BK))


@triton.jit
def decay_from_middle(G, i_s, h, K: tl.constexpr, BK: tl.constexpr):
    """Return the log decay between each row and the middle of its block, [64, BK] fp32.

    Blocks have 2^(h + 1) rows. Later rows have the decay from the middle on, earlier rows the decay
    up to the middle.
    """
    row, column = entries(G, i_s, BK)
    middle, later = ((row >> (h + 1)) << (h + 1)) + (1 << h) - 1, ((row >> h) & 1) == 1
    b_G = load_entries(G + tl.where(later, row, middle) * K + column, column, None, K, BK)
    b_A = load_entries(G + tl.where(later, middle, row) * K + column, column, None, K, BK)
    return (b_G - b_A).to(tl.float32)


@triton.jit
def decay_from_start(G, i_s, h, K: tl.constexpr, BK: tl.constexpr):
    """Return the log decay from the start of each row's block of 2^h rows, [64, BK] fp32."""
    row, column = entries(G, i_s, BK)
    b_G = load_entries(G + row * K + column, column, None, K, BK)
    row = ((row >> h) << h) - 1
    b_A = load_entries(G + row * K + column, column, row >= 0, K, BK)
    return (b_G - b_A).to(tl.float32)


@triton.jit
def store_operand(x, token, i_h, HEADS, n_rows, i_s, b_x, K: tl.constexpr, BK: tl.constexpr):
    """Write n_rows of b_x [64, BK] to one head of a contiguous [rows, HEADS, K] tensor.

    They go to rows from `token` on, without a change of layout.
    """
    row, column = entries(x, i_s, BK)
    b_x = as_entries(narrow(b_x, x.dtype.element_ty), LOAD // x.dtype.element_ty.primitive_bitwidth)
    p_x = x + (token * HEADS + i_h) * K + row * (HEADS * K) + column
    tl.store(p_x, b_x, mask=(row < n_rows) & (column < K))
