"""Register every operator with PyTorch on import, one file per kind of rule."""

import torch

from kda_ops.registrations import schemas, kernels, fake, autograd, autocast, vmap, refusals, lazy  # noqa: F401  (schemas first)
from kda_ops.registrations import writable  # noqa: F401

# Operators for a selective-checkpointing policy that keeps the results of attention. Training
# graphs contain `chunk_fwd`, other graphs `chunk`. Of a call on a shard, `chunk_map` leaves tiles,
# which are large.
SAVE_OPS = frozenset(
    getattr(getattr(torch.ops, ns), op).default
    for ns in schemas.VARIANTS
    for op in ("chunk", "chunk_fwd", "chunk_join", "recurrent")
)
