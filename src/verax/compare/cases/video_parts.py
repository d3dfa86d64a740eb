"""Both sides of each part of a SkyReels-V2 or Wan model: its classes, its names, its inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from verax.checkpoint.names import clip as names_clip
from verax.checkpoint.names import umt5 as names_umt5
from verax.checkpoint.names import wan as names_wan
from verax.checkpoint.names.table import Renaming
from verax.checkpoint.names.wan_vae import table_for
from verax.compare.align import Names
from verax.compare.case import Side
from verax.compare.cases.text import transformers
from verax.compare.inputs import Shape
from verax.compare.recorder import Watch
from verax.compare.torch_side import reference_package
from verax.errors import InvalidParameterError
from verax.models.clip import CLIPVisionConfig, CLIPVisionModel
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.wan import layers as wan_layers
from verax.models.wan.model import WanConfig, WanModel
from verax.models.wan.vae import WanVae, WanVaeConfig

__all__ = ["PART_SIDES", "PartSides", "diffusers"]

FRAMES, HEIGHT, WIDTH = 3, 8, 10
"""Size of the latents. No two sizes of a layer's result are equal, so that no axes are mistaken for each other."""

CLIP_FRAMES, CLIP_HEIGHT, CLIP_WIDTH = 9, 5, 7
"""Frames, and latents in height and width, of the clip that the VAE encodes and decodes, a latent at a time, which is
how diffusers does it."""

WORDS = 512
"""diffusers takes what is before the last 512 tokens of a context for the image."""

TIMESTEP = 412.0
PROMPT_TOKENS = 23


Arrays = Mapping[str, np.ndarray]
"""By the names of the reference's arguments, in its layout."""


class PartSides(NamedTuple):
    """The two sides of one part.

    Attributes:
        build: our model, of its configuration.
        config: reads the configuration.
        torch: the reference's model, of the configuration as a dict.
        names: between the modules' names.
        inputs: what the reference's call takes, of our configuration; what is not given is random.
        run: both calls' inputs and how they are called, of our configuration and what is given.
    """

    build: Callable[..., nnx.Module]
    config: Callable[[Mapping[str, Any]], Any]
    torch: Callable[[dict[str, Any]], Any]
    names: Callable[[Mapping[str, Any]], Names]
    inputs: Callable[[Any], Mapping[str, Shape]]
    run: Callable[[Any, Any, Arrays], tuple[Side, Side]]


def diffusers() -> Any:
    """The package."""
    return reference_package("diffusers")


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def _float32(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32)


def _dtype(model: Any) -> Any:
    """Dtype of a torch model's matrices."""
    return next(weight.dtype for weight in reversed(list(model.parameters())) if weight.ndim > 1)


def _transformer(settings: dict[str, Any]) -> Any:
    kind = settings.pop("_class_name")
    return getattr(diffusers(), kind)(**settings)


def _transformer_inputs(config: WanConfig) -> dict[str, Shape]:
    image: dict[str, Shape] = {}
    if config.image_dim is not None:
        image["encoder_hidden_states_image"] = (1, None, config.image_dim)
    return {
        "hidden_states": (1, config.in_dim, None, None, None),
        "timestep": (1,),
        "encoder_hidden_states": (1, WORDS if image else None, config.text_dim),
        **image,
    }


def _run_transformer(model: Any, config: WanConfig, given: Arrays) -> tuple[Side, Side]:
    latents = _normal(1, FRAMES, HEIGHT, WIDTH, config.in_dim)
    if "hidden_states" in given:
        latents = _float32(given["hidden_states"]).transpose(0, 2, 3, 4, 1)
    if any(size % config.patch for size in latents.shape[2:4]):
        raise InvalidParameterError(
            f"inputs: height and width of hidden_states have to be divisible by {config.patch}, got "
            f"{latents.shape[2]} x {latents.shape[3]}"
        )
    text = _normal(1, WORDS if config.image_dim else PROMPT_TOKENS, config.text_dim)
    text = _float32(given.get("encoder_hidden_states", text))
    image = None if config.image_dim is None else _normal(1, 11, config.image_dim)
    image = None if image is None else _float32(given.get("encoder_hidden_states_image", image))
    times = _float32(given.get("timestep", np.array([TIMESTEP])))
    fps = np.array([24], np.int32) if config.inject_sample_info else None

    def theirs(model: Any, latents: Any, times: Any, text: Any, image: Any) -> Any:
        like = _dtype(model)
        frame_rate = {} if fps is None else {"fps": [1]}  # the second row of its table: any other than 16
        image = None if image is None else image.to(like)
        return model(latents.to(like), times, text.to(like), image, **frame_rate).sample

    def ours(model: Any, latents: Any, times: Any, text: Any, image: Any) -> Any:
        frame_rate = None if fps is None else jnp.asarray(fps)
        return model(latents, times, model.encode_context(text, image), fps=frame_rate)

    code = sys.modules[type(model).__module__]
    return (
        Side(
            model,
            (latents.transpose(0, 4, 1, 2, 3), times, text, image),
            call=theirs,
            watch=(Watch(code, "dispatch_attention_fn", inputs={0: "rotary_q", 1: "rotary_k"}, where=r"attn1$"),)
            if hasattr(code, "dispatch_attention_fn")
            else (),
            inputs=(r"attn\d(\.to_out\.0)?$", r"ffn$"),
        ),
        Side(
            model,
            (latents, times, text, image),
            call=ours,
            watch=(Watch(wan_layers, "rotate", outputs=("rotary_q", "rotary_k")),),
            inputs=(r"(self|cross)_attn(\.o)?$", r"ffn$"),
        ),
    )


_WAN_MODULES = Renaming(
    [
        ("blocks.{i}.self_attn", "blocks.{i}.attn1"),
        ("blocks.{i}.cross_attn", "blocks.{i}.attn2"),
        ("time_embedding", "condition_embedder.time_embedder"),
        ("text_embedding", "condition_embedder.text_embedder"),
        ("img_emb", "condition_embedder.image_embedder"),
    ]
)
_UMT5_MODULES = Renaming(
    [
        ("blocks.{i}.attn", "encoder.block.{i}.layer.0.SelfAttention"),
        ("blocks.{i}.ffn", "encoder.block.{i}.layer.1.DenseReluDense"),
        ("blocks.{i}", "encoder.block.{i}"),
    ]
)
_CLIP_MODULES = Renaming(
    [
        ("visual.transformer.{i}.attn", "vision_model.encoder.layers.{i}.self_attn"),
        ("visual.transformer.{i}", "vision_model.encoder.layers.{i}"),
    ]
)


class _Unprefixed:
    """A table without `vision_model.`, which transformers' modules have in some versions and not in others."""

    def __init__(self, table: Renaming):
        self._table = table

    def forward(self, name: str) -> tuple[str, ...] | None:
        """The reference's names of a module."""
        found = self._table.forward(name)
        return None if found is None else tuple(other.removeprefix("vision_model.") for other in found)


class _Parents:
    """Names of blocks of the VAE, by those of their first layers."""

    def __init__(self, table: Renaming):
        self._table = table

    def forward(self, name: str) -> tuple[str, ...] | None:
        """The reference's name of a block."""
        first = self._table.forward(f"{name}.residual.0")
        if first is not None and first[0].endswith(".norm1"):
            return (first[0].removesuffix(".norm1"),)
        first = self._table.forward(f"{name}.resample")
        return None if first is None else (first[0].removesuffix(".resample"),)


def _vae(settings: dict[str, Any]) -> Any:
    return diffusers().AutoencoderKLWan(**{name: value for name, value in settings.items() if name != "_class_name"})


def _vae_inputs(config: WanVaeConfig) -> dict[str, Shape]:
    return {"sample": (1, 3, None, None, None)}


def _run_vae(model: Any, config: WanVaeConfig, given: Arrays) -> tuple[Side, Side]:
    pixels = config.pixels_per_latent
    frames = np.clip(_normal(1, CLIP_FRAMES, pixels * CLIP_HEIGHT, pixels * CLIP_WIDTH, 3), -1, 1)
    if "sample" in given:
        frames = _float32(given["sample"]).transpose(0, 2, 3, 4, 1)
    if frames.shape[1] % 4 != 1 or frames.shape[2] % pixels or frames.shape[3] % pixels:
        raise InvalidParameterError(
            f"inputs: sample has 4n + 1 frames and sides divisible by {pixels}, got {frames.shape[1]} of "
            f"{frames.shape[2]} x {frames.shape[3]}"
        )

    def theirs(model: Any, frames: Any) -> Any:
        latents = model.encode(frames.to(_dtype(model))).latent_dist.mode()
        return model.decode(latents).sample

    def ours(model: Any, frames: Any) -> Any:
        return model.decode(model.encode(frames, chunk=1), chunk=1)

    return Side(model, (frames.transpose(0, 4, 1, 2, 3),), call=theirs), Side(model, (frames,), call=ours)


def _text_inputs(config: UMT5Config) -> dict[str, Shape]:
    return {"input_ids": (None, None)}


def _run_text(model: Any, config: UMT5Config, given: Arrays) -> tuple[Side, Side]:
    tokens = np.random.default_rng(0).integers(1, config.vocab_size, (2, PROMPT_TOKENS))
    tokens = given.get("input_ids", tokens)
    if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise InvalidParameterError(f"inputs: input_ids are integers from 0 to {config.vocab_size - 1}")
    tokens, lengths = tokens.astype(np.int64), np.full(len(tokens), tokens.shape[1], np.int32)
    theirs = lambda model, tokens: model(input_ids=tokens)
    return (
        Side(model, (tokens,), call=theirs, inputs=(r"SelfAttention\.o$",)),
        Side(model, (tokens, lengths), inputs=(r"attn\.o$",)),
    )


def _image_inputs(config: CLIPVisionConfig) -> dict[str, Shape]:
    return {"pixel_values": (None, 3, config.image_size, config.image_size)}


def _run_image(model: Any, config: CLIPVisionConfig, given: Arrays) -> tuple[Side, Side]:
    pixels = _normal(2, config.image_size, config.image_size, 3)
    if "pixel_values" in given:
        pixels = _float32(given["pixel_values"]).transpose(0, 2, 3, 1)

    def theirs(model: Any, pixels: Any) -> Any:
        return model(pixel_values=pixels.to(_dtype(model)), output_hidden_states=True).hidden_states[-2]

    return (
        Side(model, (pixels.transpose(0, 3, 1, 2),), call=theirs, inputs=(r"self_attn\.out_proj$",)),
        Side(model, (pixels,), inputs=(r"attn\.proj$",)),
    )


def _eager(kind: str, config: str, settings: dict[str, Any]) -> Any:
    """A model of transformers that writes its attention out."""
    made = getattr(transformers(), config)(**settings)
    made._attn_implementation = "eager"
    return getattr(transformers(), kind)(made)


_TRANSFORMER = PartSides(
    WanModel,
    WanConfig.from_hf,
    _transformer,
    lambda settings: (names_wan.TABLE, _WAN_MODULES),
    _transformer_inputs,
    _run_transformer,
)

PART_SIDES: Mapping[str, PartSides] = MappingProxyType(
    {
        "transformer": _TRANSFORMER,
        "transformer_2": _TRANSFORMER,
        "vae": PartSides(
            WanVae,
            WanVaeConfig.from_hf,
            _vae,
            lambda settings: (table_for(settings), _Parents(table_for(settings))),
            _vae_inputs,
            _run_vae,
        ),
        "text_encoder": PartSides(
            UMT5EncoderModel,
            UMT5Config.from_hf,
            partial(_eager, "UMT5EncoderModel", "UMT5Config"),
            lambda settings: (names_umt5.TABLE, _UMT5_MODULES),
            _text_inputs,
            _run_text,
        ),
        "image_encoder": PartSides(
            CLIPVisionModel,
            CLIPVisionConfig.from_hf,
            partial(_eager, "CLIPVisionModel", "CLIPVisionConfig"),
            lambda settings: tuple(
                impl(table)
                for table in (names_clip.TABLE, _CLIP_MODULES)
                for impl in (lambda table: table, _Unprefixed)
            ),
            _image_inputs,
            _run_image,
        ),
    }
)
