"""The Triton backend: CUDA tensors, and CPU tensors under the Triton interpreter. Importing this folder imports triton."""

from kda_ops.backends.triton.gate import gate, gate_backward
from kda_ops.backends.triton.gradient import gradient
from kda_ops.backends.triton.prepare import prepare
from kda_ops.backends.triton.reverse_scan import reverse_scan
from kda_ops.backends.triton.scan import scan
from kda_ops.backends.triton.step import Launch, step

plan_step = Launch

__all__ = ["gate", "gate_backward", "gradient", "plan_step", "prepare", "reverse_scan", "scan", "step"]
