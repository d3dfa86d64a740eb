"""Schedule: steps of diffusion forcing, and spans of two transformers."""

from itertools import product

import numpy as np
import pytest

from verax import VideoPipeline, VideoRequest
from verax.models.wan.family import SKYREELS
from verax.video import solvers
from verax.video.schedule import forcing_schedule, noise_levels, segment_schedules, transformer_spans

TIMESTEPS = noise_levels(6, 8.0, SKYREELS.sigmas).timesteps


@pytest.mark.parametrize(("ar_step", "block", "prefix"), product([0, 1, 2, 9], [1, 3], [0, 1, 3, 4]))
def test_every_frame_takes_each_step_once_in_order_and_given_frames_none(ar_step, block, prefix):
    schedule = forcing_schedule(9, TIMESTEPS, ar_step=ar_step, causal_block_size=block, prefix=prefix)
    for f in range(9):
        taken = schedule.update[:, f]
        if f < prefix:
            assert not taken.any()
            assert (schedule.timesteps[:, f] == 0).all()
        else:
            np.testing.assert_array_equal(schedule.row[taken, f], np.arange(6))
            np.testing.assert_array_equal(schedule.timesteps[taken, f], TIMESTEPS)


@pytest.mark.parametrize(("kind", "reference"), [("df", "skyreels"), ("df", "diffusers"), ("ti2v", "skyreels")])
def test_diffusion_forcing_loses_the_first_sample_as_both_pipelines_do(folders, kind, reference):
    """SkyReels-V2's loop, like diffusers', gives a frame's solver a view of the clip and writes the result over it."""
    pipe = VideoPipeline(folders(kind), reference=reference, show_progress=False)
    height, width = (32, 64) if kind == "ti2v" else (16, 32)
    request = pipe.resolve(
        VideoRequest("a red circle", height=height, width=width, num_frames=9, num_inference_steps=6)
    )
    made = segment_schedules(request, pipe.parts.model, latents=3, given=1, last=0)[0].tables.solver
    levels = noise_levels(6, request.shift, pipe.parts.model.rules.sigmas).sigmas
    expected = solvers.tabulate(levels, overwritten=kind == "df")
    np.testing.assert_array_equal([row[:6] for row in made[:9]], expected[:9])


def test_the_iteration_at_the_boundary_is_the_first_transformers():
    assert transformer_spans(np.array([999, 876, 875, 874, 0], np.int32), 0.875) == [(0, 0, 3), (1, 3, 5)]
    assert transformer_spans(np.array([[0, 999], [0, 874]], np.int32), 0.875) == [(0, 0, 1), (1, 1, 2)]
    assert transformer_spans(np.array([999, 0], np.int32), None) == [(0, 0, 2)]
