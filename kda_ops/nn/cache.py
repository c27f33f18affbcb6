"""Keep what a layer needs between calls: the recurrent state and the convolutions' last inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from kda_ops.arguments import is_dense
from kda_ops.checks import is_symbolic
from kda_ops.nn.checks import check_buffer, check_size, check_writable
from kda_ops.private import constant_in_graphs


class Cache(nn.Module):
    """Hold the past of N sequences for one layer, in buffers that the layer reads and writes in
    place.

    ``layer.new_cache(N)`` makes one, filled with zeros: no token seen. Save a prefilled prompt with
    `state_dict`.

    The methods have the names of transformers' caches. Each one acts on the state and on the
    convolution inputs:

    ==============================  ==========================  ================================
    ``reset(sequences)``            zero some                   in place
    ``reorder_cache(beam_idx)``     beam search, forks          in place
    ``batch_select_indices(i)``     keep some, in any order     new buffers, another N
    ``batch_repeat_interleave(r)``  each r times, neighbours    new buffers, another N
    ``copy.deepcopy(cache)``        a second cache              new buffers
    ==============================  ==========================  ================================

    In-place methods keep the addresses of the buffers, so compiled and captured decoding steps stay
    valid. After a method that makes new buffers, capture again.

    Args:
        state: ``[N, HV, V, K]``, fp32, bf16 or (for fp64 inputs) fp64: the recurrent state.
        q_conv, k_conv, v_conv: ``[N, conv_size - 1, channels]``, fp16 to fp64: the last inputs of
            each convolution, oldest first. None in a layer without convolutions. No two buffers may
            be the same memory.

    Raises:
        ValueError: one buffer is given twice.

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
        _refuse_twice(self.named_buffers(remove_duplicate=False))

    @property
    def batch_size(self) -> int:
        """The number of sequences, N."""
        return self.state.shape[0]

    @torch.no_grad()
    def reset(self, sequences: Tensor | slice | Sequence[int] | int = slice(None)) -> None:
        """Zero the past of the given sequences, so that new ones can start in their place.

        Args:
            sequences: one or more integers, a mask ``[N]`` of bools, or a slice; all by default.

        Raises:
            ValueError: `sequences` are not integers or bools along one axis.
            TypeError: torch cannot make a tensor of `sequences`.
            IndexError: an index is outside the N sequences. On a GPU torch checks that later.
            RuntimeError: the cache was made under ``torch.inference_mode()`` and is used outside.
        """
        if isinstance(sequences, int) and not isinstance(sequences, bool):
            sequences = [sequences]
        index = self._index("sequences", sequences)
        if isinstance(index, Tensor) and index.is_cpu and not torch.compiler.is_compiling():
            index = self._sequences("sequences", index)
        for buffer in self._writable():
            buffer[index] = 0

    @torch.no_grad()
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give sequence n the past of sequence ``beam_idx[n]``, in place.

        Args:
            beam_idx: ``[N]`` integers. A repeated index forks its sequence.

        Raises:
            ValueError: `beam_idx` does not have N integers.
            TypeError: torch cannot make a tensor of `beam_idx`.
            IndexError: an index is outside the N sequences.
            RuntimeError: the cache was made under ``torch.inference_mode()`` and is used outside.
        """
        source = self._sequences("beam_idx", beam_idx)
        if source.shape[0] != self.batch_size:
            raise ValueError(
                f"beam_idx must have shape [N] = [{self.batch_size}], got {list(source.shape)}: "
                "batch_select_indices changes the number of sequences."
            )
        for buffer in self._writable():
            buffer.copy_(buffer.index_select(0, source.to(buffer.device)))

    @torch.no_grad()
    def batch_select_indices(self, indices: Tensor | slice | Sequence[int]) -> None:
        """Keep only the given sequences, in the given order, in new buffers.

        Args:
            indices: ``[M]`` integers, a mask ``[N]`` of bools, or a slice.

        Raises:
            ValueError: `indices` are not integers or bools along one axis.
            TypeError: torch cannot make a tensor of `indices`.
            IndexError: an index is outside the N sequences.
        """
        kept = self._sequences("indices", indices)
        self._replace([buffer.index_select(0, kept.to(buffer.device)) for buffer in self.buffers()])

    @torch.no_grad()
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence, copies next to each other, in new buffers.

        Args:
            repeats: copies of each sequence, at least 1.

        Raises:
            ValueError: `repeats` is below 1.
            TypeError: `repeats` is not a whole number.
        """
        check_size("repeats", repeats)
        self._replace([buffer.repeat_interleave(int(repeats), 0) for buffer in self.buffers()])

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove the last tokens: a state does not store earlier states.

        Raises:
            NotImplementedError: `tokens_to_remove` is not 0.
        """
        if tokens_to_remove:
            raise NotImplementedError(
                "crop cannot remove tokens from a recurrent state, which does not store earlier "
                "states: copy.deepcopy the cache before those tokens and continue from the copy."
            )

    def _index(self, name: str, index: Tensor | slice | Sequence[int] | int) -> Tensor | slice:
        """Return an index into the sequences that torch takes; its values are not read."""
        try:
            if isinstance(index, slice):
                chosen = range(self.batch_size)[index]  # refuses what is no index
                if chosen.step > 0:
                    return index
                return torch.tensor(chosen, dtype=torch.int64, device="cpu")
            # torch's default device may be another one: it would move even a tensor
            index = index if isinstance(index, Tensor) else torch.as_tensor(index, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name} must be integers or bools along one axis, got {index!r}."
            ) from error
        index = index if index.numel() else index.long()  # torch makes floats of []
        if index.is_floating_point() or index.is_complex() or index.dim() != 1:
            raise ValueError(
                f"{name} must be integers or bools along one axis, "
                f"got {index.dtype} of shape {list(index.shape)}."
            )
        return index if index.dtype is torch.bool else index.long()  # uint8 would be a mask

    def _sequences(self, name: str, index: Tensor | slice | Sequence[int]) -> Tensor:
        """Return the numbers of the sequences that an index selects, [M] from 0 to N - 1."""
        chosen, N = self._index(name, index), self.batch_size
        numbers = torch.arange(N, device=chosen.device if isinstance(chosen, Tensor) else "cpu")
        try:
            return numbers[chosen]
        except IndexError as error:
            raise IndexError(f"{name} must name some of the N = {N} sequences: {error}.") from error

    def _writable(self) -> list[Tensor]:
        """Check that every buffer may be written; return all of them."""
        for buffer in self.buffers():
            check_buffer("cache", buffer)
        self._check_writable()
        return list(self.buffers())

    def _check_writable(self) -> None:
        """Refuse to be written outside inference mode if a buffer was made under it."""
        if self._is_of_inference_mode():  # a graph of other caches needs no check
            check_writable("cache", *self.buffers())

    # Dynamo calls it on the cache itself, and guards whether its buffers are of inference mode.
    @constant_in_graphs
    def _is_of_inference_mode(self) -> bool:
        return any(buffer.is_inference() for buffer in self.buffers())

    def _replace(self, buffers: list[Tensor]) -> None:
        names = [name for name, _ in self.named_buffers()]
        for name, buffer in zip(names, buffers):
            setattr(self, name, buffer)


def _refuse_twice(buffers: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse two buffers that begin at one address: a layer would write one over the other."""
    names: dict[object, str] = {}
    for name, x in buffers:
        has_memory = is_dense(x) and not is_symbolic(x) and x.numel()
        place = (x.device, x.data_ptr()) if has_memory else id(x)
        if place in names:
            raise ValueError(
                f"{name} must be a buffer of its own, got the memory of {names[place]}: clone it."
            )
        names[place] = name
