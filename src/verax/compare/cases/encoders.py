"""transformers' side of a comparison of encoders: how each family is loaded, and called on padded rows.

A row and its padding see themselves only, as ours have it, so that there is a right answer for padding too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from verax.compare.torch_side import torch

__all__ = ["EncoderReference"]

_HIDDEN = -1e9
"""Score of a key that a query does not see; bfloat16 holds it too."""


class EncoderReference:
    """An encoder of transformers: BERT and RoBERTa, ModernBERT, or a language model without its head.

    Args:
        package: transformers.
        folder: the checkpoint's.
        config: our configuration.
        kind: its `model_type`.
    """

    def __init__(self, package: Any, folder: Path, config: Any, kind: str):
        self._package, self._folder, self._config = package, folder, config
        self._kind = kind if kind in ("bert", "roberta", "xlm-roberta", "modernbert") else "causal"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Patterns of the modules whose input is recorded: those behind the attention."""
        places = {"modernbert": r"attn\.Wo$", "causal": r"self_attn\.o_proj$"}
        return (places.get(self._kind, r"attention\.output\.dense$"),)

    def load(self, dtype: str) -> Any:
        """The model, its module paths those of ours."""
        lib = self._package
        auto = lib.AutoModelForCausalLM if self._kind == "causal" else lib.AutoModel
        options = {} if self._kind in ("causal", "modernbert") else {"add_pooling_layer": False}
        loaded: Any = auto.from_pretrained(
            self._folder, dtype=getattr(torch(), dtype), attn_implementation="eager", **options
        )
        return loaded.eval()

    def arguments(self, ids: np.ndarray, real: np.ndarray) -> tuple[Any, ...]:
        """Arguments of `call` behind the model.

        Args:
            ids: tokens `[B, T]`.
            real: mask `[B, T]`, False for padding.
        """
        if self._kind == "causal":  # what is padded on the right, nothing before it sees
            return (ids,)
        T = ids.shape[1]
        same = real[:, None, :, None] == real[:, None, None, :]
        every = np.where(same, 0.0, _HIDDEN).astype(np.float32)
        if self._kind == "modernbert":
            near = abs(np.arange(T)[:, None] - np.arange(T)) <= self._config.local_attention // 2
            return ids, every, np.where(near, every, _HIDDEN).astype(np.float32)
        return ids, every, self._config.first_position + np.broadcast_to(np.arange(T), ids.shape)

    def call(self, model: Any, ids: Any, *masks: Any) -> Any:
        """Hidden states."""
        if self._kind == "causal":
            return model.model(input_ids=ids, use_cache=False).last_hidden_state
        seen, other = masks[0].to(model.dtype), masks[1]
        if self._kind == "modernbert":
            layers = {"full_attention": seen, "sliding_attention": other.to(model.dtype)}
            return model(input_ids=ids, attention_mask=layers).last_hidden_state
        return model(input_ids=ids, attention_mask=seen, position_ids=other).last_hidden_state
