"""Register autocast: cast q, k and v to the autocast dtype; other tensors keep theirs.

Decays, beta, gate parameters and states are summed in float32. Inside an operator autocast is off,
also in a backward that runs in an autocast region.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.operators import (
    CHUNK,
    CHUNK_,
    CHUNK__OUT,
    RECURRENT,
    RECURRENT_,
    RECURRENT__OUT,
    Operator,
)
from kda_ops.private import AUTOCAST, ExcludeKeys
from kda_ops.registrations import schemas
from kda_ops.registrations.opaque import opaque


def _cast(operator: Operator, namespace: str, device_type: str):
    op = operator.overload(namespace)

    @opaque
    def kernel(q: Tensor, k: Tensor, v: Tensor, *args, **flags):
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = (
            x.to(dtype)
            if x is not None and x.dtype is not torch.float64 and x.dtype.is_floating_point
            else x
            for x in (q, k, v)
        )
        with ExcludeKeys(AUTOCAST):
            return op(q, k, v, *args, **flags)

    return kernel


def _as_it_is(operator: Operator, namespace: str, device_type: str):
    op = operator.overload(namespace)

    @opaque
    def kernel(*args, **flags):
        with ExcludeKeys(AUTOCAST):
            return op(*args, **flags)

    return kernel


_CAST = (CHUNK, RECURRENT, RECURRENT_, CHUNK_, CHUNK__OUT, RECURRENT__OUT)

for _namespace, _library in schemas.LIBRARIES.items():
    for _operator in schemas.operators(_namespace):
        for _device in ("cpu", "cuda"):
            _library.impl(
                _operator.name,
                (_cast if _operator in _CAST else _as_it_is)(_operator, _namespace, _device),
                f"Autocast{_device.upper()}",
            )
