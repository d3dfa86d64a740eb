"""Half-size steps: the clip stays near the full-size one, with every kind of input, and the solver begins again.

Latents are compared with LightX2V's loop in tests/parity/test_video_pipeline.py.
"""

from typing import Any

import numpy as np
import pytest

from verax import VideoPipeline, VideoRequest
from verax.compare.videos import compare_clips
from verax.errors import InvalidParameterError

SIZE: dict[str, Any] = dict(height=32, width=64, num_frames=9, num_inference_steps=4, half_size_steps=2)
LONG: dict[str, Any] = dict(SIZE, num_frames=13, base_num_frames=9, overlap_history=5)
IMAGE = np.random.default_rng(0).integers(0, 256, (40, 70, 3), np.uint8)


def test_the_clip_stays_near_the_one_of_full_size_alone():
    pipe = VideoPipeline(show_progress=False)
    prompt, options = "a blue square floats down and left over a yellow to cyan gradient", dict(num_inference_steps=50)
    plain, another = (pipe(prompt, seed=seed, **options).frames for seed in (0, 7))
    for steps, psnr, ssim in ((2, 29, 0.95), (10, 20, 0.77)):
        quality = compare_clips(plain, pipe(prompt, seed=0, half_size_steps=steps, **options).frames)
        assert (quality.clip_psnr > psnr, quality.clip_ssim > ssim) == (True, True)
    assert compare_clips(plain, another).clip_psnr < 18


@pytest.mark.parametrize(("kind", "options"), [("ti2v", dict(SIZE, height=64, width=96, image=IMAGE)), ("df", LONG)])
def test_given_latents_are_of_full_size_and_a_callback_sees_both_sizes(pipes, kind, options):
    pipe, seen = pipes(kind), []
    clip = pipe("a red circle", output_type="latent", callback=lambda now: seen.append(now), **options)
    plain = pipe("a red circle", output_type="latent", **dict(options, half_size_steps=0))
    assert clip.frames.shape == plain.frames.shape
    assert np.isfinite(clip.frames).all()
    if kind == "ti2v":
        np.testing.assert_array_equal(clip.frames[:, :, 0], plain.frames[:, :, 0])
    assert (clip.frames != plain.frames).any()
    steps = [now for now in seen if now.stage == "denoise" and now.segment == 0]
    sizes = [now.latents.shape[-2:] for now in steps]
    height, width = plain.frames.shape[-2:]
    half = height // 4 * 2, width // 4 * 2
    assert [now.done for now in steps] == [1, 2, 3, 4]
    assert sizes == [half, half, (height, width), (height, width)]
    assert [max(steps[i].preview().shape) for i in (0, -1)] == [256, 256]


def test_a_cache_begins_again_with_full_size(pipes):
    options: dict[str, Any] = dict(SIZE, num_inference_steps=16, half_size_steps=8)
    clip = pipes("t2v")("a red circle", cache="teacache", cache_threshold=1e9, **options)
    assert (clip.steps, clip.computed) == (16, 2 * 5)  # the first five of each size
    more: dict[str, Any] = dict(cache="magcache", cache_threshold=1e9, cache_max_skip_steps=99)
    clip = pipes("t2v")("a red circle", **more, **options)
    assert (clip.steps, clip.computed) == (16, 2 * 2)  # a fifth of each size
    every = pipes("t2v")("a red circle", **dict(more, cache_max_skip_steps=0), **options)
    np.testing.assert_array_equal(every.frames, pipes("t2v")("a red circle", **options).frames)


def test_a_clip_continues_from_segments_of_the_same_half_size_steps(pipes, tmp_path):
    whole = pipes("df")("a red circle", resume=tmp_path / "clip", **dict(LONG, num_frames=9))
    longer = pipes("df")("a red circle", resume=tmp_path / "clip", **LONG)
    assert (whole.steps, longer.steps) == (4, 4)
    np.testing.assert_array_equal(longer.frames, pipes("df")("a red circle", **LONG).frames)
    with pytest.raises(InvalidParameterError, match=r"resume: .*half_size_steps was 2, now 1"):
        pipes("df")("a red circle", resume=tmp_path / "clip", **dict(LONG, half_size_steps=1))


def test_what_has_one_size_refuses_half_size_steps(pipes, folders):
    with pytest.raises(InvalidParameterError, match="half_size_steps: a curve is of one segment"):
        pipes("t2v").calibrate(VideoRequest("a red circle", **SIZE))
    theirs = VideoPipeline.from_pretrained(folders("df"), reference="diffusers")
    with pytest.raises(InvalidParameterError, match="half_size_steps: expected 0 for a clip of several segments"):
        theirs.resolve(VideoRequest("a red circle", **LONG))


def test_frames_of_a_users_clip_are_in_the_type_of_the_others(pipes):
    given = np.random.default_rng(0).integers(0, 256, (9, 32, 64, 3), np.uint8)
    clip = pipes("df")("a red circle", video=given, overlap_history=5, output_type="np", **SIZE)
    np.testing.assert_array_equal(clip.frames[:9], given / np.float32(255))
