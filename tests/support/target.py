"""Choose where the suite runs: native backend on CPU, Triton interpreter, or GPU.

``KDA_OPS_TEST_DEVICE=cuda`` selects the GPU, ``KDA_OPS_CPU=triton TRITON_INTERPRET=1`` the
interpreter; the default is the native backend.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from kda_ops import dispatch
from kda_ops.problem import Problem


@dataclass(frozen=True)
class Target:
    """A device and the dtypes of its backend."""

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    slow: bool  # one launch costs as much as a whole example elsewhere: few and small examples

    def operand(self, p: Problem) -> torch.dtype:
        """Return the dtype to which a twin rounds operands and stored tensors of a CPU call."""
        return p.q.dtype if dispatch.backend_name(self.device) == "triton" else p.state_dtype


GPU = Target(torch.device("cuda"), (torch.bfloat16, torch.float16, torch.float32), slow=False)


def _target() -> Target:
    device = torch.device(os.environ.get("KDA_OPS_TEST_DEVICE", "cpu"))
    if device.type == "cuda":
        return replace(GPU, device=device)
    if dispatch.backend_name(device) == "triton":
        return Target(device, (torch.float32, torch.bfloat16, torch.float16), slow=True)
    return Target(device, (torch.float32, torch.bfloat16, torch.float16, torch.float64), slow=False)


TARGET = _target()
