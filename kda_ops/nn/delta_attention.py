"""What KimiDeltaAttention and GatedDeltaNet share: projections, convolutions, the operator, the
gated norm, and the cache.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda_ops.nn.cache import Cache
from kda_ops.nn.gated_norm import GatedRMSNorm
from kda_ops.nn.local import local
from kda_ops.nn.packing import Packing, Unpadding
from kda_ops.nn.short_convolution import ShortConvolution
from kda_ops.problem import MAX_K, check_offsets

if TYPE_CHECKING:
    from kda_ops.distributed.functional import Group
    from kda_ops.distributed.plan import ContextPlan


class DeltaAttention(nn.Module):
    """A token mixer around a gated delta rule; a subclass names its operators and computes the
    logits of its decay and of its output gate.

    Sizes: H heads of K channels for q and k; HV value heads of V channels, a multiple of H; value
    head h reads head ``h // (HV // H)``.
    """

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
        dt_bias_size: int,
    ):
        super().__init__()
        self.hidden_size, self.num_heads, self.head_k_dim, self.head_v_dim = (
            hidden_size,
            num_heads,
            head_dim,
            round(head_dim * expand_v),
        )
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        for name, size, most in (
            ("hidden_size", hidden_size, None),
            ("num_heads", num_heads, None),
            ("head_dim", head_dim, MAX_K),
            ("conv_size", conv_size, None),
        ):
            if size < 1 or (most is not None and size > most):
                raise ValueError(
                    f"{name} must be at least 1{'' if most is None else f' and at most {most}'}, "
                    f"got {size}."
                )
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
        # The gate stays in fp32: rounded to 16 bits, a decay near 1 is off by its whole memory.
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads, device=device, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(dt_bias_size, device=device, dtype=torch.float32))
        self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps, norm_activation, **factory)
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False, **factory)

    def _chunk(self, *args, group, **flags) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def _chunk_(self, *args, **flags) -> Tensor:
        raise NotImplementedError

    def _recurrent_(self, *args, **flags) -> Tensor:
        raise NotImplementedError

    def _decay_logits(self, x: Tensor) -> Tensor:
        """The raw decay, [B, T, HV, K] or [B, T, HV]."""
        raise NotImplementedError

    def _output_gate(self, x: Tensor) -> Tensor | None:
        """[B, T, HV * V], or None for no gate."""
        raise NotImplementedError

    def _draw_A(self) -> Tensor:
        """A new exp(A_log), [HV]."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_gate(self) -> None:
        """Draw `A_log` and `dt_bias` anew; the bias is such that a zero logit decays at a rate
        log-uniform in [0.001, 0.1], times ``exp(A_log)``.
        """
        self.A_log.copy_(self._draw_A().log())
        rate = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
        self.dt_bias.copy_(rate + torch.log(-torch.expm1(-rate)))  # softplus(dt_bias) = rate
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Initialise every parameter, as the constructor does: after ``to_empty`` of a layer built
        on the meta device.
        """
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
        self.reset_gate()

    def new_cache(self, num_sequences: int) -> Cache:
        """Make an empty cache for N sequences, on the layer's device."""
        if num_sequences < 0:
            raise ValueError(f"num_sequences must be at least 0, got {num_sequences}.")
        q, k, v = (local(proj.weight) for proj in (self.q_proj, self.k_proj, self.v_proj))
        wide = torch.float64 if q.dtype is torch.float64 else torch.float32
        state = q.new_zeros(
            (num_sequences, v.shape[0] // self.head_v_dim, self.head_v_dim, self.head_k_dim),
            dtype=wide,
        )
        if not self.use_short_conv:
            return Cache(state)
        return Cache(
            state,
            *(
                q.new_zeros((num_sequences, self.conv_size - 1, weight.shape[0]))
                for weight in (q, k, v)
            ),
        )

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
            x: ``[B, T, hidden_size]``.
            attention_mask: ``[B, T]``, nonzero at real tokens; padding may lie anywhere, is skipped
                as if it were not there, and gives zeros. Of a longer mask, as generation loops pass
                it, the last T columns count.
            cache: the past of the N sequences, read and brought up to date in place; inference
                only. With T = 1 the token recurrence runs, otherwise, and for packed sequences, the
                chunk form.
            cu_seqlens: ``[N + 1]`` int32 or int64 offsets of sequences packed into one row; then
                ``B == 1``. Without it N is B. Tokens past the last offset give zeros; in training
                they must be finite: a NaN there reaches the weights' gradients.
            group: ranks across which the tokens lie, as `kda_ops.distributed.chunk_kda` takes it: x
                is this rank's shard, of any length, and cu_seqlens are global. The loss is the sum
                of the ranks' losses, so that parameters get partial gradients, to be summed over
                the group. Without mask and cache.

        Returns:
            ``[B, T, hidden_size]`` in x's dtype.

        Raises:
            ValueError: shapes disagree, on this rank or between ranks, or with a cache of another
                layer, or both a mask and offsets are given, or a group with a mask or a cache.
            RuntimeError: a cache is given and a gradient is wanted; or a rank of the group did not
                take part within its timeout.
        """
        plan, offsets, before = None, cu_seqlens, None
        if group is None:
            self._check(x, attention_mask, cache, cu_seqlens)
        else:
            plan, offsets, before = self._neighbours(x, attention_mask, cache, cu_seqlens, group)
        decode = x.shape[1] == 1 and cu_seqlens is None
        padded = None
        if attention_mask is not None:
            padded = Unpadding(attention_mask[:, attention_mask.shape[1] - x.shape[1] :])
            x = padded.pack(x)
            offsets = cu_seqlens = padded.cu_seqlens
        packing = None if offsets is None else Packing(offsets, x.shape[1])
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if cache is not None:
            self._check_cache(cache, q, k, v)
        if self.use_short_conv:
            if before is not None:
                tails = self.q_proj(before), self.k_proj(before), self.v_proj(before)
            else:
                tails = (
                    (None, None, None)
                    if cache is None
                    else (cache.q_conv, cache.k_conv, cache.v_conv)
                )
            q, k, v = (
                self.q_conv1d(q, tails[0], packing),
                self.k_conv1d(k, tails[1], packing),
                self.v_conv1d(v, tails[2], packing),
            )
        else:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        # Of tensor parallel layers each rank has some of the heads.
        q, k, v = (
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
        )
        o = self._attend(
            q, k, v, self._decay_logits(x), self.b_proj(x), cache, cu_seqlens, decode, plan
        )
        gate = self._output_gate(x)
        o = self.o_norm(o, None if gate is None else gate.unflatten(-1, (-1, self.head_v_dim)))
        o = self.o_proj(o.flatten(-2))
        return o if padded is None else padded.unpack(o)

    def _neighbours(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None,
        cu_seqlens: Tensor | None,
        group: Group,
    ) -> tuple[ContextPlan, Tensor | None, Tensor | None]:
        """The shards of the group, the offsets of this rank's own tokens, and the inputs before
        them that the convolutions read.
        """
        from kda_ops.distributed.plan import agree
        from kda_ops.distributed.tail import exchange_tail

        def parse() -> None:
            if attention_mask is not None:
                raise ValueError(
                    "attention_mask: padding is not skipped across ranks; pack the sequences and "
                    "pass global cu_seqlens."
                )
            if cache is not None:
                raise ValueError(
                    "cache: across ranks a layer neither reads nor fills one; the states of whole "
                    "sequences come from kda_ops.distributed."
                )
            self._check(x, None, None, cu_seqlens, across_ranks=True)

        def contract(_) -> dict[str, object]:
            """What the calls below have in common if this is: the layer, and all of x but its
            length.
            """
            grad = torch.is_grad_enabled()
            return {
                n: value
                for n, value in vars(self).items()
                if isinstance(value, (int, float)) and n != "training"
            } | {
                "layer": type(self).__name__,
                "x": f"{x.dtype} [{x.shape[0]}, T, {x.shape[2]}]",
                "parameters": str(self.q_proj.weight.dtype),
                "cu_seqlens": None if cu_seqlens is None else cu_seqlens.tolist(),
                "a gradient of x wanted": grad and x.requires_grad,
                "a gradient wanted": grad
                and (x.requires_grad or any(p.requires_grad for p in self.parameters())),
            }

        convolves = self.use_short_conv and self.conv_size > 1
        plan, _ = agree(
            group,
            x.shape[1] if x.dim() > 1 else 0,
            x.device,
            cu_seqlens,
            type(self).__name__,
            parse,
            contract,
            lengths_needed=convolves or cu_seqlens is not None,
        )
        before = exchange_tail(x, self.conv_size, plan, cu_seqlens) if convolves else None
        return plan, None if cu_seqlens is None else plan.local(cu_seqlens), before

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cache: Cache | None,
        cu_seqlens: Tensor | None,
        decode: bool,
        plan: ContextPlan | None,
    ) -> Tensor:
        """o [B, T, HV, V]."""
        flags = dict(
            A_log=local(self.A_log),
            dt_bias=local(self.dt_bias),
            cu_seqlens=cu_seqlens,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            transpose_state_layout=True,
        )
        if cache is None:
            return self._chunk(q, k, v, g, beta, group=plan, **flags)[0]
        return (self._recurrent_ if decode else self._chunk_)(
            q, k, v, g, beta, cache.state, **flags
        )

    def _check(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None,
        cu_seqlens: Tensor | None,
        across_ranks: bool = False,
    ) -> None:
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"x must have shape [B, T, hidden_size] = [B, T, {self.hidden_size}], got "
                f"{list(x.shape)}."
            )
        N = x.shape[0]
        if attention_mask is not None:
            if not isinstance(attention_mask, Tensor):
                raise TypeError(
                    "attention_mask must be a tensor of shape [B, T], got "
                    f"{type(attention_mask).__name__}: torch.tensor(...) makes one."
                )
            if cu_seqlens is not None:
                raise ValueError(
                    "attention_mask and cu_seqlens both say where sequences lie: pass one of them."
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
        """Refuse a cache of other heads or convolutions than those of the projected q, k and v, and
        any where a gradient is wanted.
        """
        N, tails = cache.state.shape[0], (cache.q_conv, cache.k_conv, cache.v_conv)
        want: list[tuple[int, ...] | None] = [
            (N, v.shape[-1] // self.head_v_dim, self.head_v_dim, self.head_k_dim)
        ]
        want += [
            (N, self.conv_size - 1, x.shape[-1]) if self.use_short_conv else None for x in (q, k, v)
        ]
        got = [None if x is None else tuple(x.shape) for x in (cache.state, *tails)]
        if got != want:
            raise ValueError(
                f"cache must hold a state and convolution tails of shapes {want}, got {got}: make "
                "it with this layer's new_cache."
            )
        wrong = [
            f"{x.dtype} on {x.device}"
            for x in tails
            if x is not None and not (x.is_floating_point() and x.device == q.device)
        ]
        if wrong:
            raise TypeError(
                f"cache must hold convolution tails of {q.dtype} on {q.device}, got {wrong[0]}: "
                "make it with this layer's new_cache."
            )
        states = (torch.float64,) if q.dtype is torch.float64 else (torch.float32, torch.bfloat16)
        # before the convolutions write their tails
        if cache.state.dtype not in states or cache.state.device != q.device:
            here, there = (
                f"{cache.state.dtype} on {cache.state.device}",
                f"{' or '.join(map(str, states))} on {q.device}",
            )
            raise TypeError(
                f"cache must hold states of {there}, got {here}: make it with this layer's "
                "new_cache."
            )
        if torch.is_grad_enabled() and (
            q.requires_grad or any(p.requires_grad for p in self.parameters())
        ):
            raise RuntimeError(
                "cache is written in place and has no gradient: call the layer under "
                "torch.no_grad() or torch.inference_mode()."
            )
