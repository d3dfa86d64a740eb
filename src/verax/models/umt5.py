"""UMT5's encoder (Chung et al., 2023, arXiv:2304.09151), the text encoder of Wan's and SkyReels-V2's video models.

T5 (Raffel et al., 2020, arXiv:1910.10683) with a table of relative positions in every layer. Module paths are the keys
of Wan's `models_t5_umt5-xxl-enc-bf16.pth`; `checkpoint/video/parts.py` has transformers' names for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax.errors import UnsupportedModelError
from verax.fields import Depth, Epsilon, Size, read_fields, require_fields
from verax.nn import Embedding, Linear, RMSNorm
from verax.ops.attention import biased_attention
from verax.ops.division import Division

__all__ = ["UMT5Config", "UMT5EncoderModel"]

_REQUIRED = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")


@dataclass(frozen=True)
class UMT5Config:
    """Sizes of a model, under their names in transformers' config.json.

    The defaults are UMT5-XXL's: Wan's layout has no config.json for it.
    """

    vocab_size: Size = 256384
    d_model: Size = 4096
    d_kv: Size = 64
    """Size of a head."""
    d_ff: Size = 10240
    num_layers: Depth = 24
    num_heads: Size = 64
    relative_attention_num_buckets: Size = 32
    """Number of rows of a layer's table of positions: half for keys to the left, half for keys to the right."""
    relative_attention_max_distance: Size = 128
    """Distance in tokens from which on all keys of a side share a row."""
    layer_norm_epsilon: Epsilon = 1e-6

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> UMT5Config:
        """Read a config.json of `model_type` umt5."""
        if (kind := config.get("model_type", "umt5")) != "umt5":
            raise UnsupportedModelError(f"config.json has model_type {kind!r}; the text encoder supported is umt5")
        require_fields(config, _REQUIRED, "umt5 model")
        if (block := config.get("feed_forward_proj", "gated-gelu")) != "gated-gelu":
            raise UnsupportedModelError(f"feed_forward_proj {block!r} is not supported; umt5 models have 'gated-gelu'")
        read = cls(**read_fields(config, cls))
        exact = read.relative_attention_num_buckets // 4
        if read.relative_attention_num_buckets % 4 or not 0 < exact < read.relative_attention_max_distance:
            raise UnsupportedModelError(
                f"relative_attention_num_buckets {read.relative_attention_num_buckets} is not supported: it must be a "
                "multiple of 4, and a quarter of it less than relative_attention_max_distance "
                f"{read.relative_attention_max_distance}"
            )
        return read


def position_rows(buckets: int, max_distance: int, length: int) -> np.ndarray:
    """Row of the table of positions for query t and key s, int32 `[length, length]`, indexed `[t, s]`.

    Each side has half of the rows. Near keys have a row for each distance. Farther keys share the other rows, whose
    widths grow by a constant factor up to the largest distance.

    `buckets`: rows of the table. `max_distance`: distance in tokens from which on all keys of a side share a row.
    """
    side = buckets // 2
    exact = side // 2
    offset = np.arange(length)[None, :] - np.arange(length)[:, None]
    distance = np.abs(offset)
    # In float32, as the reference: another rounding gives another row at the borders between rows.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    ratio = ratio / np.float32(math.log(max_distance / exact))
    far = np.minimum(exact + (ratio * np.float32(side - exact)).astype(np.int32), side - 1)
    return (np.where(distance < exact, distance, far) + side * (offset > 0)).astype(np.int32)


class RelativeEmbedding(nnx.Module):
    """Table of relative positions: a bias of each head for the distance and the side of a key, `[N, T, T]`."""

    def __init__(self, config: UMT5Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.embedding = Embedding(config.relative_attention_num_buckets, config.num_heads, dtype=dtype, rngs=rngs)

    @property
    def divisions(self) -> Mapping[str, Division]:
        """Division of the table by its columns: each of several devices has the columns of its heads."""
        return {"embedding.weight": Division(axis=1)}

    def __call__(self, rows: Int[Array, "T T"]) -> Float[Array, "N T T"]:
        return self.embedding(rows).transpose(2, 0, 1)


class T5Attention(nnx.Module):
    """Attention with unscaled scores and an added position bias."""

    def __init__(self, config: UMT5Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, H = config.d_model, config.d_kv
        inner = config.num_heads * H
        self.head_dim, self.dtype = H, jnp.dtype(dtype)
        self.q = Linear(D, inner, divided="out", unit=H, dtype=dtype, rngs=rngs)
        self.k = Linear(D, inner, divided="out", unit=H, dtype=dtype, rngs=rngs)
        self.v = Linear(D, inner, divided="out", unit=H, dtype=dtype, rngs=rngs)
        self.o = Linear(inner, D, divided="in", unit=H, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], bias: Float[Array, "N T T"], segments: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        q, k, v = (m(x).astype(self.dtype).reshape(*x.shape[:2], -1, self.head_dim) for m in (self.q, self.k, self.v))
        return self.o(biased_attention(q, k, v, bias, segments, 1.0).reshape(*x.shape[:2], -1))


class T5FeedForward(nnx.Module):
    """Gated feed-forward: `fc2(fc1(x) * gelu(gate(x)))`, with the tanh approximation of GELU."""

    def __init__(self, config: UMT5Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, F = config.d_model, config.d_ff
        self.gate = nnx.List([Linear(D, F, divided="out", dtype=dtype, rngs=rngs)])
        self.fc1 = Linear(D, F, divided="out", dtype=dtype, rngs=rngs)
        self.fc2 = Linear(F, D, divided="in", dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.fc2(self.fc1(x) * jax.nn.gelu(self.gate[0](x), approximate=True))


class T5Block(nnx.Module):
    """Pre-norm block: attention, then feed-forward, each with a residual sum."""

    def __init__(self, config: UMT5Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, eps = config.d_model, config.layer_norm_epsilon
        self.norm1 = RMSNorm(D, eps=eps, dtype=dtype)
        self.attn = T5Attention(config, dtype=dtype, rngs=rngs)
        self.norm2 = RMSNorm(D, eps=eps, dtype=dtype)
        self.ffn = T5FeedForward(config, dtype=dtype, rngs=rngs)
        self.pos_embedding = RelativeEmbedding(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], rows: Int[Array, "T T"], segments: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        x = x + self.attn(self.norm1(x), self.pos_embedding(rows), segments)
        return x + self.ffn(self.norm2(x))


class UMT5EncoderModel(nnx.Module):
    """UMT5's encoder, from tokens to hidden states.

    Matmuls take inputs that are rounded to the weights' dtype. Everything between them is float32.
    """

    quantized_weights = r"^token_embedding\.|\.(attn|ffn)\."

    def __init__(self, config: UMT5Config, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.token_embedding = Embedding(
            config.vocab_size, config.d_model, divided="vocabulary", dtype=dtype, rngs=rngs
        )
        self.blocks = nnx.List([T5Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.d_model, eps=config.layer_norm_epsilon, dtype=dtype)

    def __call__(self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]) -> Float[Array, "B T D"]:
        """Hidden states, float32. Prompts are padded on the right; the states of padding are zeros.

        A prompt's states do not depend on T, which may be as small as the length of the longest prompt.

        `tokens`: token ids; any ids at the padding. `lengths`: tokens of each prompt that are not padding.
        """
        T = tokens.shape[1]
        segments = (jnp.arange(T) >= lengths[:, None]).astype(jnp.int32)  # of a prompt, and of its padding
        config = self.config
        buckets, farthest = config.relative_attention_num_buckets, config.relative_attention_max_distance
        rows = jnp.asarray(position_rows(buckets, farthest, T))
        x = self.token_embedding(tokens)
        for block in self.blocks:
            x = block(x, rows, segments)
        return jnp.where(segments[..., None] == 0, self.norm(x), 0.0)
