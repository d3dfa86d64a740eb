"""Cost of a step cache: clips made with it compared with the same clips made without it, by threshold."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from verax import progress
from verax.bench.harness import Benchmark
from verax.bench.results import number, slug, table
from verax.bench.settings import CacheSettings
from verax.compare.videos import compare_clips

if TYPE_CHECKING:
    from verax.video.outputs import VideoOutput

PROMPTS = (
    "a blue square floats down and left over a yellow to cyan gradient",
    "over a gradient of red to white, a cyan ring moves up and right",
    "over a gradient of purple to cyan, a yellow square moves up and left",
    "a yellow circle drifts up and right across a background from green to black",
    "over a gradient of green to red, a purple square moves up and left",
    "red ring moving down and left, cyan to purple background",
    "a purple triangle floats down and left over a white to cyan gradient",
    "over a gradient of blue to black, a yellow ring moves up",
)
"""Prompts of the built-in model: words in combinations that its training never saw."""


def bench_cache(settings: CacheSettings) -> dict[str, Any]:
    """Make each prompt's clip without the cache and with each threshold, from the same noise."""
    from verax.video.pipeline import VideoPipeline

    model, thresholds = settings.model, settings.thresholds
    prompts, benchmark = list(PROMPTS), Benchmark("video")
    if settings.prompts is not None:
        lines = settings.prompts.read_text(encoding="utf-8-sig").splitlines()
        prompts = [line for line in lines if line.strip()]
    pipe = VideoPipeline.from_pretrained(model, dtype=settings.dtype, show_progress=False)
    choices: dict[float | None, dict[str, Any]] = {None: {"cache": None, "num_inference_steps": settings.steps}}
    choices |= {value: choices[None] | {"cache": settings.cache, "cache_threshold": value} for value in thresholds}
    # Compilation and the reading of weights come first.
    for threshold in (None, thresholds[0]):
        pipe(prompts[0], **choices[threshold])
    clips: dict[float | None, list[VideoOutput]] = {threshold: [] for threshold in choices}
    with progress.bar("making clips") as report:
        for i, prompt in enumerate(prompts):
            for threshold, choice in choices.items():
                clips[threshold].append(pipe(prompt, seed=i, **choice))
            report(i + 1, len(prompts), "")
    plain, rows = clips[None], []
    for threshold, cached in clips.items():
        pairs = zip(plain, cached, strict=True) if threshold is not None else ()
        compared = [compare_clips(one.frames, other.frames) for one, other in pairs]
        rows.append(
            {
                "threshold": threshold,
                "computed": cached[0].computed,
                "seconds": float(np.median([clip.seconds["denoise"] for clip in cached])),
                "psnr": [one.clip_psnr if one.max_difference else None for one in compared],
                "ssim": [one.clip_ssim for one in compared],
            }
        )
    name = "the built-in model" if model is None else str(model)
    (count, height, width), steps = plain[0].frames.shape[:3], plain[0].steps
    differing = lambda row: [value for value in row["psnr"] if value is not None]
    columns = {
        "threshold": lambda row: f"{row['threshold']:g}" if row["threshold"] else "none",
        "steps computed": lambda row: f"{row['computed']} of {steps}",
        "s": lambda row: number(row["seconds"]),
        "times as fast": lambda row: f"{rows[0]['seconds'] / row['seconds']:.2f}",
        "PSNR, mean": lambda row: f"{fmean(differing(row)):.1f}" if differing(row) else "no difference",
        "PSNR, worst clip": lambda row: f"{min(differing(row)):.1f}" if differing(row) else "",
        "SSIM, worst clip": lambda row: f"{min(row['ssim']):.3f}" if row["ssim"] else "",
    }
    asked = {"model": name, "prompts": prompts, "frames": [count, height, width], "steps": steps}
    return benchmark.result(
        slug(settings.cache, Path(name).name),
        title=f"{'TeaCache' if settings.cache == 'teacache' else 'MagCache'}: {Path(name).name}, {settings.dtype}",
        intro=f"{len(prompts)} clips of {count} frames of {height} x {width}, first without a cache and then with "
        "each threshold from the same noise; PSNR in dB of the second compared with the first. Seconds: median of the "
        f"loop over {steps} steps.",
        settings=asdict(settings) | asked,
        tables=[table(rows, columns)],
        seconds=rows[0]["seconds"],
        thresholds=rows[1:],
    )
