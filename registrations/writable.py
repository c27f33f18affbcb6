"""Check in a graph that buffers may be written, before they are.

The operator reads the buffers and has no output. It is marked as having a side effect, so torch
keeps it. Eager and AOT graphs run it in the order of the program, and copy to mutated inputs at the
end. Inductor writes a buffer only after every kernel that reads its old values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_ops.arguments import check_writable
from kda_ops.registrations import fake, schemas
from kda_ops.registrations.opaque import opaque

_LIBRARY, _NAME = schemas.LIBRARIES[schemas.KDA], "check_writable"


@opaque
def _check(buffers: list[Tensor], name: str) -> None:
    check_writable(name, *buffers)


_LIBRARY.define(f"{_NAME}(Tensor[] buffers, str name) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl(_NAME, _check, _key)
fake.register(schemas.KDA, _NAME, lambda buffers, name: None)
torch.fx.node.has_side_effect(torch.ops.kda.check_writable.default)
