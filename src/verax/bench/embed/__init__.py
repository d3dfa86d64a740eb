"""Sentence embeddings beside transformers: `verax bench embed`."""
