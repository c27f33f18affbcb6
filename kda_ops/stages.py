"""The contracts of backends: what each stage reads and returns, and what training may keep.

The passes of `kda_ops.chunk`, `shard`, `recurrent`, `gate`, `convolution` and `norm` call the
stages of a `Backend` in order and know no mathematics. The stages know the mathematics
(docs/maths.md) and nothing of autograd or dispatch. Sizes and letters: docs/maths.md.

Chunks lie on one axis of length NT, sequence after sequence (`sequences.Chunks` numbers them). Rows
past the end of a sequence count as tokens with q = k = v = beta = 0 and g = 0. The decay axis ``D``
is K for KDA and 1 for GDN.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_ops.gates import Gate
from kda_ops.problem import CHUNK, Problem

if TYPE_CHECKING:
    from kda_ops.convolution import Convolution
    from kda_ops.operators import Operator


@dataclass
class Tile:
    """What a chunk needs besides the state entering it, as `prepare` makes it.

    Each tensor is ``[NT, HV, C, .]``, but for gamma and factors. A scan may form some of them from
    q, k, v, g and beta in registers. Its backend leaves those None, and may pass it `factors`
    instead.
    """

    A: Tensor | None  # [.., C, C]  (I + L)^-1, unit lower triangular
    P: Tensor | None = None  # [.., C, C]  scale q_i·k_j decayed from j to i, j <= i
    w: Tensor | None = None  # [.., C, K]  A (beta k exp G)
    u: Tensor | None = None  # [.., C, V]  A (beta v)
    qg: Tensor | None = None  # [.., C, K]  scale q exp G
    kg: Tensor | None = None  # [.., C, K]  k exp(sum of g over the later rows)
    gamma: Tensor | None = None  # [NT, HV, D]  exp(sum of g over the chunk).
    # R factors of each row, such as beta and norms: [NT, HV, R, C] in the dtype of gamma. Their
    # order is the backend's.
    factors: Tensor | None = None
    AP: Tensor | None = None  # [.., C, C]  A and P in one tile, which only `prepare` can read


class WholeTile(Protocol):
    """A tile of a backend whose `prepare` makes all of it."""

    A: Tensor
    P: Tensor
    w: Tensor
    u: Tensor
    qg: Tensor
    kg: Tensor
    gamma: Tensor


def whole(tile: Tile) -> WholeTile:
    """Return the tile, typed as whole: the backend leaves out nothing but factors and AP."""
    return cast(WholeTile, tile)


@dataclass
class Trace:
    """What the scan passed through, kept for backward."""

    states: Tensor  # [NT, HV, K, V]  the state entering each chunk
    v_new: Tensor  # [NT, HV, C, V]  u - w S
    o: Tensor | None = None  # [B, T, HV, V]  the output, if it was written


@dataclass
class Walked:
    """What `Backend.train` keeps for `walk_back`: some tensors of `KEPT`, in shapes of their own.

    Here each half of a chunk, C / 2 rows, counts as a chunk, but A has one tile per whole chunk.
    """

    A: Tensor | None = None  # [NT, HV, C / 2, 2 C]  of each half A and P, side by side
    states: Tensor | None = None  # [halves, HV, V, K]  the state entering each half, transposed
    v_new: Tensor | None = None  # [halves, HV, C / 2, V]


@dataclass
class Reverse:
    """What the reverse scan found, last chunk first."""

    dstates: Tensor  # [NT, HV, K, V]  gradient of the state leaving each chunk
    z: Tensor | None  # [NT, HV, C, V]  A^T dv_new, the gradient of beta (v - k exp(G) S)
    # [B, T, HV, V]  beta z, the gradient of v. None: `gradient` makes it, or it is not needed.
    dv: Tensor | None
    dinitial_state: Tensor | None  # [N, HV, K, V] seen through the caller's strides


@dataclass
class Gradients:
    """One gradient per differentiable input, in its shape and dtype.

    It is None if it is not needed, or if its input is absent.
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
# What training may keep: names and axes; the order is that of `chunk_fwd`'s outputs. Where training
# walks, `Walked` has the shapes.
KEPT = {
    "A": "chCC",  # or `AP` in its place, where both are made
    "P": "chCC",
    "w": "chCK",
    "u": "chCV",
    "qg": "chCK",
    "kg": "chCK",
    "gamma": "chD",
    "factors": "chRC",
    "states": "shKV",
    "v_new": "shCV",
}
TILE = tuple(n for n in KEPT if n not in ("states", "v_new"))  # of KEPT, what is of the tile
SUMS = frozenset(("gamma", "factors"))  # kept in the dtype of sums; the others are operands
CONVOLVED = ("x", "weight", "bias", "initial_tail")  # the differentiable inputs of `short_conv`
NORMALISED = ("x", "weight", "gate")  # the inputs of `gated_rms_norm`, all differentiable


class Pass:
    """One pass over a call: what an operator asks of a backend.

    Making one checks the call: `args` are tensors in the order of the operator's schema, and
    `flags` the rest.
    """

    operator: ClassVar[Operator]  # `kda_ops.operators` sets it

    def __init__(self, rank: int, args: tuple, flags: dict[str, Any]):
        raise NotImplementedError

    def named(self, args: tuple) -> dict[str, Any]:
        """Return the tensors of a call by name; those that the dispatcher strips are left out."""
        return dict(zip(self.operator.names, args))

    def outputs(self) -> tuple[Tensor | None, ...]:
        """Allocate the results; a gradient that is absent or not asked for is None."""
        raise NotImplementedError

    def run(self, b: Backend) -> Sequence[Tensor | None]:
        """Call the stages of a backend, and return the results as `outputs` does."""
        raise NotImplementedError


def new_like(x: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """Allocate a contiguous tensor like x; None for None."""
    return None if x is None else x.new_empty(x.shape, dtype=dtype or x.dtype)


class Keeps:
    """What training keeps on a backend. Asking imports no kernels.

    This class answers for backends that compute in float32 or float64.
    """

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a tile's operands for inputs of a dtype."""
        return torch.promote_types(dtype, torch.float32)

    def names(
        self, rank: int, dtype: torch.dtype, l2norm: bool, disable_recompute: bool
    ) -> frozenset[str]:
        """Return what is kept besides the inputs: names of `KEPT`, and "o" if backward reads it."""
        return frozenset(KEPT) - {"factors"} if disable_recompute else frozenset()

    def trains(self, p: Problem) -> bool:
        """Return whether `Backend.train` serves a call. It keeps `trained_names` at most.

        Nothing here depends on values, B, N, T, strides or addresses.
        """
        return False

    def trained_names(self, p: Problem) -> frozenset[str]:
        """Return what `Backend.train` keeps of a call that it serves: names of `Walked`."""
        return frozenset(("A", "states", "v_new") if p.disable_recompute else ("A",))

    def keeps_AP(self, p: Problem) -> bool:
        """Return whether the A that is kept shares its tile with P, as `AP`."""
        return False

    def tile_names(self, rank: int) -> frozenset[str]:
        """Return what a `Tile` has besides AP: names of `KEPT`."""
        return frozenset(TILE) - {"factors"}

    def runs(self, p: Problem) -> int:
        """Return into how many runs a shard is cut; 0 where its sequences stay whole."""
        return 0


class Backend:
    """The stages of one backend, and how it runs a pass.

    The equations of the stages are in docs/maths.md under the same names.
    """

    keeps = Keeps()

    def run(self, kind: type[Pass], rank: int, args: tuple, flags: dict[str, Any]) -> Any:
        """Run one pass over a call; each result is contiguous, or None if it is absent."""
        results = kind(rank, args, flags).run(self)
        return [None if x is None else x.contiguous() for x in results]

    def cut_length(
        self, HV: int, K: int, V: int, dtype: torch.dtype, device: torch.device
    ) -> int | None:
        """Return at which multiples of tokens a sequence may be cut without a change of bits.

        None means at none. The states between the pieces have the dtype of sums.
        """
        return CHUNK

    def uniform(self, p: Problem) -> Problem:
        """Return a call with `invariant`, in the one form in which its kernels read every call."""
        return p

    def uniform_gradients(
        self, p: Problem, do: Tensor | None, dfinal_state: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of o and of the final state likewise."""
        return do, dfinal_state

    def writes_to(self, out: Tensor) -> bool:
        """Return whether stages can write o to a caller's tensor, which may have any strides."""
        return True

    def copy_to(self, out: Tensor, o: Tensor) -> None:
        """Copy o to a caller's tensor to which stages cannot write."""
        out.copy_(o)

    def overlap_streams(self, p: Problem) -> AbstractContextManager[AbstractContextManager]:
        """Overlap two stages: the yielded context launches on a second stream, joined on exit.

        A backend without streams runs them one after the other.
        """
        return nullcontext(nullcontext())

    def prepare(
        self,
        p: Problem,
        A: Tensor | None = None,
        with_AP: bool = False,
        norms: bool = False,
        overlap: bool = False,
    ) -> Tile:
        """Return all that the chunks need besides the state.

        A kept A saves the inverse. With `with_AP` (only if `keeps_AP` allows it) `AP` is made too.
        Passed back as A, with `with_AP`, it saves the scores as well. With `norms`, `factors`
        contains the norms that `gradient` reads. With `overlap` some chunks may not be ready on
        return: call `scan` before anything else reads the tile. With `overlap` and without `norms`,
        only `scan` may read it.
        """
        raise NotImplementedError

    def scan(
        self, p: Problem, tile: Tile, o: Tensor | None, final_state: Tensor | None, keep: bool
    ) -> Trace | None:
        """Carry the state through the chunks of each sequence::

            v_new = u - w S;   o = qg S + P v_new;   S <- gamma S + kg^T v_new

        Starts from `p.state` (row n, or slot ``p.state_indices[n]``; zero without it). Writes o [B,
        T, HV, V] with zeros past the last sequence, and the last state into `final_state`, [N, HV,
        K, V] or the pool itself, in the caller's layout. A negative slot is neither read nor
        written and its sequence's output is zero. Slots up to `p.null_slot` count as negative ones,
        and `p.slots` makes them negative. With `p.snapshot_indices`, slot ``[n, j]`` takes the
        state after chunk ``(j + 1) * p.snapshot_every`` of sequence n. Where `p.has_initial_state`
        [N] is false, a sequence starts from zero, whatever its slot holds. Returns a `Trace` if
        `keep`; then o may be None. In a shard that is cut, `p.state` has what each run starts from.
        """
        raise NotImplementedError

    def infer(self, p: Problem, o: Tensor, final_state: Tensor | None) -> None:
        """Write o and the final state as `scan` does, for a call that keeps nothing."""
        self.scan(p, self.prepare(p, overlap=True), o, final_state, keep=False)

    def train(self, p: Problem, o: Tensor, final_state: Tensor | None) -> Walked:
        """Write o and the final state as `scan` does, and return what `keeps.trained_names` names.

        For calls that `keeps.trains` allows.
        """
        raise NotImplementedError

    def walks_back(self, p: Problem, need: frozenset[str]) -> bool:
        """Return whether `walk_back` serves the backward of a call that `train` may have served."""
        return self.keeps.trains(p)

    def walk_back(
        self,
        p: Problem,
        kept: Walked,
        do: Tensor,
        dfinal_state: Tensor | None,
        need: frozenset[str],
    ) -> Gradients:
        """Return the gradients of the inputs named in `need`, from what `train` has kept.

        For calls with tokens and sequences that `walks_back` allows. `kept.A` is not None. If
        `kept.states` and `kept.v_new` are None, the stage computes both again. Gradients are given
        as to `reverse_scan`.
        """
        raise NotImplementedError

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
        strides are accepted. `need` is that of `gradient`. In a shard that is cut,
        `dfinal_state` has the gradient that each run starts from.
        """
        raise NotImplementedError

    def map_shard(self, p: Problem, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Return the map of each sequence of a shard, and those of its runs if it is cut.

        A map [b | M] is [N, HV, K, V + K] in the dtype of sums: from S, a sequence ends with
        M S + b. Those of runs are [keeps.runs(p), HV, K, V + K].
        """
        wide, columns = copy(p), p.V + p.K
        wide.v, wide.V, wide.transposed = F.pad(p.v, (0, p.K)), columns, False
        eye = torch.eye(p.K, dtype=p.state_dtype, device=p.q.device)
        wide.state = F.pad(eye, (p.V, 0)).expand(p.N, p.HV, p.K, columns)
        whole = p.q.new_empty((p.N, p.HV, p.K, columns), dtype=p.state_dtype)
        assert tile.u is not None  # `scan` of this backend reads it
        self.scan(wide, replace(tile, u=F.pad(tile.u, (0, p.K))), None, whole, keep=False)
        return whole, None

    def map_shard_back(
        self, p: Problem, tile: Tile, do: Tensor | None, dfinal_state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of the states that enter a shard, and the maps of its runs back.

        A run's map back [c | M^T] takes the gradient of the state that leaves it to that of the
        state that enters it.
        """
        found = self.reverse_scan(p, tile, do, dfinal_state, frozenset(("initial_state",)))
        assert found.dinitial_state is not None  # it is needed
        return found.dinitial_state, None

    def starts_of_runs(self, p: Problem, maps: Tensor, back: bool, state: Tensor | None) -> Tensor:
        """Return what each run starts from, [runs, HV, K, V], if sequences start from `state`.

        `state` is [N, HV, K, V], or None for zero. With `back`, maps and states are gradients'.
        """
        raise NotImplementedError

    def gradient(
        self,
        p: Problem,
        tile: Tile,
        trace: Trace,
        do: Tensor | None,
        reverse: Reverse,
        need: frozenset[str],
    ) -> Gradients:
        """Return the gradients of the inputs named in `need`, chunk by chunk.

        The tile comes without P, w, u, qg and kg. `trace.o` is given if `Keeps.names` contains
        "o", the gradient of q is needed and do is not None.
        """
        raise NotImplementedError

    def walks(
        self, p: Problem, do: Tensor | None, dfinal_state: Tensor | None, need: frozenset[str]
    ) -> bool:
        """Return whether `reverse_walk` takes the place of `reverse_scan` and `gradient`."""
        return False

    def reverse_walk(
        self,
        p: Problem,
        tile: Tile,
        trace: Trace | None,
        do: Tensor,
        dfinal_state: Tensor | None,
        need: frozenset[str],
    ) -> Gradients:
        """Return the gradients of the inputs named in `need`: `reverse_scan` and `gradient` in one.

        Without a trace it begins with `scan`. For calls that `walks` allows; `need` is that of
        `gradient`.
        """
        raise NotImplementedError

    def step(self, p: Problem, o: Tensor, final_state: Tensor | None) -> None:
        """Run the recurrence token by token, for decode; o is [B, T, HV, V], states as for `scan`.

        With two-dimensional `p.state_indices` [N, S], the state after token t goes to slot
        ``[n, t]``. Sequence n then starts from slot ``[n, num_accepted_tokens[n] - 1]``, or from
        column 0 without `num_accepted_tokens`. A token whose slot is negative has output zero, and
        its state is not written. Several sequences may start from one slot that none of them
        writes.
        """
        raise NotImplementedError

    def gate(
        self, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, which: Gate, rank: int
    ) -> Tensor:
        """Return the log decay from raw logits, in float32 (float64 for float64)."""
        raise NotImplementedError

    def gate_backward(
        self,
        dy: Tensor,
        g: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        which: Gate,
        rank: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of g, A_log and dt_bias.

        Sums for parameters are at least float32, and are cast once, at the end.
        """
        raise NotImplementedError

    def short_conv(self, p: Convolution) -> tuple[Tensor, Tensor | None]:
        """Return y [B, T, D], and the final tail or None::

            z_t = bias + sum_i weight[:, i] x_{t - W + 1 + i};   y = silu(z) or z

        Inputs before the first of a sequence are those of `p.tail`, or zero. Tokens past the last
        sequence have y = 0. The final tail has the last W - 1 inputs, those of `p.tail` included.
        Sums are in `p.sum_dtype`.
        """
        raise NotImplementedError

    def short_conv_backward(
        self, p: Convolution, dy: Tensor | None, dfinal_tail: Tensor | None, need: frozenset[str]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs in `CONVOLVED`, None where `need` has no name.

        Sums for parameters are at least float32, and are cast once, at the end.
        """
        raise NotImplementedError

    def short_conv_in_place(self, p: Convolution) -> Tensor:
        """Return y as `short_conv` does, and write the final tails to the pool `p.tail`.

        Sequence n uses slot ``p.tail_indices[n]``, or slot n. A negative slot is neither read nor
        written and its sequence's output is zero. `p.null_slot` and `p.has_initial_state` are those
        of `scan`.
        """
        raise NotImplementedError

    def gated_norm(
        self, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, silu: bool
    ) -> Tensor:
        """Return y [B, T, H, V] in x's dtype, computed in at least float32::

            y = x / sqrt(mean(x^2) + eps) weight a(gate);   a = silu or sigmoid, 1 without a gate

        Head h reads row ``h // (H // G)`` of weight [G, V].
        """
        raise NotImplementedError

    def gated_norm_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, silu: bool
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and gate, None of an absent gate.

        The sum for weight is at least float32, and is cast once, at the end.
        """
        raise NotImplementedError
