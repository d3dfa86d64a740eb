"""gpt-oss: experts in every layer, heads with attention sinks, and a sliding window in every second layer.

Follows transformers' `GptOssForCausalLM`; module paths are the keys of its checkpoints. Published files have the
experts as MXFP4, which is held exactly, as integers of 8 bits; files of floats have them with inputs before outputs.
Report: gpt-oss (arXiv:2508.10925).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax import ops
from verax.errors import UnsupportedModelError
from verax.fields import Finite, Positive, Size, read_value
from verax.files import JsonObject
from verax.models import qwen3, qwen3_moe
from verax.models.causal_lm import text_config
from verax.models.qwen3 import (
    FULL,
    SLIDING,
    Qwen3Config,
    Qwen3ForCausalLM,
    decoder_fields,
    layer_windows,
)
from verax.models.qwen3_moe import ExpertsConfig
from verax.nn.parallel import part_index, sum_parts
from verax.ops.division import Division
from verax.ops.rope import rotary_settings

__all__ = ["GptOssConfig", "GptOssForCausalLM"]

_DEFAULTS = {"rms_norm_eps": 1e-5, "head_dim": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072} | {
    "attention_bias": True,
    "rope_theta": 150000.0,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}
_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
"""Values that a file may leave out."""


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(Qwen3Config):
    """Sizes and flags, by the names of config.json where these are clear."""

    experts: ExpertsConfig
    swiglu_alpha: Finite = 1.702
    """Factor of the gate in the sigmoid."""
    swiglu_limit: Positive = 7.0
    """Bound of the gate from above, and of the magnitude of the input that it multiplies."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GptOssConfig:
        """Read a config.json of `model_type` gpt_oss."""
        text = text_config(config, **_DEFAULTS)
        text["rope_parameters"] = rotary_settings(text) or _ROPE
        fields = decoder_fields(text, ops.RotaryConfig.from_hf(text))
        depth = fields["num_hidden_layers"]
        kinds = [FULL if i % 2 else SLIDING for i in range(depth)]
        sizes = JsonObject({**text, "moe_intermediate_size": fields["intermediate_size"]}, text.where)
        if (experts := ExpertsConfig.from_hf(sizes, depth)) is None:
            raise UnsupportedModelError(f"{text.where}: num_local_experts 0 is not supported")
        return cls(
            **fields,
            windows=layer_windows(text, read_value(text, "sliding_window", Size, None), kinds),
            experts=experts,
            swiglu_alpha=read_value(text, "swiglu_alpha", Finite, 1.702),
            swiglu_limit=read_value(text, "swiglu_limit", Positive, 7.0),
        )


class Attention(qwen3.Attention):
    """Grouped-query attention in which each head sees a sink too: a key with a learned score and no value."""

    divisions = MappingProxyType({"sinks": Division()})
    """Division of each divided parameter."""

    def __init__(self, config: GptOssConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.sinks = nnx.Param(jnp.zeros(config.num_attention_heads, dtype))

    def score_options(self) -> Mapping[str, Any]:
        """Sinks of the heads."""
        return {"sinks": self.sinks[...]}


class Router(qwen3_moe.Router):
    """Choice of k experts for each token by biased scores, and their weights, which add up to 1."""

    def __init__(self, config: GptOssConfig, *, rngs: nnx.Rngs):
        super().__init__(config, config.experts, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(config.experts.num_experts, jnp.float32))

    def scores(self, x: Float[Array, "*B D"]) -> Float[Array, "*B E"]:
        """Score of each expert."""
        return super().scores(x) + self.bias[...]


class Experts(qwen3_moe.Experts):
    """Feed-forward parts with biases and a clamped SwiGLU, whose gate and input alternate in the outputs."""

    def __init__(self, config: GptOssConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, config.experts, dtype=dtype, rngs=rngs)
        (E, F, D), self.alpha, self.limit = self.gate_up_proj.shape, config.swiglu_alpha, config.swiglu_limit
        self.gate_up_proj_bias = nnx.Param(jnp.zeros((E, F), dtype))
        self.down_proj_bias = nnx.Param(jnp.zeros((E, D), dtype))

    def __call__(
        self, x: Float[Array, "*B D"], experts: Int[Array, "*B k"], weights: Float[Array, "*B k"]
    ) -> Float[Array, "*B D"]:
        gate_up, down = self.gate_up_proj.get_value(), self.down_proj.get_value()
        # Biases are whole on every device: what another device's expert adds to the first is multiplied by zeros.
        own = experts - part_index() * gate_up.shape[0]
        y = ops.grouped_linear(x[..., None, :], gate_up, own) + self.gate_up_proj_bias[...][experts]
        gate, up = jnp.minimum(y[..., ::2], self.limit), jnp.clip(y[..., 1::2], -self.limit, self.limit)
        y = ops.grouped_linear((up + 1) * gate * jax.nn.sigmoid(self.alpha * gate), down, own)
        y = sum_parts(jnp.sum(y * weights[..., None], axis=-2))
        return y + jnp.sum(self.down_proj_bias[...][experts] * weights[..., None], axis=-2)


class MLP(nnx.Module):
    """Router and experts of a layer."""

    def __init__(self, config: GptOssConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.router = Router(config, rngs=rngs)
        self.experts = Experts(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        _, weights, experts = self.router(x)
        return self.experts(x, experts, weights)


class DecoderLayer(qwen3.DecoderLayer):
    """Attention, then experts, each on a normalised copy of the residual stream."""

    attention_class = Attention
    mlp_class = MLP


class GptOssForCausalLM(Qwen3ForCausalLM):
    """The language model: `Qwen3ForCausalLM` with sinks and experts."""

    layer_class = DecoderLayer

    stacked_weights = ((r"^(.*\.experts)\.(gate_up_proj|down_proj)$", (r"\1.{}.\2.weight",)),)
    """(pattern, replacements) pairs of stacks and of the keys of their single matrices, in files of integers."""

    transposed_weights = (r"\.experts\.(gate_up|down)_proj$",)
    """Patterns of stacks that files of floats have as `[E, in, out]`."""
