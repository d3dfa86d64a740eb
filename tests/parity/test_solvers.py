"""UniPC, DPM-Solver++, noise levels and the forcing schedule against diffusers; the pipelines compare others."""

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from diffusers.pipelines.skyreels_v2.pipeline_skyreels_v2_diffusion_forcing import SkyReelsV2DiffusionForcingPipeline
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

from verax.models.wan.family import DIFFUSERS, WanVideoModel
from verax.video import solvers
from verax.video.schedule import forcing_schedule, noise_levels

SHAPE = (1, 3, 2, 5, 4)  # B F h w C
SCHEDULES = [(1, 5.0), (2, 8.0), (3, 1.0), (8, 3.0), (50, 8.0)]
"""Numbers of steps, and shifts."""


def scheduler(spacing, steps, shift):
    """Diffusers' scheduler; on the original's schedule, by handing it that schedule's formula."""
    settings = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    if spacing == "diffusers":
        made = UniPCMultistepScheduler(**settings, flow_shift=shift)
        made.set_timesteps(steps)
    else:
        made = UniPCMultistepScheduler(**settings, flow_shift=1.0)
        even = np.linspace(float(np.float32(0.999)), 0, steps + 1)[:-1]
        made.set_timesteps(sigmas=shift * even / (1 + (shift - 1) * even))
    return made


def velocity(sample, timestep):
    """A stand-in for the model: not linear, and changing with time."""
    return np.tanh(1.3 * sample + timestep / 700) - 0.4 * sample[..., ::-1]


@pytest.mark.parametrize(("steps", "shift"), SCHEDULES)
@pytest.mark.parametrize("spacing", ["skyreels", "diffusers"])
def test_noise_levels_and_timesteps_are_the_references(spacing, steps, shift):
    theirs = scheduler(spacing, steps, shift)
    ours = noise_levels(steps, shift, WanVideoModel.references[spacing].sigmas)
    np.testing.assert_array_equal(ours.sigmas, theirs.sigmas.numpy())
    np.testing.assert_array_equal(ours.timesteps, theirs.timesteps.numpy())


@pytest.mark.parametrize(("steps", "shift"), SCHEDULES)
@pytest.mark.parametrize("kind", ["FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler"])
def test_noise_levels_of_other_solvers_are_those_of_diffusers(kind, steps, shift):
    theirs = getattr(diffusers, kind)(shift=shift)
    theirs.set_timesteps(steps)
    ours = noise_levels(steps, shift, DIFFUSERS.other_sigmas["euler"], solver="euler")
    np.testing.assert_allclose(ours.sigmas, theirs.sigmas.numpy(), atol=1e-6)
    np.testing.assert_allclose(ours.timesteps, theirs.timesteps.numpy(), atol=1e-3)


def check_steps(table, theirs, atol):
    """Compare every step by a table with diffusers' scheduler."""
    noise = np.random.default_rng(len(theirs.timesteps)).normal(size=SHAPE).astype(np.float32)
    advance, state, expected = jax.jit(solvers.step), solvers.start(jax.numpy.asarray(noise)), torch.from_numpy(noise)
    for i, timestep in enumerate(theirs.timesteps):
        # Both are given what the model says of the reference's sample, so that each step is compared by itself.
        seen = velocity(expected.numpy(), float(timestep)).astype(np.float32)
        state = advance(table, np.int32(i), state, seen)
        expected = theirs.step(torch.from_numpy(seen), timestep, expected, return_dict=False)[0]
        np.testing.assert_allclose(state.sample, expected.numpy(), atol=atol, err_msg=f"step {i}")


@pytest.mark.parametrize(("steps", "shift"), SCHEDULES)
@pytest.mark.parametrize("spacing", ["skyreels", "diffusers"])
def test_every_step_matches_diffusers(spacing, steps, shift):
    theirs = scheduler(spacing, steps, shift)
    levels = noise_levels(steps, shift, WanVideoModel.references[spacing].sigmas)
    check_steps(solvers.tabulate(levels.sigmas), theirs, atol=1e-5)


@pytest.mark.parametrize(("steps", "shift"), SCHEDULES)
def test_every_step_of_dpm_matches_diffusers(steps, shift):
    theirs = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )
    theirs.set_timesteps(steps)
    levels = noise_levels(steps, shift, DIFFUSERS.other_sigmas["dpm++"], solver="dpm++")
    np.testing.assert_array_equal(levels.timesteps, theirs.timesteps.numpy())
    np.testing.assert_allclose(levels.sigmas, theirs.sigmas.numpy(), atol=1e-6)
    check_steps(solvers.SOLVERS["dpm++"](levels.sigmas), theirs, atol=2e-5)


def diffusers_matrix(frames, timesteps, ar_step, prefix, block):
    pipe = SkyReelsV2DiffusionForcingPipeline.__new__(SkyReelsV2DiffusionForcingPipeline)
    matrix, index, mask, intervals = pipe.generate_timestep_matrix(
        frames, torch.from_numpy(timesteps), frames, ar_step, prefix, block
    )
    assert set(intervals) == {(0, frames)}
    return matrix.numpy(), index.numpy(), mask.numpy()


@pytest.mark.parametrize(
    ("frames", "ar_step", "prefix", "block", "steps"),
    [
        (25, 0, 0, 1, 30),
        (7, 0, 1, 1, 3),
        (25, 5, 5, 5, 30),
        (12, 2, 3, 3, 3),
        (12, 2, 4, 3, 30),
        (6, 40, 0, 2, 1),
        (1, 0, 0, 1, 1),
    ],
)
def test_forcing_schedules_match_diffusers(frames, ar_step, prefix, block, steps):
    timesteps = noise_levels(steps, 8.0, DIFFUSERS.sigmas).timesteps
    matrix, index, mask = diffusers_matrix(frames, timesteps, ar_step, prefix, block)
    ours = forcing_schedule(
        frames, timesteps, ar_step=ar_step, causal_block_size=block, prefix=prefix, keep_partial_blocks=False
    )
    np.testing.assert_array_equal(ours.timesteps, matrix)
    np.testing.assert_array_equal(ours.update, mask)
    np.testing.assert_array_equal(ours.row[mask], index[mask] - 1)


@pytest.mark.parametrize("overwritten", [True, False])
def test_frames_at_different_steps_go_as_one_scheduler_each(overwritten):
    frames, block, ar_step, prefix = 6, 2, 2, 2
    levels = noise_levels(7, 5.0, DIFFUSERS.sigmas)
    table = solvers.tabulate(levels.sigmas, overwritten=overwritten)
    schedule = forcing_schedule(frames, levels.timesteps, ar_step=ar_step, causal_block_size=block, prefix=prefix)
    theirs = [scheduler("diffusers", 7, 5.0) for _ in range(frames)]
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(2, frames, 3, 2, 4)).astype(np.float32)
    state, expected = solvers.start(jax.numpy.asarray(noise)), torch.from_numpy(noise.copy())
    advance = jax.jit(solvers.step)
    for timesteps, index, update in zip(*schedule, strict=True):
        seen = velocity(expected.numpy(), timesteps[None, :, None, None, None]).astype(np.float32)
        state = advance(table, index, state, seen, update)
        for f in np.flatnonzero(update):
            # Diffusers' pipeline hands its scheduler a view, and writes the result over it.
            said, view = torch.from_numpy(seen[:, f]), expected[:, f]
            sample = view if overwritten else view.clone()
            expected[:, f] = theirs[f].step(said, torch.tensor(timesteps[f]), sample, return_dict=False)[0]
        np.testing.assert_allclose(state.sample, expected.numpy(), atol=1e-5)
    np.testing.assert_array_equal(state.sample[:, :prefix], noise[:, :prefix])
