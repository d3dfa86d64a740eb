"""Recipes of few steps: what they set, what contradicts them, and half the work without guidance."""

from typing import Any

import numpy as np
import pytest

from verax import VideoPipeline, VideoRequest
from verax.models.video_model import shift_sigmas
from verax.models.wan.model import WanModel
from verax.options import options_of
from verax.video import solvers
from verax.video.networks import PromptStates
from verax.video.recipes import RECIPES, with_recipe
from verax.video.schedule import segment_schedules, transformer_spans

SIZE: dict[str, Any] = dict(height=16, width=32, num_frames=9, output_type="latent")
QUARTERS = np.array([1, 0.75, 0.5, 0.25])


def schedule(pipe, **options):
    request = pipe.resolve(VideoRequest("a red circle", **{**SIZE, **options}))
    return request, segment_schedules(request, pipe.parts.model, latents=3, given=0, last=0)[0]


# Timesteps as the published code computes them: LightX2V's and Self-Forcing's `timesteps[1000 - step]` of 1000 shifted
# noise levels, and DMD's own, whose sigma is that of the nearest of 1000 shifted levels.
@pytest.mark.parametrize(
    ("recipe", "shift", "steps"),
    [
        ("lightx2v", 5.0, [1000, 750, 500, 250]),
        ("self-forcing", 5.0, [1000, 750, 500, 250]),
        ("causvid", 8.0, [1000, 757, 522]),
        ("fastwan", 8.0, [1000, 757, 522]),
    ],
)
def test_noise_levels_and_timesteps_are_the_published_codes(pipes, recipe, shift, steps):
    even = np.linspace(1, 0, 1001)[:-1]
    grid = shift * even / (1 + (shift - 1) * even)
    if shift == 5.0:
        sigmas = grid[1000 - np.array(steps)]
        timesteps = 1000 * sigmas
    else:
        sigmas = grid[[np.abs(1000 * grid - step).argmin() for step in steps]]
        timesteps = np.array(steps)
    request, made = schedule(pipes("t2v"), recipe=recipe)
    np.testing.assert_allclose(made.timesteps, timesteps, rtol=1e-7)
    np.testing.assert_allclose(made.tables.solver.sigma[: len(steps)], sigmas, rtol=1e-6)
    assert (request.num_inference_steps, request.shift, request.guided, request.rows) == (len(steps), shift, False, 1)


def test_both_transformers_take_the_steps_that_lightx2v_gives_them(pipes):
    """Its `boundary_step_index` is 2."""
    _, made = schedule(pipes("t2v-a14b"), recipe="lightx2v")
    assert transformer_spans(made.timesteps, 0.875) == transformer_spans(made.timesteps, 0.9) == [(0, 0, 2), (1, 2, 4)]


def test_options_name_the_recipes_and_solvers():
    assert tuple(RECIPES) == options_of(VideoRequest)["recipe"].choices
    assert tuple(solvers.SOLVERS) == options_of(VideoRequest)["solver"].choices


def test_options_that_repeat_a_recipe_are_taken(pipes):
    same = VideoRequest("a", recipe="lightx2v", sigmas=[1, 0.75, 0.5, 0.25], num_inference_steps=4, guidance_scale=1)
    resolved = pipes("t2v").resolve(same)
    assert with_recipe(resolved).sigmas is resolved.sigmas


@pytest.mark.parametrize("solver", solvers.SOLVERS)
def test_given_noise_levels_replace_the_references_spacing(pipes, solver):
    request, made = schedule(pipes("t2v"), sigmas="1,0.75,0.5,0.25", shift=3.0, solver=solver)
    expected = shift_sigmas(QUARTERS, 3.0)
    assert request.num_inference_steps == 4
    np.testing.assert_allclose(made.tables.solver.sigma[:4], expected, atol=2e-6)
    cut = 1000 * expected
    if solver in ("unipc", "dpm++"):
        cut = np.floor(cut - [1e-3 * (solver == "unipc"), 0, 0, 0])
    np.testing.assert_allclose(made.timesteps, cut, rtol=1e-6)


def test_a_scale_of_one_runs_the_prompt_alone(folders, monkeypatch):
    """Half the rows go through the blocks, and the negative prompt is not encoded."""
    pipe = VideoPipeline(folders("t2v"), dtype="float32", show_progress=False)
    rows, texts = [], []
    run, encode = WanModel.run_blocks, PromptStates.__call__

    def counted_run(self, x, *arguments, **options):
        rows.append(len(x))
        return run(self, x, *arguments, **options)

    def counted_encode(self, prompt):
        texts.append(prompt)
        return encode(self, prompt)

    monkeypatch.setattr(WanModel, "run_blocks", counted_run)
    monkeypatch.setattr(PromptStates, "__call__", counted_encode)
    measured = {}
    for scale in (1.0, 5.0):
        rows.clear()
        texts.clear()
        pipe("a red circle", num_inference_steps=2, guidance_scale=scale, guidance="batch", **SIZE)
        measured[scale] = max(rows), len(texts)
    assert measured == {1.0: (1, 1), 5.0: (2, 2)}
