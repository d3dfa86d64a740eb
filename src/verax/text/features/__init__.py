"""LoRA, speculative decoding, grammars, tools and reasoning."""
