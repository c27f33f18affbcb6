"""Run the sequences of a call in pieces, or a head of one sequence alone, as calls of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from kda_ops import dispatch
from kda_ops.problem import CHUNK
from kda_ops.stages import GRADIENTS
from tests.support.calls import Results, as_leaves, overload, with_gradients
from tests.support.cases import TOKENS, Case, Tensors
from tests.support.pools import pool_arguments
from tests.support.target import TARGET

Cuts = Sequence[Sequence[int]]  # of each sequence, the chunks before each cut
# lengths whose pieces the native backend computes in chunks of 64 rows (docs/numerics.md)
LONG = (0, 64, 101, 128, 165, 192)
ANY = (*LONG, 1, 37, 65, 129, 193)
SHARED = ("A_log", "dt_bias")  # inputs without sequences


def keeps_any_piece(invariant: bool) -> bool:
    """Return whether the bits of a piece do not depend on its length."""
    return invariant or dispatch.backend_name(TARGET.device) != "native"


@st.composite
def cuts(draw, case: Case, calls: int = 3) -> Cuts:
    """Draw where each sequence is cut for so many calls; rows of a batch are cut alike."""
    spans = case.spans if case.lengths is not None else case.spans[:1]
    most = [(b - a + CHUNK - 1) // CHUNK for _, a, b in spans]
    return [sorted(draw(st.lists(st.integers(0, n), min_size=calls - 1, max_size=calls - 1)))
            for n in most]  # fmt: skip


class Piece(NamedTuple):
    """A call on pieces: its tokens in the whole call, its offsets, and chunks before each."""

    tokens: Any
    cu_seqlens: Tensor | None
    before: list[int]


def pieces(case: Case, where: Cuts) -> list[Piece]:
    """Return the calls into which cuts divide a call; pieces of a sequence may be empty."""
    found = []
    for i in range(len(where[0]) + 1 if where else 1):
        edges = []
        for (_, a, b), chunks in zip(case.spans, where):
            at = [a, *(min(a + CHUNK * c, b) for c in chunks), b]
            edges.append((at[i], at[i + 1]))
        before = [0 if i == 0 else chunks[i - 1] for chunks in where]
        if case.lengths is None:
            found.append(Piece(slice(*edges[0]), None, before[:1] * case.N))
            continue
        tokens = torch.cat([torch.arange(a, b) for a, b in edges] or [torch.arange(0)])
        lengths = [b - a for a, b in edges]
        offsets = torch.tensor([0, *accumulate(lengths)], device=TARGET.device)
        found.append(Piece(tokens.to(TARGET.device), offsets, before))
    return found


def _of(piece: Piece, x: Tensors) -> Tensors:
    own = {n: t[:, piece.tokens] if t is not None and n in TOKENS else t for n, t in x.items()}
    return own | {"cu_seqlens": piece.cu_seqlens}


def run_in_pieces(
    case: Case,
    where: Cuts,
    inputs: Tensors | None = None,
    cotangents: tuple[Tensor, Tensor] | None = None,
    need: Iterable[str] | None = GRADIENTS,
    **flags: object,
) -> Results:
    """Return what `calls.run` does from one call per piece, but no gradients of the gate's weights.

    Each piece starts from the state of the piece before, and gets the gradient of its final state
    from the piece after. Without `need` nothing is differentiated.
    """
    inputs = case.inputs(TARGET.device) if inputs is None else inputs
    do, dfinal = case.cotangents(TARGET.device) if cotangents is None else cotangents
    need = None if need is None else frozenset(need) - {*SHARED}
    op, state = overload(case.variant, "chunk"), inputs["initial_state"]
    every, made = pieces(case, where), []
    for i, piece in enumerate(every):
        last = i == len(every) - 1
        asked = {"output_final_state": case.final or not last}
        x = _of(piece, inputs) | {"initial_state": state}
        carried = need if need is None or i == 0 else need | {"initial_state"}
        leaves = {} if carried is None else as_leaves(x, carried)
        with torch.set_grad_enabled(need is not None):
            o, state = op(*(x | leaves).values(), **(case.flags() | flags | asked))
        outs = {"o": o} | ({"final_state": state} if state.dim() > 1 else {})
        made.append((piece, outs, leaves))
        state = state.detach()
    results = {"o": torch.zeros_like(do)}
    if case.final:
        results["final_state"] = state
    for piece, outs, leaves in reversed(made):
        got = {n: x.detach() for n, x in outs.items()}
        if leaves:
            got = with_gradients(outs, leaves, (do[:, piece.tokens], dfinal))
        for name, x in got.items():
            if name == "o" or name[1:] in TOKENS:
                like = results["o"] if name == "o" else inputs[name[1:]]
                results.setdefault(name, torch.zeros_like(like).contiguous())
                results[name][:, piece.tokens] = x
        dfinal = got.get("dinitial_state")
    if dfinal is not None and need is not None and "initial_state" in need:
        results["dinitial_state"] = dfinal
    return results


class Pools(NamedTuple):
    """What calls on a pool leave: o, and the pool with a snapshot after each whole chunk."""

    o: Tensor
    pool: Tensor


def prefill(
    case: Case, where: Cuts | None, dtype: torch.dtype | None = None, **flags: object
) -> Pools:
    """Run `chunk_` on a pool, in pieces or, without cuts, in one call.

    Sequence n has slot n; slots behind those hold the snapshots, sequence after sequence.
    """
    inputs, N = case.inputs(TARGET.device), case.N
    most = max([(b - a) // CHUNK for _, a, b in case.spans] + [1])
    start = torch.randn(case.state_shape, generator=torch.Generator().manual_seed(case.seed + 2))
    pool = torch.zeros((N * (1 + most), *start.shape[1:]), dtype=dtype or case.state_dtype)
    pool[:N] = start
    pool, slots = pool.to(TARGET.device), torch.arange(N, device=TARGET.device)
    table = torch.arange(N, N * (1 + most)).view(N, most)
    o = torch.zeros_like(case.cotangents(TARGET.device)[0])
    flags = case.flags("chunk_") | flags
    for piece in pieces(case, [()] * N if where is None else where):
        into = torch.full((N, most), -1)
        for n, c in enumerate(piece.before):
            into[n, : max(most - c, 0)] = table[n, c:]
        x = pool_arguments(_of(piece, inputs), pool, slots, into.to(TARGET.device))
        with torch.no_grad():
            o[:, piece.tokens] = overload(case.variant, "chunk_")(*x, **flags)
    return Pools(o, pool)


def of_heads(x: Tensor, HV: int, values: slice) -> Tensor:
    """Return the rows of some value heads of A_log or dt_bias, flat where x is flat."""
    rows = x.reshape(HV, -1)[values].clone()
    return rows.flatten() if x.dim() == 1 else rows


def head_alone(case: Case, n: int, head: int) -> tuple[Case, Tensors, tuple[Tensor, Tensor]]:
    """Return sequence n with one key head and its value heads as a call of its own.

    Its tensors are contiguous, whatever strides the call has.
    """
    row, a, b = case.spans[n]
    group = case.HV // case.H
    values = slice(head * group, (head + 1) * group)
    x: Tensors = {}
    for name, t in case.inputs(TARGET.device).items():
        if t is None or name == "cu_seqlens":
            x[name] = None
        elif name in TOKENS:
            of = slice(head, head + 1) if name in ("q", "k") else values
            x[name] = t[row : row + 1, a:b, of].clone(memory_format=torch.contiguous_format)
        elif name == "initial_state":
            x[name] = t[n : n + 1, values].clone(memory_format=torch.contiguous_format)
        else:
            x[name] = of_heads(t, case.HV, values)
    do, dfinal = case.cotangents(TARGET.device)
    own = Case(**vars(case) | dict(B=1, T=b - a, lengths=None, tail=0, H=1, HV=group))
    return own, x, (do[row : row + 1, a:b, values].clone(), dfinal[n : n + 1, values].clone())


def results_of(case: Case, results: Results, n: int, head: int) -> Results:
    """Return what a call gave for sequence n and one key head, but for the gate's weights."""
    row, a, b = case.spans[n]
    group = case.HV // case.H
    values = slice(head * group, (head + 1) * group)
    found = {}
    for name, x in results.items():
        if name in ("final_state", "dinitial_state"):
            found[name] = x[n : n + 1, values]
        elif name[1:] not in SHARED:
            of = slice(head, head + 1) if name in ("dq", "dk") else values
            found[name] = x[row : row + 1, a:b, of]
    return found
