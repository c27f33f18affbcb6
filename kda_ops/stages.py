"""The contracts between the stages: what each one reads and returns, written once for every
backend.

A backend is a module with the functions of `Backend` below. `kda_ops.chunk` and `kda_ops.recurrent`
call them in order and know no mathematics; the stages know the mathematics (docs/maths.md) and
nothing of autograd or dispatch. Sizes and letters: docs/maths.md.

Chunks lie on one axis of length NT, sequence after sequence (`sequences.Chunks` numbers them). Rows
past the end of a sequence count as tokens with q = k = v = beta = 0 and g = 0. The decay axis ``D``
is K for KDA and 1 for GDN.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol, cast

from torch import Tensor

from kda_ops.problem import Problem


@dataclass
class Tile:
    """What a chunk needs besides the state entering it; `prepare` makes it, each tensor
    ``[NT, HV, C, .]``.

    A backend whose scan forms some of these from q, k, v, g and beta in registers leaves them None,
    and may leave it `rows` for that.
    """

    A: Tensor | None  # [.., C, C]  (I + L)^-1, unit lower triangular
    P: Tensor | None = None  # [.., C, C]  scale q_i·k_j decayed from j to i, j <= i
    w: Tensor | None = None  # [.., C, K]  A (beta k exp G)
    u: Tensor | None = None  # [.., C, V]  A (beta v)
    qg: Tensor | None = None  # [.., C, K]  scale q exp G
    kg: Tensor | None = None  # [.., C, K]  k exp(sum of g over the later rows)
    gamma: Tensor | None = None  # [NT, HV, D]  exp(sum of g over the chunk)
    # [NT, HV, R, C] R numbers per row, of the dtype of gamma: beta, norms and the like, in the
    # backend's order
    rows: Tensor | None = None
    pairs: Tensor | None = None  # [.., C, C]  A and P in one tile, which only `prepare` can read


class WholeTile(Protocol):
    """A tile of a backend whose `prepare` leaves nothing to its scan."""

    A: Tensor
    P: Tensor
    w: Tensor
    u: Tensor
    qg: Tensor
    kg: Tensor
    gamma: Tensor


def whole(tile: Tile) -> WholeTile:
    """The tile, none of whose tensors the backend leaves out (rows and pairs apart)."""
    return cast(WholeTile, tile)


@dataclass
class Trace:
    """What the scan passed through, kept for backward."""

    states: Tensor  # [NT, HV, K, V]  the state entering each chunk
    v_new: Tensor  # [NT, HV, C, V]  u - w S
    o: Tensor | None = None  # [B, T, HV, V]  the output, if it was written


@dataclass
class Reverse:
    """What the reverse scan found, last chunk first."""

    dstates: Tensor  # [NT, HV, K, V]  gradient of the state leaving each chunk
    z: Tensor | None  # [NT, HV, C, V]  A^T dv_new, the gradient of beta (v - k exp(G) S)
    # [B, T, HV, V] beta z, the gradient of v, where the backend's `gradient` takes it from here
    dv: Tensor | None
    dinitial_state: Tensor | None  # [N, HV, K, V] seen through the caller's strides


@dataclass
class Gradients:
    """One entry per differentiable input, in the input's shape and dtype; None where it was not
    asked for or the input is absent.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    g: Tensor | None = None
    beta: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_state: Tensor | None = None


GRADIENTS = tuple(f.name for f in fields(Gradients))
# What training may keep, with `pairs` in the place of A where both are made; o is an output anyway.
KEPT = (*(f.name for f in fields(Tile) if f.name != "pairs"), "states", "v_new")


class Backend(Protocol):
    """A set of stage functions. Their equations are in docs/maths.md under the same names."""

    def prepare(
        self,
        p: Problem,
        A: Tensor | None = None,
        pack: bool = False,
        norms: bool = False,
        overlap: bool = False,
    ) -> Tile:
        """Everything about the chunks that does not depend on the state; a kept A spares the
        inverse. With `pack` (where `dispatch.packs_pairs` says so) `pairs` are made too, and given
        back as A with `pack` they spare the scores as well. With `norms`, `rows` has those that
        `gradient` reads. With `overlap` some of the tile may be made no sooner than by `scan`,
        which must come before anything else that reads it.
        """

    def scan(
        self, p: Problem, tile: Tile, o: Tensor | None, final_state: Tensor | None, keep: bool
    ) -> Trace | None:
        """Carry the state through the chunks of each sequence::

            v_new = u - w S;   o = qg S + P v_new;   S <- gamma S + kg^T v_new

        Starts from `p.state` (row n, or slot ``p.state_indices[n]``; zero without it). Writes o [B,
        T, HV, V] with zeros past the last sequence, and the last state into `final_state`, [N, HV,
        K, V] or the pool itself, in the caller's layout. A negative slot is neither read nor
        written and its sequence's output is zero. With `p.snapshot_indices`, slot ``[n, j]`` takes
        the state after chunk ``(j + 1) * p.snapshot_every`` of sequence n. Returns a `Trace` if
        `keep`; then o may be None.
        """

    def reverse_scan(
        self,
        p: Problem,
        tile: Tile,
        do: Tensor | None,
        dfinal_state: Tensor | None,
        need: frozenset[str],
    ) -> Reverse:
        """Carry the gradient of the state back::

            dv_new = P^T do + kg dS;   z = A^T dv_new;   dS <- gamma dS + qg^T do - w^T dv_new

        Starts from `dfinal_state` in the caller's layout; a gradient that is None is zero, and any
        strides are accepted. `need` is that of `gradient`.
        """

    def gradient(
        self,
        p: Problem,
        tile: Tile,
        trace: Trace,
        do: Tensor | None,
        reverse: Reverse,
        need: frozenset[str],
    ) -> Gradients:
        """One step per chunk from the trace and the reverse scan to the gradients of the inputs
        named in `need`; the tile has lost P, w, u, qg and kg.

        `trace.o` is there if `dispatch.reads_output` says so, "q" is needed and there is a do.
        """

    def step(self, p: Problem, o: Tensor, final_state: Tensor | None) -> None:
        """The token recurrence, for decode: o [B, T, HV, V], states as for `scan`, but a
        two-dimensional `p.state_indices` [N, S] takes the state after token t into slot ``[n, t]``
        and starts from slot ``[n, num_accepted_tokens[n] - 1]`` (column 0 without it); where the
        slot of a token is negative nothing is written and its output is zero.
        """

    def gate(
        self,
        g: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        lower_bound: float | None,
        rank: int,
    ) -> Tensor:
        """The log decay from raw logits, in float32 (float64 for float64)."""

    def gate_backward(
        self,
        dy: Tensor,
        g: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        lower_bound: float | None,
        rank: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of g, A_log and dt_bias; parameter sums in at least float32, cast once at the
        end.
        """
