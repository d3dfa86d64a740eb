"""What a checkpoint is best asked for: its kind, and defaults for what a request leaves out."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from verax.checkpoint.video.folder import SETTINGS, VideoFolder
from verax.errors import CheckpointError, InvalidParameterError
from verax.fields import Finite, Positive, Size, read_fields
from verax.files import read_json

__all__ = ["KINDS", "REFERENCES", "RESOLUTIONS", "VideoSettings", "read_settings"]

KINDS = ("t2v", "i2v", "df")
"""Text to video, image to video, diffusion forcing."""

REFERENCES = ("skyreels", "diffusers")
"""PyTorch pipelines whose rules can be asked for where they differ."""

RESOLUTIONS = {"540P": (544, 960), "720P": (720, 1280)}
"""Height and width, by the names of the published models."""

_FRAMES = {"540P": 97, "720P": 121}
"""Frames that the published models are trained on."""

ENGLISH = (
    "Bright tones, overexposed, static, blurred details, subtitles, style, works, paintings, images, static, overall "
    "gray, worst quality, low quality, JPEG compression residue, ugly, incomplete, extra fingers, poorly drawn hands, "
    "poorly drawn faces, deformed, disfigured, misshapen limbs, fused fingers, still picture, messy background, three "
    "legs, many people in the background, walking backwards"
)
CHINESE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，"
    "杂乱的背景，三条腿，背景人很多，倒着走"
)
"""What SkyReels-V2's commands ask not to see: in English, and for diffusion forcing in Wan's Chinese."""


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """Defaults of a checkpoint, and the fields of its `verax.json`."""

    kind: str = "t2v"
    height: Size = 544
    width: Size = 960
    num_frames: Size = 97
    """Frames of a clip, and of a segment of a longer one."""
    num_inference_steps: Size = 30
    guidance_scale: Finite = 6.0
    shift: Positive = 8.0
    fps: Size = 24
    negative_prompt: str = ENGLISH
    text_tokens: Size = 512
    """Rows of a prompt's states, padding included: all of them are attended to."""
    needs_image: bool = True
    """Whether image to video is all that an image-to-video model was trained for."""


def read_settings(folder: VideoFolder, shift: float, *, kind: str | None, reference: str) -> VideoSettings:
    """The defaults of a checkpoint.

    Args:
        folder: of it: the settings in its `verax.json`, if it has one, are preferred to all others.
        shift: of its scheduler; 1 says nothing, as the published converter leaves it at that.
        kind: what the caller says that it is; None to go by the pipeline.
        reference: one of `REFERENCES`.

    Raises:
        CheckpointError: if `verax.json` has something else in it.
        InvalidParameterError: if there is no such kind or reference.
    """
    if kind is not None and kind not in KINDS:
        raise InvalidParameterError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if reference not in REFERENCES:
        raise InvalidParameterError(f"reference: expected one of {', '.join(REFERENCES)}, got {reference!r}")
    if kind is None:
        pipeline = folder.pipeline
        kind = "df" if "DiffusionForcing" in pipeline else "i2v" if "ImageToVideo" in pipeline else "t2v"
    size = "720P" if "720P" in folder.name.upper() else "540P"
    negative = CHINESE if kind == "df" else ENGLISH
    settings = VideoSettings(
        kind=kind,
        height=RESOLUTIONS[size][0],
        width=RESOLUTIONS[size][1],
        num_frames=_FRAMES[size],
        shift=shift if shift != 1 else VideoSettings.shift,
        negative_prompt="" if reference == "diffusers" else negative,
    )
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
