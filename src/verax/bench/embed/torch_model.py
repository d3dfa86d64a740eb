"""Model of transformers that gives pooled, normalised vectors: what is run as a baseline, or exported for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verax.errors import MissingDependencyError

__all__ = ["import_torch", "pooled_model"]


def import_torch() -> tuple[Any, Any]:
    """Modules torch and transformers, without their progress bars and remarks.

    Raises:
        MissingDependencyError: if one of them is not installed.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            "comparing with transformers needs it and torch: pip install 'verax[parity]'"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return torch, transformers


def pooled_model(folder: Path, pooling: str, *, dtype: str = "float32", attention: str = "sdpa") -> Any:
    """`torch.nn.Module` from token ids and mask, int64 `[B, T]` with padding on the right, to vectors `[B, D]`.

    Its `padding` is the token id behind the end of a text.

    Args:
        folder: the checkpoint's.
        pooling: `"mean"`, `"cls"` or `"lasttoken"`.
        dtype: of weights and vectors.
        attention: `attn_implementation` of transformers.

    Raises:
        MissingDependencyError: without torch or transformers.
    """
    torch, transformers = import_torch()

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
