"""transformers as a side of `verax bench embed`, as in sentence-transformers. Needs `pip install 'verax[parity]'`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from verax.bench.embed.torch_model import import_torch, pooled_model
from verax.embed.settings import EncoderSettings
from verax.machine import num_cores

__all__ = ["TransformersSide"]


class TransformersSide:
    """`SentenceTransformer.encode`, without that library: sorted, tokenised, padded, run, pooled, normalised."""

    def __init__(self, folder: Path, dtype: str, settings: EncoderSettings):
        self._torch, transformers = import_torch()
        self._settings = settings
        self._versions = {"torch": self._torch.__version__, "transformers": transformers.__version__}
        self._torch.set_num_threads(num_cores())
        self._device = "cuda" if self._torch.cuda.is_available() else "cpu"
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, padding_side="right")
        self._model: Any = pooled_model(folder, settings.pooling, dtype=dtype).to(self._device)

    def versions(self) -> dict[str, Any]:
        """Versions, threads and device of this side."""
        return {**self._versions, "torch_threads": self._torch.get_num_threads(), "torch_device": self._device}

    def encode(self, texts: list[str], batch_size: int) -> Float32[np.ndarray, "n D"]:
        """Normalised vectors, in order."""
        torch = self._torch
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found = []
        with torch.inference_mode():
            for begin in range(0, len(order), batch_size):
                chosen = [texts[i] for i in order[begin : begin + batch_size]]
                inputs = self._tokenizer(
                    chosen, padding=True, truncation=True, max_length=self._settings.max_length, return_tensors="pt"
                )
                ids, mask = inputs["input_ids"].to(self._device), inputs["attention_mask"].to(self._device)
                found.append(self._model(ids, mask).float().cpu())
        vectors = torch.cat(found).numpy()
        return vectors[np.argsort(order)]
