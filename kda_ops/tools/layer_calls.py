"""The calls of a layer's convolution and gated norm that `kda_ops.tools.offline` compiles."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from kda_ops import convolution, norm


@dataclass(frozen=True)
class LayerCall:
    """A convolution of 16 heads of 128 channels, or the gated norm of such heads."""

    op: str  # "conv" or "norm"
    gate: str = "silu"  # the activation; budgets are by kernel and gate
    dtype: torch.dtype = torch.bfloat16
    packed: bool = False
    pool: bool = False  # one token per sequence on a pool of tails

    @property
    def label(self) -> str:
        """What the row is called."""
        marks = " packed" * self.packed + " on a pool" * self.pool
        return f"{self.op} {str(self.dtype)[6:]} {self.gate}{marks}"

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    def compile(self) -> None:
        """Launch forward and backward, or decode on a pool."""
        from kda_ops.backends.triton import BACKEND

        flags: dict[str, Any] = {"activation": self.gate}
        inputs: tuple[torch.Tensor | None, ...]
        if self.op == "norm":
            x = self._empty(2, 4096, 16, 128)
            inputs = x, self._empty(1, 128), x
            BACKEND.run(norm.Norm, 0, inputs, flags)
            BACKEND.run(norm.NormBackward, 0, (x, *inputs), flags)
            return
        weight, bias = self._empty(2048, 4), self._empty(2048)
        if self.pool:
            pool, slots = self._empty(256, 3, 2048), self._empty(128, dtype=torch.int32)
            inputs = self._empty(128, 1, 2048), weight, None, pool, slots
            BACKEND.run(convolution.ConvolveInPlace, 0, inputs, flags)
            return
        x, tail, offsets = self._empty(2, 4096, 2048), None, None
        if self.packed:
            x, tail = self._empty(1, 4096, 2048), self._empty(8, 3, 2048)
            offsets = self._empty(9, dtype=torch.int32)
        inputs = x, weight, bias if self.packed else None, tail, offsets
        flags |= {"output_final_tail": self.packed}
        BACKEND.run(convolution.Convolve, 0, inputs, flags)
        cotangents = x, tail if self.packed else None
        BACKEND.run(convolution.ConvolveBackward, 0, (*cotangents, *inputs), flags | {"need": 15})


LAYER_CALLS = (
    LayerCall("conv", packed=True),
    LayerCall("conv"),
    LayerCall("conv", pool=True),
    LayerCall("norm", "sigmoid"),
    LayerCall("norm"),
    *(LayerCall(op, dtype=dtype) for op, dtype in product(("conv", "norm"), (torch.float32,))),
    LayerCall("conv", pool=True, dtype=torch.float32),
)
