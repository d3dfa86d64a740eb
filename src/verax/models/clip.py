"""CLIP's image encoder (Radford et al., 2021, arXiv:2103.00020): a vision transformer, run to its last layer but one.

Wan's and SkyReels-V2's image-to-video models take OpenCLIP's ViT-H/14. Module paths are the keys of Wan's
`models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth`; `checkpoint/video/parts.py` has transformers' names for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from verax import ops
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.fields import Depth, Epsilon, Size, check_multiple, file_of, read_fields, read_value, require_fields
from verax.files import JsonObject
from verax.models.bert import ACTIVATIONS, check_activation
from verax.nn import LayerNorm, Linear, Sequential
from verax.nn.layers import INIT_STD

__all__ = ["CLIPVisionConfig", "CLIPVisionModel"]

_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class CLIPVisionConfig:
    """Sizes of a model, under their names in transformers' config.json.

    The defaults are ViT-H/14's: Wan's layout has no config.json for it.
    """

    hidden_size: Size = 1280
    intermediate_size: Size = 5120
    num_hidden_layers: Depth = 32
    num_attention_heads: Size = 16
    image_size: Size = 224
    patch_size: Size = 14
    hidden_act: str = "gelu"
    layer_norm_eps: Epsilon = 1e-5

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_patches(self) -> int:
        """Number of patches of an image, P."""
        return (self.image_size // self.patch_size) ** 2

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> CLIPVisionConfig:
        """Read a config.json of `model_type` clip_vision_model, or of a whole `clip` that has one."""
        if config.get("model_type") == "clip" and isinstance(config.get("vision_config"), Mapping):
            vision = {"model_type": "clip_vision_model", **config["vision_config"]}
            config = JsonObject(vision, f"{file_of(config)}: vision_config")
        if (kind := config.get("model_type", "clip_vision_model")) != "clip_vision_model":
            raise UnsupportedModelError(
                f"config.json has model_type {kind!r}; the image encoder supported is clip_vision_model"
            )
        # Left out of config.json, these two would be transformers' defaults, which are another model's.
        require_fields(config, (*_REQUIRED, "patch_size", "hidden_act"), "clip_vision_model")
        for key in ("image_size", "patch_size"):
            if isinstance(config.get(key), (list, dict)):
                raise UnsupportedModelError(f"{key} {config[key]} is not supported; images and patches are square")
        read = cls(**read_fields(config, cls))
        check_activation(read.hidden_act)
        if (channels := read_value(config, "num_channels", int, 3)) != 3:
            raise UnsupportedModelError(f"num_channels {channels} is not supported; images have 3")
        check_multiple(config, hidden_size=read.hidden_size, num_attention_heads=read.num_attention_heads)
        check_multiple(config, image_size=read.image_size, patch_size=read.patch_size)
        return read


class PatchEmbedding(nnx.Module):
    """Linear map of each patch of an image. Its weight has the shape of a convolution's, `[D, 3, p, p]`."""

    def __init__(self, config: CLIPVisionConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.patch_size = config.patch_size
        shape = (config.hidden_size, 3, config.patch_size, config.patch_size)
        self.weight = nnx.Param(INIT_STD * jax.random.normal(rngs.params(), shape, dtype))

    def __call__(self, pixels: Float[Array, "B H W 3"]) -> Float[Array, "B P D"]:
        patches = ops.conv2d(pixels, self.weight[...], stride=self.patch_size)
        return patches.reshape(len(pixels), -1, patches.shape[-1])


class SelfAttention(nnx.Module):
    """Attention of every patch to all patches. The weights of queries, keys and values are rows of one matrix."""

    def __init__(self, config: CLIPVisionConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, H = config.hidden_size, config.head_dim
        self.head_dim = H
        self.to_qkv = Linear(D, 3 * D, bias=True, divided="out", unit=(H, H, H), dtype=dtype, rngs=rngs)
        self.proj = Linear(D, D, bias=True, divided="in", unit=H, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        qkv = self.to_qkv(x).reshape(*x.shape[:2], 3, -1, self.head_dim)
        dtype = self.to_qkv.weight.get_value().dtype
        q, k, v = qkv[:, :, 0], qkv[:, :, 1].astype(dtype), qkv[:, :, 2].astype(dtype)
        return self.proj(ops.attention(q, k, v, causal=False).reshape(*x.shape[:2], -1))


class AttentionBlock(nnx.Module):
    """Pre-norm block: attention, then feed-forward, each with a residual sum."""

    def __init__(self, config: CLIPVisionConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, F = config.hidden_size, config.intermediate_size
        self.norm1 = LayerNorm(D, eps=config.layer_norm_eps, dtype=dtype)
        self.attn = SelfAttention(config, dtype=dtype, rngs=rngs)
        self.norm2 = LayerNorm(D, eps=config.layer_norm_eps, dtype=dtype)
        up = Linear(D, F, bias=True, divided="out", dtype=dtype, rngs=rngs)
        down = Linear(F, D, bias=True, divided="in", dtype=dtype, rngs=rngs)
        self.mlp = Sequential([up, ACTIVATIONS[config.hidden_act], down])

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nnx.Module):
    """Vision transformer: a class token and the patches, learnt positions, and the blocks without the last."""

    def __init__(self, config: CLIPVisionConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, eps = config.hidden_size, config.layer_norm_eps
        self.patch_embedding = PatchEmbedding(config, dtype=dtype, rngs=rngs)
        self.cls_embedding = nnx.Param(INIT_STD * jax.random.normal(rngs.params(), (1, 1, D), dtype))
        positions = (1, 1 + config.num_patches, D)
        self.pos_embedding = nnx.Param(INIT_STD * jax.random.normal(rngs.params(), positions, dtype))
        self.pre_norm = LayerNorm(D, eps=eps, dtype=dtype)
        self.transformer = nnx.List(
            [AttentionBlock(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)]
        )
        self.post_norm = LayerNorm(D, eps=eps, dtype=dtype)

    def __call__(self, pixels: Float[Array, "B H W 3"]) -> Float[Array, "B T D"]:
        patches = self.patch_embedding(pixels)
        first = jnp.broadcast_to(self.cls_embedding[...].astype(jnp.float32), (len(pixels), 1, patches.shape[-1]))
        x = jnp.concatenate([first, patches], axis=1) + self.pos_embedding[...].astype(jnp.float32)
        x = self.pre_norm(x)
        for block in list(self.transformer)[:-1]:
            x = block(x)
        return x


class CLIPVisionModel(nnx.Module):
    """CLIP's image encoder, from images to one hidden state for each patch.

    Matmuls take inputs that are rounded to the weights' dtype. Everything between them is float32. The last block and
    `post_norm` are loaded so that a saved model is complete; they are not run.
    """

    ignored_weights = (r"^textual\.", r"^log_scale$", r"^visual\.head$", r"^visual_projection\.", r"position_ids$")
    """Patterns of keys that are not loaded, in either layout: the text encoder, projections, an old constant."""

    def __init__(self, config: CLIPVisionConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.visual = VisionTransformer(config, dtype=dtype, rngs=rngs)

    def __call__(self, pixels: Float[Array, "B H W 3"]) -> Float[Array, "B T D"]:
        """Hidden states before the last block, float32 `[B, 1 + P, D]`: transformers' `hidden_states[-2]`.

        `pixels`: normalised by CLIP's mean and standard deviation (`video.pictures`); H and W are `image_size`.
        """
        size = self.config.image_size
        if pixels.shape[1:3] != (size, size):
            raise InvalidParameterError(f"pixels: expected images of {size} x {size}, got {pixels.shape[1:3]}")
        return self.visual(pixels.astype(jnp.float32))
