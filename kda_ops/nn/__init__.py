"""Build layers from the operators, in plain PyTorch; parameters have the names of FLA's layers."""

from kda_ops.nn.cache import Cache
from kda_ops.nn.gated_deltanet import GatedDeltaNet
from kda_ops.nn.gated_norm import GatedRMSNorm
from kda_ops.nn.invariant_cache import InvariantCache
from kda_ops.nn.kimi_delta_attention import KimiDeltaAttention
from kda_ops.nn.short_convolution import ShortConvolution

__all__ = [
    "Cache",
    "GatedDeltaNet",
    "GatedRMSNorm",
    "InvariantCache",
    "KimiDeltaAttention",
    "ShortConvolution",
]
