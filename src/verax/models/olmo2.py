"""OLMo 2 and OLMo 3: decoders that normalise the outputs of a layer's parts, and queries and keys over all heads.

Follows transformers' `Olmo2ForCausalLM` and `Olmo3ForCausalLM`; module paths are the keys of their checkpoints. OLMo 3
has sliding windows in three layers out of four. Reports: OLMo 2 (arXiv:2501.00656), OLMo 3 (arXiv:2512.13961).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from verax import ops
from verax.fields import Size, read_value
from verax.models import qwen3
from verax.models.causal_lm import AttentionFn, text_config
from verax.models.gemma3 import rotary_of_kind
from verax.models.qwen3 import (
    FULL,
    SLIDING,
    Projected,
    Qwen3Config,
    Qwen3ForCausalLM,
    Rotary,
    decoder_fields,
    layer_windows,
    norm,
    rotated,
    split_heads,
)
from verax.nn import DividedRMSNorm, fused_linear
from verax.ops.rope import rotary_settings

__all__ = ["Olmo2Config", "Olmo2ForCausalLM"]

OLMO3_THETA = 5e5
"""Base frequency of OLMo 3 in a file that has none, and always of its windowed layers in a file of transformers 4."""


@dataclass(frozen=True)
class Olmo2Config(Qwen3Config):
    """Sizes and flags, by the names of config.json where these are clear."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Olmo2Config:
        """Read a config.json of `model_type` olmo2 or olmo3."""
        text = text_config(config, rms_norm_eps=1e-5, max_position_embeddings=2048)
        if read_value(text, "model_type", str) == "olmo2":
            return cls(**decoder_fields(text, ops.RotaryConfig.from_hf(text)))
        text = text_config(text, sliding_window=4096, rope_theta=OLMO3_THETA, local_theta=OLMO3_THETA)
        given = rotary_settings(text)
        if text.get("rope_parameters") and not given.keys() & {FULL, SLIDING}:  # of transformers 5.0 to 5.10
            base = read_value(given, "rope_theta", float, OLMO3_THETA)
            text["rope_parameters"] = {FULL: given, SLIDING: {"rope_theta": base}}
        fields = decoder_fields(text, rotary_of_kind(text, FULL, "rope_theta"))
        kinds = [SLIDING if (i + 1) % 4 else FULL for i in range(fields["num_hidden_layers"])]
        windows = layer_windows(text, read_value(text, "sliding_window", Size, None), kinds)
        return cls(**fields, windows=windows, local_rotary=rotary_of_kind(text, SLIDING, "local_theta"))


class Attention(qwen3.Attention):
    """Grouped-query attention, with norms over the queries of all heads and over the keys of all heads."""

    def __init__(self, config: Olmo2Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        H, eps = config.head_dim, config.rms_norm_eps
        self.q_norm = DividedRMSNorm(config.num_attention_heads * H, eps=eps, unit=H, dtype=dtype)
        self.k_norm = DividedRMSNorm(config.num_key_value_heads * H, eps=eps, unit=H, repeats=True, dtype=dtype)

    def project(self, x: Float[Array, "*B T D"]) -> Projected:
        """Queries, keys and values by head, the first two normalised."""
        H = self.config.head_dim
        q, k, v = fused_linear(x, self.q_proj, self.k_proj, self.v_proj)
        return split_heads(self.q_norm(q), H), split_heads(self.k_norm(k), H), split_heads(v, H), None

    def rotate(
        self, q: Float[Array, "*B T N H"], k: Float[Array, "*B T K H"], rotary: Rotary
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T K H"]]:
        """Queries and keys at their positions."""
        return rotated(q, k, rotary)


class DecoderLayer(qwen3.DecoderLayer):
    """Attention, then feed-forward; the output of each is normalised before it is added to the residual stream."""

    attention_class = Attention

    def __init__(self, config: Olmo2Config, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        del self.input_layernorm
        self.post_feedforward_layernorm = norm(config, dtype)

    def __call__(
        self, x: Float[Array, "*B T D"], rotary: Rotary, layer: int, attend: AttentionFn
    ) -> Float[Array, "*B T D"]:
        x = x + self.post_attention_layernorm(self.self_attn(x, rotary, layer, attend))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class Olmo2ForCausalLM(Qwen3ForCausalLM):
    """The language model: `Qwen3ForCausalLM` with norms in other places."""

    layer_class = DecoderLayer
