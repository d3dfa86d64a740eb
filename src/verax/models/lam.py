"""LAM, a sentence encoder: MiniLM's embeddings and feed-forward blocks around layers of a hierarchical delta rule.

Published in PyTorch (Qonsult1001/arxiv, folder LAM) and as SAID-LAM-v1. This file follows its equations and has its
parameter names. `LamConfig.rule` selects the layer: as published, faults included, or corrected (docs/lam.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax import ops
from verax.errors import UnsupportedModelError
from verax.fields import Depth, Epsilon, Size, check_multiple, file_of, read_fields, read_value, require_fields
from verax.files import JsonObject
from verax.models.lam_layers import DeltaNetConfig, EnhancedHierarchicalDeltaNet, HierarchicalGatedDeltaNet, Rule
from verax.nn import Embedding, LayerNorm, Linear

__all__ = ["LamConfig", "LamModel"]


@dataclass(frozen=True, kw_only=True)
class LamConfig(DeltaNetConfig):
    """Sizes and initial values of a model, under their names in config.json."""

    vocab_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    layer_norm_eps: Epsilon = 1e-12
    max_position_embeddings: Size = 32768
    """Length of the longest sequence, in tokens."""
    num_positions: Size = 512
    """Rows of MiniLM's table of positions. The rows of a longer sequence are interpolated."""
    type_vocab_size: Size = 2

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LamConfig:
        """Read a config.json of `model_type` lam.

        Raises:
            UnsupportedModelError: naming what is missing, unknown or not supported.
            CheckpointError: for a value of a wrong type, or a size that no model has.
        """
        require_fields(config, _SIZES, "lam model")
        for key, only in _ONLY.items():
            if config.get(key, only) != only:
                raise UnsupportedModelError(f"{key} {config[key]!r} is not supported; lam models have {only!r}")
        for key, same in _SYNONYMS.items():
            if key in config and config[key] != config[same]:
                raise UnsupportedModelError(f"config.json has {key} {config[key]} and {same} {config[same]}")
        layer = JsonObject(read_value(config, "lam_config", dict, {}), f"{file_of(config)}: lam_config")
        for key, only in _DESCRIPTIONS.items():
            if layer.pop(key, only) != only:
                raise UnsupportedModelError(f"lam_config.{key} is not supported unless it is {only!r}")
        unknown = sorted(set(layer) - set(_LAYER))
        if unknown:
            raise UnsupportedModelError(f"lam_config has unknown {', '.join(unknown)}; known are {', '.join(_LAYER)}")
        if layer.get("rule", "local") not in get_args(Rule):
            known = ", ".join(get_args(Rule))
            raise UnsupportedModelError(f"rule {layer['rule']!r} is not supported; there are {known}")
        values = read_fields(config, cls, (*_SIZES, *_OPTIONAL)) | read_fields(layer, cls, _LAYER)
        values.setdefault("num_positions", min(512, values.get("max_position_embeddings", 512)))
        read = cls(**values)
        check_multiple(config, hidden_size=read.hidden_size, num_attention_heads=read.num_attention_heads)
        return read


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OPTIONAL = ("layer_norm_eps", "max_position_embeddings", "num_positions", "type_vocab_size")
_LAYER = ("rule", "chunk_size", "coupling_interval", "fast_decay_init", "slow_decay_init", "allow_neg_eigval")
_ONLY = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
_SYNONYMS = {"num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"}
_DESCRIPTIONS = {
    "use_hierarchical_decay": True,
    "use_enhanced_flux": True,
    "complexity": "O(n)",
    "memory_type": "dual_state",
}
"""Entries of `lam_config` that describe a published model, with their only value."""


class Embeddings(nnx.Module):
    """Word, position and token-type embeddings, summed and normalised. A sentence is all of type 0."""

    def __init__(self, config: LamConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D = config.hidden_size
        self.config = config
        self.word_embeddings = Embedding(config.vocab_size, D, dtype=dtype, rngs=rngs)
        self.position_embeddings = Embedding(config.num_positions, D, dtype=dtype, rngs=rngs)
        self.token_type_embeddings = Embedding(config.type_vocab_size, D, dtype=dtype, rngs=rngs)
        self.LayerNorm = LayerNorm(D, eps=config.layer_norm_eps, dtype=dtype)

    def __call__(self, tokens: Int[Array, "B T"], lengths: Int[Array, "#B"]) -> Float[Array, "B T D"]:
        """Embeddings, float32.

        Args:
            tokens: token ids.
            lengths: number of tokens over which the table of positions is interpolated if it is shorter than T.
        """
        T, rows = tokens.shape[1], self.config.num_positions
        if rows >= T:
            positions = self.position_embeddings(jnp.arange(T))
        else:
            # The first and the last token keep the first and the last row. In whole numbers, which are exact.
            steps = jnp.maximum(lengths[:, None], rows) - 1
            at = jnp.minimum(jnp.arange(T), steps) * (rows - 1)
            low, part = at // steps, (at % steps / steps)[..., None]
            high = self.position_embeddings(jnp.minimum(low + 1, rows - 1))
            positions = (1 - part) * self.position_embeddings(low) + part * high
        types = self.token_type_embeddings(jnp.zeros(1, jnp.int32))
        return self.LayerNorm(self.word_embeddings(tokens) + positions + types)


class AddAndNorm(nnx.Module):
    """BERT's `output`: projection (if `size_in` is given), residual sum, normalisation."""

    def __init__(self, config: LamConfig, *, size_in: int = 0, dtype: DTypeLike, rngs: nnx.Rngs):
        self.dense = Linear(size_in, config.hidden_size, bias=True, dtype=dtype, rngs=rngs) if size_in else None
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps, dtype=dtype)

    def __call__(self, x: Float[Array, "B T F"], residual: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.LayerNorm(x if self.dense is None else self.dense(x), residual)


class Dense(nnx.Module):
    """Linear layer under the name `dense`, as in BERT's modules."""

    def __init__(self, size_in: int, size_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.dense = Linear(size_in, size_out, bias=True, dtype=dtype, rngs=rngs)


class MixerOutput(nnx.Module):
    """Residual sum and normalisation after the delta rule, under the key of BERT's attention."""

    def __init__(self, config: LamConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.output = AddAndNorm(config, dtype=dtype, rngs=rngs)


class Block(nnx.Module):
    """Rest of a layer, beside its delta rule: two normalised residual sums, and the feed-forward between them."""

    def __init__(self, config: LamConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.published = config.rule != "gated"
        self.attention = MixerOutput(config, dtype=dtype, rngs=rngs)
        self.intermediate = Dense(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)
        self.output = AddAndNorm(config, size_in=config.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], mixed: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = self.attention.output(mixed, x)
        inner = ops.gelu(self.intermediate.dense(x))
        # As published, GELU is applied twice: by MiniLM's module and again by LAM's.
        return self.output(ops.gelu(inner) if self.published else inner, x)


class Encoder(nnx.Module):
    """Stack of blocks."""

    def __init__(self, config: LamConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.layer = nnx.List([Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)])


class Teacher(nnx.Module):
    """Modules taken from MiniLM. The pooler is in the files and in the published parameter count, but not used."""

    def __init__(self, config: LamConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.embeddings = Embeddings(config, dtype=dtype, rngs=rngs)
        self.encoder = Encoder(config, dtype=dtype, rngs=rngs)
        self.pooler = Dense(config.hidden_size, config.hidden_size, dtype=dtype, rngs=rngs)


class LamModel(nnx.Module):
    """LAM's encoder, from tokens to hidden states.

    Matmuls take inputs that are rounded to the weights' dtype. Everything between them is float32.
    """

    ignored_weights = (
        r"^teacher_model\.encoder\.layer\.\d+\.attention\.(self|output\.dense)\.",
        r"position_ids$",
        r"^(embeddings|deltanet_norms|deltanet_ffns|ffn_norms|output_denses|pooler)\.",
    )
    """Patterns of keys that are not loaded: the replaced attention, an old constant, duplicates of the teacher."""

    def __init__(self, config: LamConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        layer = HierarchicalGatedDeltaNet if config.rule == "gated" else EnhancedHierarchicalDeltaNet
        self.teacher_model = Teacher(config, dtype=dtype, rngs=rngs)
        self.deltanet_layers = nnx.List(
            [layer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)]
        )

    takes_packed_sentences = False
    """True if several sentences may lie in one row."""

    @property
    def depends_on_padding(self) -> bool:
        """True if a sentence's states change with its padding or its batch, as those of the published rules do."""
        return self.config.rule != "gated"

    def __call__(self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"] | None = None) -> Float[Array, "B T D"]:
        """Final hidden states, float32. Sentences are padded on the right; the states of padding mean nothing.

        Args:
            tokens: token ids. T is at most `max_position_embeddings`.
            lengths: tokens of each sentence that are not padding; all if None. The published rules ignore it, and
                their results depend on the padding.
        """
        gated = self.config.rule == "gated"
        whole = jnp.full((1,), tokens.shape[1])
        x = self.teacher_model.embeddings(tokens, lengths if gated and lengths is not None else whole)
        for layer, block in zip(self.deltanet_layers, self.teacher_model.encoder.layer, strict=True):
            mixed, _ = layer(x, lengths) if isinstance(layer, HierarchicalGatedDeltaNet) else layer(x)
            x = block(x, mixed)
        return x
