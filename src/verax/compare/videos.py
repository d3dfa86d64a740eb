"""Distances between two clips: MSE, PSNR and SSIM of each frame, differences of pixels, and a verdict in words.

Pixels count from 0 to 1. PSNR and SSIM are scikit-image's; `DEFINITIONS` has their parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from verax import progress
from verax._optional import require_optional
from verax.errors import InvalidParameterError
from verax.files import json_value

WINDOW = 11
"""Side of SSIM's Gaussian window in pixels: scikit-image's, for a standard deviation of 1.5."""

QUALITY = (("excellent", 40.0, 0.99), ("very good", 35.0, 0.98), ("good", 30.0, 0.95), ("fair", 25.0, 0.90))
"""Verdicts: the least PSNR (dB) and SSIM of the clip for each; both must hold. Below them all: "poor".

Conventions of this project. For scale: two runs of one video model, in bfloat16 by two frameworks, were reported at
36.6 dB and 0.994."""

DEFINITIONS = {
    "MSE": "mean squared difference over a frame's pixels and channels, pixels from 0 to 1",
    "PSNR": "10 log10(1 / MSE) in dB, data range 1; of the clip: from the MSE over all of its frames, to which "
    "identical frames add nothing",
    "SSIM": f"Wang et al. 2004: Gaussian window of {WINDOW} x {WINDOW} with standard deviation 1.5, K1 = 0.01, "
    "K2 = 0.03, population covariance, data range 1; mean of the three channels; of the clip: mean of its frames",
    "differences": "absolute, over every pixel and channel of the clip; a percentile is the smallest difference that "
    "this share of all does not exceed",
    "relative": "mean absolute difference over the mean of the first clip's pixels",
}


@dataclass(frozen=True)
class VideoComparison:
    """Distances between two clips; pixels from 0 to 1."""

    height: int
    width: int
    mse: tuple[float, ...]
    psnr: tuple[float, ...]
    """PSNR of each frame, dB; infinite for identical frames."""
    ssim: tuple[float, ...]
    mean_difference: float
    p95_difference: float
    p99_difference: float
    max_difference: float
    relative_difference: float | None
    """Mean difference over the mean of the first clip; None if that is black."""

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self.mse)

    @property
    def identical_frames(self) -> int:
        """Number of frames without any difference."""
        return sum(error == 0 for error in self.mse)

    @property
    def clip_psnr(self) -> float:
        """PSNR of the clip in dB, from the MSE over all frames."""
        return decibels(sum(self.mse) / self.frames)

    @property
    def clip_ssim(self) -> float:
        """SSIM of the clip, the mean over its frames."""
        return sum(self.ssim) / self.frames

    @property
    def worst_frame(self) -> int:
        """Index, from 0, of the frame with the largest MSE."""
        return int(np.argmax(self.mse))

    @property
    def verdict(self) -> str:
        """Verdict in words: "identical", a name of `QUALITY`, or "poor"."""
        if self.max_difference == 0:
            return "identical"
        reached = (name for name, psnr, ssim in QUALITY if self.clip_psnr >= psnr and self.clip_ssim >= ssim)
        return next(reached, "poor")

    def to_dict(self) -> dict[str, Any]:
        """Figures of the clip and of its frames, ready for JSON; infinite decibels become None."""
        return {
            "frames": self.frames,
            "height": self.height,
            "width": self.width,
            "verdict": self.verdict,
            "identical_frames": self.identical_frames,
            "worst_frame": self.worst_frame,
            "psnr": json_value(self.clip_psnr),
            "worst_psnr": json_value(self.psnr[self.worst_frame]),
            "ssim": self.clip_ssim,
            "worst_ssim": min(self.ssim),
            "mse": sum(self.mse) / self.frames,
            "difference": {
                "mean": self.mean_difference,
                "p95": self.p95_difference,
                "p99": self.p99_difference,
                "max": self.max_difference,
                "relative": self.relative_difference,
            },
            "by_frame": [
                {"mse": mse, "psnr": json_value(psnr), "ssim": ssim}
                for mse, psnr, ssim in zip(self.mse, self.psnr, self.ssim, strict=True)
            ],
            "definitions": DEFINITIONS,
            "quality": {name: {"psnr": psnr, "ssim": ssim} for name, psnr, ssim in QUALITY},
        }


def compare_clips(first: np.ndarray, second: np.ndarray) -> VideoComparison:
    """Compare two clips of one size, frame by frame.

    `first`: `[frames, height, width, 3]`, uint8, or floats from 0 to 1. The relative difference is relative to it.
    `second`: the same shape; its dtype may be the other.
    """
    for name, clip in (("first", first), ("second", second)):
        _check(name, clip)
    if len(first) != len(second):
        raise InvalidParameterError(f"second: it has {len(second)} frames, the first has {len(first)}")
    if first.shape != second.shape:
        sizes = [f"{clip.shape[2]} x {clip.shape[1]}" for clip in (second, first)]
        raise InvalidParameterError(f"second: its frames are {sizes[0]}, the first clip's are {sizes[1]}")
    if min(first.shape[1:3]) < WINDOW:
        raise InvalidParameterError(
            f"first: frames of {first.shape[2]} x {first.shape[1]} are smaller than SSIM's window of "
            f"{WINDOW} x {WINDOW}"
        )
    metrics = require_optional("skimage.metrics")
    mse, psnr, ssim = [], [], []
    with progress.bar("comparing frames") as report:
        for a, b in _pairs(first, second):
            mse.append(float(metrics.mean_squared_error(a, b)))
            # Not by the library where frames are equal: it divides by zero.
            psnr.append(float(metrics.peak_signal_noise_ratio(a, b, data_range=1.0)) if mse[-1] else math.inf)
            ssim.append(
                float(
                    metrics.structural_similarity(
                        a,
                        b,
                        data_range=1.0,
                        channel_axis=-1,
                        gaussian_weights=True,
                        sigma=1.5,
                        use_sample_covariance=False,
                    )
                )
            )
            report(len(mse), len(first))
    off = differences(first, second)
    peak = 255.0 if off.dtype == np.uint8 else 1.0
    p95, p99 = (float(p) / peak for p in np.percentile(off, (95, 99), method="inverted_cdf"))
    mean = float(off.mean(dtype=np.float64)) / peak
    level = float(first.mean(dtype=np.float64)) / (255 if first.dtype == np.uint8 else 1)
    return VideoComparison(
        height=first.shape[1],
        width=first.shape[2],
        mse=tuple(mse),
        psnr=tuple(psnr),
        ssim=tuple(ssim),
        mean_difference=mean,
        p95_difference=p95,
        p99_difference=p99,
        max_difference=float(off.max()) / peak,
        relative_difference=mean / level if level else None,
    )


def differences(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Absolute differences of two clips `[T, H, W, 3]`: uint8 in 0..255 if both are uint8, else float32 in 0..1."""
    if first.dtype == second.dtype == np.uint8:
        return np.maximum(first, second) - np.minimum(first, second)
    off = np.empty(first.shape, np.float32)
    for i, (a, b) in enumerate(_pairs(first, second)):
        off[i] = np.abs(a - b)
    return off


def decibels(mse: float) -> float:
    """PSNR in dB of a mean squared error, for a data range of 1; infinite for 0."""
    return -10 * math.log10(mse) if mse else math.inf


def _pairs(first: np.ndarray, second: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of frames of both clips, float64 from 0 to 1."""
    for pair in zip(first, second, strict=True):
        a, b = (frame / 255 if frame.dtype == np.uint8 else frame.astype(np.float64) for frame in pair)
        yield a, b


def _check(name: str, clip: np.ndarray) -> None:
    if clip.ndim != 4 or clip.shape[-1] != 3 or 0 in clip.shape:
        raise InvalidParameterError(
            f"{name}: expected a clip [frames, height, width, 3], got an array of shape {list(clip.shape)}"
        )
    if clip.dtype == np.uint8:
        return
    if not np.issubdtype(clip.dtype, np.floating):
        raise InvalidParameterError(f"{name}: expected uint8, or floats from 0 to 1, got {clip.dtype}")
    low, high = float(clip.min()), float(clip.max())
    if not (low >= 0 and high <= 1):  # not `<` and `>`, which NaN passes
        raise InvalidParameterError(f"{name}: expected uint8, or floats from 0 to 1, got {low:g} to {high:g}")
