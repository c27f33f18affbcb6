"""Decode with the bits of training: run the chunk form on the tokens since the last whole chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda_ops.checks import (
    can_read,
    check_index,
    check_offsets,
    check_on_device,
    check_resumed,
    check_slots,
    dtype_error,
    shape_error,
    without_null,
)
from kda_ops.nn.cache import Cache
from kda_ops.nn.checks import check_size
from kda_ops.problem import CHUNK

NAMES = ("q", "k", "v", "g", "beta")
_OURS = frozenset(
    ("snapshot_indices", "snapshot_every", "output_final_state", "invariant", "out")
)  # arguments of `chunk_` that `step` does not take


class InvariantCache(Cache):
    """Hold the past of N sequences so that each step gives the bits of one call on all tokens.

    For each sequence the cache keeps the state after its last whole chunk of 64 tokens, and the raw
    inputs of the tokens since. `step` runs the chunk form from that state on those inputs and the
    new ones, and returns the rows of the new ones. Later tokens change no earlier bit of the chunk
    form, so these rows have the bits of a call of ``chunk_*`` with ``invariant=True`` on the whole
    sequence, such as that of training (docs/numerics.md, "Invariant calls").

    The last `drafts` tokens of a sequence may be taken back by `crop`, because no token goes into a
    state before `drafts` others have followed. Methods and limits are otherwise those of `Cache`.

    A sequence takes its state, and 64 + drafts (+ `before`) rows of inputs. With K = V = 128 and
    tokens in 16 bits that is 64 KB + 64 KB per value head of KDA, and 64 KB + 48 KB of GDN.

    Args:
        state: the pool of states ``[N, HV, K, V]`` or ``[N, HV, V, K]``, fp32 (fp64 for fp64
            inputs). What it holds is never read: sequences begin from zero.
        q, k, v, g, beta: tensors like those of the calls; only their axes after the second, their
            dtypes and their device count. A call has g or beta if they are given here.
        drafts: the most tokens that `crop` takes back, at least 0.
        before: how many inputs in front of the first kept token are kept too, for convolutions.

    Buffers: `seen` ``[N]`` int64, the tokens of each sequence, and `start` ``[N]`` int64, those in
    its state. Token t lies in row ``t % (63 + drafts + before)`` of the kept inputs.

    Example:
        >>> import torch, kda_ops, kda_ops.nn
        >>> q, k, v = (torch.randn(1, 100, 4, 32) for _ in range(3))
        >>> words = dict(use_qk_l2norm_in_kernel=True)
        >>> whole, _ = kda_ops.chunk_kda(q, k, v, None, None, invariant=True, **words)
        >>> cache = kda_ops.nn.InvariantCache(torch.zeros(8, 4, 32, 32), q, k, v)
        >>> slot, parts = torch.tensor([5]), []
        >>> for a, b in ((0, 70), (70, 71), (71, 100)):
        ...     x = (t[:, a:b] for t in (q, k, v))
        ...     parts.append(cache.step(kda_ops.chunk_kda_, *x, None, None, slot, **words))
        >>> torch.equal(torch.cat(parts, 1), whole)
        True

    Source: Kimi Linear technical report, arXiv:2510.26692 (chunkwise form).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    start: Tensor
    seen: Tensor

    def __init__(
        self,
        state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None = None,
        beta: Tensor | None = None,
        *,
        drafts: int = 0,
        before: int = 0,
    ):
        super().__init__(state)
        check_size("drafts", drafts, least=0)
        check_size("before", before, least=0)
        self.drafts, self.before = int(drafts), int(before)
        # one row more, for tokens that nobody keeps
        shape = (state.shape[0], self.rows + 1)
        for name, x in zip(NAMES, (q, k, v, g, beta)):
            kept = None if x is None else x.new_zeros((*shape, *x.shape[2:]))
            self.register_buffer(name, kept)
        for name in ("start", "seen"):
            self.register_buffer(name, q.new_zeros(shape[:1], dtype=torch.int64))

    @property
    def rows(self) -> int:
        """The tokens of a sequence that are kept."""
        return CHUNK - 1 + self.drafts + self.before

    def step(
        self,
        operator: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor | None,
        state_indices: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        has_initial_state: Tensor | None = None,
        *,
        null_slot: int = -1,
        convolve: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None,
        **flags: Any,
    ) -> Tensor:
        """Append tokens to sequences and return their outputs; inference only.

        Prompts, pieces of prompts of any length, single tokens and drafts may be mixed in one call.
        All sizes follow from those of the arguments and nothing is read on the host, so a CUDA
        graph may hold the call.

        Args:
            operator: `kda_ops.chunk_kda_` or `kda_ops.chunk_gdn_`.
            q, k, v, g, beta: the new tokens, as `operator` takes them, with the heads, widths and
                dtypes of the cache.
            state_indices: ``[N]``, int32 or int64: the slot of each sequence. Those of a negative
                slot give zeros and are not kept. None: sequence n has slot n.
            cu_seqlens: ``[N + 1]``, int32 or int64: offsets of packed sequences.
            has_initial_state: ``[N]``, bool. Where it is false, a sequence begins anew.
            null_slot: as for `operator`.
            convolve: make q, k and v of `operator` from the kept ones, as a layer does. It gets q,
                k, v ``[1, T', ...]``, a list of the `before` inputs in front of each sequence
                ``[N, before, ...]`` and the offsets, and returns q, k and v.
            flags: other keyword arguments of `operator`, the same in each call.

        Returns:
            o ``[B, T, HV, V]`` in v's dtype.

        Raises:
            ValueError: shapes disagree with each other or with the cache.
            TypeError: dtypes or devices disagree, the states are bf16, or `flags` has an argument
                that the cache sets.
            RuntimeError: grad mode is on and an input requires a gradient. Or the cache was made
                under ``torch.inference_mode()`` and is used outside.
        """
        if ours := _OURS & flags.keys():
            raise TypeError(f"{min(ours)} must not be given: step sets it, or returns o itself.")
        self._check_writable()
        new = self._check_tokens(q, k, v, g, beta)
        B, T = q.shape[:2]
        if cu_seqlens is not None:
            check_offsets(cu_seqlens, B, T, q.device)
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        slots = self._slots(state_indices, N, q.device, null_slot)
        if has_initial_state is not None:
            check_resumed(has_initial_state, N, q.device)
        if N == 0:
            return torch.zeros_like(v)
        if cu_seqlens is None:
            first = torch.arange(B + 1, device=q.device) * T
        else:
            first = cu_seqlens.long()

        # the tokens of each sequence: those in its state, then those held, then the new ones
        live, at = slots >= 0, slots.clamp(min=0)
        old_seen, old_start = self.seen[at], self.start[at]
        resumed = live if has_initial_state is None else live & has_initial_state
        seen, start = old_seen.where(resumed, 0), old_start.where(resumed, 0)
        offsets = torch.cat([first[:1], (seen - start + first.diff()).cumsum(0)])
        held, count = N * (self.rows - self.before), B * T
        t, i = (torch.arange(n, device=q.device) for n in (count, held + count))
        n, m = (torch.searchsorted(x[1:], y, right=True) for x, y in ((first, t), (offsets, i)))
        n, m = n.clamp(max=N - 1), m.clamp(max=N - 1)
        inside, token = t < first[-1], seen[n] + t - first[n]
        # where new tokens lie in the packed row, those of no sequence at its end
        place = torch.where(inside, offsets[n] + token - start[n], held + t)
        source = at[m] * (self.rows + 1) + (start[m] + i - offsets[m]) % self.rows
        packed = {
            name: self._flat(name).index_select(0, source).index_copy_(0, place, x)[None]
            for name, x in new.items()
        }
        if convolve is not None:
            tails = self._tails(at, start)
            packed |= zip("qkv", convolve(*(packed[x] for x in "qkv"), tails, offsets))

        # a state moves by whole chunks of tokens that `crop` cannot reach any more
        now = seen + first.diff()
        after = torch.maximum(start, (now - self.drafts).clamp(min=0) // CHUNK * CHUNK)
        column = torch.arange(1, (self.rows - self.before + T) // CHUNK + 1, device=q.device)
        moves = column == ((after - start) // CHUNK)[:, None]
        o = operator(
            *(packed.get(name) for name in NAMES),
            self.state,
            slots,
            slots[:, None].where(moves, -1),
            cu_seqlens=offsets,
            has_initial_state=start > 0,
            output_final_state=False,
            invariant=True,
            **flags,
        )

        # of new tokens with one row, the last one is kept; the others write it too
        if T > self.rows:
            end = first[1:][n] - 1
            last = torch.where(inside, end - (end - t) % self.rows, t)
            new = {name: x.index_select(0, last) for name, x in new.items()}
        row = torch.where(inside & live[n], token % self.rows, self.rows)
        for name, x in new.items():
            self._flat(name).index_copy_(0, at[n] * (self.rows + 1) + row, x)
        for counts, old, value in ((self.seen, old_seen, now), (self.start, old_start, after)):
            counts.index_add_(0, at, (value - old).where(live, 0))
        return o[0].index_select(0, place).unflatten(0, (B, T))

    def crop(self, tokens_to_remove: Tensor | int, state_indices: Tensor | None = None) -> None:
        """Take back the last tokens of sequences, such as drafts that were rejected.

        Args:
            tokens_to_remove: ``[N]`` int32 or int64, or one number for all sequences. The last
                `drafts` tokens may always be removed, and others if no state has them yet.
            state_indices: as for `step`.

        Raises:
            ValueError: a sequence has no so many tokens that may be taken back. On a GPU that is
                checked with KDA_OPS_CHECK=1 only.
            TypeError: `tokens_to_remove` is no int32 or int64, or on another device.
        """
        self._check_writable()
        device = self.seen.device
        N = self.batch_size if state_indices is None else state_indices.shape[0]
        if not isinstance(tokens_to_remove, Tensor):
            check_size("tokens_to_remove", tokens_to_remove, least=0)
            tokens_to_remove = torch.full((N,), tokens_to_remove, device=device)
        slots = self._slots(state_indices, N, device)
        if tokens_to_remove.shape != (N,):
            shape_error("tokens_to_remove", "[N]", (N,), tokens_to_remove)
        check_index("tokens_to_remove", tokens_to_remove, device, "the cache")
        live, at = slots >= 0, slots.clamp(min=0)
        most = self.seen[at] - self.start[at]
        if can_read(tokens_to_remove):
            wrong = live & ((tokens_to_remove < 0) | (tokens_to_remove > most))
            if bool(wrong.any()):
                n = int(wrong.nonzero()[0])
                raise ValueError(
                    f"tokens_to_remove must lie between 0 and {int(most[n])} for sequence {n}, got "
                    f"{int(tokens_to_remove[n])}: make the cache with more drafts than "
                    f"{self.drafts}."
                )
        gone = torch.minimum(tokens_to_remove.long().clamp(min=0), most)
        self.seen.index_add_(0, at, -gone.where(live, 0))

    def _flat(self, name: str) -> Tensor:
        """Return the kept inputs of all sequences, one row each."""
        return getattr(self, name).flatten(0, 1)

    def _tails(self, at: Tensor, start: Tensor) -> list[Tensor]:
        """Return the inputs of q, k and v before the state's end, zero before the first token."""
        token = start[:, None] + torch.arange(-self.before, 0, device=start.device)
        rows = at[:, None] * (self.rows + 1) + token % self.rows
        there = (token >= 0)[..., None]
        return [torch.where(there, self._flat(name)[rows], 0.0) for name in "qkv"]

    def _check_tokens(self, *tensors: Tensor | None) -> dict[str, Tensor]:
        """Return the given tensors with one row per token, if the cache has kept such ones."""
        found: dict[str, Tensor] = {}
        for name, x in zip(NAMES, tensors):
            kept = getattr(self, name)
            if x is None and kept is None:
                continue
            if x is None or kept is None:
                raise TypeError(
                    f"{name} must be {'None' if kept is None else 'a tensor'}, as when the cache "
                    f"was made, got {'None' if x is None else 'a tensor'}."
                )
            shape = tensors[0].shape[:2] if isinstance(tensors[0], Tensor) else x.shape[:2]
            want = (*shape, *kept.shape[2:])
            if x.shape != want:
                shape_error(name, "[B, T, ...]", want, x, ", with the axes of the cache")
            if x.dtype is not kept.dtype:
                dtype_error(name, str(kept.dtype), x.dtype, ", which the cache would round")
            check_on_device(name, x, kept.device, "the cache")
            found[name] = x.flatten(0, 1)
        return found

    def _slots(
        self, state_indices: Tensor | None, N: int, device: torch.device, null_slot: int = -1
    ) -> Tensor:
        """Return the slots of a call's N sequences, [N] int64, negative for none."""
        if state_indices is None:
            if self.batch_size != N:
                raise ValueError(
                    f"state_indices must be given for {N} sequences on a cache of "
                    f"{self.batch_size}, got None."
                )
            return torch.arange(N, device=device)
        if state_indices.shape != (N,):
            shape_error("state_indices", "[N]", (N,), state_indices)
        check_index("state_indices", state_indices, device)
        slots = without_null(state_indices, null_slot).long()
        if can_read(slots):
            check_slots(slots, self.batch_size, "state_indices")
        return slots
