"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llamas with one matrix for queries, keys and values, and one for gate and up.

Follows transformers' `Phi3ForCausalLM`; module paths are the keys of its checkpoints. Reports: Phi-3
(arXiv:2404.14219), Phi-4 (arXiv:2412.08905), Phi-4-mini (arXiv:2503.01743).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from verax import ops
from verax.errors import UnsupportedModelError
from verax.fields import Size, read_value
from verax.files import JsonObject
from verax.models import qwen3
from verax.models.causal_lm import text_config
from verax.models.qwen3 import Projected, Qwen3Config, Qwen3ForCausalLM, decoder_fields, split_heads
from verax.nn import Linear, split_swiglu
from verax.ops.rope import rotary_settings

__all__ = ["Phi3Config", "Phi3ForCausalLM"]

LONGROPE = {"su": "longrope", "yarn": "longrope"}
"""Names that older files have for LongRoPE."""


@dataclass(frozen=True)
class Phi3Config(Qwen3Config):
    """Sizes and flags, by the names of config.json where these are clear."""

    shared_heads: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Phi3Config:
        """Read a config.json of `model_type` phi3."""
        text = text_config(config, rms_norm_eps=1e-5, max_position_embeddings=4096)
        fields = decoder_fields(text, _rotary(text))
        window = read_value(text, "sliding_window", Size, None)
        return cls(**fields, windows=() if window is None else (window,) * fields["num_hidden_layers"])


def _rotary(config: JsonObject) -> ops.RotaryConfig:
    """Rotation of heads: plain or LongRoPE, of which older files have other names."""
    rope = dict(rotary_settings(config))
    kind = rope.get("rope_type", rope.pop("type", "default"))
    rope["rope_type"] = LONGROPE.get(kind, kind)
    if rope["rope_type"] not in ("default", "longrope"):
        raise UnsupportedModelError(f"{config.where}: rope_type {kind!r} is not supported; phi3 uses 'longrope'")
    original = {"original_max_position_embeddings": config.get("original_max_position_embeddings", 4096)}
    changed = {**config, **original, "rope_parameters": rope, "rope_scaling": None}
    return ops.RotaryConfig.from_hf(JsonObject(changed, config.where), fraction=1.0)


class Attention(qwen3.Attention):
    """Grouped-query attention whose queries, keys and values come from one matrix, one below the other."""

    def __init__(self, config: Phi3Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, N, K, H = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.config = config
        units = N // K * H, H, H  # a head of keys and one of values, with the queries that read them
        self.qkv_proj = Linear(D, (N + 2 * K) * H, divided="out", unit=units, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(N * H, D, divided="in", unit=N // K * H, dtype=dtype, rngs=rngs)
        self.q_norm = self.k_norm = None

    def project(self, x: Float[Array, "*B T D"]) -> Projected:
        """Queries, keys and values by head."""
        heads = split_heads(self.qkv_proj(x), self.config.head_dim)
        keys = heads.shape[-2] // (self.config.num_attention_heads // self.config.num_key_value_heads + 2)
        q, k, v = jnp.split(heads, (heads.shape[-2] - 2 * keys, heads.shape[-2] - keys), axis=-2)
        return q, k, v, None


class MLP(nnx.Module):
    """Gated feed-forward (SwiGLU) whose gate and input come from one matrix, one below the other."""

    def __init__(self, config: Phi3Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, F = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(D, 2 * F, divided="out", unit=(1, 1), dtype=dtype, rngs=rngs)
        self.down_proj = Linear(F, D, divided="in", dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return self.down_proj(split_swiglu(x, self.gate_up_proj))


class DecoderLayer(qwen3.DecoderLayer):
    """Attention, then feed-forward, each on a normalised copy of the residual stream."""

    attention_class = Attention
    mlp_class = MLP


class Phi3ForCausalLM(Qwen3ForCausalLM):
    """The language model: `Qwen3ForCausalLM` with fused projections."""

    layer_class = DecoderLayer
