"""Cases of `verax compare video`: each part of a SkyReels-V2 or Wan model, in a PyTorch library and in verax."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from verax import builtin
from verax._optional import require_optional
from verax.checkpoint.load import random_weight
from verax.checkpoint.video.folder import VideoFolder
from verax.checkpoint.video.parts import (
    CLIP,
    EXPERTS,
    PARTS,
    UMT5,
    VAE_2_2,
    WAN,
    Renaming,
    diffusers_transformer,
    wan_vae_names,
)
from verax.compare.align import Names
from verax.compare.case import Case, Inputs, Shape, Side
from verax.compare.cases.text import WEIGHTS, transformers
from verax.compare.torch_side import torch
from verax.compare.trace import Watch
from verax.errors import CheckpointError, InvalidParameterError
from verax.loading import load_model
from verax.models import DTYPES
from verax.models.clip import CLIPVisionConfig, CLIPVisionModel
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.wan import layers as wan_layers
from verax.models.wan.model import WanConfig, WanModel
from verax.models.wan.vae import WanVae, WanVaeConfig

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
"""Arrays by the names of the reference's arguments, in its layout."""


class PartSides(NamedTuple):
    """The two sides of one part.

    Attributes:
        torch: function from the configuration as a dict to the reference's model.
        names: function from the configuration to tables between the modules' names.
        inputs: function from our configuration to the shapes of the reference's arguments, which are random by default.
        run: function from a model, our configuration and given arrays to both sides' calls.
    """

    build: Callable[..., nnx.Module]
    config: Callable[[Mapping[str, Any]], Any]
    torch: Callable[[dict[str, Any]], Any]
    names: Callable[[Mapping[str, Any]], Names]
    inputs: Callable[[Any], Mapping[str, Shape]]
    run: Callable[[Any, Any, Arrays], tuple[Side, Side]]


def diffusers() -> Any:
    """The package diffusers."""
    return require_optional("diffusers")


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
        names = self._table.forward(name)
        return None if names is None else tuple(other.removeprefix("vision_model.") for other in names)


class _Parents:
    """Names of blocks of the VAE, by the names of their first layers."""

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


def _run_text(model: Any, config: UMT5Config, given: Arrays) -> tuple[Side, Side]:
    tokens = np.random.default_rng(0).integers(1, config.vocab_size, (2, PROMPT_TOKENS))
    tokens = given.get("input_ids", tokens)
    if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise InvalidParameterError(f"inputs: input_ids are integers from 0 to {config.vocab_size - 1}")
    tokens, lengths = tokens.astype(np.int64), np.full(len(tokens), tokens.shape[1], np.int32)
    theirs = lambda model, tokens: model(input_ids=tokens)
    return (
        Side(model, (tokens,), call=theirs, inputs=(r"SelfAttention\.o$",), without=WEIGHTS),
        Side(model, (tokens, lengths), inputs=(r"attn\.o$",)),
    )


def _run_image(model: Any, config: CLIPVisionConfig, given: Arrays) -> tuple[Side, Side]:
    pixels = _normal(2, config.image_size, config.image_size, 3)
    if "pixel_values" in given:
        pixels = _float32(given["pixel_values"]).transpose(0, 2, 3, 1)

    def theirs(model: Any, pixels: Any) -> Any:
        return model(pixel_values=pixels.to(_dtype(model)), output_hidden_states=True).hidden_states[-2]

    return (
        Side(model, (pixels.transpose(0, 3, 1, 2),), call=theirs, inputs=(r"self_attn\.out_proj$",), without=WEIGHTS),
        Side(model, (pixels,), inputs=(r"attn\.proj$",)),
    )


def _eager(kind: str, config: str, settings: dict[str, Any]) -> Any:
    """A model of transformers that writes its attention out."""
    hf_config = getattr(transformers(), config)(**settings)
    hf_config._attn_implementation = "eager"
    return getattr(transformers(), kind)(hf_config)


_TRANSFORMER = PartSides(
    WanModel,
    WanConfig.from_hf,
    _transformer,
    lambda settings: (WAN, _WAN_MODULES),
    _transformer_inputs,
    _run_transformer,
)

PART_SIDES: Mapping[str, PartSides] = {
    "transformer": _TRANSFORMER,
    "transformer_2": _TRANSFORMER,
    "vae": PartSides(
        WanVae,
        WanVaeConfig.from_hf,
        _vae,
        lambda settings: (wan_vae_names(settings), _Parents(wan_vae_names(settings))),
        lambda config: {"sample": (1, 3, None, None, None)},
        _run_vae,
    ),
    "text_encoder": PartSides(
        UMT5EncoderModel,
        UMT5Config.from_hf,
        partial(_eager, "UMT5EncoderModel", "UMT5Config"),
        lambda settings: (UMT5, _UMT5_MODULES),
        lambda config: {"input_ids": (None, None)},
        _run_text,
    ),
    "image_encoder": PartSides(
        CLIPVisionModel,
        CLIPVisionConfig.from_hf,
        partial(_eager, "CLIPVisionModel", "CLIPVisionConfig"),
        lambda settings: tuple(
            impl(table) for table in (CLIP, _CLIP_MODULES) for impl in (lambda table: table, _Unprefixed)
        ),
        lambda config: {"pixel_values": (None, 3, config.image_size, config.image_size)},
        _run_image,
    ),
}


VIDEO_PARTS = tuple(PARTS)
"""Names of the parts: transformer, transformer_2, vae, text_encoder, image_encoder."""

_TEXT = dict(vocab_size=100, d_model=16, d_kv=6, d_ff=36, num_layers=2, num_heads=5, feed_forward_proj="gated-gelu")


def _wan(kind: str, heads: int, channels: tuple[int, int], ffn_dim: int, layers: int, **more: Any) -> dict[str, Any]:
    """Settings of a transformer with channels in and out, at the published widths where `more` has no others."""
    sizes = dict(num_attention_heads=heads, attention_head_dim=128, in_channels=channels[0], out_channels=channels[1])
    widths = dict(text_dim=4096, freq_dim=256, ffn_dim=ffn_dim, num_layers=layers)
    return dict(_class_name=f"{kind}Transformer3DModel", **sizes | widths | more)


_TINY = dict(attention_head_dim=12, text_dim=16, freq_dim=64, rope_max_seq_len=32)

RANDOM: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "tiny": {
        "transformer": _wan("SkyReelsV2", 2, (36, 16), 32, 2, image_dim=20, added_kv_proj_dim=24, **_TINY),
        "vae": dict(base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1)
        | dict(temperal_downsample=[False, True, True]),
        "text_encoder": _TEXT,
        "image_encoder": dict(hidden_size=20, intermediate_size=52, num_hidden_layers=3, num_attention_heads=4)
        | dict(image_size=35, patch_size=7, hidden_act="gelu"),
    },
    "tiny-5b": {
        "transformer": _wan("Wan", 2, (24, 24), 32, 2, **_TINY),
        "vae": dict(VAE_2_2, base_dim=6, decoder_base_dim=6, z_dim=24, num_res_blocks=1, dim_mult=[1, 2, 2, 2])
        | dict(latents_mean=[0.1] * 24, latents_std=[0.9, 1.2] * 12),
        "text_encoder": _TEXT,
    },
    "5b": {"transformer": _wan("Wan", 24, (48, 48), 14336, 30), "vae": dict(VAE_2_2)},
    "1.3b": {
        "transformer": _wan("SkyReelsV2", 12, (36, 16), 8960, 30, image_dim=1280, added_kv_proj_dim=1536),
        "vae": dict(base_dim=96, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2)
        | dict(temperal_downsample=[False, True, True]),
    },
}
"""Settings of the parts of random models, by size: small ones, which fit each other, the sizes of
SkyReels-V2-I2V-1.3B, and small and published sizes like Wan2.2-TI2V-5B's."""

RANDOM_INPUTS = Inputs()


def video_case(model: str | Path | None, part: str, *, inputs: Inputs = RANDOM_INPUTS, size: str = "tiny") -> Case:
    """Case that compares one part of a video model.

    `model`: a folder of either published layout; None for random weights. `inputs`: arrays by the names of the
    reference's arguments, in its layout; the others are random.
    """
    if part not in VIDEO_PARTS:
        raise InvalidParameterError(f"part: expected one of {', '.join(VIDEO_PARTS)}, got {part!r}")
    kind, folder = PART_SIDES[part], None if model is None else VideoFolder(model)
    if folder is None and part not in (known := _random(size)):
        raise InvalidParameterError(f"part: random weights of {size} are made for {', '.join(known)}, not {part}")
    settings = dict(RANDOM[size][part]) if folder is None else folder.config(part)
    if part in EXPERTS and folder is not None:
        settings = diffusers_transformer(settings, folder.pipeline)
    config = kind.config(settings)
    given = inputs.checked(kind.inputs(config))
    abstract = nnx.eval_shape(lambda: build_part(part, settings))
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(abstract))}
    opened = None if folder is None else folder.checkpoint(part, quantized=False)

    def weight(name: str) -> np.ndarray:
        return random_weight(name, shapes[name]) if opened is None else np.asarray(opened.read(name), np.float32)

    def reference(dtype: str) -> Side:
        return kind.run(reference_model(part, settings, weight, dtype), config, given)[0]

    def ours(dtype: str) -> Side:
        if opened is not None:
            module = load_model(opened, kind.build, config, dtype=dtype)
        else:
            graph, state = nnx.split(nnx.eval_shape(lambda: kind.build(config, dtype=DTYPES[dtype], rngs=nnx.Rngs(0))))
            leaves = [
                (path, leaf.replace(jnp.asarray(weight(".".join(map(str, path))), leaf.dtype)))
                for path, leaf in nnx.to_flat_state(state)
            ]
            module = nnx.merge(graph, nnx.from_flat_state(leaves))
        return kind.run(module, config, given)[1]

    if folder is None:
        weights = "random" if size == "tiny" else f"random, {size}"
    else:
        weights = "built-in" if folder.path == builtin.video_model() else str(folder.path)
    about = {"model": weights, "part": PARTS[part].what, **inputs.about}
    what = type(abstract).__name__
    library = "transformers" if part.endswith("encoder") else "diffusers"
    return Case(f"{what} and {library}", reference, ours, kind.names(settings), about)


def reference_model(part: str, settings: Mapping[str, Any], weight: Callable[[str], np.ndarray], dtype: str) -> Any:
    """The PyTorch library's model of a part, cast as `from_pretrained` does; `weight` takes the original's name."""
    module = PART_SIDES[part].torch({name: value for name, value in settings.items() if name != "_diffusers_version"})
    _fill(module, part, settings, weight)
    _cast(module.eval().requires_grad_(False), dtype)
    return module


def build_part(part: str, settings: Mapping[str, Any]) -> nnx.Module:
    """Our module of a part with the given settings."""
    kind = PART_SIDES[part]
    return kind.build(kind.config(settings), rngs=nnx.Rngs(0))


def has_part(model: str | Path | None, part: str, *, size: str = "tiny") -> bool:
    """True if a folder, or a random model of a size, has a part."""
    return part in (_random(size) if model is None else VideoFolder(model))


def _random(size: str) -> Mapping[str, Any]:
    if size not in RANDOM:
        raise InvalidParameterError(f"size: expected one of {', '.join(RANDOM)}, got {size!r}")
    return RANDOM[size]


def _fill(model: Any, part: str, settings: Mapping[str, Any], weight: Callable[[str], np.ndarray]) -> None:
    """Copy weights into the reference's model, one after the other; `weight` takes the original's name."""
    names, state, filled = PARTS[part].names(settings), model.state_dict(), set()
    for key, tensor in state.items():
        if (source := names.backward(key)) is None:
            continue
        original, piece = source
        whole = PARTS[part].form(original).to_diffusers(weight(original))
        array = np.split(whole, len(names.forward(original) or (key,)))[piece]
        if array.shape != tuple(tensor.shape):
            raise CheckpointError(f"{original}: shape {list(array.shape)}, the reference needs {list(tensor.shape)}")
        tensor.copy_(torch().from_numpy(np.array(array)))
        filled.add(key)
    if missing := {key for key, _ in model.named_parameters()} - filled:
        raise CheckpointError(f"no weights for the reference's {', '.join(sorted(missing)[:5])}")


def _cast(model: Any, dtype: str) -> None:
    """Cast parameters as `from_pretrained` does.

    Modules that diffusers keeps in float32 are not cast. Buffers are not cast.
    """
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    kept = kept if hasattr(model, "register_to_config") else ()
    for name, parameter in model.named_parameters():
        if not set(name.split(".")) & set(kept):
            parameter.data = parameter.data.to(getattr(torch(), dtype))
