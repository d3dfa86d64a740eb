"""Schedule: steps of diffusion forcing, spans of two transformers, and TeaCache against its authors' loop of calls."""

from itertools import product

import numpy as np
import pytest

from verax.models.wan.family import SKYREELS, teacache_for
from verax.video.schedule import forcing_schedule, noise_levels, steps_running_blocks, transformer_spans

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


def test_the_iteration_at_the_boundary_is_the_first_transformers():
    assert transformer_spans(np.array([999, 876, 875, 874, 0], np.int32), 0.875) == [(0, 0, 3), (1, 3, 5)]
    assert transformer_spans(np.array([[0, 999], [0, 874]], np.int32), 0.875) == [(0, 0, 1), (1, 1, 2)]
    assert transformer_spans(np.array([999, 0], np.int32), None) == [(0, 0, 2)]


KINDS = [
    {"width": 1536, "image_to_video": True, "pixels": 544 * 960},
    {"width": 5120, "image_to_video": True, "pixels": 720 * 1280},
    {"width": 1536, "image_to_video": False, "pixels": 544 * 960},
    {"width": 5120, "image_to_video": False, "pixels": 544 * 960},
]


def embedding(timesteps):
    """Something that moves with time about as fast as a trained model's embedding, and a projection of it."""
    e = 1 + 0.4 * np.sin(timesteps[..., None].astype(np.float32) / 250 + np.linspace(0, 6, 32, dtype=np.float32))
    return e, np.tanh(e @ np.random.default_rng(0).normal(size=(32, 96)).astype(np.float32) * 0.3)


def as_published(timesteps, threshold, cache):
    """Two calls a step, counted as TeaCache's authors count them."""
    first, end = 2 * cache.first, 2 * (len(timesteps) - cache.last)
    previous, sums, decisions = [np.ones(1), np.ones(1)], [0.0, 0.0], []
    rescale = np.poly1d(cache.polynomial)
    for call in range(2 * len(timesteps)):
        side = call % 2
        now = embedding(timesteps[call // 2])[1 if cache.projected else 0]
        if call < first or call >= end:
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
@pytest.mark.parametrize("projected", [True, False])
@pytest.mark.parametrize("threshold", [0.05, 0.1, 0.3])
def test_teacache_computes_the_steps_of_a_loop_over_calls(kind, projected, threshold):
    timesteps = noise_levels(30, 8.0, SKYREELS.sigmas).timesteps
    cache = teacache_for(**kind, projected=projected)
    computed = steps_running_blocks(timesteps, embedding(timesteps), threshold, cache)
    assert computed.tolist() == as_published(timesteps, threshold, cache)


def test_each_kind_of_model_has_coefficients_of_its_own():
    assert len({teacache_for(**kind, projected=p).polynomial for kind in KINDS for p in (True, False)}) == 8


def test_a_higher_threshold_leaves_out_more_but_never_the_first_or_last_step():
    timesteps = noise_levels(30, 8.0, SKYREELS.sigmas).timesteps
    cache = teacache_for(**KINDS[2], projected=False)
    counts = [steps_running_blocks(timesteps, embedding(timesteps), threshold, cache) for threshold in (0.1, 0.3, 1e9)]
    assert 30 > counts[0].sum() > counts[1].sum() > counts[2].sum() == 2
    assert all(computed[0] and computed[-1] for computed in counts)


def test_frames_at_different_steps_have_one_decision():
    timesteps = np.stack([noise_levels(8, 5.0, SKYREELS.sigmas).timesteps] * 3, axis=1)
    cache = teacache_for(**KINDS[0])
    alone = steps_running_blocks(timesteps[:, 0], embedding(timesteps[:, 0]), 0.2, cache)
    np.testing.assert_array_equal(steps_running_blocks(timesteps, embedding(timesteps), 0.2, cache), alone)
