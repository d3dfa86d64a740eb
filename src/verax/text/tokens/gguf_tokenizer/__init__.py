"""Tokenizer of a GGUF file's metadata, with the ids that transformers gives for the model's tokenizer.json."""

from verax.text.tokens.gguf_tokenizer.metadata import TokenizerParts, read_gguf_tokenizer

__all__ = ["TokenizerParts", "read_gguf_tokenizer"]
