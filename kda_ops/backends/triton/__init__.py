"""The Triton backend: CUDA tensors, and CPU tensors under the Triton interpreter. Importing this
folder imports triton.
"""

from kda_ops.backends.triton.gate import gate, gate_backward
from kda_ops.backends.triton.gradient import gradient
from kda_ops.backends.triton.launch import beside, compiling
from kda_ops.backends.triton.prepare import prepare
from kda_ops.backends.triton.reverse_scan import reverse_scan
from kda_ops.backends.triton.scan import scan
from kda_ops.backends.triton.step import Launch, step
from kda_ops.backends.triton.tuning import leaves_room

plan_step = Launch

__all__ = [
    "beside",
    "compiling",
    "gate",
    "gate_backward",
    "gradient",
    "leaves_room",
    "plan_step",
    "prepare",
    "reverse_scan",
    "scan",
    "step",
]
