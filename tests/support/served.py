"""Serve sequences by `InvariantCache`, in calls that mix prompts, tokens and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from hypothesis import strategies as st
from torch import Tensor

import kda_ops
from kda_ops.nn import InvariantCache
from tests.support.cases import TOKENS, Case, replace
from tests.support.target import TARGET

# the sequences of a call in their order, None for one without a slot; how many of its own tokens
# each reads, and how many others as drafts, which are rejected
Call = Sequence[tuple[int | None, int, int]]


@st.composite
def served(draw, case: Case, drafts: int, calls: int) -> list[Call]:
    """Draw calls in which every sequence reads all of its tokens."""
    left, found = [b - a for _, a, b in case.spans], []
    pieces, wrong = st.sampled_from((0, 1, 1, 1, 2, 63, 64, 65, 100)), st.integers(0, drafts)
    for i in range(calls):
        call: list[tuple[int | None, int, int]] = []
        for n in draw(st.permutations(range(case.N))):
            if i < calls - 1 and not draw(st.booleans()):
                continue
            right = left[n] if i == calls - 1 else min(draw(pieces), left[n])
            left[n] -= right
            call.append((n, right, draw(wrong)))
        if draw(st.booleans()):
            call.insert(draw(st.integers(0, len(call))), (None, draw(st.integers(0, 2)), 0))
        found.append(call)
    return found


def new_cache(case: Case, slots: int, drafts: int) -> InvariantCache:
    """Return a cache for so many sequences of a case, as other ones have left it, with NaN."""
    x = case.inputs(TARGET.device)
    pool = torch.zeros((slots, *case.state_shape[1:]), dtype=case.state_dtype)
    cache = InvariantCache(pool.to(TARGET.device), *(x[n] for n in TOKENS), drafts=drafts)
    for buffer in cache.buffers():
        buffer.fill_(torch.nan if buffer.is_floating_point() else 1000)
    return cache


def serve(case: Case, calls: Sequence[Call], drafts: int, null: int = -1) -> Tensor:
    """Return o of a case from calls of a cache, whose slots are the sequences in reverse order.

    Outputs of sequences without a slot are zero.
    """
    inputs = case.inputs(TARGET.device)
    other = replace(case, seed=case.seed + 2, lengths=(100,)).inputs(TARGET.device)
    first = null + 1
    cache = new_cache(case, first + case.N, drafts)
    shape = inputs["v"].shape
    o, done = torch.zeros(shape, dtype=case.dtype, device=TARGET.device), [-1] * case.N
    for call in calls:
        parts: dict[str, list[Tensor]] = {n: [] for n in TOKENS if inputs[n] is not None}
        slots, lengths, resumed = [], [], []
        for n, right, wrong in call:
            row, a = (0, 0) if n is None else case.spans[n][:2]
            at = a if n is None else a + max(done[n], 0)
            for name, rows in parts.items():
                if n is not None:
                    rows.append(inputs[name][row, at : at + right])
                rows.append(other[name][0, : right if n is None else wrong])
            slots.append(null if n is None else first + case.N - 1 - n)
            lengths.append(right + wrong)
            resumed.append(n is None or done[n] >= 0)
        offsets = [0, *accumulate(lengths)]
        x = {n: torch.cat(rows)[None] for n, rows in parts.items()} if call else {
            n: inputs[n][:1, :0] for n in parts
        }  # fmt: skip
        table = torch.tensor(slots, dtype=torch.int64, device=TARGET.device)
        with torch.no_grad():
            got = cache.step(
                getattr(kda_ops, f"chunk_{case.variant}_"),
                *(x.get(n) for n in TOKENS),
                table,
                torch.tensor(offsets, device=TARGET.device),
                torch.tensor(resumed, dtype=torch.bool, device=TARGET.device),
                A_log=inputs["A_log"],
                dt_bias=inputs["dt_bias"],
                null_slot=null,
                **case.flags("chunk_"),
            )
            wrong_ones = [wrong for _, _, wrong in call]
            crop = torch.tensor(wrong_ones, dtype=torch.int64, device=TARGET.device)
            cache.crop(crop, torch.where(table > null, table, -1))
        for (n, right, _), begin, end in zip(call, offsets, offsets[1:]):
            if n is None:
                assert not got[0, begin:end].any()
                continue
            row, a, _ = case.spans[n]
            done[n] = max(done[n], 0)
            o[row, a + done[n] : a + done[n] + right] = got[0, begin : begin + right]
            done[n] += right
    return o
