"""Text, embeddings and rerankers over HTTP, in four dialects."""
