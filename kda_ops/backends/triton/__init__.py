"""The Triton backend, for CUDA tensors, and for CPU tensors under the Triton interpreter.

The first use of `BACKEND` imports triton; the package alone and `keeps` do not.
"""

import importlib

__all__ = ["BACKEND"]


def __getattr__(name: str):
    if name == "BACKEND":
        return importlib.import_module("kda_ops.backends.triton.backend").BACKEND
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
