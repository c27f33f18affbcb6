"""Define the Gated DeltaNet layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kda_ops.functional import chunk_gdn, chunk_gdn_, recurrent_gdn_
from kda_ops.nn.checks import check_flag
from kda_ops.nn.delta_attention import DeltaAttention
from kda_ops.nn.local import across


class GatedDeltaNet(DeltaAttention):
    """Mix tokens with Gated DeltaNet: a delta rule with one decay per token and value head.

    q, k and v pass a projection, a short causal convolution and SiLU. Write strengths are
    ``sigmoid(b_proj(x))``. The operator normalises q and k, and activates the decay and the write
    strengths. An RMS norm gated by ``activation(g_proj(x))``, and ``o_proj``, follow. Input and
    output are ``[B, T, hidden_size]``; see `forward`.

    Args:
        hidden_size: width of the input and output.
        expand_v: V / K, the ratio of the widths of a value head and a key head.
        head_dim: K, up to 256.
        num_heads: H, heads of q and k.
        num_v_heads: HV, a multiple of H; H by default.
        use_gate: gate the output; False: only normalise it.
        output_gate_activation: ``"swish"``, also called ``"silu"``, or ``"sigmoid"``.
        use_short_conv: convolve q, k and v; False: only SiLU.
        allow_neg_eigval: allow write strengths up to 2: ``2 * sigmoid(b_proj(x))``.
        conv_size, conv_bias: taps per channel, and whether each channel adds a bias.
        norm_eps: epsilon of the gated RMS norm, above 0.
        device, dtype: of the parameters, 16 bits or more. `A_log` and `dt_bias` are fp32 for any
            `dtype`. ``.to(torch.bfloat16)`` rounds them, and forward then warns: pass `dtype`
            instead.
        invariant: pass ``invariant=True`` to the chunk form (`kda_ops.chunk_gdn`). The bits of the
            projections, and of the token recurrence that decodes single tokens from a cache, are
            not part of that promise (docs/numerics.md, "Invariant calls").

    Parameters: ``q_proj k_proj v_proj``, ``q_conv1d k_conv1d v_conv1d``
    ``[channels, 1, conv_size]``, ``a_proj`` (decay), ``b_proj``, ``A_log`` and ``dt_bias``
    ``[HV]``, ``g_proj`` (output gate), ``o_norm``, ``o_proj``. ``A_log`` starts at
    ``log U(0, 16)``. ``A_log`` and ``dt_bias`` have the attribute ``_no_weight_decay = True``.
    `copy.deepcopy`, ``fully_shard``, ``to_empty`` and ``load_state_dict(assign=True)`` make new
    parameters without it. After these, select the parameters for weight decay by name.

    FSDP2 requires one dtype per parameter group ("uniform original parameter dtype"), and a
    ``MixedPrecisionPolicy`` rounds a whole group. With ``dtype=torch.bfloat16``, or with such a
    policy, give ``A_log`` and ``dt_bias`` a group of their own::

        fully_shard(list(layer.children()), mp_policy=policy)  # or no policy, with dtype=
        fully_shard(layer)  # A_log and dt_bias, in fp32

    With a policy, decode with ``new_cache(N, dtype=policy.param_dtype)``.

    Raises:
        ValueError: sizes do not fit together, or `norm_eps` is not finite and above 0.
        TypeError: an option has another Python type, or `dtype` has 8 bits or is not a float.

    Example:
        >>> import torch, kda_ops.nn
        >>> layer = kda_ops.nn.GatedDeltaNet(hidden_size=64, head_dim=16, num_heads=2)
        >>> mask = torch.ones(3, 100)
        >>> mask[0, :40] = 0  # left padding
        >>> layer(torch.randn(3, 100, 64), attention_mask=mask)[0, :40].any()
        tensor(False)

    Source: Gated Delta Networks, arXiv:2412.06464.
    """

    _decay_rank = 0

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2.0,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        *,
        use_gate: bool = True,
        output_gate_activation: str = "swish",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        device=None,
        dtype=None,
        invariant: bool = False,
    ):
        check_flag("use_gate", use_gate)
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
            norm_activation=output_gate_activation,
            dt_bias_width=1,
            invariant=invariant,
        )
        value_heads = self.num_v_heads
        self.a_proj = nn.Linear(hidden_size, value_heads, bias=False, device=device, dtype=dtype)
        self.g_proj = (
            nn.Linear(
                hidden_size, value_heads * self.head_v_dim, bias=False, device=device, dtype=dtype
            )
            if use_gate
            else None
        )
        self.reset_gate()

    def _chunk(self, *args, group, **flags) -> tuple[Tensor, Tensor | None]:
        return across(group, chunk_gdn)(*args, **flags)

    def _chunk_(self, *args, **flags) -> Tensor:
        return chunk_gdn_(*args, **flags)

    def _recurrent_(self, *args, **flags) -> Tensor:
        return recurrent_gdn_(*args, **flags)

    def _decay_logits(self, x: Tensor) -> Tensor:
        return self.a_proj(x)

    def _output_gate(self, x: Tensor) -> Tensor | None:
        return None if self.g_proj is None else self.g_proj(x)

    def _draw_A(self) -> Tensor:
        return 16 * (1 - torch.rand_like(self.A_log))  # never 0: its log is -inf
