"""Models to plan: a folder with config.json alone, a GGUF file, a hub id, a built-in model, or shapes by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from verax import builtin
from verax.checkpoint import Checkpoint, resolve
from verax.checkpoint.video.folder import is_video_folder
from verax.errors import CheckpointError, UnsupportedModelError
from verax.files import read_json
from verax.loading import DEQUANTIZE
from verax.models import causal_lm
from verax.models.wan.model import WAN_CONFIGS
from verax.shapes import MINILM_L6, MODERNBERT_BASE, SHAPES

_BUILTIN = {
    "text-builtin": builtin.text_model,
    "encoder-builtin": builtin.encoder,
    "video-builtin": builtin.video_model,
}

_ENCODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "minilm": ("all-MiniLM-L6-v2 shapes", MINILM_L6),
    "modernbert": ("gte-modernbert-base shapes", MODERNBERT_BASE),
}

NAMES = (*SHAPES, *_ENCODERS, *WAN_CONFIGS, *_BUILTIN)
"""Names of shapes that come with the package."""


class Described(NamedTuple):
    """A model by its configuration.

    `config`: contents of config.json; of a video model, the folder, or a name out of `WAN_CONFIGS`. `opened`: the
    checkpoint, if it is a GGUF file, whose weights have formats of their own.
    """

    name: str
    kind: str
    config: Any
    opened: Checkpoint | None = None


def describe(model: str, *, quantization: str | None = None) -> Described:
    """Find a model's configuration. No weights are read, and none need be there.

    `model`: a folder, a GGUF file, a hub id (of which config.json is fetched), or one of `NAMES`. `quantization`:
    `"dequantize"` to plan the floats of a folder whose weights are quantised.
    """
    if model in WAN_CONFIGS:
        return Described(f"Wan {model} shapes", "video", model)
    if model in SHAPES or model in _ENCODERS:
        name, config = SHAPES.get(model) or _ENCODERS[model]
        return Described(name, _kind(config), dict(config))
    folder = _BUILTIN[model]() if model in _BUILTIN else _found(model)
    if folder.is_file():
        opened = Checkpoint.open(folder)
        return Described(folder.name, "text", opened.config, opened)
    if is_video_folder(folder):
        return Described(folder.resolve().name, "video", folder)
    config = read_json(folder / "config.json")
    if "quantization_config" in config and quantization != DEQUANTIZE:
        raise UnsupportedModelError(
            f"{folder}: its weights are quantised, in formats that config.json alone does not decide; plan its floats "
            f"with --quantization {DEQUANTIZE}, or the model that it was made of with --quantization int8 or int4"
        )
    return Described(model if model in _BUILTIN else folder.resolve().name, _kind(config), config)


def _found(model: str) -> Path:
    try:
        return resolve(model, weights=False)
    except CheckpointError as error:
        raise CheckpointError(f"{error}, or one of {', '.join(NAMES)}") from error


def _kind(config: Mapping[str, Any]) -> str:
    try:
        causal_lm(config)
    except UnsupportedModelError:
        return "embedding"
    return "text"
