"""Sentence embeddings compared with transformers, OpenVINO and onnxruntime: `verax bench embed`."""
