"""The promises made to PyTorch, one file per kind: importing this package registers every operator
once.
"""

import torch

from kda_ops.registrations import schemas, kernels, fake, autograd, autocast, vmap, refusals, lazy  # noqa: F401  (schemas first)
from kda_ops.registrations import writable  # noqa: F401

# The operators that a selective-checkpointing policy names to keep what chunked attention computed:
# `chunk_fwd` stands in training graphs, `chunk` in others.
SAVE_OPS = frozenset(
    getattr(getattr(torch.ops, ns), op).default
    for ns in schemas.VARIANTS
    for op in ("chunk", "chunk_fwd", "recurrent")
)
