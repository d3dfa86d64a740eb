"""Comparisons that `verax compare` has by name: text, embeddings, video."""
