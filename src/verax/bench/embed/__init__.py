"""Sentence embeddings beside transformers, OpenVINO and onnxruntime: `verax bench embed`."""
