"""Context parallelism: KDA and GDN over sequences whose tokens lie across the ranks of a group,
with torch.distributed alone.

Each rank holds a contiguous shard of the token axis, in the order of the ranks, of any length. See
`kda_ops.distributed.chunk` for the method and its cost.
"""

from kda_ops.distributed.functional import chunk_gdn, chunk_kda
from kda_ops.distributed.plan import ContextPlan, plan_context
from kda_ops.distributed.tail import exchange_tail

__all__ = ["ContextPlan", "chunk_gdn", "chunk_kda", "exchange_tail", "plan_context"]
