"""transformers as a side of `verax bench embed`, as in sentence-transformers. Needs `pip install 'verax[parity]'`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from verax.bench.harness import import_torch, torch_versions
from verax.embed.settings import EncoderSettings

__all__ = ["pooled_model", "transformers_encode"]


def pooled_model(folder: Path, pooling: str, *, dtype: str = "float32", attention: str = "sdpa") -> Any:
    """`torch.nn.Module` from token ids and mask, int64 `[B, T]` with padding on the right, to unit vectors `[B, D]`.

    It is what is run as a baseline, or exported for others. Its `padding` is the token id after the end of a text.

    Args:
        folder: the checkpoint's.
        pooling: `"mean"`, `"cls"` or `"lasttoken"`.
        dtype: of weights and vectors.
        attention: `attn_implementation` of transformers.

    Raises:
        MissingDependencyError: without torch or transformers.
    """
    torch, transformers = import_torch("transformers")

    class PooledModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            model: Any = transformers.AutoModel.from_pretrained(
                folder, dtype=getattr(torch, dtype), attn_implementation=attention
            )
            # Keys and values that nothing reads later.
            model.config.use_cache = False
            self.model = model
            self.padding: int = model.config.pad_token_id or 0

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return torch.nn.functional.normalize(pooled(hidden, attention_mask))

    def pooled(hidden: Any, mask: Any) -> Any:
        if pooling == "cls":
            return hidden[:, 0]
        if pooling == "lasttoken":
            last = (mask.sum(1) - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
            return hidden.gather(1, last)[:, 0]
        weights = mask[..., None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)

    return PooledModel().eval()


def transformers_encode(folder: Path, dtype: str, settings: EncoderSettings, batch_size: int) -> tuple[Any, dict]:
    """`SentenceTransformer.encode` without that library: sorted, tokenised, padded, run, pooled, normalised.

    Returns:
        Function from texts to their vectors, in order, and the versions.
    """
    torch, transformers = import_torch("transformers")
    versions = torch_versions(torch, transformers)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, padding_side="right")
    model: Any = pooled_model(folder, settings.pooling, dtype=dtype).to(versions["torch_device"])

    def encode(texts: list[str]) -> Float32[np.ndarray, "n D"]:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors = []
        with torch.inference_mode():
            for begin in range(0, len(order), batch_size):
                batch = [texts[i] for i in order[begin : begin + batch_size]]
                inputs = tokenizer(
                    batch, padding=True, truncation=True, max_length=settings.max_length, return_tensors="pt"
                )
                ids, mask = (inputs[name].to(versions["torch_device"]) for name in ("input_ids", "attention_mask"))
                vectors.append(model(ids, mask).float().cpu())
        return torch.cat(vectors).numpy()[np.argsort(order)]

    return encode, versions
