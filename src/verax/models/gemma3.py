"""Gemma 3 and Gemma 2, text: decoder-only transformers most of whose layers see a sliding window.

Follows transformers' `Gemma3ForCausalLM`, the language model of its `Gemma3ForConditionalGeneration`, and
`Gemma2ForCausalLM`; module paths are the keys of their checkpoints. Reports: Gemma 3 (arXiv:2503.19786), Gemma 2
(arXiv:2408.00118).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax import ops
from verax.errors import CheckpointError, UnsupportedModelError
from verax.fields import Depth, Epsilon, Positive, Size, check_multiple, file_of, read_fields, read_value
from verax.files import JsonObject
from verax.models import qwen3
from verax.models.causal_lm import AttentionFn
from verax.models.qwen3 import Attention, Qwen3ForCausalLM, Rotary, norm
from verax.nn import Embedding, fused_linear
from verax.ops.attention import soft_capped

__all__ = ["Gemma3Config", "Gemma3ForCausalLM"]

GLOBAL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Gemma3Config:
    """Sizes and flags of both families, by the names of config.json where these are clear."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    rms_norm_eps: Epsilon
    max_position_embeddings: Size
    query_pre_attn_scalar: Positive
    """Scores are q . k divided by its square root."""
    layer_types: tuple[str, ...]
    """`full_attention` or `sliding_attention` by layer."""
    rotary: ops.RotaryConfig
    local_rotary: ops.RotaryConfig
    """Rotation in layers that see a window."""
    tie_word_embeddings: bool
    qk_norm: bool
    """Gemma 3: RMSNorm on each head of q and k."""
    sliding_window: Size | None = None
    """Tokens that a sliding layer sees, the newest included."""
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    attention_bias: bool = False

    mlp_bias: ClassVar[bool] = False
    zero_centered_norms: ClassVar[bool] = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma3Config:
        """Read a config.json of `model_type` gemma3_text or gemma2, or the text part of a gemma3 one.

        Published files leave out sizes that are the defaults of transformers' classes, which are therefore used here.

        Raises:
            UnsupportedModelError: for another activation, layers of another kind, attention in both directions, an
                unknown rope type, or sizes that do not divide.
            CheckpointError: for a value of a wrong type, or a size that no model has.
        """
        part = read_value(config, "text_config", dict, None)
        where = f"{file_of(config)}: text_config" if part else file_of(config)
        family = read_value(config, "model_type", str)
        defaults = _GEMMA2 if family == "gemma2" else _GEMMA3
        text = JsonObject({**_DEFAULTS, **defaults, **(config if part is None else part)}, where)
        # With a vision tower, the outer file says whether the output head is tied, as transformers reads it.
        text["tie_word_embeddings"] = config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
        if (activation := text["hidden_activation"]) not in (None, "gelu_pytorch_tanh"):
            raise UnsupportedModelError(
                f"hidden_activation {activation!r} is not supported; this family uses 'gelu_pytorch_tanh'"
            )
        if read_value(text, "use_bidirectional_attention", bool, False):
            raise UnsupportedModelError(f"{family} with use_bidirectional_attention is not supported as a causal model")
        fields = read_fields(text, cls, _READ)
        check_multiple(text, **{name: fields[name] for name in ("num_attention_heads", "num_key_value_heads")})
        if fields["head_dim"] % 2:
            raise UnsupportedModelError(f"{where}: head_dim {fields['head_dim']} is odd; rotary positions need pairs")
        window = read_value(text, "sliding_window", Size, None)
        rotary = ops.RotaryConfig.from_hf(text) if family == "gemma2" else _rotary(text, GLOBAL, "rope_theta")
        local = rotary if family == "gemma2" else _rotary(text, SLIDING, "rope_local_base_freq")
        return cls(
            **fields,
            layer_types=_layer_types(text, fields["num_hidden_layers"], window),
            sliding_window=window,
            attn_logit_softcapping=read_value(text, "attn_logit_softcapping", Positive, None),
            final_logit_softcapping=read_value(text, "final_logit_softcapping", Positive, None),
            rotary=rotary,
            local_rotary=local,
            qk_norm=family != "gemma2",
        )

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Window of each layer in tokens; None for a layer that sees everything."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    @property
    def qkv_bias(self) -> bool:
        """True for a bias on q, k and v."""
        return self.attention_bias

    @property
    def output_bias(self) -> bool:
        """True for a bias on the output of attention."""
        return self.attention_bias

    @property
    def score_options(self) -> Mapping[str, float | None]:
        """Scale and cap of the scores of attention."""
        return {"scale": self.query_pre_attn_scalar**-0.5, "soft_cap": self.attn_logit_softcapping}


_DEFAULTS = MappingProxyType(
    {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
    }
)
_GEMMA2 = MappingProxyType(
    {
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    }
)
_GEMMA3 = MappingProxyType(
    {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    }
)
"""Values that a file may leave out."""

_READ = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "query_pre_attn_scalar"),
    *("tie_word_embeddings", "attention_bias"),
)


def _layer_types(config: JsonObject, depth: int, window: int | None) -> tuple[str, ...]:
    """Kinds of the layers: those that the file lists, or every `sliding_window_pattern`-th one sees everything."""
    pattern = read_value(config, "sliding_window_pattern", Size)
    kinds = read_value(config, "layer_types", tuple[str, ...], ())
    kinds = kinds or tuple(SLIDING if (i + 1) % pattern else GLOBAL for i in range(depth))
    if len(kinds) != depth:
        raise CheckpointError(f"{config.where}: layer_types has {len(kinds)} entries for {depth} layers")
    if unknown := sorted({*kinds} - {GLOBAL, SLIDING}):
        raise UnsupportedModelError(f"{config['model_type']} with layers of type {', '.join(unknown)} is not supported")
    if SLIDING in kinds and window is None:
        raise UnsupportedModelError(f"{config.where} lacks sliding_window, which its {SLIDING} layers need")
    return kinds


def _rotary(config: JsonObject, kind: str, base: str) -> ops.RotaryConfig:
    """Rotation in layers of one kind: by kind in `rope_parameters` (transformers 5), or by names of their own."""
    by_kind = read_value(config, "rope_parameters", dict, {})
    given = read_value(by_kind, kind, dict, {}) if by_kind else {}
    if not by_kind and kind == GLOBAL:
        given = read_value(config, "rope_scaling", dict, {})
    rope = {"rope_theta": config[base], **given}
    context = {"max_position_embeddings": config["max_position_embeddings"]}
    return ops.RotaryConfig.from_hf(JsonObject({"rope_parameters": rope, **context}, config.where))


class MLP(qwen3.MLP):
    """Gated feed-forward: GeGLU (Shazeer, 2020, arXiv:2002.05202), GELU by its tanh approximation."""

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        gate, up = fused_linear(x, self.gate_proj, self.up_proj)
        return self.down_proj(jax.nn.gelu(gate, approximate=True) * up)


class DecoderLayer(nnx.Module):
    """Attention, then feed-forward, each between a norm of its input and one of its output."""

    def __init__(self, config: Gemma3Config, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.self_attn = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)
        self.input_layernorm = norm(config, dtype)
        self.post_attention_layernorm = norm(config, dtype)
        self.pre_feedforward_layernorm = norm(config, dtype)
        self.post_feedforward_layernorm = norm(config, dtype)

    def __call__(
        self, x: Float[Array, "*B T D"], rotary: Rotary, layer: int, attend: AttentionFn
    ) -> Float[Array, "*B T D"]:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotary, layer, attend))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class ScaledEmbedding(Embedding):
    """Embedding whose rows are multiplied by the square root of their size."""

    def __init__(self, vocab_size: int, size: int, *, divided: Literal["vocabulary"], dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(vocab_size, size, divided=divided, dtype=dtype, rngs=rngs)
        # Rounded to the model's dtype: in bfloat16 these models were trained with 25.25 where sqrt(640) is 25.298.
        self.scale = float(np.asarray(size**0.5, jnp.dtype(dtype)))

    def __call__(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        return super().__call__(tokens) * self.scale


class Decoder(qwen3.Decoder):
    """Token embedding, the layers, and the final norm."""

    layer_class = DecoderLayer
    embedding_class = ScaledEmbedding

    def rotary_tables(self, positions: Int[Array, "*B T"]) -> list[Rotary]:
        """Tables of cos and sin for each layer, of two kinds."""
        config = self.config
        tables = {
            GLOBAL: ops.rotary_tables(positions, config.rotary, config.head_dim),
            SLIDING: ops.rotary_tables(positions, config.local_rotary, config.head_dim),
        }
        return [tables[kind] for kind in config.layer_types]


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

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Scores over the vocabulary, float32."""
        return soft_capped(super().logits(hidden), self.config.final_logit_softcapping)
