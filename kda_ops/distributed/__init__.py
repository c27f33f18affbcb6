"""Context parallelism for KDA and GDN, with torch.distributed alone.

Each rank of a group holds a contiguous shard of the token axis, of any length, in the order of the
ranks. `kda_ops.distributed.chunk` describes the method and its cost.
"""

from kda_ops.distributed.functional import chunk_gdn, chunk_kda
from kda_ops.distributed.plan import ContextPlan, plan_context
from kda_ops.distributed.tail import exchange_tail

__all__ = ["ContextPlan", "chunk_gdn", "chunk_kda", "exchange_tail", "plan_context"]
