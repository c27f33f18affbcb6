"""The Triton backend, for CUDA tensors, and for CPU tensors under the Triton interpreter.

The first use of `BACKEND` imports triton. `KEEPS` does not.
"""

import importlib

from kda_ops.backends.triton.keeps import KEEPS

__all__ = ["BACKEND", "KEEPS"]


def __getattr__(name: str):
    if name == "BACKEND":
        return importlib.import_module("kda_ops.backends.triton.backend").BACKEND
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
