"""`LatentPreview`: the linear map finds the colours of a VAE that is linear in them."""

import numpy as np
import pytest

from verax.serve.video.jobs import LatentPreview

pytest.importorskip("PIL.Image")


def test_the_colours_of_latents_are_found():
    mix = np.random.default_rng(1).standard_normal((3, 16))

    def encode(frames):
        _, T, H, W, _ = frames.shape
        return frames.reshape(1, T, H // 8, 8, W // 8, 8, 3).mean((3, 5)) @ mix + 2

    preview = LatentPreview(encode, 8)
    colors = {43: (200, 10, 10), 128: (10, 10, 200), 213: (30, 220, 30)}
    clip = np.zeros((1, 3, 32, 96, 3), np.uint8)
    clip[:, 1] = np.asarray(list(colors.values()), np.uint8).repeat(32, axis=0)
    image = preview.image(encode(clip).transpose(0, 4, 1, 2, 3))
    assert image.shape == (85, 256, 3)
    for column, color in colors.items():
        np.testing.assert_allclose(image[40, column].astype(int), color, atol=8)
    assert preview.jpeg(encode(clip).transpose(0, 4, 1, 2, 3)).startswith(b"\xff\xd8\xff")
