"""Settings of a checkpoint: its kind, and defaults for the options that a request leaves out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from verax.checkpoint.video.folder import SETTINGS, VideoFolder
from verax.errors import CheckpointError, InvalidParameterError

__all__ = ["KINDS", "RESOLUTIONS", "VideoSettings", "read_settings"]

KINDS = ("t2v", "i2v", "df")
"""Text to video, image to video, diffusion forcing."""

_PIPELINES = {"DiffusionForcing": "df", "ImageToVideo": "i2v"}
"""Kinds by a part of the name of diffusers' pipeline, the first that fits."""

RESOLUTIONS = {"540P": (544, 960), "720P": (720, 1280)}
"""Height and width in pixels, by the names of the published models."""

_FRAMES = {"540P": 97, "720P": 121}
"""Frames that the published models are trained on."""


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """Defaults of a checkpoint; the fields of its `verax.json`."""

    kind: str = "t2v"
    height: int = 544
    width: int = 960
    num_frames: int = 97
    """Frames of a clip, and of a segment of a longer one."""
    num_inference_steps: int = 30
    guidance_scale: float = 6.0
    shift: float = 8.0
    fps: int = 24
    negative_prompt: str = ""
    text_tokens: int = 512
    """Tokens of a prompt's states, padding included: all of them are attended to."""
    needs_image: bool = True
    """True if an image-to-video model was trained for nothing else, so that every request must have an image."""


def read_settings(
    folder: VideoFolder, shift: float, *, kind: str | None, negative_prompts: Mapping[str, str]
) -> VideoSettings:
    """Settings of a checkpoint.

    Args:
        folder: the checkpoint. The settings in its `verax.json`, if it has one, are preferred to all others.
        shift: shift of its scheduler. 1 counts as not given, as the published converter leaves it at that.
        kind: one of `KINDS`; None to go by the name of the checkpoint's pipeline.
        negative_prompts: negative prompt of each kind; "" for kinds that are not listed.

    Raises:
        CheckpointError: if `verax.json` has something else in it.
        InvalidParameterError: if there is no such kind.
    """
    if kind is not None and kind not in KINDS:
        raise InvalidParameterError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if kind is None:
        kind = next((kind for part, kind in _PIPELINES.items() if part in folder.pipeline), "t2v")
    size = "720P" if "720P" in folder.name.upper() else "540P"
    settings = VideoSettings(
        kind=kind,
        height=RESOLUTIONS[size][0],
        width=RESOLUTIONS[size][1],
        num_frames=_FRAMES[size],
        shift=shift if shift != 1 else VideoSettings.shift,
        negative_prompt=negative_prompts.get(kind, ""),
    )
    return replace(settings, **_own(folder.path / SETTINGS))


def _own(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    known = {field.name: type(field.default) for field in fields(VideoSettings)}
    for name, value in found.items() if isinstance(found, dict) else [("it", found)]:
        if name not in known or not (isinstance(value, known[name]) or (known[name] is float and type(value) is int)):
            raise CheckpointError(f"{path}: {name} is {value!r}; expected an object with some of {', '.join(known)}")
    return found
