"""A SkyReels-V2 or Wan model from either published layout to either, one tensor in memory at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from verax.checkpoint.checkpoint import Checkpoint
from verax.checkpoint.formats.safetensors import SHARD_BYTES, NewTensor, write_shards
from verax.checkpoint.video.folder import SETTINGS, TOKENIZER, VideoFolder
from verax.checkpoint.video.parts import (
    EXPERTS,
    PARTS,
    PUBLISHED,
    Part,
    diffusers_transformer,
    has_image_states,
    original_transformer,
)
from verax.errors import CheckpointError, InvalidParameterError
from verax.files import atomic_path, write_json

Layout = Literal["original", "diffusers"]


class _PartFiles(NamedTuple):
    """Output of a part: files under `target / folder`, `stem` numbered as needed, and its settings."""

    folder: str
    stem: str
    tensors: dict[str, NewTensor]
    settings: tuple[str, dict[str, Any]]


def convert(
    source: VideoFolder,
    target: str | Path,
    to: Layout,
    *,
    dtype: DTypeLike | None = None,
    force: bool = False,
    max_shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a model in one of the two layouts; the folder. Weights keep their bits, unless `dtype` rounds them.

    The folder appears when it is complete: all is written next to it first. In the original layout the VAE, the text
    and the image encoder are safetensors under the original's names (`Wan2.1_VAE.safetensors` for `Wan2.1_VAE.pth`),
    with their settings next to them (`Wan2.1_VAE.json`), which the original's code does not need.

    Args:
        dtype: dtype of the transformer and the encoders, where they are floats; unchanged if None. The VAE is kept:
            its encoder loses visibly by fewer bits, and it is small.
        max_shard_bytes: a new file is begun beyond this size.
        progress: called with (bytes done, bytes in all) after each tensor.
    """
    target = Path(target)
    if target.exists() and target.resolve() in (source.path.resolve(), *source.path.resolve().parents):
        raise CheckpointError(f"{target}: that is the model itself, or has it inside; name another folder")
    if target.exists() and not force:
        raise CheckpointError(f"{target}: it exists already; name another folder, or --force to replace it")
    if to not in ("original", "diffusers"):
        raise InvalidParameterError(f"to: expected original or diffusers, got {to!r}")
    if (kind := source.config("transformer").get("_class_name", PUBLISHED[0])) not in PUBLISHED:
        raise CheckpointError(f"{source.path}: a {kind} has one layout; {', '.join(PUBLISHED)} can be converted")
    parts = [_plan(source, name, to, None if name == "vae" else dtype) for name in _wanted(source)]
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as partial:
        partial.mkdir()
        _write_settings(source, partial, to)
        total = sum(tensor.size for part in parts for tensor in part.tensors.values())
        done = 0
        for part in parts:
            folder = partial / part.folder
            folder.mkdir(exist_ok=True)
            name, settings = part.settings
            write_json(folder / name, settings)
            for tensor in write_shards(folder, part.stem, part.tensors, max_shard_bytes):
                done += tensor.size
                if progress is not None:
                    progress(done, total)
    return target


def _wanted(source: VideoFolder) -> list[str]:
    """The parts that a model has; an image encoder and a second transformer only if the first part says so."""
    optional = {
        "image_encoder": has_image_states(source.config("transformer")),
        "transformer_2": source.boundary_ratio is not None,
    }
    return [name for name in PARTS if optional.get(name, True) or name in source]


def _plan(source: VideoFolder, name: str, to: Layout, dtype: DTypeLike | None) -> _PartFiles:
    part, checkpoint = PARTS[name], source.checkpoint(name, quantized=False)
    names = part.names(checkpoint.config)
    tensors: dict[str, NewTensor] = {}
    for key in checkpoint.names():
        theirs = names.forward(key)
        if theirs is None:
            where = checkpoint.place(key)[0]
            raise CheckpointError(f"{where}: {key} is not a weight of the {part.what} in either layout")
        tensors |= _tensors(part, checkpoint, key, theirs if to == "diffusers" else None, dtype)
    settings = checkpoint.config
    if to == "diffusers":
        settings = diffusers_transformer(settings, source.pipeline) if name in EXPERTS else settings
        return _PartFiles(name, part.stem, tensors, ("config.json", settings))
    stem = part.original_stem(settings)
    if name not in EXPERTS:
        return _PartFiles("", stem, tensors, (f"{stem}.json", settings))
    boundary = source.boundary_ratio
    more = {"boundary_ratio": boundary, "expand_timesteps": source.expand_timesteps}
    settings = original_transformer(settings, source.pipeline, **more)
    return _PartFiles("" if boundary is None else EXPERTS[name], stem, tensors, ("config.json", settings))


def _tensors(
    part: Part, checkpoint: Checkpoint, key: str, theirs: tuple[str, ...] | None, dtype: DTypeLike | None
) -> dict[str, NewTensor]:
    """Tensors to write for a weight: itself, or under diffusers' names (`theirs`) one tensor or several parts."""
    stored = checkpoint.info(key)
    floats = dtype is not None and jnp.issubdtype(stored.dtype, jnp.floating)
    kind = jnp.dtype(dtype) if floats else stored.dtype
    names, form = ((key,), lambda array: array) if theirs is None else (theirs, part.form(key).to_diffusers)
    whole = form(np.broadcast_to(np.int8(0), stored.shape)).shape
    if len(names) > 1 and whole[0] % len(names):
        raise CheckpointError(f"{checkpoint.place(key)[0]}: {key} has {whole[0]} rows, for {len(names)} tensors")
    rows = whole[0] // len(names) if len(names) > 1 else None
    shape = whole if rows is None else (rows, *whole[1:])

    def read(first: int) -> np.ndarray:
        array = checkpoint.read_raw(key)
        return form(array) if rows is None else form(array)[first : first + rows]

    release = lambda: checkpoint.release(key)
    return {name: NewTensor(kind, shape, lambda i=i: read(i * (rows or 0)), release) for i, name in enumerate(names)}


def _write_settings(source: VideoFolder, target: Path, to: Layout) -> None:
    """All that is not a part: tokenizer, scheduler, image processor, and for diffusers what the folders are."""
    if (source.path / SETTINGS).is_file():
        shutil.copyfile(source.path / SETTINGS, target / SETTINGS)
    shutil.copytree(source.tokenizer, target / ("tokenizer" if to == "diffusers" else TOKENIZER))
    scheduler, processor = source.scheduler, source.image_processor
    if to == "original":
        write_json(target / "scheduler_config.json", scheduler)
        if processor is not None:
            write_json(target / "preprocessor_config.json", processor)
        return
    (target / "scheduler").mkdir()
    write_json(target / "scheduler" / "scheduler_config.json", scheduler)
    if "image_encoder" in source:
        (target / "image_processor").mkdir()
        write_json(target / "image_processor" / "preprocessor_config.json", processor or _CLIP_PROCESSOR)
    index = source.path / "model_index.json"
    if source.layout == "diffusers" and index.is_file():
        shutil.copyfile(index, target / index.name)
    else:
        write_json(target / index.name, _model_index(source))


_CLIP_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 224},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_convert_rgb": True,
}
"""CLIP's, for the published image encoder."""


def _model_index(source: VideoFolder) -> dict[str, Any]:
    """Diffusers' list of a pipeline's parts and the classes that load them."""
    transformer = diffusers_transformer(source.config("transformer"), source.pipeline)["_class_name"]
    more: dict[str, Any] = {"expand_timesteps": True} if source.expand_timesteps else {}
    if source.boundary_ratio is not None:
        more = {"boundary_ratio": source.boundary_ratio, "transformer_2": ["diffusers", transformer]}
    index: dict[str, Any] = {
        "_class_name": source.pipeline,
        "_diffusers_version": "0.35.0",
        **more,
        "scheduler": ["diffusers", source.scheduler.get("_class_name", "UniPCMultistepScheduler")],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", transformer],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if "image_encoder" in source:
        kind = (source.config("image_encoder").get("architectures") or ["CLIPVisionModelWithProjection"])[0]
        index |= {"image_encoder": ["transformers", kind], "image_processor": ["transformers", "CLIPImageProcessor"]}
    return index
