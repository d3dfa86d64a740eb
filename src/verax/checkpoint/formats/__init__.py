"""File formats of weights: safetensors, `.pth`, GGUF, compressed-tensors; all memory-mapped."""
