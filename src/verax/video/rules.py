"""Rules in which the two published PyTorch pipelines differ, as data.

`SKYREELS` follows SkyReels-V2's own code (SkyworkAI/SkyReels-V2), less its slips. `DIFFUSERS` follows the pipelines of
diffusers. No other module compares the names of references: they read a field of `ReferenceRules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np

from verax.video import images

__all__ = ["DIFFUSERS", "REFERENCES", "SKYREELS", "ReferenceRules"]

Resize = Callable[[np.ndarray, int, int], np.ndarray]
"""`resize(image, height, width)`: an image uint8 `[H, W, 3]` as a frame uint8 `[height, width, 3]`."""

ClipPixels = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
"""`clip_pixels(image, frame, size)`: the image encoder's input float32 `[size, size, 3]`, of the user's image and the
frame that `Resize` made of it."""

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
"""Negative prompts of SkyReels-V2's commands: English, and Wan's Chinese for diffusion forcing."""


@dataclass(frozen=True)
class ReferenceRules:
    """Rules of one reference pipeline. Mappings have a value for each kind of model that uses them.

    Attributes:
        name: name of the reference, as `VideoPipeline(reference=...)` takes it.
        sigma_schedule: spacing of the noise levels, one of `sigmas.SIGMA_SCHEDULES`.
        resize: resizing of images to the size of a frame.
        clip_pixels: input of the image encoder.
        negative_prompts: negative prompt of a request without one; "" for kinds that are not listed.
        decode_whole_clip: True if the segments of a long clip share latents, and are decoded together at the end.
            False if they share frames: each segment is decoded, and its last frames are encoded anew as the first
            frames of the next segment, as in training.
        causal_attention: True if attention is block-causal by default as soon as there are blocks. The released models
            were not trained for it.
        keep_partial_blocks: True if all prefix latents stay as they are. False if only those that fill whole blocks do,
            and the others are taken for noise.
        overwrite_first_sample: True if diffusion forcing's solver loses its first sample, see `unipc.tabulate`.
    """

    name: str
    sigma_schedule: str
    resize: Mapping[str, Resize]
    clip_pixels: ClipPixels
    negative_prompts: Mapping[str, str]
    decode_whole_clip: bool
    causal_attention: bool
    keep_partial_blocks: bool
    overwrite_first_sample: bool


def _crop_and_resize(image: np.ndarray, height: int, width: int, *, method: images.Filter) -> np.ndarray:
    return images.resize(images.crop_to_aspect(image, height, width), height, width, method=method)


SKYREELS = ReferenceRules(
    name="skyreels",
    sigma_schedule="skyreels",
    resize=MappingProxyType(
        {
            "i2v": partial(_crop_and_resize, method="lanczos"),
            "ti2v": partial(_crop_and_resize, method="lanczos"),
            "df": partial(_crop_and_resize, method="bicubic"),
        }
    ),
    clip_pixels=lambda image, frame, size: images.clip_pixels_skyreels(images.to_signed(frame), size),
    negative_prompts=MappingProxyType({"t2v": ENGLISH, "i2v": ENGLISH, "ti2v": CHINESE, "df": CHINESE}),
    decode_whole_clip=False,
    causal_attention=False,
    keep_partial_blocks=True,
    overwrite_first_sample=False,
)
"""Rules of SkyReels-V2's own code."""

DIFFUSERS = ReferenceRules(
    name="diffusers",
    sigma_schedule="diffusers",
    resize=MappingProxyType({"i2v": images.resize, "ti2v": images.resize, "df": images.resize}),
    clip_pixels=lambda image, frame, size: images.clip_pixels_diffusers(image, size),
    negative_prompts=MappingProxyType({}),
    decode_whole_clip=True,
    causal_attention=True,
    keep_partial_blocks=False,
    overwrite_first_sample=True,
)
"""Rules of diffusers' pipelines."""

REFERENCES: Mapping[str, ReferenceRules] = MappingProxyType({rules.name: rules for rules in (SKYREELS, DIFFUSERS)})
"""Rules by the name of their reference."""
