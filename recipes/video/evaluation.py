"""Evaluation of a video model of drawn clips, on scenes that are held out of training."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from recipes.video.classifier import classify
from recipes.video.shapes import Scene, draw, scenes
from verax import progress

SEED = 7
"""Seed of the scenes, whose combinations of words are held out of training."""

CLIPS, DECODED = {"text": 150, "image": 48}, 16
"""Clips from text alone, clips from a drawn clip's caption and first frame, and drawn clips that the VAE encodes and
decodes."""


def psnr(one: UInt8[np.ndarray, "*B"], other: UInt8[np.ndarray, "*B"]) -> float:
    """Peak signal-to-noise ratio of 8-bit colours, dB."""
    error = float(np.mean((one.astype(np.float64) - other) ** 2))
    return float(10 * np.log10(255.0**2 / max(error, 1e-12)))


def evaluate(folder: str | Path) -> dict[str, float]:
    """Generate clips with the folder's defaults from held-out prompts, and classify them.

    `folder`: folder of a video model trained by `recipe`.

    Returns:
        Share of the clips in which each word of the caption is recognised, and all words together (`text_all`,
        `image_all`); means of PSNR, dB; median time of a clip after the first, seconds.
    """
    from verax.video.pipeline import VideoPipeline

    pipe = VideoPipeline.from_pretrained(folder, show_progress=False)
    found: dict[str, float] = {}
    seconds: list[float] = []
    first: list[float] = []
    with progress.bar("clips") as report:
        for name, count in CLIPS.items():
            right: list[dict[str, bool]] = []
            for scene in scenes(SEED, 0, count, split="held_out"):
                picture = draw([scene], frames=1)[0, 0] if name == "image" else None
                begin = time.perf_counter()
                frames = pipe(scene.caption, image=picture, seed=len(seconds)).frames
                seconds.append(time.perf_counter() - begin)
                right.append(classify(frames).agrees(scene))
                if picture is not None:
                    first.append(psnr(frames[0], picture))
                report(len(seconds), sum(CLIPS.values()), "")
            found |= {f"{name}_{word}": float(np.mean([one[word] for one in right])) for word in right[0]}
            found[f"{name}_all"] = float(np.mean([all(one.values()) for one in right]))
    drawn = draw(scenes(SEED, 0, DECODED, split="held_out"))
    latents = [pipe.stages.encode(clip[None]) for clip in drawn]
    back = [np.asarray(pipe.stages.finish(pipe.stages.decode_call(z)(z))) for z in latents]
    found["first_frame_psnr"] = float(np.mean(first))
    found["seconds_per_clip"] = float(np.median(seconds[1:]))
    found["vae_psnr"] = float(np.mean([psnr(a, b) for a, b in zip(drawn, back, strict=True)]))
    return found


def contact_sheet(
    folder: str | Path, drawn: list[Scene], *, columns: int = 5, pictures: bool = False
) -> UInt8[np.ndarray, "H W 3"]:
    """Contact sheet: for each scene's caption, a row of evenly spaced frames of a generated clip.

    Args:
        folder: folder of the model.
        drawn: scenes, of which only the captions are used, and the first frames if `pictures`.
        columns: frames of a row.
        pictures: give the model the first frames.
    """
    from verax.video.pipeline import VideoPipeline

    pipe = VideoPipeline.from_pretrained(folder, show_progress=False)
    rows = []
    for seed, scene in enumerate(drawn):
        picture = draw([scene], frames=1)[0, 0] if pictures else None
        frames = pipe(scene.caption, image=picture, seed=seed).frames
        shown = frames[np.linspace(0, len(frames) - 1, columns).round().astype(int)]
        rows.append(np.concatenate(np.pad(shown, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=255), axis=1))
    return np.concatenate(rows)
