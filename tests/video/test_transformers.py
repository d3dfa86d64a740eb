"""Pipelines of two transformers: a rule chooses one for each iteration, and no other part of the run changes."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tiny_video import video_folder
from verax import VideoPipeline, VideoRequest
from verax.models.wan.family import SKYREELS
from verax.video import unipc
from verax.video.networks import Denoiser
from verax.video.programs import Component
from verax.video.schedule import noise_levels, transformer_spans

STEPS = 5
OPTIONS: dict[str, Any] = dict(height=16, width=32, num_frames=9, num_inference_steps=STEPS, guidance_scale=1.0)
NOISE = np.random.default_rng(0).normal(size=(1, 16, 3, 2, 4)).astype(np.float32)
BOUNDARY = 0.9


def test_the_iteration_at_the_boundary_is_the_first_transformers():
    assert transformer_spans(np.array([999, 876, 875, 874, 0], np.int32), 0.875) == [(0, 0, 3), (1, 3, 5)]
    assert transformer_spans(np.array([[0, 999], [0, 874]], np.int32), 0.875) == [(0, 0, 1), (1, 1, 2)]
    assert transformer_spans(np.array([999, 0], np.int32), None) == [(0, 0, 2)]


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    folder = video_folder("t2v", tmp_path_factory.mktemp("t2v"))
    made = VideoPipeline.from_pretrained(folder, dtype="float32", show_progress=False)
    first = made.denoiser.transformer
    with first.weights() as weights:
        scaled = tuple(0.7 * weight for weight in weights)
    second = Component("second transformer", lambda: first.module(scaled), lambda _: first.module(scaled), keep=True)
    model: Any = made.parts.model
    model = replace(model, settings=replace(model.settings, boundary_ratio=BOUNDARY))
    made.parts = replace(made.parts, model=model, denoisers=(made.denoiser, Denoiser(second)))
    return made


def by_hand(pipe, chosen):
    """Latents of a loop over steps, of which each has its transformer."""
    levels = noise_levels(STEPS, pipe.settings.shift, SKYREELS.sigmas)
    table, state = unipc.tabulate(levels.sigmas), unipc.start(jnp.asarray(NOISE.transpose(0, 2, 3, 4, 1)))
    states = pipe.parts.prompt_states("a red circle")
    for i, (timestep, index) in enumerate(zip(levels.timesteps, chosen, strict=True)):
        component = pipe.parts.denoisers[index].transformer
        with component.weights() as weights:
            model = component.module(weights)
            velocity = model(state.sample, jnp.array([timestep]), model.encode_context(states))
        state = unipc.step(table, jnp.int32(i), state, velocity)
    return np.asarray(state.sample).transpose(0, 4, 1, 2, 3)


@pytest.mark.parametrize("callback", [None, lambda now: True], ids=["one call a span", "one call a step"])
def test_high_noise_goes_to_the_first_transformer_and_low_noise_to_the_second(pipe, callback):
    chosen = (noise_levels(STEPS, pipe.settings.shift, SKYREELS.sigmas).timesteps < 1000 * BOUNDARY).astype(int)
    assert 0 < chosen.sum() < STEPS
    made = pipe("a red circle", latents=NOISE, output_type="latent", callback=callback, **OPTIONS)
    assert (made.steps, made.computed) == (STEPS, STEPS)
    np.testing.assert_allclose(made.frames, by_hand(pipe, chosen), atol=1e-4)
    assert np.abs(made.frames - by_hand(pipe, np.zeros(STEPS, int))).max() > 1e-2


def test_the_plan_has_a_row_for_each_transformer(pipe):
    plan = pipe.plan(VideoRequest("a red circle", **OPTIONS))
    assert [row.stage for row in plan] == ["text", "denoise", "denoise", "decode"]
    first, second = (row for row in plan if row.stage == "denoise")
    assert second.others == first.others + first.weights


def test_teacache_begins_anew_with_each_transformer(pipe):
    options: dict[str, Any] = {**OPTIONS, "num_inference_steps": 16}
    made = pipe("a red circle", cache="teacache", cache_threshold=1e9, **options)
    assert (made.steps, made.computed) == (16, 2 * 5)  # the first five of each are computed
