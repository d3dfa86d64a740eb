"""Settings of a checkpoint: its kind, and defaults for the options that a request leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from verax.checkpoint.video.folder import SETTINGS, VideoFolder
from verax.errors import CheckpointError, InvalidParameterError
from verax.fields import Epsilon, Finite, Positive, Size, read_fields
from verax.files import read_json

__all__ = ["KINDS", "RESOLUTIONS", "VideoSettings", "read_settings"]

KINDS = ("t2v", "i2v", "ti2v", "df")
"""Text to video, image to video, either of the two, diffusion forcing."""

_PIPELINES = {"DiffusionForcing": "df", "ImageToVideo": "i2v"}
"""Kinds by a part of the name of diffusers' pipeline, the first that fits."""

RESOLUTIONS = {"540P": (544, 960), "720P": (720, 1280)}
"""Height and width in pixels, by the names of the published models."""

_FRAMES = {"540P": 97, "720P": 121}
"""Frames that the published models are trained on."""

_WAN_2_2: Mapping[str, Mapping[str, Any]] = {
    "t2v": dict(height=720, width=1280, num_frames=81, fps=16, num_inference_steps=40)
    | dict(guidance_scale=4.0, guidance_scale_2=3.0),
    "i2v": dict(height=720, width=1280, num_frames=81, fps=16, num_inference_steps=40)
    | dict(guidance_scale=3.5, guidance_scale_2=3.5),
    "ti2v": dict(height=704, width=1280, num_frames=121, fps=24, num_inference_steps=50, guidance_scale=5.0),
}
"""Settings of Wan2.2's own commands (`wan/configs`), by kind of model: two with two transformers, and 5B."""


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """Defaults of a checkpoint; the fields of its `verax.json`."""

    kind: str = "t2v"
    height: Size = 544
    width: Size = 960
    num_frames: Size = 97
    """Frames of a clip, and of a segment of a longer one."""
    num_inference_steps: Size = 30
    guidance_scale: Finite = 6.0
    guidance_scale_2: Finite | None = None
    """Scale with the second of two transformers; `guidance_scale` if None."""
    boundary_ratio: Epsilon | None = None
    """Share of the noise levels from which the first of two transformers is used; None for one transformer."""
    shift: Positive = 8.0
    fps: Size = 24
    negative_prompt: str = ""
    text_tokens: Size = 512
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
        kind = "ti2v" if folder.expand_timesteps else kind
    boundary_ratio = folder.boundary_ratio
    is_wan_2_2 = boundary_ratio is not None or kind == "ti2v"
    size = "720P" if "720P" in folder.name.upper() else "540P"
    settings = VideoSettings(
        kind=kind,
        height=RESOLUTIONS[size][0],
        width=RESOLUTIONS[size][1],
        num_frames=_FRAMES[size],
        shift=shift if shift != 1 else VideoSettings.shift,
        # Wan2.2's commands have one negative prompt for all kinds.
        negative_prompt=negative_prompts.get("ti2v" if is_wan_2_2 else kind, ""),
        boundary_ratio=boundary_ratio,
    )
    if is_wan_2_2:
        settings = replace(settings, **_WAN_2_2.get(kind, {}))
    return replace(settings, **_own(folder.path / SETTINGS))


def _own(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = read_json(path)
    known = [field.name for field in fields(VideoSettings)]
    for name, value in found.items():
        if name not in known:
            raise CheckpointError(f"{path}: {name} is {value!r}; expected an object with some of {', '.join(known)}")
    if (kind := found.get("kind", KINDS[0])) not in KINDS:
        raise CheckpointError(f"{path}: kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    return read_fields(found, VideoSettings)
