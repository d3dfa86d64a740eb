"""GGUF, llama.cpp's file format: header and tensors, names and layout, weights."""
