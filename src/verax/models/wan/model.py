"""The diffusion transformer of Wan 2.1 and 2.2 (Wan Team, 2025, arXiv:2503.20314) and SkyReels-V2 (Chen et al., 2025,
arXiv:2504.13074): text to video, image to video, and models in which each latent frame has its own time.

Module paths are the keys of the original checkpoints; `checkpoint/video/parts.py` has diffusers' names. Follows both
originals' `WanModel` and diffusers' `SkyReelsV2Transformer3DModel`, which agree in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from verax import ops
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.fields import Count, Depth, Epsilon, Size, read_fields, read_value, require_fields
from verax.models.video_model import ATTENTION, Control, SequenceParallel
from verax.models.wan.layers import (
    Block,
    CrossKeys,
    Float32Linear,
    Head,
    ImageEmbedding,
    PatchEmbedding,
    block_causal,
    gelu_tanh,
    rotary_tables,
    sinusoid,
)
from verax.models.wan.vace import ControlBlock, ControlContext, control_context, run_controlled
from verax.nn import Embedding, Linear, Sequential
from verax.nn.parallel import STACKED_BLOCKS, scan_blocks

WanContext = tuple[CrossKeys, ...] | CrossKeys | ControlContext
"""Each layer's cross-attention keys and values, of one prompt per row; a pytree. Blocks in one stack (`ShardedBlocks`)
have one `CrossKeys`, with the layer in the second axis: `[B, L, S, N, H]`."""


@dataclass(frozen=True, kw_only=True)
class WanConfig:
    """Sizes, by the names of the original's config.json."""

    dim: Size
    ffn_dim: Size
    num_heads: Size
    num_layers: Depth
    in_dim: Size = 16
    """Channels of the input: 16 of the latents and, for image to video, 20 of the condition."""
    out_dim: Size = 16
    text_dim: Size = 4096
    image_dim: Size | None = None
    """Width of the image encoder's output; None for a model that takes text alone."""
    image_positions: Size | None = None
    """Tokens of a first and a last image, with positions added; None for a model that sees one image."""
    vace_layers: tuple[Count, ...] = ()
    """Layers that a control condition is added to, the first of them 0; none for a model without."""
    vace_in_dim: Size = 96
    """Channels of the control condition: 32 of latents, and a mask of 8 x 8 pixels."""
    freq_dim: Size = 256
    patch: int = 2
    """Height and width of a token's patch of the latents; it is one frame deep."""
    eps: Epsilon = 1e-6
    inject_sample_info: bool = False
    """True if the frames per second are an input of the model."""
    max_positions: Size = 1024
    """Frames, rows or columns of tokens at most."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> WanConfig:
        """Read the config.json of an original checkpoint (`WanModel`) or of one in diffusers' layout."""
        kind = read_value(config, "_class_name", str, "WanModel")
        if kind not in _KEYS:
            known = ", ".join(_KEYS)
            raise UnsupportedModelError(f"config.json has _class_name {kind!r}; transformers supported are {known}")
        for name, values in _ONLY.items():
            if name in config and config[name] not in values:
                raise UnsupportedModelError(f"{name} {config[name]!r} is not supported; only {values[0]!r} is")
        patch = read_value(config, "patch_size", tuple[Size, ...], (1, 2, 2))
        if len(patch) != 3 or patch[0] != 1 or patch[1] != patch[2]:
            raise UnsupportedModelError(f"patch_size {list(patch)} is not supported; only squares one frame deep are")
        keys, original = _KEYS[kind], kind in ORIGINALS
        width = "dim" if original else "attention_head_dim"
        require_fields(config, (width, "ffn_dim", keys.get("num_heads", "num_heads"), "num_layers"), "Wan transformer")
        sizes = read_fields(config, cls, _SAME, keys)
        dim = read_value(config, width, Size) * (1 if original else sizes["num_heads"])
        if not original:
            sizes.setdefault("out_dim", sizes.get("in_dim", 16))
        image_dim = _original_image_dim(config) if original else _diffusers_image_dim(config, dim)
        first_and_last = FIRST_AND_LAST if config.get("model_type") == "flf2v" else None
        positions = read_value(config, "pos_embed_seq_len", Size, first_and_last)
        if kind in (ORIGINAL_VACE, VACE) and not sizes.get("vace_layers"):
            sizes["vace_layers"] = tuple(range(0, sizes["num_layers"], 2 if original else 5))
        return cls(**sizes, dim=dim, image_dim=image_dim, image_positions=positions, patch=patch[1])

    @property
    def takes_fps(self) -> bool:
        """True if the frames per second are an input of the model."""
        return self.inject_sample_info

    @property
    def control_layers(self) -> int:
        """Number of layers that a control condition is added to."""
        return len(self.vace_layers)

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        return self.dim // self.num_heads

    def __post_init__(self) -> None:
        if self.dim % self.num_heads or self.head_dim % 2:
            raise UnsupportedModelError(f"dim {self.dim} does not divide into {self.num_heads} heads of an even size")
        layers = self.vace_layers
        rising = layers == tuple(sorted({0, *layers})) and layers[-1] < self.num_layers
        if layers and not (rising and self.image_dim is None):
            raise UnsupportedModelError(
                f"vace_layers {list(layers)} with {self.num_layers} layers and image_dim {self.image_dim} are not "
                "supported; expected rising numbers of layers from 0 on, and no image encoder"
            )
        if self.image_positions is not None and self.image_dim is None:
            raise UnsupportedModelError("pos_embed_seq_len is for an image encoder's states; image_dim is missing")


_SAME = (
    *("ffn_dim", "num_heads", "num_layers", "in_dim", "out_dim", "text_dim", "freq_dim", "eps"),
    *("inject_sample_info", "max_positions", "vace_layers", "vace_in_dim"),
)
_DIFFUSERS = {
    "num_heads": "num_attention_heads",
    "in_dim": "in_channels",
    "out_dim": "out_channels",
    "max_positions": "rope_max_seq_len",
}
ORIGINAL, ORIGINAL_VACE = ORIGINALS = ("WanModel", "VaceWanModel")
SKYREELS, WAN, VACE = "SkyReelsV2Transformer3DModel", "WanTransformer3DModel", "WanVACETransformer3DModel"
"""Class names of transformers: the originals', then diffusers'."""

_KEYS = {
    **{name: {"max_positions": "rope_max_seq_len"} for name in ORIGINALS},
    SKYREELS: _DIFFUSERS,
    WAN: _DIFFUSERS,
    VACE: {**_DIFFUSERS, "vace_in_dim": "vace_in_channels"},
}
"""Keys of config.json that are not `WanConfig`'s names, by class name."""


def _original_image_dim(config: Mapping[str, Any]) -> int | None:
    """`image_dim`, which published originals leave out; null is a model without an image encoder, as Wan 2.2's are."""
    kind = config.get("model_type", "t2v")
    known = ("t2v", "vace") if config.get("_class_name") == ORIGINAL_VACE else ("t2v", "i2v", "flf2v", "ti2v")
    if kind not in known:
        raise UnsupportedModelError(f"model_type {kind!r} is not supported; those supported are {', '.join(known)}")
    seen = kind in ("i2v", "flf2v")
    return read_value({"image_dim": IMAGE_DIM, **config}, "image_dim", Size, None) if seen else None


def _diffusers_image_dim(config: Mapping[str, Any], dim: int) -> int | None:
    image_dim, added = (read_value(config, name, Size, None) for name in ("image_dim", "added_kv_proj_dim"))
    if (added is not None or image_dim is not None) and (added != dim or image_dim is None):
        raise UnsupportedModelError(
            f"image_dim {image_dim} with added_kv_proj_dim {added} is not supported: an image needs both, the second "
            f"of the model's width {dim}"
        )
    return image_dim


_ONLY: dict[str, tuple[Any, ...]] = {
    "cross_attn_norm": (True,),
    "qk_norm": ("rms_norm_across_heads", True),
    "window_size": ((-1, -1), [-1, -1]),
    "text_len": (512,),
    # A request has its own, `causal_block_size`. Diffusers saves the last call's with the model.
    "num_frame_per_block": (1,),
}
"""Options of either layout, and their values that are supported."""


IMAGE_DIM = 1280
"""Width of CLIP ViT-H/14, the image encoder of every published model."""

FIRST_AND_LAST = 2 * 257
"""Its states of two pictures."""

_SMALL = WanConfig(dim=1536, ffn_dim=8960, num_heads=12, num_layers=30)
_LARGE = WanConfig(dim=5120, ffn_dim=13824, num_heads=40, num_layers=40)

WAN_CONFIGS: Mapping[str, WanConfig] = {
    "t2v-1.3b": _SMALL,
    "i2v-1.3b": replace(_SMALL, in_dim=36, image_dim=IMAGE_DIM),
    "df-1.3b": replace(_SMALL, inject_sample_info=True),
    "t2v-14b": _LARGE,
    "i2v-14b": replace(_LARGE, in_dim=36, image_dim=IMAGE_DIM),
    "df-14b": _LARGE,
    "flf2v-14b": replace(_LARGE, in_dim=36, image_dim=IMAGE_DIM, image_positions=FIRST_AND_LAST),
    "vace-1.3b": replace(_SMALL, vace_layers=tuple(range(0, 30, 2))),
    "vace-14b": replace(_LARGE, vace_layers=tuple(range(0, 40, 5))),
    "t2v-a14b": _LARGE,
    "i2v-a14b": replace(_LARGE, in_dim=36),
    "ti2v-5b": WanConfig(dim=3072, ffn_dim=14336, num_heads=24, num_layers=30, in_dim=48, out_dim=48),
}
"""The published sizes: Wan2.1's text to video, SkyReels-V2's image to video and diffusion forcing, and both's 14B. Then
the sizes of Wan2.2: each of the two experts of A14B, and 5B."""


def _blocks(config: WanConfig, count: int, dtype: DTypeLike, rngs: nnx.Rngs, make: Any = Block) -> list[Any]:
    """Fresh blocks of the class `make`, each from its own key.

    One is traced and serves for all: what flax does to draw a weight while it traces (`nnx.eval_shape`) takes time
    with all that was traced before, three quarters of a minute for 30 blocks.
    """

    def one(key: Array) -> Any:
        D, F, heads, image = config.dim, config.ffn_dim, config.num_heads, config.image_dim is not None
        return make(D, F, heads, image=image, eps=config.eps, dtype=dtype, rngs=nnx.Rngs(params=key))

    graph = nnx.graphdef(nnx.eval_shape(lambda: one(jax.random.key(0))))
    draw = jax.jit(lambda key: nnx.state(one(key)))
    return [nnx.merge(graph, draw(rngs.params())) for _ in range(count)]


class WanModel(nnx.Module):
    """Noisy latents to the flow's velocity.

    The residual stream and everything between matmuls is float32; matmul inputs are rounded to the weights' dtype,
    except the inputs of the time's embedding and of the head. The layers are separate arrays under separate names, and
    one program after another in the compiled step. `nn.parallel.shard_blocks` makes a stack and a loop of them.
    """

    ignored_weights = (r"\.cross_attn\.norm_q_img\.weight$",)
    """A norm that some files carry and no model uses."""

    quantized_weights = r"^blocks\."
    """All but a hundredth of the weights. Errors of the embeddings and of the head would reach every token whole."""

    stacked_weights = STACKED_BLOCKS

    def __init__(self, config: WanConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        D = config.dim
        self.config = config

        def linear(size_in: int, size_out: int, kind: type[Linear] = Linear) -> Linear:
            return kind(size_in, size_out, bias=True, dtype=dtype, rngs=rngs)

        self.patch_embedding = PatchEmbedding(config.in_dim, D, config.patch, dtype=dtype, rngs=rngs)
        self.text_embedding = Sequential([linear(config.text_dim, D), gelu_tanh, linear(D, D)])
        image = {"positions": config.image_positions, "dtype": dtype, "rngs": rngs}
        self.img_emb = None if config.image_dim is None else ImageEmbedding(config.image_dim, D, **image)
        silu = jax.nn.silu
        self.time_embedding = Sequential([linear(config.freq_dim, D, Float32Linear), silu, linear(D, D, Float32Linear)])
        self.time_projection = Sequential([silu, linear(D, 6 * D, Float32Linear)])
        takes_fps = config.inject_sample_info
        self.fps_embedding = Embedding(2, D, dtype=dtype, rngs=rngs) if takes_fps else None
        self.fps_projection = (
            Sequential([linear(D, D, Float32Linear), silu, linear(D, 6 * D, Float32Linear)]) if takes_fps else None
        )
        self.blocks = nnx.List(_blocks(config, config.num_layers, dtype, rngs))
        controls, more = bool(config.vace_layers), len(config.vace_layers) - 1
        first = partial(ControlBlock, first=True)
        self.vace_patch_embedding = (
            PatchEmbedding(config.vace_in_dim, D, config.patch, dtype=dtype, rngs=rngs) if controls else None
        )
        self.vace_blocks = (
            nnx.List(_blocks(config, 1, dtype, rngs, first) + _blocks(config, more, dtype, rngs, ControlBlock))
            if controls
            else None
        )
        self.head = Head(D, config.out_dim * config.patch**2, eps=config.eps, dtype=dtype, rngs=rngs)

    def encode_context(
        self, text: Float[Array, "B S E"], image: Float[Array, "B P I"] | None = None, control: Control | None = None
    ) -> WanContext:
        """Each layer's keys and values of a prompt, which no step changes, and a control condition.

        `text`: the text encoder's states; zeros at pads, all of which are attended to. Published models have S 512.
        `image`: the image encoder's states, for a model with an `image_dim`. `control`: for one with `vace_layers`.
        """
        if (image is None) != (self.img_emb is None):
            what = "has no use for one" if self.img_emb is None else "needs an image's states in addition to the text's"
            raise InvalidParameterError(f"image: this model {what} (image_dim {self.config.image_dim})")
        words = self.text_embedding(text)
        pixels = None if image is None or self.img_emb is None else self.img_emb(image)

        def keys(_: None, block: Block, __: None) -> tuple[None, CrossKeys]:
            return None, block.cross_attn.keys(words, pixels)

        context = scan_blocks(keys, self.blocks, None)[1]
        if (control is None) != (self.vace_blocks is None):
            what = "has no use for one" if self.vace_blocks is None else "needs one"
            raise InvalidParameterError(f"control: this model {what} (vace_layers)")
        if control is None or self.vace_blocks is None:
            return context
        return control_context(context, scan_blocks(keys, self.vace_blocks, None)[1], control, len(text))

    def embed_time(
        self, timesteps: Num[Array, "B *F"], fps: Int[Array, "B"] | None = None
    ) -> tuple[Float[Array, "B G D"], Float[Array, "B G 6 D"]]:
        """The time's embedding `e` and its projection `e0`; G is 1, or F where each frame has its own time.

        `timesteps`: 0 (clean) to 1000 (noise). `fps`: frames per second, for a model with `inject_sample_info`, which
        distinguishes 16 from all others.
        """
        if (fps is None) != (self.fps_embedding is None):
            what = "has no use for it" if self.fps_embedding is None else "needs the frames per second"
            raise InvalidParameterError(f"fps: this model {what} (inject_sample_info)")
        e = self.time_embedding(sinusoid(timesteps.reshape(timesteps.shape[0], -1), self.config.freq_dim))
        e0 = self.time_projection(e)
        if fps is not None and self.fps_embedding is not None and self.fps_projection is not None:
            e0 += self.fps_projection(self.fps_embedding(jnp.where(fps == 16, 0, 1)))[:, None]
        return e, e0.reshape(*e.shape[:2], 6, -1)

    def embed_latents(self, latents: Float[Array, "B F hp wp C"]) -> Float[Array, "B F h w D"]:
        """One token for each patch: the residual stream before the blocks."""
        config = self.config
        *_, height, width, channels = latents.shape
        if channels != config.in_dim:
            raise InvalidParameterError(f"latents: expected {config.in_dim} channels in the last axis, got {channels}")
        if height % config.patch or width % config.patch:
            raise InvalidParameterError(
                f"latents: {height} x {width} does not divide into patches of {config.patch} x {config.patch}"
            )
        return self.patch_embedding(latents)

    def run_blocks(
        self,
        x: Float[Array, "B F h w D"],
        e0: Float[Array, "B #F 6 D"],
        context: WanContext,
        *,
        causal_block_size: int | None = None,
        attention: str = "auto",
        sequence: SequenceParallel | None = None,
    ) -> Float[Array, "B F h w D"]:
        """Residual stream after all blocks, see `VideoTransformer`. Step caches keep `run_blocks(x, ...) - x`."""
        config = self.config
        _, F, h, w, _ = x.shape
        if sequence is not None:
            h, w = sequence.height, sequence.width
        if max(F, h, w) > config.max_positions:
            raise InvalidParameterError(
                f"latents: {F} frames of {h} x {w} patches; this model has positions for {config.max_positions} of each"
            )
        if attention not in ATTENTION:
            raise InvalidParameterError(f"attention: expected one of {', '.join(ATTENTION)}, got {attention!r}")
        if causal_block_size is not None and causal_block_size < 1:
            raise InvalidParameterError(f"causal_block_size: expected at least 1 frame, got {causal_block_size}")
        attend = ATTENTION[attention]
        attend_self = attend if causal_block_size is None else block_causal(attend, causal_block_size * h * w)
        cos, sin = rotary_tables(F, h, w, config.head_dim)
        if sequence is not None:
            attend_self, cos, sin = sequence.attention(attend_self), sequence.rotary(cos), sequence.rotary(sin)

        def run(x: Array, block: Block, keys: CrossKeys) -> tuple[Array, None]:
            return ops.materialize(block(x, e0, keys, (cos, sin), attend, attend_self)), None

        if not isinstance(context, ControlContext):
            return scan_blocks(run, self.blocks, x, context)[0]
        assert self.vace_patch_embedding is not None
        assert self.vace_blocks is not None
        latents = context.latents if sequence is None else sequence.divide(context.latents)
        layers = dict(zip(config.vace_layers, self.vace_blocks, strict=True))
        tokens = self.vace_patch_embedding(latents)
        return run_controlled(run, self.blocks, layers, x, tokens, context, (e0, (cos, sin), attend, attend_self))

    def unembed(self, x: Float[Array, "B F h w D"], e: Float[Array, "B #F D"]) -> Float[Array, "B F hp wp O"]:
        """The residual stream after the blocks to the velocity of each latent."""
        p = self.config.patch
        patches = self.head(x, e)
        B, F, h, w, _ = patches.shape
        grid = patches.reshape(B, F, h, w, p, p, -1).transpose(0, 1, 2, 4, 3, 5, 6)
        return grid.reshape(B, F, h * p, w * p, -1)

    def __call__(
        self,
        latents: Float[Array, "B F hp wp C"],
        timesteps: Num[Array, "B *F"],
        context: WanContext,
        *,
        fps: Int[Array, "B"] | None = None,
        causal_block_size: int | None = None,
        attention: str = "auto",
    ) -> Float[Array, "B F hp wp O"]:
        """Velocity of each latent, in float32.

        `latents`: normalised latents, followed by the condition's channels where the model has any. `timesteps`: `[B]`,
        or `[B, F]` for a time of each latent frame (diffusion forcing); 0 to 1000.
        """
        if timesteps.shape not in (latents.shape[:1], latents.shape[:2]):
            raise InvalidParameterError(
                f"timesteps: expected shape {list(latents.shape[:1])} or {list(latents.shape[:2])}, "
                f"got {list(timesteps.shape)}"
            )
        e, e0 = self.embed_time(timesteps, fps)
        x = self.embed_latents(latents)
        x = self.run_blocks(x, e0, context, causal_block_size=causal_block_size, attention=attention)
        return self.unembed(x, e)
