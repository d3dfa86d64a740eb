"""SmolLM3: a Llama of which every fourth layer has no rotary positions (NoPE).

Follows transformers' `SmolLM3ForCausalLM`; module paths are the keys of its checkpoints. NoPE in some layers: Yang et
al., 2025 (arXiv:2501.18795).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verax import ops
from verax.errors import CheckpointError
from verax.fields import Size, read_value
from verax.models.causal_lm import text_config
from verax.models.qwen3 import (
    FULL,
    SLIDING,
    Qwen3Config,
    Qwen3ForCausalLM,
    decoder_fields,
    layer_windows,
)

__all__ = ["SmolLM3Config", "SmolLM3ForCausalLM"]


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(Qwen3Config):
    """Sizes and flags, by the names of config.json where these are clear."""

    rotated: tuple[bool, ...]
    """True for each layer that rotates queries and keys by their positions."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> SmolLM3Config:
        """Read a config.json of `model_type` smollm3."""
        text = text_config(config, rope_theta=2e6, num_key_value_heads=4, tie_word_embeddings=True)
        fields = decoder_fields(text, ops.RotaryConfig.from_hf(text))
        layers = range(fields["num_hidden_layers"])
        interval = read_value(text, "no_rope_layer_interval", Size, 4)
        rotated = read_value(text, "no_rope_layers", tuple[int, ...], tuple((i + 1) % interval != 0 for i in layers))
        if len(rotated) < len(layers):
            raise CheckpointError(f"{text.where}: no_rope_layers has {len(rotated)} entries for {len(layers)} layers")
        rotated = tuple(map(bool, rotated[: len(layers)]))
        windowed = read_value(text, "use_sliding_window", bool, False)
        window = read_value(text, "sliding_window", Size, None) if windowed else None
        kinds = [FULL if window is None or rotated[i] else SLIDING for i in layers]
        return cls(**fields, rotated=rotated, windows=layer_windows(text, window, kinds))

    @property
    def rotaries(self) -> tuple[ops.RotaryConfig | None, ...]:
        """Rotation in each layer; None for a layer without one."""
        pairs = zip(super().rotaries, self.rotated, strict=True)
        return tuple(rotary if rotated else None for rotary, rotated in pairs)


class SmolLM3ForCausalLM(Qwen3ForCausalLM):
    """The language model: `Qwen3ForCausalLM`, whose configuration says which layers rotate."""
