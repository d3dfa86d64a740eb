"""The few modules that models share. Parameters keep PyTorch's names, shapes and layouts, so a path is a file's key."""

from verax.nn.layers import (
    CausalConv3d,
    Conv2d,
    DividedRMSNorm,
    Embedding,
    LayerNorm,
    Linear,
    LowRank,
    RMSNorm,
    Sequential,
    fused_gelu_mlp,
    fused_linear,
    fused_swiglu,
    is_tied_head,
    pack_linear_weights,
    packed_copy,
    split_swiglu,
)
from verax.nn.sentences import Sentences

__all__ = [
    "CausalConv3d",
    "Conv2d",
    "DividedRMSNorm",
    "Embedding",
    "LayerNorm",
    "Linear",
    "LowRank",
    "RMSNorm",
    "Sentences",
    "Sequential",
    "fused_gelu_mlp",
    "fused_linear",
    "fused_swiglu",
    "is_tied_head",
    "pack_linear_weights",
    "packed_copy",
    "split_swiglu",
]
