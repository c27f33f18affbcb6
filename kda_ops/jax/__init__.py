"""KDA and Gated DeltaNet for JAX: Pallas TPU kernels under the names of the torch functions.

``pip install "kda-ops[jax]"``. Without a TPU the kernels run in Pallas's interpret mode.
"""

from kda_ops.jax.functional import (
    chunk_gdn,
    chunk_kda,
    gdn_gate,
    kda_gate,
    recurrent_gdn,
    recurrent_kda,
)

__all__ = ["chunk_gdn", "chunk_kda", "gdn_gate", "kda_gate", "recurrent_gdn", "recurrent_kda"]
