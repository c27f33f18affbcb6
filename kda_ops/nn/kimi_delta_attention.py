"""Define the Kimi Delta Attention layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kda_ops.functional import chunk_kda, chunk_kda_, recurrent_kda_
from kda_ops.gates import check_lower_bound
from kda_ops.nn.checks import check_flag, check_number
from kda_ops.nn.delta_attention import DeltaAttention
from kda_ops.nn.local import across


class KimiDeltaAttention(DeltaAttention):
    """Mix tokens with Kimi Delta Attention: a delta rule with one decay per token and key channel.

    q, k and v pass a projection, a short causal convolution and SiLU. Low-rank projections give the
    logits of the decay and of the output gate. Write strengths are ``sigmoid(b_proj(x))``. The
    operator normalises q and k, and activates the decay and the write strengths. A gated RMS norm
    and ``o_proj`` follow. Input and output are ``[B, T, hidden_size]``; see `forward`.

    Args:
        hidden_size: width of the input and output.
        expand_v: V / K, the ratio of the widths of a value head and a key head.
        head_dim: K, up to 256.
        num_heads: H, heads of q and k.
        num_v_heads: HV, a multiple of H; H by default.
        use_short_conv: convolve q, k and v; False: only SiLU.
        allow_neg_eigval: allow write strengths up to 2: ``2 * sigmoid(b_proj(x))``.
        safe_gate: start ``A_log`` at zero; needs `lower_bound`. The operators know the bound from
            `lower_bound` alone, so speed does not depend on this flag.
        lower_bound: lower bound of the log decay, a finite number below 0. It selects the gate
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`` instead of
            ``-exp(A_log) * softplus(g + dt_bias)``.
        conv_size, conv_bias: taps per channel, and whether each channel adds a bias.
        norm_eps: epsilon of the gated RMS norm, above 0.
        device, dtype: of the parameters, 16 bits or more. `A_log` and `dt_bias` are fp32 for any
            `dtype`. ``.to(torch.bfloat16)`` rounds them, and forward then warns: pass `dtype`
            instead.
        invariant: pass ``invariant=True`` to the chunk form (`kda_ops.chunk_kda`). The bits of the
            projections, and of the token recurrence that decodes single tokens from a cache, are
            not part of that promise (docs/numerics.md, "Invariant calls").

    Parameters: ``q_proj k_proj v_proj``, ``q_conv1d k_conv1d v_conv1d``
    ``[channels, 1, conv_size]``, ``f_proj.0 f_proj.1`` (decay), ``b_proj``, ``A_log`` ``[HV]``,
    ``dt_bias`` ``[HV * K]``, ``g_proj.0 g_proj.1`` (output gate), ``o_norm``, ``o_proj``. ``A_log``
    starts at ``log U(1, 16)``, or at zero with `safe_gate`. ``A_log`` and ``dt_bias`` have the
    attribute ``_no_weight_decay = True``. `copy.deepcopy`, ``fully_shard``, ``to_empty`` and
    ``load_state_dict(assign=True)`` make new parameters without it. After these, select the
    parameters for weight decay by name.

    FSDP2 requires one dtype per parameter group ("uniform original parameter dtype"), and a
    ``MixedPrecisionPolicy`` rounds a whole group. With ``dtype=torch.bfloat16``, or with such a
    policy, give ``A_log`` and ``dt_bias`` a group of their own::

        fully_shard(list(layer.children()), mp_policy=policy)  # or no policy, with dtype=
        fully_shard(layer)  # A_log and dt_bias, in fp32

    With a policy, decode with ``new_cache(N, dtype=policy.param_dtype)``.

    Raises:
        ValueError: sizes do not fit together, `norm_eps` is not finite and above 0, or `safe_gate`
            is set without `lower_bound`.
        TypeError: an option has another Python type, or `dtype` has 8 bits or is not a float.

    Example:
        >>> import torch, kda_ops.nn
        >>> layer = kda_ops.nn.KimiDeltaAttention(
        ...     hidden_size=64, head_dim=16, num_heads=2, num_v_heads=4)
        >>> x = torch.randn(3, 100, 64)
        >>> with torch.no_grad():
        ...     cache = layer.new_cache(3)
        ...     prompt, token = layer(x[:, :99], cache=cache), layer(x[:, 99:], cache=cache)
        ...     torch.allclose(torch.cat([prompt, token], 1), layer(x), atol=1e-5)
        True

    Source: Kimi Linear technical report, arXiv:2510.26692.
    """

    _decay_rank = 1

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        *,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        device=None,
        dtype=None,
        invariant: bool = False,
    ):
        check_flag("safe_gate", safe_gate)
        if safe_gate and lower_bound is None:
            raise ValueError(
                "safe_gate=True promises a bounded decay and needs the bound: pass lower_bound, "
                "for instance -5.0."
            )
        if lower_bound is not None:
            check_number("lower_bound", lower_bound)
        check_lower_bound(lower_bound)
        super().__init__(
            hidden_size,
            expand_v,
            head_dim,
            num_heads,
            num_v_heads,
            use_short_conv,
            allow_neg_eigval,
            conv_size,
            conv_bias,
            norm_eps,
            device,
            dtype,
            norm_activation="sigmoid",
            dt_bias_width=head_dim,
            invariant=invariant,
        )
        self.safe_gate, self.lower_bound = safe_gate, lower_bound
        factory = dict(device=device, dtype=dtype)
        rank, value_heads = self.head_v_dim, self.num_v_heads
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, rank, bias=False, **factory),
            nn.Linear(rank, value_heads * head_dim, bias=False, **factory),
        )
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, rank, bias=False, **factory),
            nn.Linear(rank, value_heads * rank, bias=True, **factory),
        )
        self.reset_gate()

    def _chunk(self, *args, group, **flags) -> tuple[Tensor, Tensor | None]:
        return across(group, chunk_kda)(
            *args, lower_bound=self.lower_bound, safe_gate=self.safe_gate, **flags
        )

    def _chunk_(self, *args, **flags) -> Tensor:
        return chunk_kda_(*args, lower_bound=self.lower_bound, safe_gate=self.safe_gate, **flags)

    def _recurrent_(self, *args, **flags) -> Tensor:
        return recurrent_kda_(*args, lower_bound=self.lower_bound, **flags)

    def _decay_logits(self, x: Tensor) -> Tensor:
        return self.f_proj(x).unflatten(-1, (-1, self.head_k_dim))

    def _output_gate(self, x: Tensor) -> Tensor:
        return self.g_proj(x)

    def _draw_A(self) -> Tensor:
        return (
            torch.ones_like(self.A_log)
            if self.safe_gate
            else torch.empty_like(self.A_log).uniform_(1, 16)
        )
