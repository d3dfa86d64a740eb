"""DeBERTa v2 and v3 (He et al., 2020, arXiv:2006.03654; 2021, arXiv:2111.09543): encoders of many rerankers.

Attention is disentangled: to the score of two tokens' contents come a score of the query's content for the distance,
and one of the key's content for the distance. Follows transformers' `DebertaV2Model`; module paths are its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax.errors import UnsupportedModelError
from verax.fields import Count, Depth, Epsilon, Size, check_multiple, file_of, read_fields, read_value
from verax.models.bert import ACTIVATIONS, BertEmbeddings, BertLayer, check_activation
from verax.nn import Embedding, LayerNorm, Linear, Sentences
from verax.ops.attention import biased_attention, float32_product

__all__ = ["DebertaConfig", "DebertaForSequenceClassification", "DebertaModel"]


@dataclass(frozen=True)
class DebertaConfig:
    """Sizes and flags of a model, under their names in config.json."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    pos_att_type: tuple[str, ...]
    """Parts of a score that depend on distances: `c2p` (the query's content), `p2c` (the key's content)."""
    max_relative_positions: Size
    """Distance in tokens from which on all tokens share a row of the table of distances."""
    normalizes_positions: bool
    hidden_act: str = "gelu"
    layer_norm_eps: Epsilon = 1e-7
    max_position_embeddings: Size = 512
    type_vocab_size: Count = 0
    relative_attention: bool = False
    position_buckets: int = -1
    """Rows of the table of distances for each side; `max_relative_positions` if below 1."""
    share_att_key: bool = False
    position_biased_input: bool = True
    pooler_hidden_act: str = "gelu"

    @property
    def has_position_table(self) -> bool:
        """True if a table has an embedding of each position, in addition to distances."""
        return self.position_biased_input

    @property
    def span(self) -> int:
        """Rows of the table of distances for each side."""
        return self.position_buckets if self.position_buckets > 0 else self.max_relative_positions

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DebertaConfig:
        """Read a config.json of `model_type` deberta-v2."""
        given = read_value(config, "pos_att_type", str | tuple[str, ...], ())
        parts = tuple(part.strip() for part in (given.lower().split("|") if isinstance(given, str) else given))
        if unknown := sorted({*parts} - {"c2p", "p2c"}):
            raise UnsupportedModelError(f"{file_of(config)}: pos_att_type {', '.join(unknown)} is not supported")
        names = [field.name for field in fields(cls) if field.name not in _COMPUTED]
        values = read_fields(config, cls, names)
        positions = values.get("max_position_embeddings", cls.max_position_embeddings)
        farthest = read_value(config, "max_relative_positions", int, -1)
        norms = read_value(config, "norm_rel_ebd", str, "none").lower().split("|")
        read = cls(
            **values,
            pos_att_type=parts,
            max_relative_positions=farthest if farthest >= 1 else positions,
            normalizes_positions="layer_norm" in [norm.strip() for norm in norms],
        )
        check_multiple(config, hidden_size=read.hidden_size, num_attention_heads=read.num_attention_heads)
        head_size = read.hidden_size // read.num_attention_heads
        sizes = {"attention_head_size": head_size, "conv_kernel_size": 0}
        sizes |= dict.fromkeys(("embedding_size", "pooler_hidden_size"), read.hidden_size)
        for key, size in sizes.items():
            if (other := read_value(config, key, int, size)) != size:
                raise UnsupportedModelError(f"{file_of(config)}: {key} {other} is not supported; {size} is")
        if (buckets := read.position_buckets) > 0 and not 0 < buckets // 2 < read.max_relative_positions - 1:
            raise UnsupportedModelError(
                f"{file_of(config)}: position_buckets {buckets}: expected at least 2, and half of it below "
                f"max_relative_positions {read.max_relative_positions}"
            )
        for key in ("hidden_act", "pooler_hidden_act"):
            check_activation(getattr(read, key), key)
        return read


_COMPUTED = ("pos_att_type", "max_relative_positions", "normalizes_positions")


def distance_rows(config: DebertaConfig, length: int) -> np.ndarray:
    """Row of the table of distances for a query 1 - length, ... length - 1 tokens after a key, int32 `[2 length - 1]`.

    Near keys have a row for each distance. Farther keys share rows whose widths grow by a constant factor.
    """
    offset = np.arange(1 - length, length)
    bucket = offset
    if config.position_buckets > 0:
        middle = config.position_buckets // 2
        # In float32, as the reference: another rounding gives another row at the borders between rows.
        distance = np.where(np.abs(offset) < middle, middle - 1, np.abs(offset)).astype(np.float32)
        ratio = np.log(np.maximum(distance, 1) / np.float32(middle))
        ratio = ratio / np.log(np.float32((config.max_relative_positions - 1) / middle))
        far = np.ceil(ratio * np.float32(middle - 1)) + middle
        bucket = np.where(distance <= middle, offset, far * np.sign(offset)).astype(np.int64)
    return np.clip(bucket + config.span, 0, 2 * config.span - 1).astype(np.int32)


def skewed(scores: Float[Array, "B N T R"]) -> Float[Array, "B N T T"]:
    """Scores `[t, s]` of scores by distance, `scores[t, s - t + T - 1]`: a copy, where a gather takes far longer."""
    T = scores.shape[2]
    flat = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(*scores.shape[:2], -1)
    return flat[..., T - 1 : T - 1 + T * (2 * T - 1)].reshape(*scores.shape[:3], 2 * T - 1)[..., :T]


class DisentangledSelfAttention(nnx.Module):
    """Attention of every token to all tokens of its sentence, by contents and distances."""

    def __init__(self, config: DebertaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D = config.hidden_size
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.query_proj = Linear(D, D, bias=True, dtype=dtype, rngs=rngs)
        self.key_proj = Linear(D, D, bias=True, dtype=dtype, rngs=rngs)
        self.value_proj = Linear(D, D, bias=True, dtype=dtype, rngs=rngs)
        own = {part for part in config.pos_att_type if config.relative_attention and not config.share_att_key}
        self.pos_key_proj = Linear(D, D, bias=True, dtype=dtype, rngs=rngs) if "c2p" in own else None
        self.pos_query_proj = Linear(D, D, bias=True, dtype=dtype, rngs=rngs) if "p2c" in own else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segments: Int[Array, "B T"],
        table: Float[Array, "R D"] | None,
        rows: Int[Array, "R2"],
    ) -> Float[Array, "B T D"]:
        """Attend; `table` has the states of distances, and `rows` its row for each distance of the row's tokens."""
        N, parts = self.config.num_attention_heads, self.config.pos_att_type
        q = self.query_proj(x).reshape(*x.shape[:2], N, -1)
        k, v = (proj(x).astype(self.dtype).reshape(q.shape) for proj in (self.key_proj, self.value_proj))
        scale = (q.shape[-1] * (1 + len(parts))) ** -0.5
        bias = jnp.zeros((1, N, x.shape[1], x.shape[1]), jnp.float32)

        def scores(
            table: Float[Array, "R D"], states: Float[Array, "B T N H"], project: Linear, rows: Int[Array, "R2"]
        ) -> Float[Array, "B N T T"]:
            positions = project(table).astype(self.dtype).reshape(-1, N, q.shape[-1])[rows]
            return skewed(float32_product("btnh,rnh->bntr", (states * scale).astype(self.dtype), positions))

        if table is not None and "c2p" in parts:
            bias = bias + scores(table, q, self.pos_key_proj or self.key_proj, rows[::-1])
        if table is not None and "p2c" in parts:
            bias = bias + scores(table, k, self.pos_query_proj or self.query_proj, rows).swapaxes(2, 3)
        return biased_attention(q, k, v, bias, segments, scale).reshape(x.shape)


class DebertaEncoder(nnx.Module):
    """The layers, and the table of distances that they share."""

    def __init__(self, config: DebertaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, eps, relative = config.hidden_size, config.layer_norm_eps, config.relative_attention
        layers = range(config.num_hidden_layers)
        self.layer = nnx.List([BertLayer(config, DisentangledSelfAttention, dtype=dtype, rngs=rngs) for _ in layers])
        self.rel_embeddings = Embedding(2 * config.span, D, dtype=dtype, rngs=rngs) if relative else None
        self.LayerNorm = LayerNorm(D, eps=eps, dtype=dtype) if config.normalizes_positions else None

    def table(self) -> Float[Array, "R D"] | None:
        """States of distances, normalised where the model says so; None for a model without them."""
        if self.rel_embeddings is None:
            return None
        table = self.rel_embeddings.weight[...].astype(jnp.float32)
        return table if self.LayerNorm is None else self.LayerNorm(table)


class DebertaModel(nnx.Module):
    """The encoder, from tokens to hidden states.

    Matmuls take inputs that are rounded to the weights' dtype. Everything between them is float32.
    """

    ignored_weights = (
        r"^(lm_predictions|cls|mask_predictions|pooler|classifier)\.",
        r"position_(ids|embeddings\.weight)$",
    )
    """Patterns of keys that are not loaded: heads, constants, positions that only a decoder of pre-training reads."""

    key_aliases = ((r"^", "deberta."),)
    """Keys of the same weights in checkpoints with a head."""

    def __init__(self, config: DebertaConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = BertEmbeddings(config, dtype=dtype, rngs=rngs)
        self.encoder = DebertaEncoder(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Final hidden states, float32. The arguments are as in `BertModel`."""
        x = self.embeddings(tokens, sentences.positions, types)
        # Tokens of a sentence lie next to each other, so that a distance in the row is one in the sentence.
        rows, table = jnp.asarray(distance_rows(self.config, tokens.shape[1])), self.encoder.table()
        for layer in self.encoder.layer:
            x = layer(x, sentences.segments, table, rows)
        return x


class DebertaForSequenceClassification(nnx.Module):
    """A cross-encoder: one logit for a pair of texts, from the first token's state."""

    ignored_weights = (r"position_(ids|embeddings\.weight)$", r"^(lm_predictions|mask_predictions)\.")
    """Patterns of keys that are not loaded: constants, and heads of pre-training."""

    def __init__(self, config: DebertaConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.deberta = DebertaModel(config, dtype=dtype, rngs=rngs)
        self.pooler = nnx.Dict(dense=Linear(config.hidden_size, config.hidden_size, bias=True, dtype=dtype, rngs=rngs))
        self.classifier = Linear(config.hidden_size, 1, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"]) -> Float[Array, "S"]:
        """Logit of each pair, float32. The arguments are as in `BertModel`."""
        first = sentences.first(self.deberta(tokens, sentences, types))
        return self.classifier(ACTIVATIONS[self.config.pooler_hidden_act](self.pooler.dense(first)))[:, 0]
