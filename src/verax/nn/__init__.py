"""The few modules that models share. Parameters keep PyTorch's names, shapes and layouts, so a path is a file's key."""

from verax.nn.layers import Embedding, LayerNorm, Linear, RMSNorm

__all__ = ["Embedding", "LayerNorm", "Linear", "RMSNorm"]
