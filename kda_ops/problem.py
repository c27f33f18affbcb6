"""Validate one operator call and allocate its outputs, for kernels and fake implementations alike.

A `Problem` names every size of a call and holds its tensors and flags. It refuses calls that mean
nothing (`checks`). Under ``torch.compile`` sizes may be symbolic: then each comparison of sizes
becomes a guard of the graph.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kda_ops import checks
from kda_ops.arguments import check_out
from kda_ops.checks import (
    can_read,
    check_accepted,
    check_beta,
    check_beta_values,
    check_columns,
    check_decay,
    check_decay_values,
    check_float,
    check_gate,
    check_gate_parameters,
    check_index,
    check_key_lengths,
    check_no_overlap,
    check_null_slot,
    check_offsets,
    check_on_device,
    check_range,
    check_readers,
    check_resumed,
    check_slots,
    check_token_slots,
    check_vectors,
    dtype_error,
    is_symbolic,
    refuse_float64_on_cuda,
    shape_error,
    without_null,
)
from kda_ops.exported import count_results, is_any_size
from kda_ops.gates import Gate, gate_of

CHUNK = 64  # tokens per chunk, C in docs/maths.md


class Problem:
    """The sizes, tensors and flags of one call to an operator of either variant.

    Sizes: B batch, T tokens, N sequences, H query/key heads, HV value heads (a multiple of H), K
    and V widths. `rank` is the rank of the decay per token and value head: 1 for KDA (a K-vector),
    0 for GDN (a scalar). `state_dtype` is the dtype of states and of all sums: float32, or float64
    when q is.

    `scratch` is None, or a dictionary. The stages of one pass keep there what they compute from the
    inputs and share. `sharded` tells of a call in two halves, on one rank's part of the sequences
    (`kda_ops.shard`).
    """

    __slots__ = (
        "rank",
        "q",
        "k",
        "v",
        "g",
        "beta",
        "A_log",
        "dt_bias",
        "state",
        "cu_seqlens",
        "state_indices",
        "num_accepted_tokens",
        "source",
        "source_indices",
        "snapshot_indices",
        "B",
        "T",
        "N",
        "H",
        "HV",
        "K",
        "V",
        "scale",
        "l2norm",
        "gate",
        "safe_beta",
        "safe_keys",
        "sigmoid_beta",
        "neg_eigval",
        "transposed",
        "disable_recompute",
        "output_final_state",
        "snapshot_every",
        "null_slot",
        "has_initial_state",
        "out",
        "state_dtype",
        "scratch",
        "invariant",
        "sharded",
    )

    def __init__(
        self,
        rank: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor | None,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        lower_bound: float | None = None,
        safe_gate: bool = False,
        safe_beta: bool = False,
        safe_keys: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        transpose_state_layout: bool = False,
        output_final_state: bool = False,
        disable_recompute: bool = False,
        invariant: bool = False,
        sharded: bool = False,
    ):
        check_vectors(q, k, v)
        B, T, H, K = q.shape
        HV, V = v.shape[2], v.shape[3]
        sizes, device = (B, T, HV, K), q.device
        check_decay(rank, g, sizes, device)
        check_beta(beta, sizes, use_beta_sigmoid_in_kernel, allow_neg_eigval, device)
        self.gate = gate_of(use_gate_in_kernel, lower_bound, safe_gate, g is not None)
        check_gate(rank, g, A_log, dt_bias, self.gate, sizes, device)
        if cu_seqlens is None:
            self.N = B
        else:
            check_offsets(cu_seqlens, B, T, device)
            self.N = cu_seqlens.shape[0] - 1
        self.rank, self.q, self.k, self.v, self.g, self.beta = rank, q, k, v, g, beta
        self.A_log, self.dt_bias = A_log, dt_bias
        # kernels read it with stride 1
        self.cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        self.state_dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        self.B, self.T, self.H, self.HV, self.K, self.V = B, T, H, HV, K, V
        if scale is not None and not -math.inf < scale < math.inf:
            raise ValueError(f"scale must be a finite number, got {scale}.")
        self.scale = K**-0.5 if scale is None else scale
        self.l2norm, self.sigmoid_beta = use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel
        self.neg_eigval, self.transposed = allow_neg_eigval, transpose_state_layout
        self.safe_beta, self.safe_keys = safe_beta, safe_keys
        self.output_final_state, self.disable_recompute = output_final_state, disable_recompute
        self.state: Tensor | None = None
        self.state_indices: Tensor | None = None
        self.num_accepted_tokens: Tensor | None = None
        self.source: Tensor | None = None
        self.source_indices: Tensor | None = None
        self.snapshot_indices: Tensor | None = None
        self.snapshot_every = 1
        self.null_slot = -1
        self.has_initial_state: Tensor | None = None
        self.out: Tensor | None = None
        self.scratch: dict[str, Any] | None = None
        self.invariant = invariant
        self.sharded = sharded

    @classmethod
    def parse(
        cls,
        rank,
        q,
        k,
        v,
        g,
        beta,
        A_log=None,
        dt_bias=None,
        initial_state=None,
        cu_seqlens=None,
        **flags,
    ) -> Problem:
        """Parse a call of `chunk` or `recurrent`: whole sequences, optional initial state."""
        p = cls(rank, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, **flags)
        if initial_state is not None:
            p._take_state("initial_state", "N", p.N, initial_state, pool=False)
        p._check_values()
        return p

    @classmethod
    def parse_step(
        cls,
        rank,
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices=None,
        num_accepted_tokens=None,
        A_log=None,
        dt_bias=None,
        cu_seqlens=None,
        source=None,
        source_indices=None,
        *,
        out=None,
        null_slot=-1,
        **flags,
    ) -> Problem:
        """Parse a call of `recurrent_`: decode on a state pool."""
        p = cls(rank, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, **flags)
        if out is not None:
            p._take_out(out)
        p._take_pool(state, state_indices, null_slot)
        if num_accepted_tokens is not None:
            p._take_accepted(num_accepted_tokens, state_indices)
        if source is not None or source_indices is not None:
            p._take_source(source, source_indices)
        p._check_values()
        if state_indices is not None and state_indices.dim() == 2:
            p._check_columns(state_indices)
        elif state_indices is not None and can_read(state_indices):
            check_slots(p.slots(state_indices), state.shape[0], "state_indices")
        return p

    @classmethod
    def parse_prefill(
        cls,
        rank,
        q,
        k,
        v,
        g,
        beta,
        state,
        state_indices=None,
        snapshot_indices=None,
        A_log=None,
        dt_bias=None,
        cu_seqlens=None,
        has_initial_state=None,
        *,
        out=None,
        snapshot_every=1,
        null_slot=-1,
        output_final_state=True,
        **flags,
    ) -> Problem:
        """Parse a call of `chunk_`: prefill on a state pool."""
        p = cls(rank, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, **flags)
        p.output_final_state = output_final_state
        if out is not None:
            p._take_out(out)
        if state_indices is not None and state_indices.dim() != 1:
            shape_error("state_indices", "[N]", (p.N,), state_indices)
        p._take_pool(state, state_indices, null_slot)
        p._check_values()
        if snapshot_indices is not None:
            p._take_snapshots(snapshot_indices, snapshot_every)
        elif snapshot_every != 1:
            raise ValueError(
                "snapshot_every spaces the snapshots and needs snapshot_indices of shape [N, "
                "snapshots], got None: pass the slots to write to."
            )
        if snapshot_every < 1:
            raise ValueError(
                f"snapshot_every must be at least 1 (chunks of {CHUNK} tokens), got "
                f"{snapshot_every}."
            )
        p.snapshot_every = snapshot_every
        if has_initial_state is not None:
            check_resumed(has_initial_state, p.N, p.q.device)
            p.has_initial_state = has_initial_state.contiguous()
        if snapshot_indices is None and state_indices is not None and can_read(state_indices):
            slots = p.slots(state_indices)
            check_slots(slots, state.shape[0], "state_indices", written=output_final_state)
        return p

    def _take_out(self, out: Tensor) -> None:
        """Check the caller's tensor for o; `arguments.check_apart` compares it with the others."""
        check_out(out, self.v)
        check_no_overlap("out", out)
        self.out = out

    def _take_state(self, name: str, letter: str, count, state: Tensor, pool: bool) -> None:
        HV, K, V = self.HV, self.K, self.V
        shape = state.shape
        if is_any_size(shape[0] if shape else 0):
            count = shape[0]  # checked when the exported program runs
        want = (count, HV, V, K) if self.transposed else (count, HV, K, V)
        if shape != want:
            hint = ""
            layout, other = ("V, K", "K, V") if self.transposed else ("K, V", "V, K")
            if shape == (count, HV, want[3], want[2]):
                hint = (
                    f": that is the [{other}] layout, pass "
                    f"transpose_state_layout={not self.transposed}"
                )
            layout = f"[{letter}, HV, {layout}]"
            raise ValueError(
                f"{name} must have shape {layout} = {list(want)} "
                f"(transpose_state_layout={self.transposed}), got {list(shape)}{hint}."
            )
        if state.dtype is not self.state_dtype:
            if not pool or self.state_dtype is torch.float64:
                dtype_error(
                    name,
                    str(self.state_dtype),
                    state.dtype,
                    f" (states are kept in {self.state_dtype} for {self.q.dtype} inputs)",
                )
            if state.dtype is not torch.bfloat16:
                dtype_error(name, "float32 or bfloat16", state.dtype)
            if self.invariant:
                dtype_error(
                    name,
                    "float32 with invariant=True",
                    state.dtype,
                    ": it would round the state at the end of each piece of a sequence",
                )
        check_on_device(name, state, self.q.device)
        self.state = state

    def _take_pool(self, state: Tensor, state_indices: Tensor | None, null_slot: int) -> None:
        if state is None:
            raise TypeError(
                "state must be a tensor, the pool of states that is read and written in place, "
                "got None."
            )
        if state.dim() != 4:
            layout = "[slots, HV, V, K]" if self.transposed else "[slots, HV, K, V]"
            raise ValueError(
                f"state must have 4 dimensions {layout} "
                f"(transpose_state_layout={self.transposed}), got shape {list(state.shape)}."
            )
        check_no_overlap("state", state)
        if state_indices is None:
            self._take_state("state", "N", self.N, state, pool=True)
        else:
            self._take_state("state", "slots", state.shape[0], state, pool=True)
            if (
                state_indices.dim() not in (1, 2)
                or state_indices.shape[0] != self.N
                or 0 in state_indices.shape[1:]
            ):
                hint = ": S is at least 1" if 0 in state_indices.shape[1:] else ""
                raise ValueError(
                    f"state_indices must have shape [N] or [N, S] with N = {self.N}, got "
                    f"{list(state_indices.shape)}{hint}."
                )
            check_index("state_indices", state_indices, self.q.device)
        check_null_slot(null_slot, state_indices, "state_indices")
        self.state_indices, self.null_slot = state_indices, null_slot

    def _take_accepted(self, num_accepted_tokens: Tensor, state_indices: Tensor | None) -> None:
        if state_indices is None or state_indices.dim() != 2:
            got = "None" if state_indices is None else list(state_indices.shape)
            raise ValueError(
                "num_accepted_tokens picks the column of state_indices to start from and "
                f"needs state_indices of shape [N, S], got {got}."
            )
        if num_accepted_tokens.shape != (self.N,):
            shape_error("num_accepted_tokens", "[N]", (self.N,), num_accepted_tokens)
        check_index("num_accepted_tokens", num_accepted_tokens, self.q.device)
        if can_read(num_accepted_tokens):
            check_accepted(num_accepted_tokens, self.slots(state_indices))
        self.num_accepted_tokens = num_accepted_tokens.contiguous()

    def _take_source(self, source: Tensor | None, source_indices: Tensor | None) -> None:
        """Check a second pool of the states that sequences start from."""
        assert self.state is not None
        if source is None:
            raise ValueError("source_indices must be None without source, got a tensor.")
        if self.num_accepted_tokens is not None:
            raise ValueError(
                "source must be None with num_accepted_tokens, because a sequence starts from one "
                "state, got a tensor: name the accepted state in source_indices."
            )
        if source_indices is None:
            raise ValueError(
                "source_indices must name the slot of source that each sequence starts from, shape "
                "[N], got None."
            )
        if source_indices.shape != (self.N,):
            shape_error("source_indices", "[N]", (self.N,), source_indices)
        check_index("source_indices", source_indices, self.q.device)
        if source.dim() != 4 or source.shape[1:] != self.state.shape[1:]:
            raise ValueError(
                "source must have shape [slots, ...] with states as in state, "
                f"{list(self.state.shape[1:])}, got {list(source.shape)}."
            )
        if source.dtype is not self.state.dtype:
            dtype_error("source", f"{self.state.dtype}, the dtype of state", source.dtype)
        check_on_device("source", source, self.q.device)
        if can_read(source_indices):
            check_range(self.slots(source_indices).tolist(), source.shape[0], "source_indices")
        self.source, self.source_indices = source, source_indices.contiguous()

    def _check_columns(self, state_indices: Tensor) -> None:
        """Check the columns of [N, S] slots, one for every token."""
        assert self.state is not None
        if self.cu_seqlens is None and self.T > state_indices.shape[1]:
            raise ValueError(
                "state_indices must name a slot for every token, shape [N, S] with S at least T = "
                f"{self.T}, got {list(state_indices.shape)}."
            )
        tables = (state_indices, self.num_accepted_tokens, self.cu_seqlens, self.source_indices)
        if all(can_read(x) for x in tables if x is not None):
            state_indices = self.slots(state_indices)
            lengths = [self.T] * self.N
            if self.cu_seqlens is not None:
                lengths = self.cu_seqlens.diff().tolist()
                check_columns(lengths, state_indices)
            source = self.source_indices
            source = None if source is None else self.slots(source)
            starts, count = self.num_accepted_tokens, self.state.shape[0]
            check_token_slots(state_indices, starts, source, lengths, count)

    def _take_snapshots(self, snapshot_indices: Tensor, snapshot_every: int) -> None:
        assert self.state is not None
        if snapshot_indices.dim() != 2 or snapshot_indices.shape[0] != self.N:
            raise ValueError(
                f"snapshot_indices must have shape [N, snapshots] = [{self.N}, ...], got "
                f"{list(snapshot_indices.shape)}."
            )
        check_index("snapshot_indices", snapshot_indices, self.q.device)
        if snapshot_every >= 1 and can_read(snapshot_indices):
            own = (
                torch.arange(self.N, device=self.q.device)
                if self.state_indices is None
                else self.slots(self.state_indices).long()
            )
            lengths = (
                torch.full_like(own, self.T) if self.cu_seqlens is None else self.cu_seqlens.diff()
            )
            column = torch.arange(1, snapshot_indices.shape[1] + 1, device=self.q.device)
            written = column <= (lengths // CHUNK // snapshot_every)[:, None]
            into = self.slots(snapshot_indices).long().where(written & (own >= 0)[:, None], -1)
            count = self.state.shape[0]
            if self.output_final_state:
                slots = torch.cat([own, into.flatten()])
                check_slots(slots, count, "state_indices and snapshot_indices")
            else:
                check_slots(own, count, "state_indices", written=False)
                check_slots(into, count, "snapshot_indices")
                check_readers(own, into)
        self.snapshot_indices = snapshot_indices

    # Kernels and fake implementations allocate outputs with the same two functions.

    def new_output(self) -> Tensor:
        """Allocate o [B, T, HV, V] in v's dtype, contiguous for any strides of v."""
        return new_output(self.v)

    def new_final_state(self) -> Tensor:
        """Allocate the final state, [N, HV, K, V] or [N, HV, V, K], in `state_dtype`.

        If the call does not ask for it, return an empty float32 tensor.
        """
        if not self.output_final_state:
            return self.q.new_empty((0,), dtype=torch.float32)
        N = count_results(self.N, self.cu_seqlens, self.state)
        width = (self.V, self.K) if self.transposed else (self.K, self.V)
        return self.q.new_empty((N, self.HV, *width), dtype=self.state_dtype)

    def differentiable(self) -> tuple[Tensor | None, ...]:
        """Return the inputs that have gradients, in the order of `stages.GRADIENTS`."""
        return self.q, self.k, self.v, self.g, self.beta, self.A_log, self.dt_bias, self.state

    def slots(self, table: Tensor) -> Tensor:
        """Return a table of slots with -1 for every slot that is nobody's."""
        return without_null(table, self.null_slot)

    def as_kv(self, state: Tensor) -> Tensor:
        """View a state in the caller's layout as S[k, v], by swapping two strides if needed."""
        return state.transpose(-1, -2) if self.transposed else state

    def _check_values(self) -> None:
        """Refuse gates and keys outside their range, if KDA_OPS_CHECK=1.

        A decay must not exceed 0 nor fall below the bound that `safe_gate` promises. A given beta
        must lie in [0, 2], or in [0, 1] with `safe_beta`. With `safe_keys`, no key may be longer
        than `checks.SAFE_LENGTH`. Tokens of sequences without a slot are not checked.
        """
        if not checks.CHECK_VALUES:
            return
        if self.g is not None and not self.gate.inside and not is_symbolic(self.g):
            check_decay_values(self._live(self.g), self.gate.bound)
        if self.beta is not None and not self.sigmoid_beta and not is_symbolic(self.beta):
            check_beta_values(self._live(self.beta), self.safe_beta)
        if self.safe_keys and not self.l2norm and not is_symbolic(self.k):
            check_key_lengths(self._live(self.k))

    def _live(self, x: Tensor) -> Tensor:
        """Select from x [B, T, ...] the tokens of sequences that have a slot."""
        slots = self.state_indices if self.source_indices is None else self.source_indices
        if self.cu_seqlens is not None:
            x = x[:, : int(self.cu_seqlens[-1])]
        if slots is None:
            return x
        slots = self.slots(slots)
        live = (slots if slots.dim() == 1 else slots.amax(1)) >= 0
        return (
            x[live]
            if self.cu_seqlens is None
            else x[:, live.repeat_interleave(self.cu_seqlens.diff())]
        )

    @property
    def bounded_inverse(self) -> bool:
        """Whether the flags promise keys of at most unit length and beta in [0, 1].

        Then no entry of a chunk's inverse exceeds 1, and kernels may form it in fp16. That changes
        the result by rounding only.
        """
        if self.beta is None:
            strength = True  # beta is 1
        else:
            strength = not self.neg_eigval if self.sigmoid_beta else self.safe_beta
        return strength and (self.l2norm or self.safe_keys)


def new_output(v: Tensor) -> Tensor:
    """Allocate what `Problem.new_output` does, for a call that is parsed already."""
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def gate_problem(
    rank: int, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, gate: Gate
) -> torch.dtype:
    """Validate a call to `kda::gate` or `gdn::gate`; return the dtype of its result."""
    if g is None:
        raise TypeError("g must be a tensor, got None.")
    if g.dim() != 3 + rank:
        raise ValueError(
            f"g must have shape {'[B, T, HV, K]' if rank else '[B, T, HV]'}, got {list(g.shape)}."
        )
    check_float("g", g, g.device)
    refuse_float64_on_cuda("g", g)
    K = g.shape[3] if rank else 1
    check_gate_parameters(rank, g.shape[2], K, A_log, dt_bias, gate, g.device, "g")
    return torch.float64 if g.dtype is torch.float64 else torch.float32
