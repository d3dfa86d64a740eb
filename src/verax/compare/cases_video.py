"""What `verax compare video` compares: each part of a SkyReels-V2 or Wan model in diffusers or transformers, and in
verax."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from verax.checkpoint import load_module, names_clip, names_umt5, names_wan
from verax.checkpoint.names import NameTable
from verax.checkpoint.names_wan_vae import name_table
from verax.checkpoint.random_weights import random_weight
from verax.checkpoint.video_folder import VideoFolder
from verax.checkpoint.video_parts import PARTS, diffusers_transformer
from verax.compare.align import Names
from verax.compare.cases import transformers
from verax.compare.recorder import Watch
from verax.compare.run import Case, Side
from verax.compare.torch_side import torch
from verax.errors import CheckpointError, InvalidParameterError, MissingDependencyError
from verax.models import DTYPES, wan_layers
from verax.models.clip import CLIPVisionConfig, CLIPVisionModel
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.wan import WanConfig, WanModel
from verax.models.wan_vae import WanVae, WanVaeConfig

__all__ = ["RANDOM", "VIDEO_PARTS", "build_part", "diffusers", "has_part", "video_case"]

VIDEO_PARTS = tuple(PARTS)
"""transformer, vae, text_encoder, image_encoder."""

FRAMES, HEIGHT, WIDTH = 3, 8, 10
"""Of the latents. No two sizes of a layer's result are equal, so that no axes are mistaken for each other."""

CLIP_FRAMES, CLIP_HEIGHT, CLIP_WIDTH = 9, 40, 56
"""Of the clip that the VAE encodes and decodes, a latent at a time, which is how diffusers does it."""

WORDS = 512
"""diffusers takes what is before the last 512 tokens of a context for the image."""

TIMESTEP = 412.0
PROMPT_TOKENS = 23

RANDOM: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "transformer": dict(
            _class_name="SkyReelsV2Transformer3DModel",
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=36,
            out_channels=16,
            image_dim=20,
            added_kv_proj_dim=24,
            text_dim=16,
            freq_dim=64,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=32,
        ),
        "vae": dict(base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1)
        | dict(temperal_downsample=[False, True, True]),
        "text_encoder": dict(vocab_size=100, d_model=16, d_kv=6, d_ff=36, num_layers=2, num_heads=5)
        | dict(feed_forward_proj="gated-gelu"),
        "image_encoder": dict(hidden_size=20, intermediate_size=52, num_hidden_layers=3, num_attention_heads=4)
        | dict(image_size=35, patch_size=7, hidden_act="gelu"),
    }
)
"""Small settings of each part, which fit each other."""


class _Part(NamedTuple):
    """How one part runs on both sides.

    Attributes:
        build: our model, of its configuration.
        config: reads the configuration.
        torch: the reference's model, of the configuration as a dict.
        names: between the modules' names.
        run: both calls' inputs and how they are called, of our configuration.
    """

    build: Callable[..., nnx.Module]
    config: Callable[[Mapping[str, Any]], Any]
    torch: Callable[[dict[str, Any]], Any]
    names: Callable[[Mapping[str, Any]], Names]
    run: Callable[[Any, Any], tuple[Side, Side]]


def video_case(model: str | Path | None, part: str) -> Case:
    """One part of a video model, on random inputs.

    Args:
        model: a folder of either published layout; None for small random weights.
        part: one of `VIDEO_PARTS`.

    Raises:
        CheckpointError: if the folder or the part cannot be read.
        InvalidParameterError: for another part.
        MissingDependencyError: without torch, diffusers or transformers.
    """
    if part not in VIDEO_PARTS:
        raise InvalidParameterError(f"part: expected one of {', '.join(VIDEO_PARTS)}, got {part!r}")
    kind, folder = _PARTS[part], None if model is None else VideoFolder(model)
    settings = dict(RANDOM[part]) if folder is None else folder.config(part)
    if part == "transformer" and folder is not None:
        settings = diffusers_transformer(settings, folder.pipeline)
    config = kind.config(settings)
    abstract = nnx.eval_shape(lambda: build_part(part, settings))
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(abstract))}
    opened = None if folder is None else folder.checkpoint(part)

    def weight(name: str) -> np.ndarray:
        return random_weight(name, shapes[name]) if opened is None else np.asarray(opened.read(name), np.float32)

    def reference(dtype: str) -> Side:
        made = kind.torch({name: value for name, value in settings.items() if name != "_diffusers_version"})
        _fill(made, part, settings, weight)
        _cast(made.eval().requires_grad_(False), dtype)
        return kind.run(made, config)[0]

    def ours(dtype: str) -> Side:
        wanted = nnx.eval_shape(lambda: kind.build(config, dtype=DTYPES[dtype], rngs=nnx.Rngs(0)))
        if opened is not None:
            ignored = getattr(kind.build, "ignored_weights", ())
            made = load_module(wanted, opened, dtype=jnp.dtype(DTYPES[dtype]), ignore=ignored)
        else:
            graph, state = nnx.split(wanted)
            leaves = [
                (path, leaf.replace(jnp.asarray(weight(".".join(map(str, path))), leaf.dtype)))
                for path, leaf in nnx.to_flat_state(state)
            ]
            made = nnx.merge(graph, nnx.from_flat_state(leaves))
        return kind.run(made, config)[1]

    about = {"model": "random" if folder is None else str(folder.path), "part": PARTS[part].what}
    what = type(abstract).__name__
    library = "transformers" if part.endswith("encoder") else "diffusers"
    return Case(f"{what} and {library}", reference, ours, kind.names(settings), about)


def build_part(part: str, settings: Mapping[str, Any]) -> nnx.Module:
    """Our module of a part, of its settings."""
    kind = _PARTS[part]
    return kind.build(kind.config(settings), rngs=nnx.Rngs(0))


def has_part(model: str | Path | None, part: str) -> bool:
    """Whether a folder has a part; random models have all.

    Raises:
        CheckpointError: if it is no video model's folder.
    """
    return model is None or part in VideoFolder(model)


def _fill(model: Any, part: str, settings: Mapping[str, Any], weight: Callable[[str], np.ndarray]) -> None:
    """Weights by the original's names into the reference's model, one after the other."""
    names, state, filled = PARTS[part].names(settings), model.state_dict(), set()
    for key, tensor in state.items():
        if (found := names.to_original(key)) is None:
            continue
        original, piece = found
        whole = PARTS[part].form(original).to_diffusers(weight(original))
        array = np.split(whole, len(names.to_diffusers(original) or (key,)))[piece]
        if array.shape != tuple(tensor.shape):
            raise CheckpointError(f"{original}: shape {list(array.shape)}, the reference needs {list(tensor.shape)}")
        tensor.copy_(torch().from_numpy(np.array(array)))
        filled.add(key)
    if missing := {key for key, _ in model.named_parameters()} - filled:
        raise CheckpointError(f"no weights for the reference's {', '.join(sorted(missing)[:5])}")


def _cast(model: Any, dtype: str) -> None:
    """As `from_pretrained` casts: what diffusers keeps in float32 stays so, and buffers are left alone."""
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    kept = kept if hasattr(model, "register_to_config") else ()
    for name, parameter in model.named_parameters():
        if not set(name.split(".")) & set(kept):
            parameter.data = parameter.data.to(getattr(torch(), dtype))


def diffusers() -> Any:
    """The package, and torch.

    Raises:
        MissingDependencyError: where it is not installed.
    """
    torch()
    try:
        import diffusers
    except ImportError as error:
        raise MissingDependencyError("the reference needs diffusers: pip install 'verax[parity]'") from error
    return diffusers


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def _dtype(model: Any) -> Any:
    """Of a torch model's matrices."""
    return next(weight.dtype for weight in reversed(list(model.parameters())) if weight.ndim > 1)


def _transformer(settings: dict[str, Any]) -> Any:
    kind = settings.pop("_class_name")
    return getattr(diffusers(), kind)(**settings)


def _run_transformer(model: Any, config: WanConfig) -> tuple[Side, Side]:
    latents = _normal(1, FRAMES, HEIGHT, WIDTH, config.in_dim)
    text = _normal(1, WORDS if config.image_dim else PROMPT_TOKENS, config.text_dim)
    image = None if config.image_dim is None else _normal(1, 11, config.image_dim)
    times = np.array([TIMESTEP], np.float32)
    fps = np.array([24], np.int32) if config.inject_sample_info else None

    def theirs(model: Any, latents: Any, times: Any, text: Any, image: Any) -> Any:
        like = _dtype(model)
        told = {} if fps is None else {"fps": [1]}  # the second row of its table: any other than 16
        image = None if image is None else image.to(like)
        return model(latents.to(like), times, text.to(like), image, **told).sample

    def ours(model: Any, latents: Any, times: Any, text: Any, image: Any) -> Any:
        told = None if fps is None else jnp.asarray(fps)
        return model(latents, times, model.encode_context(text, image), fps=told)

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


_WAN_MODULES = NameTable(
    [
        ("blocks.{i}.self_attn", "blocks.{i}.attn1"),
        ("blocks.{i}.cross_attn", "blocks.{i}.attn2"),
        ("time_embedding", "condition_embedder.time_embedder"),
        ("text_embedding", "condition_embedder.text_embedder"),
        ("img_emb", "condition_embedder.image_embedder"),
    ]
)
_UMT5_MODULES = NameTable(
    [
        ("blocks.{i}.attn", "encoder.block.{i}.layer.0.SelfAttention"),
        ("blocks.{i}.ffn", "encoder.block.{i}.layer.1.DenseReluDense"),
        ("blocks.{i}", "encoder.block.{i}"),
    ]
)
_CLIP_MODULES = NameTable(
    [
        ("visual.transformer.{i}.attn", "vision_model.encoder.layers.{i}.self_attn"),
        ("visual.transformer.{i}", "vision_model.encoder.layers.{i}"),
    ]
)


class _Unprefixed:
    """A table without `vision_model.`, which transformers' modules have in some versions and not in others."""

    def __init__(self, table: NameTable):
        self._table = table

    def to_diffusers(self, name: str) -> tuple[str, ...]:
        """The reference's names."""
        return tuple(found.removeprefix("vision_model.") for found in self._table.to_diffusers(name))


class _Parents:
    """Names of blocks of the VAE, by those of their first layers."""

    def __init__(self, table: NameTable):
        self._table = table

    def to_diffusers(self, name: str) -> tuple[str, ...]:
        """The reference's name of a block."""
        layer, theirs = (".resample", ".resample") if not self._has(name, ".residual.0") else (".residual.0", ".norm1")
        return tuple(found.removesuffix(theirs) for found in self._table.to_diffusers(name + layer))

    def _has(self, name: str, layer: str) -> bool:
        return any(found.endswith(".norm1") for found in _try(self._table, name + layer))


def _try(table: NameTable, name: str) -> tuple[str, ...]:
    try:
        return table.to_diffusers(name)
    except CheckpointError:
        return ()


def _vae(settings: dict[str, Any]) -> Any:
    return diffusers().AutoencoderKLWan(**{name: value for name, value in settings.items() if name != "_class_name"})


def _vae_table(settings: Mapping[str, Any]) -> NameTable:
    return name_table(settings.get("num_res_blocks", 2), len(settings.get("dim_mult", (1, 2, 4, 4))))


def _run_vae(model: Any, config: WanVaeConfig) -> tuple[Side, Side]:
    frames = np.clip(_normal(1, CLIP_FRAMES, CLIP_HEIGHT, CLIP_WIDTH, 3), -1, 1)

    def theirs(model: Any, frames: Any) -> Any:
        latents = model.encode(frames.to(_dtype(model))).latent_dist.mode()
        return model.decode(latents).sample

    def ours(model: Any, frames: Any) -> Any:
        return model.decode(model.encode(frames, chunk=1), chunk=1)

    return Side(model, (frames.transpose(0, 4, 1, 2, 3),), call=theirs), Side(model, (frames,), call=ours)


def _run_text(model: Any, config: UMT5Config) -> tuple[Side, Side]:
    tokens = np.random.default_rng(0).integers(1, config.vocab_size, (2, PROMPT_TOKENS))
    lengths = np.full(2, PROMPT_TOKENS, np.int32)
    theirs = lambda model, tokens: model(input_ids=tokens)  # noqa: E731
    return (
        Side(model, (tokens,), call=theirs, inputs=(r"SelfAttention\.o$",)),
        Side(model, (tokens, lengths), inputs=(r"attn\.o$",)),
    )


def _run_image(model: Any, config: CLIPVisionConfig) -> tuple[Side, Side]:
    pixels = _normal(2, config.image_size, config.image_size, 3)

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


_PARTS: Mapping[str, _Part] = MappingProxyType(
    {
        "transformer": _Part(
            WanModel,
            WanConfig.from_hf,
            _transformer,
            lambda settings: (names_wan.TABLE, _WAN_MODULES),
            _run_transformer,
        ),
        "vae": _Part(
            WanVae,
            WanVaeConfig.from_hf,
            _vae,
            lambda settings: (_vae_table(settings), _Parents(_vae_table(settings))),
            _run_vae,
        ),
        "text_encoder": _Part(
            UMT5EncoderModel,
            UMT5Config.from_hf,
            partial(_eager, "UMT5EncoderModel", "UMT5Config"),
            lambda settings: (names_umt5.TABLE, _UMT5_MODULES),
            _run_text,
        ),
        "image_encoder": _Part(
            CLIPVisionModel,
            CLIPVisionConfig.from_hf,
            partial(_eager, "CLIPVisionModel", "CLIPVisionConfig"),
            lambda settings: tuple(
                form(table)
                for table in (names_clip.TABLE, _CLIP_MODULES)
                for form in (lambda table: table, _Unprefixed)
            ),
            _run_image,
        ),
    }
)
