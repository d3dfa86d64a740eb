"""ModernBERT (Warner et al., 2024, arXiv:2412.13663): an encoder of long texts, as in GTE's newer models.

Layers are normalised before each block, positions are rotary, feed-forward blocks are GeGLU, and linear layers have no
bias. Two of three layers attend to a window around each token. Follows transformers' `ModernBertModel`; module paths
are the keys of its checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax import ops
from verax.fields import Count, Depth, Epsilon, Size, check_multiple, file_of, read_fields, read_layer_types, read_value
from verax.files import JsonObject
from verax.models.bert import ACTIVATIONS, check_activation
from verax.nn import Embedding, LayerNorm, Linear, Sentences
from verax.ops.attention import MASKED, biased_attention
from verax.ops.rope import rotary_settings

__all__ = ["ModernBertConfig", "ModernBertForMaskedLM", "ModernBertForSequenceClassification", "ModernBertModel"]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_THETAS = {_FULL: ("global_rope_theta", 160000.0), _SLIDING: ("local_rope_theta", 10000.0)}
"""Key of the rotary base of each kind of layer in older files, and its default."""

Rotary = tuple[Float[Array, "B T h"], Float[Array, "B T h"]]


@dataclass(frozen=True)
class ModernBertConfig:
    """Sizes and flags of a model, under their names in config.json where these are clear."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    layer_types: tuple[str, ...]
    """`"full_attention"` or `"sliding_attention"`, for each layer."""
    rotary: ops.RotaryConfig
    """Rotation of the layers with full attention."""
    sliding_rotary: ops.RotaryConfig
    """Rotation of the layers with a window."""
    hidden_activation: str = "gelu"
    norm_eps: Epsilon = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: Size = 8192
    local_attention: Count = 128
    """Width of the window: half of it on each side of a token."""
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_bias: bool = False
    classifier_activation: str = "gelu"
    decoder_bias: bool = True
    tie_word_embeddings: bool = True
    """False where the head of pre-training has a matrix of its own for its logits."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModernBertConfig:
        """Read a config.json of `model_type` modernbert, of transformers 4 or 5."""
        values = read_fields(config, cls, _FIELDS)
        layers = values["num_hidden_layers"]
        every = read_value(config, "global_attn_every_n_layers", Size, 3)
        kinds = tuple(_SLIDING if layer % every else _FULL for layer in range(layers))
        kinds = read_layer_types(config, layers, kinds, _THETAS)
        rotary, sliding = (_rotary(config, kind) for kind in _THETAS)
        read = cls(**values, layer_types=kinds, rotary=rotary, sliding_rotary=sliding)
        for key in ("hidden_activation", "classifier_activation"):
            check_activation(getattr(read, key), key)
        check_multiple(config, hidden_size=read.hidden_size, num_attention_heads=read.num_attention_heads)
        return read


_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("hidden_activation", "norm_eps", "norm_bias", "attention_bias", "mlp_bias", "max_position_embeddings"),
    *("local_attention", "classifier_pooling", "classifier_bias", "classifier_activation"),
    *("decoder_bias", "tie_word_embeddings"),
)


def _rotary(config: Mapping[str, Any], kind: str) -> ops.RotaryConfig:
    """Rotation of one kind of layer: of `rope_parameters` (transformers 5), or of the keys before it."""
    settings = JsonObject(rotary_settings(config), f"{file_of(config)}: rotary settings")
    given = read_value(settings, kind, dict, {}) if config.get("rope_parameters") else settings
    key, default = _THETAS[kind]
    rope = {"rope_theta": read_value(config, key, float, default), **given}
    return ops.RotaryConfig.from_hf(JsonObject({"rope_parameters": rope}, settings.where))


class ModernBertEmbeddings(nnx.Module):
    """Token embeddings, normalised."""

    def __init__(self, config: ModernBertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.tok_embeddings = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.norm = _norm(config, dtype)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.norm(self.tok_embeddings(tokens))


class ModernBertAttention(nnx.Module):
    """Attention of every token to its sentence, or to the tokens of it that are near."""

    def __init__(self, config: ModernBertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, bias = config.hidden_size, config.attention_bias
        self.heads = config.num_attention_heads
        self.dtype = jnp.dtype(dtype)
        self.Wqkv = Linear(D, 3 * D, bias=bias, dtype=dtype, rngs=rngs)
        self.Wo = Linear(D, D, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], rotary: Rotary, sentences: Sentences, window: int | None
    ) -> Float[Array, "B T D"]:
        qkv = self.Wqkv(x).reshape(*x.shape[:2], 3, self.heads, -1)
        q, k, v = (qkv[:, :, i] for i in range(3))
        q, k = ops.apply_rotary(q, *rotary), ops.apply_rotary(k, *rotary)
        arrays = q, k.astype(self.dtype), v.astype(self.dtype)
        options = {"causal": False, "segments": sentences.segments}
        if (hidden := sentences.hidden_bias()) is not None:  # queries, which are short
            places = jnp.arange(x.shape[1])
            near = True if window is None else abs(places[:, None] - places) < window
            bias = jnp.where(near, hidden, MASKED)
            out = biased_attention(*arrays, bias, sentences.segments, q.shape[-1] ** -0.5)
        elif window is None or window >= x.shape[1]:
            out = ops.attention(*arrays, **options)
        else:
            # Sentences that fit into the window take the quicker operation, which has none.
            out = lax.cond(
                jnp.max(sentences.lengths) <= window,
                lambda *arrays: ops.attention(*arrays, **options),
                lambda *arrays: ops.attention(*arrays, **options, window=window),
                *arrays,
            )
        return self.Wo(out.reshape(x.shape))


class ModernBertMLP(nnx.Module):
    """GeGLU feed-forward (Shazeer, 2020, arXiv:2002.05202): the first half of `Wi` goes through the activation."""

    def __init__(self, config: ModernBertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation = ACTIVATIONS[config.hidden_activation]
        self.Wi = Linear(D, 2 * F, bias=bias, dtype=dtype, rngs=rngs)
        self.Wo = Linear(F, D, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        up, gate = jnp.split(self.Wi(x), 2, axis=-1)
        return self.Wo(self.activation(up) * gate)


class ModernBertEncoderLayer(nnx.Module):
    """Attention, then feed-forward, each on a normalised copy of the residual stream.

    The first layer has no norm before its attention: the embeddings are normalised.
    """

    def __init__(self, config: ModernBertConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.attn_norm = _norm(config, dtype) if layer else None
        self.attn = ModernBertAttention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = _norm(config, dtype)
        self.mlp = ModernBertMLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], rotary: Rotary, sentences: Sentences, window: int | None
    ) -> Float[Array, "B T D"]:
        x = x + self.attn(x if self.attn_norm is None else self.attn_norm(x), rotary, sentences, window)
        return x + self.mlp(self.mlp_norm(x))


class ModernBertModel(nnx.Module):
    """The encoder, from tokens to hidden states.

    Matmuls take inputs that are rounded to the weights' dtype. Everything between them is float32.
    """

    hides_tokens = True
    """Some tokens of a sentence may be hidden from the others, see `Sentences.hidden`."""

    ignored_weights = (r"^(head|decoder)\.",)
    """Patterns of keys that are not loaded: the head of pre-training."""

    key_aliases = ((r"^", "model."),)
    """Other keys of the same weights, in checkpoints with a head."""

    def __init__(self, config: ModernBertConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = ModernBertEmbeddings(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [ModernBertEncoderLayer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_hidden_layers)]
        )
        self.final_norm = _norm(config, dtype)

    def __call__(
        self, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Final hidden states, float32. The arguments are as in `BertModel`, but ModernBERT reads no `types`."""
        config = self.config
        head_dim = config.hidden_size // config.num_attention_heads
        rotary = ops.rotary_tables(sentences.positions, config.rotary, head_dim)
        sliding_rotary = ops.rotary_tables(sentences.positions, config.sliding_rotary, head_dim)
        reach = config.local_attention // 2 + 1  # tokens that a token sees on each side, itself included
        x = self.embeddings(tokens)
        for layer, kind in zip(self.layers, config.layer_types, strict=True):
            if kind == _FULL:
                x = layer(x, rotary, sentences, None)
            else:
                x = layer(x, sliding_rotary, sentences, reach)
        return self.final_norm(x)


class ModernBertPredictionHead(nnx.Module):
    """Layer, activation and norm before a classifier or logits of the vocabulary."""

    def __init__(self, config: ModernBertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D = config.hidden_size
        self.activation = ACTIVATIONS[config.classifier_activation]
        self.dense = Linear(D, D, bias=config.classifier_bias, dtype=dtype, rngs=rngs)
        self.norm = _norm(config, dtype)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return self.norm(self.activation(self.dense(x)))


class ModernBertForMaskedLM(ModernBertModel):
    """ModernBERT with its head of pre-training, from tokens to logits of the vocabulary."""

    tied_weights: ClassVar[Mapping[str, str]] = {"decoder.weight": "embeddings.tok_embeddings.weight"}
    """Key of the logits' matrix, and of the embeddings that it is where config.json has them tied."""

    ignored_weights: ClassVar[tuple[str, ...]] = ()
    """Patterns of keys that are not loaded: none."""

    key_aliases = (*ModernBertModel.key_aliases, (r"^decoder_bias$", "decoder.bias"))
    """Other keys of the same weights: the encoder's, and the name of the logits' bias."""

    def __init__(self, config: ModernBertConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.head = ModernBertPredictionHead(config, dtype=dtype, rngs=rngs)
        sizes = config.vocab_size, config.hidden_size
        self.decoder = None if config.tie_word_embeddings else Embedding(*sizes, dtype=dtype, rngs=rngs)
        self.decoder_bias = nnx.Param(jnp.zeros(config.vocab_size, dtype)) if config.decoder_bias else None

    def __call__(
        self, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Logits, float32. The arguments are as in `ModernBertModel`."""
        decoder = self.embeddings.tok_embeddings if self.decoder is None else self.decoder
        logits = decoder.attend(self.head(super().__call__(tokens, sentences)))
        return logits if self.decoder_bias is None else logits + self.decoder_bias[...].astype(jnp.float32)


class ModernBertForSequenceClassification(nnx.Module):
    """A cross-encoder: one logit for a pair of texts, from the first token's state or the mean of all."""

    def __init__(self, config: ModernBertConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.model = ModernBertModel(config, dtype=dtype, rngs=rngs)
        self.head = ModernBertPredictionHead(config, dtype=dtype, rngs=rngs)
        self.classifier = Linear(config.hidden_size, 1, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"]) -> Float[Array, "S"]:
        """Logit of each pair, float32. The arguments are as in `BertModel`, but ModernBERT reads no `types`."""
        hidden = self.model(tokens, sentences)
        pooled = sentences.first(hidden) if self.config.classifier_pooling == "cls" else sentences.mean(hidden)
        return self.classifier(self.head(pooled))[:, 0]


def _norm(config: ModernBertConfig, dtype: DTypeLike) -> LayerNorm:
    return LayerNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype, bias=config.norm_bias)
