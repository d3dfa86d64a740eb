"""Ministral 3 and Mistral Small 3: Mistral, in the first with queries that grow with their positions.

Follows transformers' `Ministral3ForCausalLM` and the language model of its `Mistral3ForConditionalGeneration`; module
paths are the keys of their checkpoints. The growth of queries is Llama 4's temperature of attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from verax import ops
from verax.errors import UnsupportedModelError
from verax.fields import Finite, Positive, Size, read_value
from verax.models import qwen3
from verax.models.causal_lm import text_config
from verax.models.gemma3 import Gemma3ForCausalLM
from verax.models.qwen3 import Qwen3Config, Qwen3ForCausalLM, decoder_fields
from verax.ops.rope import rotary_settings

__all__ = ["Ministral3Config", "Ministral3ForCausalLM"]

ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384} | {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Rotation of a Ministral 3 whose file has none."""


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(Qwen3Config):
    """Sizes and flags, by the names of config.json where these are clear."""

    scaling_beta: Finite = 0.0
    """Factor of the growth of queries, which is logarithmic in the contexts of pretraining before a position."""
    scaling_context: Positive = 1.0
    """Tokens of the context of pretraining."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Ministral3Config:
        """Read a config.json of `model_type` ministral3, or the text part of a mistral3 one."""
        outer = read_value(config, "model_type", str) == "mistral3"
        kind = read_value(text_config(config, model_type="mistral"), "model_type", str) if outer else "ministral3"
        if kind == "mistral":
            text = text_config(config, model_type=kind, rms_norm_eps=1e-5, head_dim=128, sliding_window=None)
            return cls(**vars(Qwen3Config.from_hf(text)))
        if kind != "ministral3":
            raise UnsupportedModelError(f"mistral3 with a text_config of model_type {kind!r} is not supported")
        text = text_config(config, rms_norm_eps=1e-5, num_key_value_heads=8, head_dim=128)
        text.setdefault("max_position_embeddings", 262144)
        text["rope_parameters"] = rope = rotary_settings(text) or ROPE
        fields = decoder_fields(text, ops.RotaryConfig.from_hf(text))
        window = read_value(text, "sliding_window", Size, None)
        longest = read_value(text, "max_position_embeddings", Size)
        original = read_value(rope, "original_max_position_embeddings", Positive, longest)
        return cls(
            **fields,
            windows=() if window is None else (window,) * fields["num_hidden_layers"],
            scaling_beta=read_value(rope, "llama_4_scaling_beta", Finite, 0.0),
            scaling_context=float(original),
        )


class Attention(qwen3.Attention):
    """Grouped-query attention whose queries are multiplied by a factor of their positions."""

    def rotate(self, q: Float[Array, "*B T N H"], k: Float[Array, "*B T K H"], rotary: Any) -> tuple[Array, Array]:
        """Queries and keys at their positions."""
        *tables, factor = rotary
        q, k = super().rotate(q, k, tuple(tables))
        return q * factor[..., None], k


class DecoderLayer(qwen3.DecoderLayer):
    """Attention, then feed-forward, each on a normalised copy of the residual stream."""

    attention_class = Attention


class Decoder(qwen3.Decoder):
    """Token embedding, the layers, and the final norm."""

    def rotary_tables(self, positions: Int[Array, "*B T"]) -> list[Any]:
        """Tables of cos and sin, and the factor of queries, for each layer."""
        passed = jnp.floor(positions / self.config.scaling_context)
        factor = 1 + self.config.scaling_beta * jnp.log1p(passed)[..., None]
        return [tables and (*tables, factor) for tables in super().rotary_tables(positions)]


class Ministral3ForCausalLM(Qwen3ForCausalLM):
    """The language model: `Qwen3ForCausalLM` with another attention."""

    ignored_weights = Gemma3ForCausalLM.ignored_weights
    key_aliases = Gemma3ForCausalLM.key_aliases
    decoder_class = Decoder
    layer_class = DecoderLayer
