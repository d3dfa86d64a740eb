"""Step caches: TeaCache and MagCache against their authors' loops of calls, curves in files, and loss of quality."""

import json
from typing import Any

import numpy as np
import pytest

from verax import VideoPipeline, VideoRequest
from verax.compare.videos import compare_clips
from verax.errors import InvalidParameterError
from verax.models.wan.family import SKYREELS, magcache_for, teacache_for
from verax.video.caches import MagCurve, interpolated, magcache_steps, teacache_steps
from verax.video.schedule import noise_levels

KINDS = [
    {"width": 1536, "image_to_video": True, "pixels": 544 * 960},
    {"width": 5120, "image_to_video": True, "pixels": 720 * 1280},
    {"width": 1536, "image_to_video": False, "pixels": 544 * 960},
    {"width": 5120, "image_to_video": False, "pixels": 544 * 960},
]


def embedding(timesteps):
    """Something that moves with time about as fast as the projection of a trained model's embedding."""
    e = 1 + 0.4 * np.sin(timesteps[..., None].astype(np.float32) / 250 + np.linspace(0, 6, 32, dtype=np.float32))
    return np.tanh(e @ np.random.default_rng(0).normal(size=(32, 96)).astype(np.float32) * 0.3)


def teacache_as_published(timesteps, threshold, cache):
    """Two calls a step, counted as TeaCache's authors count them."""
    previous, sums, decisions = [np.ones(1), np.ones(1)], [0.0, 0.0], []
    rescale = np.poly1d(cache.polynomial)
    for call in range(2 * len(timesteps)):
        side = call % 2
        now = embedding(timesteps[call // 2])
        if call < 2 * cache.kept:
            calculate, sums[side] = True, 0.0
        else:
            sums[side] += rescale(np.abs(now - previous[side]).mean() / np.abs(previous[side]).mean())
            calculate = sums[side] >= threshold
            if calculate:
                sums[side] = 0.0
        previous[side] = now
        decisions.append(calculate)
    assert decisions[::2] == decisions[1::2]
    return decisions[::2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threshold", [0.05, 0.1, 0.3])
def test_teacache_computes_the_steps_of_a_loop_over_calls(kind, threshold):
    timesteps = noise_levels(30, 8.0, SKYREELS.sigmas).timesteps
    cache = teacache_for(**kind)
    computed = teacache_steps(timesteps, embedding(timesteps), threshold, cache)
    assert computed.tolist() == teacache_as_published(timesteps, threshold, cache)


def test_each_kind_of_model_has_coefficients_of_its_own():
    assert len({teacache_for(**kind).polynomial for kind in KINDS}) == 4


def magcache_as_published(ratios, threshold, max_skip_steps, retention_ratio):
    """Two calls a step, each with sums of its own, as MagCache's authors count them: which calls run the blocks."""
    calls, ran = 2 * len(ratios), []
    product, error, skipped = [1.0, 1.0], [0.0, 0.0], [0, 0]
    for call in range(calls):
        side, skip = call % 2, False
        if call >= int(calls * retention_ratio):
            product[side] *= ratios[call // 2][side]
            skipped[side] += 1
            error[side] += np.abs(1 - product[side])
            skip = error[side] < threshold and skipped[side] <= max_skip_steps
            if not skip:
                product[side], error[side], skipped[side] = 1.0, 0.0, 0
        ran.append(not skip)
    return np.reshape(ran, (-1, 2))


MODELS = [
    dict(kind=kind, width=width, experts=experts, pixels=pixels, has_image=has_image)
    for kind, width, experts, pixels, has_image in [
        ("t2v", 1536, False, 480 * 832, False),
        ("t2v", 5120, False, 720 * 1280, False),
        ("i2v", 5120, False, 480 * 832, True),
        ("i2v", 5120, False, 720 * 1280, True),
        ("vace", 1536, False, 480 * 832, False),
        ("t2v", 5120, True, 720 * 1280, False),
        ("i2v", 5120, True, 720 * 1280, True),
        ("ti2v", 3072, False, 704 * 1280, False),
        ("ti2v", 3072, False, 704 * 1280, True),
    ]
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", [(0.12, 2, 0.2), (0.24, 6, 0.2), (0.06, 3, 0.1)])
@pytest.mark.parametrize("steps", [50, 40, 28])
def test_magcache_skips_the_steps_that_its_authors_skip_for_both_prompts(model, settings, steps):
    threshold, max_skip_steps, retention_ratio = settings
    curve = magcache_for(**model)
    assert curve is not None
    ratios = interpolated(curve, steps)
    options = dict(threshold=threshold, max_skip_steps=max_skip_steps, retention_ratio=retention_ratio)
    for column in (0, 1):
        expected = magcache_as_published(np.repeat(ratios[:, column : column + 1], 2, axis=1), *settings)[:, 0]
        one = np.ones_like(ratios)  # the other prompt may skip every step
        one[:, column] = ratios[:, column]
        np.testing.assert_array_equal(magcache_steps(one, **options), expected)
    assert 0.25 * steps < magcache_steps(ratios, **options).sum() < 0.65 * steps


def test_magcache_keeps_the_clips_of_the_built_in_model():
    pipe = VideoPipeline(show_progress=False)
    prompt = "a blue square floats down and left over a yellow to cyan gradient"
    plain = pipe(prompt, num_inference_steps=50, seed=0)
    cached = pipe(prompt, num_inference_steps=50, seed=0, cache="magcache")
    quality = compare_clips(plain.frames, cached.frames)
    assert (cached.steps, cached.steps / cached.computed >= 1.75) == (50, True)
    assert (quality.clip_psnr > 32, quality.clip_ssim > 0.97) == (True, True)


SIZE: dict[str, Any] = dict(height=16, width=32, num_frames=9)


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0], ids=["prompt alone", "guidance"])
def test_a_measured_curve_is_read_from_its_file(pipes, tmp_path, guidance_scale):
    pipe = pipes("t2v")
    options = dict(SIZE, num_inference_steps=6, guidance_scale=guidance_scale)
    curve = pipe.calibrate(VideoRequest("a red circle", **options))
    assert curve.ratios.shape == (6, 1 if guidance_scale == 1 else 2)
    assert (curve.ratios[0] == 1).all()
    read = MagCurve.read(curve.save(tmp_path / "curve.json"))
    np.testing.assert_allclose(read.ratios, curve.ratios, atol=1e-5)
    cache: dict[str, Any] = dict(cache="magcache", cache_curve=tmp_path / "curve.json", cache_threshold=1e9)
    clip = pipe("a red circle", **options, **cache, cache_max_skip_steps=2, cache_retention_ratio=0.34)
    assert clip.computed == 3  # 2 kept, 2 skipped, 1 of 2 computed
    every = pipe("a red circle", **options, **cache, cache_max_skip_steps=0)
    np.testing.assert_array_equal(every.frames, pipe("a red circle", **options).frames)


def test_each_transformer_begins_with_computed_steps_and_images_keep_all_steps_of_high_noise(pipes, tmp_path):
    def computed(kind, **options):
        pipe = pipes(kind)
        options |= dict(SIZE, num_inference_steps=16, guidance_scale=3.0)
        high = sum(
            noise_levels(16, pipe.settings.shift, SKYREELS.sigmas).timesteps >= 1000 * pipe.settings.boundary_ratio
        )
        assert 4 < high < 12
        cache: dict[str, Any] = dict(cache="magcache", cache_threshold=1e9, cache_max_skip_steps=99)
        return pipe("a red circle", **options, **cache).computed, high

    got, high = computed("t2v-a14b")
    assert got == int(0.2 * high + 0.5) + int(0.2 * (16 - high) + 0.5)
    got, high = computed("i2v-a14b", image=np.zeros((16, 32, 3), np.uint8))
    assert got == high + int(0.2 * (16 - high) + 0.5)


@pytest.fixture(scope="module")
def curve_file(pipes, tmp_path_factory):
    path = tmp_path_factory.mktemp("curve") / "curve.json"
    return pipes("t2v").calibrate(VideoRequest("a red circle", **SIZE, num_inference_steps=6)).save(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": None, "ratios": [[1.0, 1.0]] * 5}, "cache_curve: .*is of 5 steps, and the clip has 6"),
        ({"model": "another"}, "cache_curve: .*is of another checkpoint: its model is another, and this one's t2v"),
        ({"transformer": "30 layers of 1536, 12 heads"}, "another checkpoint: its transformer is 30 layers of 1536"),
        ({"ratios": [[1.0], [1.0, 1.0]]}, "cache_curve: .*ratios: expected a row for each step"),
        ({"ratios": [[0.0]] * 6}, "cache_curve: .*ratios"),
        ({"ratios": "0.9"}, "cache_curve: .*ratios"),
    ],
    ids=["steps", "model", "sizes", "ragged", "zero", "text"],
)
def test_a_curve_that_does_not_fit_is_an_error_before_the_run(pipes, curve_file, tmp_path, change, message):
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({**json.loads(curve_file.read_text()), **change}))
    request = VideoRequest("a red circle", **SIZE, num_inference_steps=6, cache="magcache", cache_curve=path)
    with pytest.raises(InvalidParameterError, match=message):
        pipes("t2v").resolve(request)


def test_a_curve_is_measured_on_one_segment(pipes):
    with pytest.raises(InvalidParameterError, match="num_frames: a curve is of one segment"):
        pipes("df").calibrate(VideoRequest("a red circle", **dict(SIZE, num_frames=17), overlap_history=5))
