"""Jina Embeddings v2 (arXiv:2310.19923): BERT with ALiBi (arXiv:2108.12409) to both sides and a gated feed-forward.

Follows the two implementations that the published checkpoints name, `jina-bert-implementation` and, for source code,
`jina-bert-v2-qk-post-norm`, which normalises queries, keys and the residual sum of attention once more. Module paths
are the keys of the first; no code of a checkpoint is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax.errors import UnsupportedModelError
from verax.fields import Count, Depth, Epsilon, Size, check_multiple, file_of, read_fields, read_value
from verax.models.bert import ACTIVATIONS, BertAttention, BertEmbeddings, BertSelfAttention
from verax.nn import LayerNorm, Linear, Sentences
from verax.ops.attention import biased_attention

__all__ = ["JinaBertConfig", "JinaBertModel"]

_GATES = {"geglu": "gelu", "reglu": "relu"}
"""Activation function of each `feed_forward_type`."""

_SCORES_AT_ONCE = 1 << 26
"""Scores of attention that are held at a time: 64 million, or one head's."""


@dataclass(frozen=True)
class JinaBertConfig:
    """Sizes of a model, under their names in config.json."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    layer_norm_eps: Epsilon = 1e-12
    max_position_embeddings: Size = 512
    type_vocab_size: Count = 2
    feed_forward_type: str = "original"
    qk_post_norm: bool = False
    """True for the implementation that normalises queries, keys and attention's residual sum once more."""

    has_position_table: ClassVar[bool] = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> JinaBertConfig:
        """Read a config.json of `model_type` bert with `position_embedding_type` alibi."""
        names = [name for name in cls.__annotations__ if name not in ("qk_post_norm", "has_position_table")]
        code = [str(config.get("_name_or_path")), *read_value(config, "auto_map", dict, {}).values()]
        read = cls(**read_fields(config, cls, names), qk_post_norm=any("qk-post-norm" in str(name) for name in code))
        check_multiple(config, hidden_size=read.hidden_size, num_attention_heads=read.num_attention_heads)
        if read.feed_forward_type not in _GATES:
            raise UnsupportedModelError(
                f"{file_of(config)}: feed_forward_type {read.feed_forward_type!r} is not supported; "
                f"{' and '.join(_GATES)} are"
            )
        return read


def alibi_slopes(heads: int) -> list[float]:
    """Slopes of ALiBi (Press et al., 2022, arXiv:2108.12409), one a head.

    A geometric sequence for a power of two of heads; further heads take every second slope of the next power.
    """
    power = 1 << (heads.bit_length() - 1)
    start = 2.0 ** (-8 / power)
    between = [] if power == heads else alibi_slopes(2 * power)[::2][: heads - power]
    return [start ** (i + 1) for i in range(power)] + between


class JinaBertSelfAttention(BertSelfAttention):
    """Attention whose scores lose the distance of query and key, times the head's slope."""

    def __init__(self, config: JinaBertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        size, eps = config.hidden_size, config.layer_norm_eps
        self.layer_norm_q = LayerNorm(size, eps=eps, dtype=dtype) if config.qk_post_norm else None
        self.layer_norm_k = LayerNorm(size, eps=eps, dtype=dtype) if config.qk_post_norm else None

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Float[Array, "B T D"], segments: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.layer_norm_q is not None and self.layer_norm_k is not None:
            q, k = self.layer_norm_q(q), self.layer_norm_k(k)
        B, T, D = x.shape
        # Tokens of a sentence lie next to each other, so that a distance in the row is one in the sentence.
        distances = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)).astype(jnp.float32)

        def attend(head: tuple[Array, ...]) -> Array:
            q, k, v = (y[:, :, None] for y in head[:3])
            return biased_attention(q, k, v, -head[3] * distances[None], segments, q.shape[-1] ** -0.5)[:, :, 0]

        q, k, v = (jnp.moveaxis(y.reshape(B, T, self.heads, -1), 2, 0) for y in (q, k, v))
        parts = q, k.astype(self.dtype), v.astype(self.dtype), jnp.asarray(alibi_slopes(self.heads), jnp.float32)
        out = jax.lax.map(attend, parts, batch_size=min(max(_SCORES_AT_ONCE // (B * T * T), 1), self.heads))
        return jnp.moveaxis(out, 0, 2).reshape(B, T, D)


class JinaBertMLP(nnx.Module):
    """Feed-forward `wo(act(gate) * up)`, from one matrix of both, normalised after the residual sum."""

    def __init__(self, config: JinaBertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, F = config.hidden_size, config.intermediate_size
        self.activation = ACTIVATIONS[_GATES[config.feed_forward_type]]
        self.gate_is_first = not config.qk_post_norm
        self.gated_layers = Linear(D, 2 * F, dtype=dtype, rngs=rngs)
        self.wo = Linear(F, D, bias=True, dtype=dtype, rngs=rngs)
        self.layernorm = LayerNorm(D, eps=config.layer_norm_eps, dtype=dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        first, second = jnp.split(self.gated_layers(x), 2, axis=-1)
        gate, up = (first, second) if self.gate_is_first else (second, first)
        return self.layernorm(self.wo(self.activation(gate) * up), x)


class JinaBertLayer(nnx.Module):
    """Attention, then feed-forward, each normalised after the residual sum."""

    def __init__(self, config: JinaBertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.attention = BertAttention(config, JinaBertSelfAttention, dtype=dtype, rngs=rngs)
        size, eps = config.hidden_size, config.layer_norm_eps
        self.layer_norm_1 = LayerNorm(size, eps=eps, dtype=dtype) if config.qk_post_norm else None
        self.mlp = JinaBertMLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], segments: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        y = self.attention(x, segments)
        return self.mlp(y if self.layer_norm_1 is None else self.layer_norm_1(y, x))


class JinaBertModel(nnx.Module):
    """The encoder, from tokens to hidden states. All tokens have type 0.

    Matmuls take inputs that are rounded to the weights' dtype. Everything between them is float32.
    """

    ignored_weights = (r"^(bert\.)?pooler\.", r"^cls\.", r"position_ids$", r"encoder\.alibi$")
    """Patterns of keys that are not loaded: the pooler, heads of pre-training, constants."""

    key_aliases = tuple(
        (pattern, before + name)
        for before in ("", "bert.")
        for pattern, name in (
            (r"^(encoder\.layer\.\d+\.)mlp\.gated_layers\.", r"\1mlp.up_gated_layer."),
            (r"^(encoder\.layer\.\d+\.)mlp\.wo\.", r"\1mlp.down_layer."),
            (r"^(encoder\.layer\.\d+\.)mlp\.layernorm\.", r"\1layer_norm_2."),
            (r"^", ""),
        )
    )
    """Keys of the implementation that normalises once more, with and without a head."""

    def __init__(self, config: JinaBertConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = BertEmbeddings(config, dtype=dtype, rngs=rngs)
        layers = [JinaBertLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)]
        self.encoder = nnx.Dict(layer=nnx.List(layers))

    def __call__(
        self, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Final hidden states, float32. The arguments are as in `BertModel`."""
        x = self.embeddings(tokens, sentences.positions, types)
        for layer in self.encoder.layer:
            x = layer(x, sentences.segments)
        return x
