"""Tables of accuracy of the earlier ports, measured again by `verax bench reports`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from verax import builtin
from verax.bench.reports.tables import Table, not_run
from verax.compare import Comparison, compare_case
from verax.compare.cases.text import embed_case, text_case
from verax.compare.cases.video import VIDEO_PARTS, has_part, video_case
from verax.compare.pipelines import Clip, compare_pipelines, random_video
from verax.compare.videos import VideoComparison

__all__ = ["frame_tables", "layer_tables"]

DTYPES = ("float32", "bfloat16")

CLIP = Clip(num_frames=13, height=64, width=64, num_inference_steps=5)
"""Frames and steps of the earlier port's clip."""

LAYERS = 12
"""Rows of a table of layers: those with the largest errors."""

PARTS = 2
"""Parts of the built-in video model that `--quick` compares layer by layer: the transformer and the VAE."""


def frame_tables(quick: bool) -> tuple[list[Table], dict[str, Any]]:
    """One clip by diffusers' whole pipeline and by verax's, in both precisions: overall, by frame, by pixel."""
    clips: dict[str, VideoComparison] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = builtin.video_model()
        model = model if model.is_dir() else random_video(Path(scratch) / "video")
        what = "built-in video model" if model == builtin.video_model() else "small video model of random weights"
        for dtype in DTYPES:
            clips[dtype] = compare_pipelines(model, CLIP, dtype=dtype).comparison
    note = (
        f"The {what}: one clip of {CLIP.num_frames} frames of {CLIP.height} x {CLIP.width} in "
        f"{CLIP.num_inference_steps} steps, by diffusers' pipeline and by verax from the same noise; `verax compare "
        "video --part output`. Pixels from 0 to 1."
    )
    overall = [
        [dtype, f"{sum(clip.mse) / clip.frames:.1e}", f"{clip.clip_psnr:.2f}", f"{clip.clip_ssim:.6f}", clip.verdict]
        for dtype, clip in clips.items()
    ]
    pixels = [
        [dtype, *(_percent(part) for part in _differences(clip)), _percent(clip.relative_difference or 0)]
        for dtype, clip in clips.items()
    ]
    frames = [
        [str(i + 1), *(cell for clip in clips.values() for cell in _frame(clip, i))]
        for i in range(clips[DTYPES[0]].frames)
    ]
    by_frame = ["frame", *(f"{dtype} {what}" for dtype in DTYPES for what in ("MSE", "PSNR dB", "SSIM"))]
    tables = [
        Table("Overall statistics", ["precision", "MSE", "PSNR dB", "SSIM", "verdict"], overall, note),
        Table("Frame by frame", by_frame, frames),
        Table(
            "Distribution of pixel differences",
            ["precision", "mean", "95th percentile", "99th percentile", "largest", "mean, of the clip's mean"],
            pixels,
        ),
    ]
    return tables, {"machine": _versions(), "clips": {name: clip.to_dict() for name, clip in clips.items()}}


def _differences(clip: VideoComparison) -> tuple[float, ...]:
    return clip.mean_difference, clip.p95_difference, clip.p99_difference, clip.max_difference


def _percent(part: float) -> str:
    return f"{100 * part:.2g}%"


def _frame(clip: VideoComparison, i: int) -> tuple[str, str, str]:
    return f"{clip.mse[i]:.1e}", f"{clip.psnr[i]:.2f}", f"{clip.ssim[i]:.6f}"


def layer_tables(quick: bool) -> tuple[list[Table], dict[str, Any]]:
    """Errors by layer of the built-in models against PyTorch, in float32, and in bfloat16 with float32 as arbiter."""
    tables: list[Table] = []
    found: dict[str, Any] = {}
    video = builtin.video_model() if builtin.video_model().is_dir() else None
    makers: dict[str, Any] = {"text": lambda scratch: text_case(None, scratch)}
    makers["embedding"] = lambda scratch: embed_case(None, scratch)
    parts = [part for part in VIDEO_PARTS if has_part(video, part)]
    for part in parts[: PARTS if quick else None]:
        makers[f"video, {part}"] = lambda scratch, part=part: video_case(video, part)
    for name, make in makers.items():
        for dtype in DTYPES:
            with tempfile.TemporaryDirectory() as scratch:
                compared = compare_case(make(Path(scratch)), dtype=dtype)
            found[f"{name}, {dtype}"] = compared.as_dict()
            tables.append(_layers(f"Errors by layer: {name}, {dtype}", compared))
    if quick and parts[PARTS:]:
        tables.append(not_run(f"Errors by layer: {', '.join(parts[PARTS:])}", "--quick leaves it out"))
    return tables, {"machine": _versions(), "comparisons": found}


def _versions() -> dict[str, str]:
    import diffusers
    import torch
    import transformers

    return {library.__name__: str(library.__version__) for library in (torch, transformers, diffusers)}


def _layers(title: str, compared: Comparison) -> Table:
    """The layers with the largest errors, and the output."""
    judged = compared.output is not None and compared.output.ratio is not None
    worst = sorted(compared.rows, key=lambda row: -row.errors.l2)[:LAYERS]
    chosen = [row for row in compared.rows if row in worst or row is compared.output]
    rows = [
        [
            row.name,
            row.reference_dtype,
            row.dtype,
            f"{row.errors.max_abs:.1e}",
            f"{row.errors.max_rel:.1e}",
            f"{row.errors.l2:.1e}",
            f"{row.errors.cosine:.6f}",
            *(["" if row.ratio is None else f"{row.ratio:.2f}"] if judged else []),
        ]
        for row in chosen
    ]
    note = (
        f"{compared.title}. {len(compared.rows)} layers compared ({'equal' if compared.passed else 'different'}); "
        "those with the largest errors, in the order of the model."
    )
    note += " The ratio is our error over PyTorch's, both against float32." if judged else ""
    columns = ["layer", "PyTorch's dtype", "ours", "max abs", "max / mean", "relative L2", "cosine"]
    columns += ["error ratio"] if judged else []
    return Table(title, columns, rows, note)
