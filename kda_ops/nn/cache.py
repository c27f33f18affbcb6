"""What a layer remembers between calls: the recurrent state, and the last inputs of its
convolutions.
"""

from __future__ import annotations

from torch import Tensor, nn


class Cache(nn.Module):
    """Hold the past of N sequences for one layer, in buffers that the layer reads and writes in
    place.

    Made by ``layer.new_cache(N)``; zeros mean that nothing has been seen. Its addresses never
    change, so compiled and captured decoding steps keep working on it, and `state_dict` saves a
    prompt that was read once.

    Args:
        state: ``[N, HV, V, K]`` fp32, the recurrent state.
        q_conv, k_conv, v_conv: ``[N, conv_size - 1, channels]`` in the layer's dtype, the last
            inputs of each convolution, oldest first; None in a layer without convolutions.

    Example:
        >>> import torch, kda_ops.nn
        >>> layer = kda_ops.nn.KimiDeltaAttention(hidden_size=64, head_dim=16, num_heads=2)
        >>> cache = layer.new_cache(3)
        >>> cache.state.shape, cache.q_conv.shape
        (torch.Size([3, 2, 16, 16]), torch.Size([3, 3, 32]))

    Source: Kimi Linear technical report, arXiv:2510.26692 (a state of constant size per sequence).
    """

    state: Tensor
    q_conv: Tensor | None
    k_conv: Tensor | None
    v_conv: Tensor | None

    def __init__(
        self,
        state: Tensor,
        q_conv: Tensor | None = None,
        k_conv: Tensor | None = None,
        v_conv: Tensor | None = None,
    ):
        super().__init__()
        self.register_buffer("state", state)
        self.register_buffer("q_conv", q_conv)
        self.register_buffer("k_conv", k_conv)
        self.register_buffer("v_conv", v_conv)

    def reset(self, sequences: Tensor | slice = slice(None)) -> None:
        """Forget the given sequences (an index into N; all by default), so that new ones can start
        in their place.
        """
        for buffer in self.buffers():
            buffer[sequences] = 0
