"""Kimi Delta Attention (KDA) and Gated DeltaNet (GDN) as PyTorch operators.

``import kda_ops`` registers the operators as ``torch.ops.kda.*`` and ``torch.ops.gdn.*``. The
functions here call them.
"""

from kda_ops import _checkout  # noqa: F401  (finds the registrations, so it comes first)
from kda_ops.registrations import SAVE_OPS
from kda_ops.functional import (
    chunk_gdn,
    chunk_gdn_,
    chunk_kda,
    chunk_kda_,
    gdn_gate,
    kda_gate,
    recurrent_gdn,
    recurrent_gdn_,
    recurrent_kda,
    recurrent_kda_,
)
from kda_ops.layer_functional import gated_rms_norm, short_conv, short_conv_
from kda_ops.cuts import cut_length

__version__ = "0.1.0"  # the only place: pyproject.toml reads it
__all__ = [
    "SAVE_OPS",
    "chunk_gdn",
    "chunk_gdn_",
    "chunk_kda",
    "chunk_kda_",
    "cut_length",
    "gated_rms_norm",
    "gdn_gate",
    "kda_gate",
    "recurrent_gdn",
    "recurrent_gdn_",
    "recurrent_kda",
    "recurrent_kda_",
    "short_conv",
    "short_conv_",
]
