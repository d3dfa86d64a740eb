"""Granite 3, and the dense models of Granite 4: Llamas whose embeddings, scores, layers and logits are multiplied.

Follows transformers' `GraniteForCausalLM` and, where no layer has experts or recurrence, its
`GraniteMoeHybridForCausalLM`; module paths are the keys of their checkpoints. The multipliers come from maximal
update parametrisation (Yang et al., 2022, arXiv:2203.03466).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax import ops
from verax.errors import UnsupportedModelError
from verax.fields import Count, Positive, Size, read_fields, read_layer_types, read_value
from verax.models import qwen3
from verax.models.causal_lm import AttentionFn, text_config
from verax.models.qwen3 import Qwen3Config, Qwen3ForCausalLM, Rotary, decoder_fields
from verax.nn import Linear, split_swiglu

__all__ = ["GraniteConfig", "GraniteForCausalLM", "GraniteMoeHybridForCausalLM"]


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(Qwen3Config):
    """Sizes and flags, by the names of config.json where these are clear."""

    embedding_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    """Scale of the scores of attention."""
    residual_multiplier: Positive = 1.0
    """Factor on what a part of a layer adds to the residual stream."""
    logits_scaling: Positive = 1.0
    """Divisor of the logits."""
    rotated: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GraniteConfig:
        """Read a config.json of `model_type` granite, or a granitemoehybrid one without experts and recurrence."""
        text = text_config(config, max_position_embeddings=2048)
        names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
        read = cls(**decoder_fields(text, ops.RotaryConfig.from_hf(text)), **read_fields(text, cls, names))
        if read_value(text, "model_type", str) == "granite":
            return read
        depth, recurrent = read.num_hidden_layers, ["linear_attention"] * read.num_hidden_layers
        if experts := read_value(text, "num_local_experts", Count, 8):
            raise UnsupportedModelError(
                f"{text.where}: granitemoehybrid with num_local_experts {experts} is not supported"
            )
        read_layer_types(text, depth, recurrent, {"attention", "full_attention"})
        positions = read_value(text, "position_embedding_type", str, "nope")
        width = read_value(text, "shared_intermediate_size", Size, 1024)
        return replace(read, rotated=positions == "rope", intermediate_size=width, mlp_bias=False)

    @property
    def rotaries(self) -> tuple[ops.RotaryConfig | None, ...]:
        """Rotation in each layer; None for a layer without one."""
        return super().rotaries if self.rotated else (None,) * self.num_hidden_layers

    @property
    def score_options(self) -> Mapping[str, float | None]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Scale of the scores of attention."""
        return {"scale": self.attention_multiplier}


class DecoderLayer(qwen3.DecoderLayer):
    """Attention, then feed-forward, each on a normalised copy of the residual stream and then multiplied."""

    def __init__(self, config: GraniteConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.residual_multiplier = config.residual_multiplier

    def __call__(
        self, x: Float[Array, "*B T D"], rotary: Rotary, layer: int, attend: AttentionFn
    ) -> Float[Array, "*B T D"]:
        x = x + self.residual_multiplier * self.self_attn(self.input_layernorm(x), rotary, layer, attend)
        return x + self.residual_multiplier * self.mlp(self.post_attention_layernorm(x))


class Decoder(qwen3.Decoder):
    """Token embedding, the layers, and the final norm."""

    def embed(self, tokens: Int[Array, "*B T"]) -> Float[Array, "*B T D"]:
        """Residual stream before the first layer."""
        return super().embed(tokens) * self.config.embedding_multiplier


class GraniteForCausalLM(Qwen3ForCausalLM):
    """The language model: `Qwen3ForCausalLM` with multipliers."""

    decoder_class = Decoder
    layer_class = DecoderLayer

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Scores over the vocabulary, float32."""
        return super().logits(hidden) / self.config.logits_scaling


class SharedMLP(nnx.Module):
    """Gated feed-forward (SwiGLU) whose gate and input come from one matrix, one below the other."""

    def __init__(self, config: GraniteConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, F = config.hidden_size, config.intermediate_size
        self.input_linear = Linear(D, 2 * F, divided="out", unit=(1, 1), dtype=dtype, rngs=rngs)
        self.output_linear = Linear(F, D, divided="in", dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return self.output_linear(split_swiglu(x, self.input_linear))


class HybridDecoderLayer(DecoderLayer):
    """The layer of a GraniteMoeHybrid model that has neither experts nor recurrence."""

    mlp = property(lambda self: self.shared_mlp)

    def __init__(self, config: GraniteConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        nnx.Module.__init__(self)
        self.self_attn = qwen3.Attention(config, dtype=dtype, rngs=rngs)
        self.shared_mlp = SharedMLP(config, dtype=dtype, rngs=rngs)
        self.input_layernorm = qwen3.norm(config, dtype)
        self.post_attention_layernorm = qwen3.norm(config, dtype)
        self.residual_multiplier = config.residual_multiplier


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """The dense language models of Granite 4: `GraniteForCausalLM` with other names of the feed-forward part."""

    layer_class = HybridDecoderLayer
