"""What a layer remembers between calls: the recurrent state, and the last inputs of its
convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Cache(nn.Module):
    """Hold the past of N sequences for one layer, in buffers that the layer reads and writes in
    place.

    ``layer.new_cache(N)`` makes one; zeros mean that nothing has been seen. `state_dict` saves a
    prompt that was read once.

    Sequences are selected, reordered and repeated by the names that transformers' caches use. State
    and convolution inputs follow together:

    ==============================  ==========================  ================================
    ``reset(sequences)``            forget some                 in place
    ``reorder_cache(beam_idx)``     beam search, forks          in place
    ``batch_select_indices(i)``     keep some, in any order     new buffers, another N
    ``batch_repeat_interleave(r)``  each r times, neighbours    new buffers, another N
    ``copy.deepcopy(cache)``        a second cache              new buffers
    ==============================  ==========================  ================================

    What works in place keeps the addresses, so compiled and captured decoding steps go on with this
    cache. After new buffers, capture again.

    Args:
        state: ``[N, HV, V, K]`` fp32, the recurrent state.
        q_conv, k_conv, v_conv: ``[N, conv_size - 1, channels]``, the last inputs of each
            convolution, oldest first; None in a layer without convolutions.

    Example:
        >>> import copy, torch, kda_ops.nn
        >>> layer = kda_ops.nn.KimiDeltaAttention(hidden_size=64, head_dim=16, num_heads=2)
        >>> cache = layer.new_cache(3)
        >>> cache.state.shape, cache.q_conv.shape
        (torch.Size([3, 2, 16, 16]), torch.Size([3, 3, 32]))
        >>> cache.reorder_cache(torch.tensor([0, 0, 2]))  # the second is a fork of the first
        >>> cache.batch_repeat_interleave(4)  # four beams for each
        >>> cache.batch_size, copy.deepcopy(cache).batch_size
        (12, 12)

    Source: Kimi Linear technical report, arXiv:2510.26692 (a state of constant size per sequence).
    """

    is_croppable = False  # see `crop`

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

    @property
    def batch_size(self) -> int:
        """N, the sequences that it holds."""
        return self.state.shape[0]

    def reset(self, sequences: Tensor | slice = slice(None)) -> None:
        """Forget the given sequences (an index into N; all by default), so that new ones can start
        in their place.
        """
        for buffer in self.buffers():
            buffer[sequences] = 0

    @torch.no_grad()
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give sequence n the past of sequence ``beam_idx[n]``, in place: ``[N]`` integers.

        An index may come more than once, which forks its sequence into the place of another.

        Raises:
            ValueError, IndexError: not N indices, or none of a sequence.
        """
        source = self._sequences("beam_idx", beam_idx)
        if source.shape[0] != self.batch_size:
            raise ValueError(
                f"beam_idx must have shape [N] = [{self.batch_size}], got {list(source.shape)}: "
                "batch_select_indices changes the number of sequences."
            )
        for buffer in self.buffers():
            buffer.copy_(buffer.index_select(0, source.to(buffer.device)))

    @torch.no_grad()
    def batch_select_indices(self, indices: Tensor | slice | Sequence[int]) -> None:
        """Keep the given sequences alone, in the given order, in new buffers.

        Args:
            indices: ``[M]`` integers, a mask ``[N]`` of bools, or a slice.

        Raises:
            ValueError, IndexError: not one axis of indices, or none of a sequence.
        """
        kept = self._sequences("indices", indices)
        self._replace([buffer.index_select(0, kept.to(buffer.device)) for buffer in self.buffers()])

    @torch.no_grad()
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Hold every sequence `repeats` times, copies next to each other, in new buffers.

        Raises:
            ValueError: `repeats` is below 1.
        """
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}.")
        self._replace([buffer.repeat_interleave(repeats, 0) for buffer in self.buffers()])

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take back the last tokens: a state does not keep what it was before them.

        Raises:
            NotImplementedError: always, but for 0 tokens.
        """
        if tokens_to_remove:
            raise NotImplementedError(
                "crop cannot take tokens out of a recurrent state, which keeps no earlier one: "
                "copy.deepcopy the cache before those tokens and go on from the copy."
            )

    def _sequences(self, name: str, index: Tensor | slice | Sequence[int]) -> Tensor:
        """The numbers of the sequences that an index picks, [M] from 0 to N - 1."""
        index = index if isinstance(index, slice) else torch.as_tensor(index)
        if isinstance(index, Tensor):
            index = index if index.numel() else index.long()  # torch makes floats of []
            if index.is_floating_point() or index.is_complex() or index.dim() != 1:
                raise ValueError(
                    f"{name} must be integers or bools along one axis, "
                    f"got {index.dtype} of shape {list(index.shape)}."
                )
        N = self.batch_size
        numbers = torch.arange(N, device=index.device if isinstance(index, Tensor) else None)
        try:
            return numbers[index]
        except IndexError as error:
            raise IndexError(f"{name} must name some of the N = {N} sequences: {error}.") from error

    def _replace(self, buffers: list[Tensor]) -> None:
        names = [name for name, _ in self.named_buffers()]
        for name, buffer in zip(names, buffers):
            setattr(self, name, buffer)
