"""Cost of TeaCache: clips made with it beside the same clips made without, by threshold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verax import progress
from verax.compare.videos import decibels
from verax.errors import InvalidParameterError
from verax.machine import fingerprint

if TYPE_CHECKING:
    from verax.video.outputs import VideoOutput

__all__ = ["THRESHOLDS", "bench_teacache"]

THRESHOLDS = (0.05, 0.1, 0.2, 0.3)
"""Around those that TeaCache's authors recommend: 0.05 to 0.1 for 1.3B, 0.14 to 0.3 for 14B."""

PROMPTS = 8
"""Number of the built-in model's own prompts: words in combinations that its training never saw."""


def bench_teacache(
    model: str | None = None,
    *,
    prompts: Sequence[str] = (),
    thresholds: Sequence[float] = THRESHOLDS,
    dtype: str = "bfloat16",
    **options: Any,
) -> dict[str, Any]:
    """Make each prompt's clip without TeaCache and with each threshold, from the same noise; a report as JSON holds it.

    Args:
        model: a checkpoint of `VideoPipeline`; the built-in model if None.
        prompts: what is to be seen; `PROMPTS` of its own kind for the built-in model if there are none.
        thresholds: of `cache_threshold`.
        dtype: of weights and of what is multiplied.
        options: of the clips, as `VideoPipeline` takes them; `seed` is the first clip's, the next ones have the next.

    Raises:
        InvalidParameterError: for no prompts, no thresholds, or an option that does not fit.
    """
    from verax.video.pipeline import VideoPipeline

    if not prompts and model is not None:
        raise InvalidParameterError("prompts: expected some: only the built-in model has prompts of its own")
    if not thresholds:
        raise InvalidParameterError("thresholds: expected one or more")
    prompts = list(prompts) or _own_prompts()
    pipe = VideoPipeline.from_pretrained(model, dtype=dtype, show_progress=False)
    choices: dict[float | None, dict[str, Any]] = {None: {"cache": None}}
    choices |= {value: {"cache": "teacache", "cache_threshold": value} for value in thresholds}
    # Compilation and the reading of weights come first.
    for threshold in (None, thresholds[0]):
        pipe(prompts[0], **options, **choices[threshold])
    seed = int(options.pop("seed", 0))
    clips: dict[float | None, list[VideoOutput]] = {threshold: [] for threshold in choices}
    with progress.bar("making clips") as report:
        for i, prompt in enumerate(prompts):
            for threshold, choice in choices.items():
                clips[threshold].append(pipe(prompt, seed=seed + i, **options, **choice))
            report(i + 1, len(prompts), "")
    whole = clips[None]
    return {
        "kind": "teacache",
        "machine": fingerprint(),
        "settings": {
            "model": "the built-in model" if model is None else str(model),
            "dtype": dtype,
            "prompts": prompts,
            "seed": seed,
            "frames": list(whole[0].frames.shape[:3]),
            "steps": whole[0].steps,
            "options": {name: value for name, value in options.items() if isinstance(value, int | float | str)},
        },
        "seconds": float(np.median([clip.seconds["denoise"] for clip in whole])),
        "thresholds": [
            {
                "threshold": threshold,
                "computed": clips[threshold][0].computed,
                "seconds": float(np.median([clip.seconds["denoise"] for clip in clips[threshold]])),
                "psnr": [_psnr(*pair) for pair in zip(whole, clips[threshold], strict=True)],
            }
            for threshold in thresholds
        ],
    }


def _own_prompts() -> list[str]:
    from recipes.video.shapes import scenes

    return [scene.caption for scene in scenes(0, 0, PROMPTS, split="held_out")]


def _psnr(one: VideoOutput, other: VideoOutput) -> float | None:
    """PSNR of the clip in dB; None if no pixel differs."""
    mse = float(np.mean((one.frames / 255.0 - other.frames / 255.0) ** 2))
    return decibels(mse) if mse else None
