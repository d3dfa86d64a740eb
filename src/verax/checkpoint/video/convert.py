"""Conversion of a SkyReels-V2 or Wan model between its two published layouts, one tensor in memory at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from verax.checkpoint.checkpoint import Checkpoint
from verax.checkpoint.formats.safetensors import DTYPES
from verax.checkpoint.save import SHARD_BYTES
from verax.checkpoint.video.folder import SETTINGS, TOKENIZER, VideoFolder
from verax.checkpoint.video.parts import PARTS, Part, diffusers_transformer, original_transformer
from verax.errors import CheckpointError, InvalidParameterError

__all__ = ["Layout", "convert"]

Layout = Literal["original", "diffusers"]

_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Tensor(NamedTuple):
    """A tensor to write.

    Attributes:
        name: its key in the file.
        dtype, shape: those of the written array.
        read: function that reads the array.
        release: function that releases the memory-mapped pages of the source.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    release: Callable[[], None]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class _PartFiles(NamedTuple):
    """Files to write for one part of a model.

    Attributes:
        folder: folder below the target; empty for the target itself.
        stem: stem of the names of the weight files; several files are numbered.
        tensors: tensors of the weight files.
        settings: name and content of the JSON file of settings.
    """

    folder: str
    stem: str
    tensors: list[Tensor]
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
    """Write a model in one of the two layouts; return its folder. Weights are copied bit by bit if `dtype` is None.

    All files are written to another folder beside it first, which is renamed when it is complete. In the original
    layout, the VAE, the text encoder and the image encoder are written as safetensors under the original's names
    (`Wan2.1_VAE.safetensors` for `Wan2.1_VAE.pth`). Their settings are written beside them (`Wan2.1_VAE.json`); the
    original's code does not need these.

    Args:
        source: an open folder of either layout.
        target: the folder to make.
        to: layout of `target`.
        dtype: dtype of the float weights of the transformer and the encoders; their own if None. The VAE keeps its
            dtype: fewer bits visibly harm its encoder, and it is small.
        force: replace `target` if it exists.
        max_shard_bytes: largest size of a file in bytes, unless a single tensor is larger.
        progress: called with (bytes done, bytes in all) after each tensor.

    Raises:
        CheckpointError: if a part of the source is missing or damaged, a weight has no name in the other layout, or
            `target` exists or is the source.
        InvalidParameterError: if `to` is another layout.
    """
    target = Path(target)
    if target.exists() and target.resolve() in (source.path.resolve(), *source.path.resolve().parents):
        raise CheckpointError(f"{target}: that is the model itself, or has it inside; name another folder")
    if target.exists() and not force:
        raise CheckpointError(f"{target}: it exists already; name another folder, or --force to replace it")
    if to not in ("original", "diffusers"):
        raise InvalidParameterError(f"to: expected original or diffusers, got {to!r}")
    parts = [_plan(source, name, to, None if name == "vae" else dtype) for name in _wanted(source)]
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _write_settings(source, partial, to)
        total = sum(tensor.size for part in parts for tensor in part.tensors)
        done = 0
        for part in parts:
            folder = partial / part.folder
            folder.mkdir(exist_ok=True)
            name, settings = part.settings
            _write_json(folder / name, settings)
            for tensor in _write_weights(folder, part.stem, part.tensors, max_shard_bytes):
                done += tensor.size
                if progress is not None:
                    progress(done, total)
        _replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _wanted(source: VideoFolder) -> list[str]:
    """Names of a model's parts. The image encoder is one if the transformer takes images, or if the source has it."""
    config = source.config("transformer")
    looks = config.get("image_dim") is not None or config.get("model_type") == "i2v"
    return [name for name in PARTS if name != "image_encoder" or looks or name in source]


def _plan(source: VideoFolder, name: str, to: Layout, dtype: DTypeLike | None) -> _PartFiles:
    """Files to write for the part `name`."""
    part, checkpoint = PARTS[name], source.checkpoint(name)
    names = part.names(checkpoint.config)
    tensors: list[Tensor] = []
    for key in checkpoint.names():
        theirs = names.forward(key)
        if theirs is None:
            where = checkpoint.place(key)[0]
            raise CheckpointError(f"{where}: {key} is not a weight of the {part.what} in either layout")
        tensors += _tensors(part, checkpoint, key, theirs if to == "diffusers" else None, dtype)
    settings = checkpoint.config
    if name == "transformer":
        settings = (original_transformer if to == "original" else diffusers_transformer)(settings, source.pipeline)
    if to == "diffusers":
        return _PartFiles(name, part.stem, tensors, ("config.json", settings))
    own = "config.json" if name == "transformer" else f"{part.original}.json"
    return _PartFiles("", part.original, tensors, (own, settings))


def _tensors(
    part: Part, checkpoint: Checkpoint, key: str, theirs: tuple[str, ...] | None, dtype: DTypeLike | None
) -> Iterator[Tensor]:
    """Tensors to write for the weight `key`.

    If `theirs` is None, the weight is written as it is. Else it is written under diffusers' names `theirs`: several
    names divide its rows evenly.

    Raises:
        CheckpointError: if the rows cannot be divided evenly.
    """
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
        array = form(array) if rows is None else form(array)[first : first + rows]
        return np.ascontiguousarray(array.astype(kind, copy=False)).reshape(shape)

    for i, name in enumerate(names):
        yield Tensor(name, kind, shape, lambda i=i: read(i * (rows or 0)), lambda: checkpoint.release(key))


def _write_settings(source: VideoFolder, target: Path, to: Layout) -> None:
    """Write the files beside the parts: tokenizer, scheduler, image processor, and diffusers' model_index.json."""
    if (source.path / SETTINGS).is_file():
        shutil.copyfile(source.path / SETTINGS, target / SETTINGS)
    shutil.copytree(source.tokenizer, target / ("tokenizer" if to == "diffusers" else TOKENIZER))
    scheduler, processor = source.scheduler, source.image_processor
    if to == "original":
        _write_json(target / "scheduler_config.json", scheduler)
        if processor is not None:
            _write_json(target / "preprocessor_config.json", processor)
        return
    (target / "scheduler").mkdir()
    _write_json(target / "scheduler" / "scheduler_config.json", scheduler)
    if "image_encoder" in source:
        (target / "image_processor").mkdir()
        _write_json(target / "image_processor" / "preprocessor_config.json", processor or _CLIP_PROCESSOR)
    index = source.path / "model_index.json"
    if source.layout == "diffusers" and index.is_file():
        shutil.copyfile(index, target / index.name)
    else:
        _write_json(target / index.name, _model_index(source))


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
"""Settings of CLIP's image processor, for the published image encoder."""


def _model_index(source: VideoFolder) -> dict[str, Any]:
    """Diffusers' list of a pipeline's parts and the classes that load them."""
    transformer = diffusers_transformer(source.config("transformer"), source.pipeline)["_class_name"]
    index: dict[str, Any] = {
        "_class_name": source.pipeline,
        "_diffusers_version": "0.35.0",
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


def _write_weights(folder: Path, stem: str, tensors: Sequence[Tensor], limit: int) -> Iterator[Tensor]:
    """Write one file, or several and an index. Each tensor is yielded once it is written."""
    files: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(one.size for one in files[-1]) + tensor.size > limit:
            files.append([])
        files[-1].append(tensor)
    names = [f"{stem}-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [f"{stem}.safetensors"]
    else:
        weight_map = {tensor.name: name for name, some in zip(names, files, strict=True) for tensor in some}
        index = {"metadata": {"total_size": sum(tensor.size for tensor in tensors)}, "weight_map": weight_map}
        _write_json(folder / f"{stem}.safetensors.index.json", index)
    for name, some in zip(names, files, strict=True):
        yield from _write_file(folder / name, some)


def _write_file(path: Path, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Write a safetensors file; each tensor is yielded once it is written.

    The library's own writer needs all tensors in memory at once.
    """
    # Wider numbers first, so that each lies at a multiple of its width.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        span = [end, end := end + tensor.size]
        header[tensor.name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(tensor.read().reshape(-1).view(np.uint8).data)
            tensor.release()
            yield tensor


def _replace(partial: Path, target: Path) -> None:
    """Move the finished folder `partial` to `target`, and remove an old `target`; an error leaves the old one."""
    if not target.exists():
        os.replace(partial, target)
        return
    old = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    os.replace(target, old)
    try:
        os.replace(partial, target)
    except BaseException:
        os.replace(old, target)
        raise
    if old.is_dir():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
