"""Implement what KimiDeltaAttention and GatedDeltaNet share, from projections to the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda_ops.checks import MAX_K, check_beta, check_decay, check_offsets, shape_error
from kda_ops.layer_functional import short_conv
from kda_ops.nn.cache import Cache
from kda_ops.nn.checks import (
    DTYPES,
    check_buffer,
    check_dense,
    check_dtype,
    check_eps,
    check_flag,
    check_float,
    check_number,
    check_size,
    check_x,
    warn_of_a_rounded_gate,
)
from kda_ops.nn.gated_norm import GatedRMSNorm
from kda_ops.nn.invariant_cache import InvariantCache
from kda_ops.nn.local import local
from kda_ops.nn.packing import Tokens, arrange
from kda_ops.nn.short_convolution import ShortConvolution
from kda_ops.private import pre_hooks

if TYPE_CHECKING:
    from kda_ops.distributed.functional import Group


class DeltaAttention(nn.Module):
    """A token mixer around a gated delta rule.

    A subclass names its operators and computes the logits of its decay and its output gate.

    Sizes: H heads of K channels for q and k; HV value heads of V channels, with HV a multiple of H.
    Value head h reads head ``h // (HV // H)``. `head_ranks` is the number of ranks over which
    `HeadParallel` has sharded the heads.
    """

    head_ranks = 1
    _decay_rank: int  # 1 for a decay per key channel, 0 for one per head

    def __init__(
        self,
        hidden_size: int,
        expand_v: float,
        head_dim: int,
        num_heads: int,
        num_v_heads: int | None,
        use_short_conv: bool,
        allow_neg_eigval: bool,
        conv_size: int,
        conv_bias: bool,
        norm_eps: float,
        device,
        dtype,
        *,
        norm_activation: str,
        dt_bias_width: int,
        invariant: bool,
    ):
        super().__init__()
        for name, size, most in (
            ("hidden_size", hidden_size, None),
            ("num_heads", num_heads, None),
            ("num_v_heads", num_heads if num_v_heads is None else num_v_heads, None),
            ("head_dim", head_dim, MAX_K),
            ("conv_size", conv_size, None),
        ):
            check_size(name, size, most)
        for name, flag in (
            ("use_short_conv", use_short_conv),
            ("allow_neg_eigval", allow_neg_eigval),
            ("conv_bias", conv_bias),
            ("invariant", invariant),
        ):
            check_flag(name, flag)
        check_eps("norm_eps", norm_eps)
        check_dtype("dtype", dtype)
        check_number("expand_v", expand_v)
        if not math.isfinite(expand_v):
            raise ValueError(f"expand_v must be a finite number, got {expand_v}.")
        self.hidden_size, self.num_heads, self.head_k_dim = hidden_size, num_heads, head_dim
        self.head_v_dim = round(head_dim * expand_v)
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        if self.num_v_heads < num_heads or self.num_v_heads % num_heads:
            raise ValueError(
                f"num_v_heads must be a multiple of num_heads = {num_heads}, so that each q/k "
                f"head serves a group of value heads, got {self.num_v_heads}."
            )
        if (
            not math.isclose(head_dim * expand_v, self.head_v_dim, rel_tol=1e-5)
            or self.head_v_dim < 1
        ):
            raise ValueError(
                "expand_v must make head_dim * expand_v a whole number of channels, got "
                f"{head_dim} * {expand_v} = {head_dim * expand_v}."
            )
        self.use_short_conv, self.allow_neg_eigval, self.conv_size = (
            use_short_conv,
            allow_neg_eigval,
            conv_size,
        )
        self.invariant = invariant
        factory = dict(device=device, dtype=dtype)
        key_dim, value_dim = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        self.q_proj = nn.Linear(hidden_size, key_dim, bias=False, **factory)
        self.k_proj = nn.Linear(hidden_size, key_dim, bias=False, **factory)
        self.v_proj = nn.Linear(hidden_size, value_dim, bias=False, **factory)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(key_dim, conv_size, conv_bias, **factory)
            self.k_conv1d = ShortConvolution(key_dim, conv_size, conv_bias, **factory)
            self.v_conv1d = ShortConvolution(value_dim, conv_size, conv_bias, **factory)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False, **factory)
        # The gate stays in fp32: 16 bits cannot hold a decay near 1, so its memory length would be
        # wrong.
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads, device=device, dtype=torch.float32))
        self.dt_bias = nn.Parameter(
            torch.empty(self.num_v_heads * dt_bias_width, device=device, dtype=torch.float32)
        )
        self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps, norm_activation, **factory)
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False, **factory)

    def _chunk(self, *args, group, **flags) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def _chunk_(self, *args, **flags) -> Tensor:
        raise NotImplementedError

    def _recurrent_(self, *args, **flags) -> Tensor:
        raise NotImplementedError

    def _decay_logits(self, x: Tensor) -> Tensor:
        """Return the raw decay, [B, T, HV, K] or [B, T, HV]."""
        raise NotImplementedError

    def _output_gate(self, x: Tensor) -> Tensor | None:
        """Return the logits of the output gate, [B, T, HV * V], or None for no gate."""
        raise NotImplementedError

    def _draw_A(self) -> Tensor:
        """Draw a new exp(A_log), [HV]."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_gate(self) -> None:
        """Draw `A_log` and `dt_bias` from their initial distributions.

        With the new bias, a logit of zero decays at a rate log-uniform in [0.001, 0.1], times
        ``exp(A_log)``.
        """
        self.A_log.copy_(self._draw_A().log())
        rate = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
        self.dt_bias.copy_(rate + torch.log(-torch.expm1(-rate)))  # softplus(dt_bias) = rate
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Initialise every parameter, as the constructor does.

        Call it after ``to_empty`` on a layer that was built on the meta device.
        """
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
        self.reset_gate()

    def new_cache(
        self,
        num_sequences: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        invariant: bool = False,
        drafts: int = 0,
    ) -> Cache:
        """Make an empty cache for N sequences, with the heads that this rank has.

        Sizes come from the layer's configuration, so weights may be sharded, quantised or on meta.

        Args:
            num_sequences: N, at least 0.
            dtype: of the convolutions' inputs; by default that of ``o_norm.weight``. States are
                float32, or float64 with float64 inputs.
            device: by default that of ``o_norm.weight``.
            invariant: make an `InvariantCache`, which gives each token the bits of training. The
                layer must have been built with ``invariant=True``, and the projections must compute
                in `dtype`.
            drafts: the last tokens of a sequence that ``cache.crop`` may take back, such as
                rejected drafts; needs `invariant`.

        Returns:
            A `Cache` filled with zeros.

        Raises:
            ValueError: `num_sequences` or `drafts` is below 0. Also raised for `invariant` on a
                layer without that flag, and for drafts without `invariant`.
            TypeError: `num_sequences` is not a whole number, or `dtype` has 8 bits or is not a
                float.
        """
        check_size("num_sequences", num_sequences, least=0)
        dtype = self.o_norm.weight.dtype if dtype is None else dtype
        device = self.o_norm.weight.device if device is None else device
        check_dtype("dtype", dtype, ": pass the one in which the projections compute")
        state, tails = self._cache_shapes(num_sequences, *self._widths())
        wide = torch.promote_types(dtype, torch.float32)
        zeros = torch.zeros(state, dtype=wide, device=device)
        if invariant:
            if not self.invariant:
                raise ValueError(
                    "invariant must be False for a layer without that flag, whose training has "
                    "other bits: build the layer with invariant=True."
                )
            HV = state[1]
            axes: list[tuple[int, ...]] = [(n,) for n in self._widths()]
            axes += [(HV, self.head_k_dim) if self._decay_rank else (HV,), (HV,)]
            q, k, v, g, beta = (torch.zeros(1, 0, *n, dtype=dtype, device=device) for n in axes)
            before = self.conv_size - 1 if self.use_short_conv else 0
            return InvariantCache(zeros, q, k, v, g, beta, drafts=drafts, before=before)
        if drafts:
            raise ValueError(f"drafts must be 0 without invariant=True, got {drafts}.")
        return Cache(
            zeros,
            *(torch.zeros(tail, dtype=dtype, device=device) for tail in tails if tail is not None),
        )

    def _widths(self) -> tuple[int, int, int]:
        """Return the channels of q, k and v that this rank has."""
        key_dim = self.num_heads // self.head_ranks * self.head_k_dim
        return key_dim, key_dim, self.num_v_heads // self.head_ranks * self.head_v_dim

    def _cache_shapes(
        self, N: int, *widths: int
    ) -> tuple[tuple[int, ...], list[tuple[int, ...] | None]]:
        """Return the shapes of a cache's state and tails, for q, k and v of these widths."""
        state = (N, widths[-1] // self.head_v_dim, self.head_v_dim, self.head_k_dim)
        if not self.use_short_conv:
            return state, [None, None, None]
        return state, [(N, self.conv_size - 1, width) for width in widths]

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        group: Group | None = None,
    ) -> Tensor:
        """Mix tokens along time.

        Args:
            x: ``[B, T, hidden_size]``, in the dtype and on the device of the projections; under
                autocast any float.
            attention_mask: ``[B, T]``, nonzero at real tokens. Padding may lie anywhere; it is
                skipped and gives zeros. Generation loops may pass a longer mask: only its last T
                columns count.
            cache: the past of the N sequences, read and updated in place; inference only. One token
                per sequence, without `cu_seqlens`, runs the token recurrence; other calls, and all
                on an `InvariantCache`, run the chunk form. An exception in a projection of x leaves
                it unchanged, so the call may be repeated. After one in ``o_norm`` or ``o_proj`` it
                holds the call's tokens.
            cu_seqlens: ``[N + 1]``, int32 or int64: offsets of N sequences packed into one row, so
                ``B == 1``. Without it N is B. Tokens past the last offset give zeros. In training
                they must be finite: a NaN there reaches the weights' gradients.
            group: the ranks across which the tokens lie, as for `kda_ops.distributed.chunk_kda`.
                Then x is this rank's shard, of any length, and cu_seqlens are global. Mask and
                cache must be None. The loss is the sum of the ranks' losses: sum the parameters'
                gradients over the group.

        Returns:
            ``[B, T, hidden_size]`` in x's dtype, or in the autocast dtype.

        Raises:
            ValueError: shapes disagree, on this rank, between ranks, or with the cache. Also raised
                for a mask with offsets, and for a group with a mask or a cache.
            TypeError: x, or a buffer of the cache, has a dtype or device that the layer cannot use.
            RuntimeError: a cache is given and a gradient is wanted, or the cache was made under
                ``torch.inference_mode()`` and is used outside. Also raised if a rank of the group
                does not take part within the timeout.
        """
        warn_of_a_rounded_gate(self.A_log, self.dt_bias)
        if group is None:
            self._check(x, attention_mask, cache, cu_seqlens)
            x, tokens = arrange(x, attention_mask, cu_seqlens)
        else:
            tokens = self._arrange_across_ranks(x, attention_mask, cache, cu_seqlens, group)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        g, beta = self._decay_logits(x), self.b_proj(x)
        gate: Tensor | None = None
        if cache is not None:  # the next line writes it, and what can fail must have been computed
            gate = self._output_gate(x)
            if not isinstance(cache, InvariantCache):  # which checks its tokens itself
                self._check_cache(cache, q, k, v)
            self._check_gates(v, g, beta, gate)
        if isinstance(cache, InvariantCache):
            o = self._continue(q, k, v, g, beta, cache, tokens)
        else:
            q, k, v = self._convolve(q, k, v, cache, tokens)
            o = self._attend(q, k, v, g, beta, cache, tokens)
        o = self._gate_and_project(o, self._output_gate(x) if cache is None else gate)
        return o if tokens.padding is None else tokens.padding.unpack(o)

    def _arrange_across_ranks(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None,
        cu_seqlens: Tensor | None,
        group: Group,
    ) -> Tokens:
        """Agree with the ranks of the group on the call, and locate this rank's tokens."""
        from kda_ops.distributed.chunk import refuse_invariant
        from kda_ops.distributed.plan import agree, place_of
        from kda_ops.distributed.tail import exchange_tail

        def parse() -> None:
            if attention_mask is not None:
                raise ValueError(
                    "attention_mask: padding is not skipped across ranks; pack the sequences and "
                    "pass global cu_seqlens."
                )
            if cache is not None:
                raise ValueError(
                    "cache: across ranks a layer neither reads nor fills one; get the states of "
                    "whole sequences from kda_ops.distributed."
                )
            self._check(x, None, None, cu_seqlens, across_ranks=True)

        def contract(_) -> dict[str, object]:
            """Return what must be equal on all ranks apart from what the plan compares.

            That is the layer, and all of x but its length.
            """
            grad = torch.is_grad_enabled()
            return {
                n: value
                for n, value in vars(self).items()
                if isinstance(value, (int, float)) and n != "training"
            } | {
                "layer": type(self).__name__,
                "x": f"{x.dtype} [{x.shape[0]}, T, {x.shape[2]}]",
                "parameters": str(self.o_norm.weight.dtype),
                "cu_seqlens": None if cu_seqlens is None else cu_seqlens.tolist(),
                "a gradient of x wanted": grad and x.requires_grad,
                "a gradient wanted": grad
                and (x.requires_grad or any(p.requires_grad for p in self.parameters())),
            }

        convolves = self.use_short_conv and self.conv_size > 1
        plan, _ = agree(
            group,
            *place_of(x),
            cu_seqlens,
            type(self).__name__,
            parse,
            contract,
            lengths_needed=convolves or cu_seqlens is not None,
        )
        refuse_invariant(self.invariant, plan)
        before = exchange_tail(x, self.conv_size, plan, cu_seqlens) if convolves else None
        offsets = None if cu_seqlens is None else plan.local(cu_seqlens)
        return Tokens(cu_seqlens, offsets, plan=plan, before=before)

    def _convolve(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Cache | None,
        tokens: Tokens,
        befores: Sequence[Tensor | None] = (None, None, None),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Convolve and activate the projections: q, k [B, T, H, K] and v [B, T, HV, V].

        `befores` are their inputs in front of each sequence, if no cache has them.
        """
        if self.use_short_conv:
            tails: tuple[Tensor | None, ...] = (None, None, None)
            if tokens.before is not None:
                before = tokens.before
                befores = self.q_proj(before), self.k_proj(before), self.v_proj(before)
            elif cache is not None:
                tails = cache.q_conv, cache.k_conv, cache.v_conv
            q, k, v = (
                conv(y, tail, tokens.offsets, initial_tail=first, checked=True)
                for conv, y, tail, first in zip(
                    (self.q_conv1d, self.k_conv1d, self.v_conv1d), (q, k, v), tails, befores
                )
            )
        elif self.invariant:  # torch's SiLU on a CPU rounds the last elements of x differently
            q, k, v = (
                short_conv(x, x.new_ones(x.shape[-1], 1), None, activation="silu")[0]
                for x in (q, k, v)
            )
        else:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        # Infer the number of heads: a rank of a tensor-parallel layer has only some of them.
        q, k = (x.unflatten(-1, (-1, self.head_k_dim)) for x in (q, k))
        return q, k, v.unflatten(-1, (-1, self.head_v_dim))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cache: Cache | None,
        tokens: Tokens,
    ) -> Tensor:
        """Run the operator, on the cache if one is given: o [B, T, HV, V]."""
        flags = self._flags() | {"cu_seqlens": tokens.cu_seqlens}
        if cache is not None and tokens.decode:
            return self._recurrent_(q, k, v, g, beta, cache.state, **flags)
        flags["invariant"] = self.invariant
        if cache is None:
            return self._chunk(q, k, v, g, beta, group=tokens.plan, **flags)[0]
        return self._chunk_(q, k, v, g, beta, cache.state, **flags)

    def _continue(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cache: InvariantCache,
        tokens: Tokens,
    ) -> Tensor:
        """Convolve and run the operator on the tokens that the cache holds and the new ones."""

        def convolve(q, k, v, befores, offsets):
            return self._convolve(q, k, v, None, Tokens(offsets, offsets), befores)

        return cache.step(
            self._chunk_,
            *(q, k, v, g, beta),
            cu_seqlens=tokens.cu_seqlens,
            convolve=convolve,
            **self._flags(),
        )

    def _flags(self) -> dict[str, Any]:
        """Return the keyword arguments that all calls of the operators share."""
        return dict(
            A_log=local(self.A_log),
            dt_bias=local(self.dt_bias),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            transpose_state_layout=True,
        )

    def _gate_and_project(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """Apply the gated norm per head, then the output projection: [B, T, hidden_size]."""
        gate = None if gate is None else gate.unflatten(-1, (-1, self.head_v_dim))
        return self.o_proj(self.o_norm(o, gate).flatten(-2))

    def _check(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None,
        cu_seqlens: Tensor | None,
        across_ranks: bool = False,
    ) -> None:
        """Refuse a call before anything is computed, communicated or written."""
        if not isinstance(x, Tensor):
            raise TypeError(
                f"x must be a tensor of shape [B, T, hidden_size], got {type(x).__name__}: "
                "torch.tensor(...) makes one."
            )
        check_dense("x", x)
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"x must have shape [B, T, hidden_size] = [B, T, {self.hidden_size}], got "
                f"{list(x.shape)}."
            )
        check_x(x, "q_proj", self.q_proj)
        N = x.shape[0]
        if attention_mask is not None:
            if not isinstance(attention_mask, Tensor):
                raise TypeError(
                    "attention_mask must be a tensor of shape [B, T], got "
                    f"{type(attention_mask).__name__}: torch.tensor(...) makes one."
                )
            check_dense("attention_mask", attention_mask)
            if attention_mask.device != x.device:
                raise TypeError(
                    f"attention_mask must be on {x.device}, where x is, "
                    f"got {attention_mask.device}: move it there."
                )
            if cu_seqlens is not None:
                raise ValueError(
                    "attention_mask and cu_seqlens both define the sequences: pass one of them."
                )
            if (
                attention_mask.dim() != 2
                or attention_mask.shape[0] != N
                or attention_mask.shape[1] < x.shape[1]
            ):
                raise ValueError(
                    f"attention_mask must have shape [B, T] = [{N}, {x.shape[1]}] (or more "
                    "columns, of which the last T count), "
                    f"got {list(attention_mask.shape)}."
                )
        if cu_seqlens is not None:
            check_offsets(cu_seqlens, N, None if across_ranks else x.shape[1], x.device, "x")
            N = cu_seqlens.shape[0] - 1
        if cache is not None:
            if not isinstance(cache, Cache):
                raise TypeError(
                    f"cache must be a kda_ops.nn.Cache, got {type(cache).__name__}: make it with "
                    f"new_cache({N})."
                )
            if cache.state.shape[0] != N:
                raise ValueError(
                    f"cache must hold the N = {N} sequences of this call, got one for "
                    f"{cache.state.shape[0]}: make it with new_cache({N})."
                )

    def _check_cache(self, cache: Cache, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Refuse a cache that does not suit the projected q, k and v, before it is written."""
        N, make = cache.state.shape[0], "make it with this layer's new_cache"
        state, tails = self._cache_shapes(N, *(x.shape[-1] for x in (q, k, v)))
        want = [state, *tails]
        if (state, tails) != self._cache_shapes(N, *self._widths()):
            make = (
                "the projections have other widths than num_heads, num_v_heads and head_dim give "
                "this rank: shard heads over ranks with HeadParallel"
            )
        buffers = (cache.state, cache.q_conv, cache.k_conv, cache.v_conv)
        got = [None if x is None else tuple(x.shape) for x in buffers]
        if got != want:
            raise ValueError(
                "cache must hold a state and convolution tails of shapes "
                f"{want}, got {got}: {make}."
            )
        wide = (torch.float64,) if q.dtype is torch.float64 else (torch.float32, torch.bfloat16)
        # a state in bf16 would be rounded at the end of each call
        self._check_cached("states", cache.state, wide[:1] if self.invariant else wide, q)
        for n, tail in zip("qkv", buffers[1:]):
            if tail is not None:
                # FSDP2's hook may convert the tail to a copy; the layer would write the copy.
                hooked = pre_hooks(getattr(self, f"{n}_conv1d"))
                self._check_cached("convolution tails", tail, (q.dtype,) if hooked else DTYPES, q)
        cache._check_writable()
        if torch.is_grad_enabled() and (
            q.requires_grad
            or any(b is not None and b.requires_grad for b in buffers)
            or any(p.requires_grad for p in self.parameters())
        ):
            raise RuntimeError(
                "cache is written in place and has no gradient: call the layer under "
                "torch.no_grad() or torch.inference_mode()."
            )

    def _check_gates(self, v: Tensor, g: Tensor, beta: Tensor, gate: Tensor | None) -> None:
        """Refuse what the operator or the norm would refuse after the tails are written."""
        sizes = (*v.shape[:2], v.shape[-1] // self.head_v_dim, self.head_k_dim)
        check_decay(self._decay_rank, g, sizes, v.device)
        check_beta(beta, sizes, True, self.allow_neg_eigval, v.device)
        if gate is not None:
            if gate.shape != v.shape:
                shape_error("gate", "[B, T, HV * V]", tuple(v.shape), gate, " (from g_proj)")
            check_float("gate", gate, v.device, "x")

    def _check_cached(
        self, what: str, x: Tensor, dtypes: tuple[torch.dtype, ...], q: Tensor
    ) -> None:
        """Refuse a buffer of a cache that would round what it stores, or cannot be written."""
        if x.dtype not in dtypes or x.device != q.device:
            names = " or ".join(map(str, dtypes))
            raise TypeError(
                f"cache must hold {what} of {names} on {q.device}, got {x.dtype} on {x.device}: "
                f"make it with new_cache({x.shape[0]}, dtype={q.dtype}, device={str(q.device)!r})."
            )
        check_buffer("cache", x)
