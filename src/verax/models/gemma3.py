"""Gemma 3 and Gemma 2, text: decoder-only transformers most of whose layers see a sliding window.

Follows transformers' `Gemma3ForCausalLM`, the language model of its `Gemma3ForConditionalGeneration`, and
`Gemma2ForCausalLM`; module paths are the keys of their checkpoints. Reports: Gemma 3 (arXiv:2503.19786), Gemma 2
(arXiv:2408.00118).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax import ops
from verax.errors import UnsupportedModelError
from verax.fields import Positive, Size, read_fields, read_value
from verax.files import JsonObject
from verax.models import qwen3
from verax.models.causal_lm import AttentionFn, text_config
from verax.models.qwen3 import (
    FULL,
    SLIDING,
    Qwen3Config,
    Qwen3ForCausalLM,
    Rotary,
    decoder_fields,
    layer_windows,
    norm,
)
from verax.nn import Embedding, fused_linear
from verax.ops.attention import soft_capped
from verax.ops.rope import rotary_settings

__all__ = ["Gemma3Config", "Gemma3ForCausalLM"]

GELU = ("hidden_activation", "gelu_pytorch_tanh", None)
"""Key of the activation of feed-forward layers, and its values."""


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Qwen3Config):
    """Sizes and flags of both families, by the names of config.json where these are clear."""

    query_pre_attn_scalar: Positive
    """Scores are q . k divided by its square root."""
    attn_logit_softcapping: Positive | None = None
    """Cap of the scores; of Gemma 2 alone: Gemma 3's files have the key too, which its code does not apply."""
    final_logit_softcapping: Positive | None = None

    zero_centered_norms: ClassVar[bool] = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma3Config:
        """Read a config.json of `model_type` gemma3_text or gemma2, or the text part of a gemma3 one.

        Published files leave out sizes that are the defaults of transformers' classes, which are therefore used here.
        """
        gemma2 = read_value(config, "model_type", str) == "gemma2"
        text = text_config(config, **_DEFAULTS, **(_GEMMA2 if gemma2 else _GEMMA3))
        if read_value(text, "use_bidirectional_attention", bool, False):
            raise UnsupportedModelError("use_bidirectional_attention is not supported in a causal model")
        rotary = ops.RotaryConfig.from_hf(text) if gemma2 else rotary_of_kind(text, FULL, "rope_theta")
        fields = decoder_fields(text, rotary, GELU)
        pattern = read_value(text, "sliding_window_pattern", Size)  # of a file that lists no layers
        kinds = [SLIDING if (i + 1) % pattern else FULL for i in range(fields["num_hidden_layers"])]
        names = ("query_pre_attn_scalar", "final_logit_softcapping")
        return cls(
            **fields,
            windows=layer_windows(text, read_value(text, "sliding_window", Size, None), kinds),
            local_rotary=None if gemma2 else rotary_of_kind(text, SLIDING, "rope_local_base_freq"),
            **read_fields(text, cls, (*names, "attn_logit_softcapping") if gemma2 else names),
        )

    @property
    def layer_types(self) -> tuple[str, ...]:
        """`full_attention` or `sliding_attention` by layer."""
        return tuple(FULL if window is None else SLIDING for window in self.sliding_windows)

    @property
    def score_options(self) -> Mapping[str, float | None]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Scale and cap of the scores of attention."""
        return {"scale": self.query_pre_attn_scalar**-0.5, "soft_cap": self.attn_logit_softcapping}


_DEFAULTS = (
    {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256}
    | {"sliding_window": 4096, "tie_word_embeddings": True}
)
_GEMMA2 = {
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window_pattern": 2,
}
_GEMMA3 = {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
}
"""Values that a file may leave out."""


def rotary_of_kind(config: JsonObject, kind: str, base: str) -> ops.RotaryConfig:
    """Rotation in layers of one kind: by kind in `rope_parameters` (transformers 5), or by names of their own.

    `base`: key of the kind's base frequency. `rope_scaling` is of layers that see everything.
    """
    given = rotary_settings(config)
    if config.get("rope_parameters"):
        if not given.keys() & {FULL, SLIDING}:
            raise UnsupportedModelError(f"{config.where}: rope_parameters: expected settings by kind of layer: {FULL}")
        given = read_value(given, kind, dict, {})
    elif kind != FULL:
        given = {}
    rope = {"rope_theta": config[base], **given}
    context = {"max_position_embeddings": config["max_position_embeddings"]}
    return ops.RotaryConfig.from_hf(JsonObject({"rope_parameters": rope, **context}, config.where))


class MLP(qwen3.MLP):
    """Gated feed-forward: GeGLU (Shazeer, 2020, arXiv:2002.05202), GELU by its tanh approximation."""

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        gate, up = fused_linear(x, self.gate_proj, self.up_proj)
        return self.down_proj(jax.nn.gelu(gate, approximate=True) * up)


class DecoderLayer(qwen3.DecoderLayer):
    """Attention, then feed-forward, each between a norm of its input and one of its output."""

    mlp_class = MLP

    def __init__(self, config: Gemma3Config, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.pre_feedforward_layernorm = norm(config, dtype)
        self.post_feedforward_layernorm = norm(config, dtype)

    def __call__(
        self, x: Float[Array, "*B T D"], rotary: Rotary, layer: int, attend: AttentionFn
    ) -> Float[Array, "*B T D"]:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotary, layer, attend))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class ScaledEmbedding(Embedding):
    """Embedding whose rows are multiplied by the square root of their size."""

    def __init__(
        self,
        vocab_size: int,
        size: int,
        *,
        scaled_as: int | None = None,
        divided: Literal["vocabulary"] | None,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        """Fresh embeddings; `scaled_as` is the size of several that a row holds side by side."""
        super().__init__(vocab_size, size, divided=divided, dtype=dtype, rngs=rngs)
        # Rounded to the model's dtype: in bfloat16 these models were trained with 25.25 where sqrt(640) is 25.298.
        self.scale = float(np.asarray((scaled_as or size) ** 0.5, jnp.dtype(dtype)))

    def __call__(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        return super().__call__(tokens) * self.scale


class Decoder(qwen3.Decoder):
    """Token embedding, the layers, and the final norm."""

    embedding_class = ScaledEmbedding


class Gemma3ForCausalLM(Qwen3ForCausalLM):
    """The language model: `Qwen3ForCausalLM` with another decoder and, in Gemma 2, a cap on its logits."""

    ignored_weights = (*Qwen3ForCausalLM.ignored_weights, r"^(model\.)?(vision_tower|multi_modal_projector)\.")
    """Patterns of keys that are not needed; among them the vision tower."""

    key_aliases = (
        (r"^model\.", ""),
        (r"^model\.", "model.language_model."),
        (r"^model\.", "language_model."),
        (r"^", "language_model."),
    )
    """Keys without a head, and with a vision tower, which has the language model one level further down."""

    decoder_class = Decoder
    layer_class = DecoderLayer

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Scores over the vocabulary, float32."""
        return soft_capped(super().logits(hidden), self.config.final_logit_softcapping)
