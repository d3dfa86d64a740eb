"""Drawn clips, their captions, and the classifier that reads them back."""

import numpy as np

from recipes.video.classifier import classify
from recipes.video.shapes import COLOURS, DIRECTIONS, SHAPES, Scene, draw, scene, scenes

SCENE = Scene("circle", "red", "right", "blue", "green", radius=0.17, start=(0.25, 0.4), end=(0.65, 0.4))


def test_a_clip_shows_the_shape_where_the_scene_says():
    clip = draw([SCENE], frames=5, height=40, width=80)[0]
    assert clip.shape == (5, 40, 80, 3)
    assert clip.dtype == np.uint8
    for frame, x in zip(clip, (20, 28, 36, 44, 52), strict=True):
        assert tuple(frame[16, x]) == COLOURS["red"]
        red = frame[16, :, 0].astype(int) > 130  # half covered
        assert abs(np.flatnonzero(red).mean() + 0.5 - x) < 0.51
        assert abs(red.sum() - 2 * 0.17 * 40) < 1.5
    np.testing.assert_allclose(clip[0, 0, 0], COLOURS["blue"], atol=2)
    np.testing.assert_allclose(clip[0, -1, -1], COLOURS["green"], atol=2)


def test_a_scene_depends_on_its_number_only_and_stays_inside():
    assert scenes(3, 5, 2) == [scene(3, 5), scene(3, 6)]
    assert scene(3, 5) != scene(4, 5)
    for drawn in scenes(0, 0, 200):
        points = np.asarray([drawn.start, drawn.end])
        assert np.all(points > drawn.radius)
        assert np.all(points < 1 - drawn.radius)
        assert tuple(np.sign(np.subtract(drawn.end, drawn.start))) == DIRECTIONS[drawn.direction]


def test_held_out_combinations_are_never_trained_on():
    trained = {drawn.combination for drawn in scenes(0, 0, 2000)}
    held_out = {drawn.combination for drawn in scenes(0, 0, 300, split="held_out")}
    assert not trained & held_out
    assert {name.split("/")[0] for name in held_out} == set(SHAPES)


def test_the_classifier_reads_noisy_and_blurred_clips():
    drawn = scenes(2, 0, 60)
    noise = np.random.default_rng(0).normal(0, 10, (60, 17, 64, 64, 3))
    right = []
    for one, clip, grain in zip(drawn, draw(drawn), noise, strict=True):
        blurred = clip.astype(np.float32)
        for axis in (1, 2):
            padded = np.pad(blurred, [(1, 1) if a == axis else (0, 0) for a in range(4)], mode="edge")
            blurred = sum(np.take(padded, np.arange(64) + k, axis) * w for k, w in ((0, 0.25), (1, 0.5), (2, 0.25)))
        right.append(all(classify(np.clip(blurred + grain, 0, 255).astype(np.uint8)).agrees(one).values()))
    assert np.mean(right) >= 0.98
