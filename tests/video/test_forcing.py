"""Iterations of diffusion forcing: what holds of every schedule, and what is refused."""

import numpy as np
import pytest

from verax.errors import InvalidParameterError
from verax.models.wan.family import SKYREELS
from verax.video.schedule import forcing_schedule, noise_levels

TIMESTEPS = noise_levels(6, 8.0, SKYREELS.sigmas).timesteps


@pytest.mark.parametrize("ar_step", [0, 1, 2, 9])
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("prefix", [0, 1, 3, 4])
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


def test_blocks_follow_each_other_by_ar_step():
    schedule = forcing_schedule(4, TIMESTEPS, ar_step=2, causal_block_size=2)
    begins = schedule.update.argmax(axis=0)
    np.testing.assert_array_equal(begins, [0, 0, 2, 2])
    assert len(schedule.timesteps) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal_block_size": 4}, r"causal_block_size: 9 latent frames .* blocks of 4"),
        ({"causal_block_size": 0}, r"causal_block_size: expected .* got 0"),
        ({"ar_step": -1}, r"ar_step: expected .* got -1"),
    ],
)
def test_impossible_schedules_are_refused(options, message):
    with pytest.raises(InvalidParameterError, match=message):
        forcing_schedule(9, TIMESTEPS, **options)
