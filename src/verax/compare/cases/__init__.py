"""Comparisons that `verax compare` knows by name: text, embeddings, video."""
