"""Clips compared: against the definitions written out."""

import json
import math

import numpy as np
import pytest
from scipy import ndimage

from verax.compare.report import VideoReport
from verax.compare.videos import compare_clips
from verax.errors import InvalidParameterError


def clip(frames=3, height=24, width=32, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), np.uint8)


def changed(frames, seed=1):
    """Small changes, none in frame 1."""
    off = np.random.default_rng(seed).integers(-9, 10, frames.shape)
    off[1] = 0
    return (frames + off).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def pair():
    first = clip()
    return first, changed(first)


def ssim(a, b):
    """Wang et al. 2004, equation 13, with its window of 11 x 11."""
    offsets = np.arange(-5, 6)
    kernel = np.exp(-(offsets**2) / (2 * 1.5**2))
    window = np.outer(kernel, kernel) / kernel.sum() ** 2

    def local(x):
        return ndimage.convolve(x, window[..., None], mode="reflect")

    mean_a, mean_b = local(a), local(b)
    var_a, var_b, cov = local(a * a) - mean_a**2, local(b * b) - mean_b**2, local(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    map_ = (2 * mean_a * mean_b + c1) * (2 * cov + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return map_[5:-5, 5:-5].mean()


def test_each_frame_has_the_errors_that_the_definitions_give(pair):
    result = compare_clips(*pair)
    a, b = (side / 255.0 for side in pair)
    mse = ((a - b) ** 2).mean((1, 2, 3))
    np.testing.assert_allclose(result.mse, mse, rtol=1e-12)
    np.testing.assert_allclose(result.psnr[::2], -10 * np.log10(mse[::2]), rtol=1e-12)
    np.testing.assert_allclose(result.ssim, [ssim(x, y) for x, y in zip(a, b, strict=True)], rtol=1e-9)
    off = np.abs(a - b)
    assert result.mean_difference == pytest.approx(off.mean())
    assert result.relative_difference == pytest.approx(off.mean() / a.mean())
    ordered = np.sort(off.ravel())
    for percent, value in ((95, result.p95_difference), (99, result.p99_difference)):
        assert value == pytest.approx(ordered[math.ceil(len(ordered) * percent / 100) - 1])
    assert result.max_difference == pytest.approx(off.max())


def test_a_percentile_is_one_of_the_differences_and_no_mean_of_two():
    off = np.random.default_rng(4).permutation(np.arange(1, 364)).reshape(1, 11, 11, 3) / 400  # no two alike
    result = compare_clips(np.zeros_like(off), off)
    # 344 of 363 are less than 95%, and 359 less than 99%.
    assert result.p95_difference == pytest.approx(345 / 400, rel=1e-6)
    assert result.p99_difference == pytest.approx(360 / 400, rel=1e-6)


def test_an_identical_frame_does_not_make_the_clip_infinite(pair):
    result = compare_clips(*pair)
    assert (result.psnr[1], result.ssim[1], result.identical_frames) == (math.inf, 1.0, 1)
    assert result.clip_psnr == pytest.approx(-10 * math.log10(np.mean(result.mse)))
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["by_frame"][1]["psnr"] is None


def test_floats_are_compared_finer_than_pixels_are():
    first = (clip() / 255).astype(np.float32) * 0.99
    result = compare_clips(first, first + np.float32(1e-4))
    assert result.clip_psnr == pytest.approx(80, abs=0.1)
    assert result.max_difference == pytest.approx(1e-4, rel=1e-2)
    assert compare_clips(first, clip()).clip_psnr == pytest.approx(compare_clips(clip(), first).clip_psnr)


@pytest.mark.parametrize(
    ("noise", "verdict"), [(0, "identical"), (0.004, "excellent"), (0.014, "very good"), (0.025, "good"), (0.2, "poor")]
)
def test_the_verdict_follows_the_stated_thresholds(noise, verdict):
    first = clip() / 255 * 0.5 + 0.25
    assert compare_clips(first, first + noise * np.sign(clip(seed=3) - 127.5)).verdict == verdict


def test_structure_that_is_lost_counts_against_a_small_error():
    """40 dB would be excellent, and yet of a faint pattern nothing is left."""
    first = 0.5 + 0.0095 * np.sign(clip(1) - 127.5)
    result = compare_clips(first, np.full_like(first, 0.5))
    assert result.clip_psnr >= 40
    assert result.verdict == "fair"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (clip(frames=4), "second: it has 4 frames, the first has 3"),
        (clip(width=30), "second: its frames are 30 x 24, the first clip's are 32 x 24"),
        (clip()[0], r"second: expected a clip \[frames, height, width, 3\], got an array of shape \[24, 32, 3\]"),
        (clip() / 100, "second: expected uint8, or floats from 0 to 1, got 0 to 2.55"),
        (clip() / np.where(clip() > 254, np.nan, 255), "second: expected uint8, or floats from 0 to 1, got nan to nan"),
        (clip().astype(int), "second: expected uint8, or floats from 0 to 1, got int64"),
    ],
)
def test_clips_that_do_not_fit_are_refused(second, message):
    with pytest.raises(InvalidParameterError, match=message):
        compare_clips(clip(), second)


def test_frames_smaller_than_the_window_are_refused():
    with pytest.raises(InvalidParameterError, match="smaller than SSIM's window of 11 x 11"):
        compare_clips(clip(height=10), clip(height=10))


def test_the_third_panel_is_the_difference_made_visible(pair):
    report = VideoReport(compare_clips(*pair), *pair, ("a", "b"))
    first, second, off = np.split(report.panels(), 3, axis=2)
    np.testing.assert_array_equal((first, second), pair)
    np.testing.assert_array_equal(off, np.abs(pair[0].astype(int) - pair[1]) * report.gain)
    assert report.gain * np.percentile(np.abs(pair[0].astype(int) - pair[1]), 99) <= 128
    odd = np.zeros((1, 13, 11, 3), np.uint8)
    assert VideoReport(compare_clips(odd, odd), odd, odd, ("a", "b")).panels().shape == (1, 14, 34, 3)


def test_differences_of_floats_too_small_to_be_seen_give_a_dark_third_panel():
    first = clip() / 255 * 0.9
    pixels = np.round(first * 255).astype(np.uint8)
    report = VideoReport(compare_clips(first, first + 1e-6), pixels, pixels, ("a", "b"), min_psnr=60)
    assert np.split(report.panels(), 3, axis=2)[2].max() == 0
    assert report.failures == []
    report = VideoReport(compare_clips(first, first + 2e-3), pixels, pixels, ("a", "b"), min_psnr=60)
    assert report.failures == ["frame 0: 53.98 dB, below the minimum of 60"]
