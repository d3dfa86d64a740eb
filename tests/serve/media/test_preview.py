"""`LatentPreview`: the linear map finds the colours of a VAE that is linear in them."""

import numpy as np
import pytest

from verax.serve.media.preview import LatentPreview

pytest.importorskip("PIL.Image")


def test_the_colours_of_latents_are_found():
    mix = np.random.default_rng(1).standard_normal((3, 16))

    def encode(frames):
        _, T, H, W, _ = frames.shape
        return frames.reshape(1, T, H // 8, 8, W // 8, 8, 3).mean((3, 5)) @ mix + 2

    preview = LatentPreview(encode, 8)
    clip = np.zeros((1, 3, 16, 24, 3), np.uint8)
    clip[:, 1, :, :8], clip[:, 1, :, 8:16], clip[:, 1, :, 16:] = (200, 10, 10), (10, 10, 200), (30, 220, 30)
    image = preview.image(encode(clip).transpose(0, 4, 1, 2, 3))
    assert image.shape == (171, 256, 3)
    for column, color in ((10, (200, 10, 10)), (128, (10, 10, 200)), (245, (30, 220, 30))):
        np.testing.assert_allclose(image[80, column].astype(int), color, atol=3)
    assert preview.jpeg(encode(clip).transpose(0, 4, 1, 2, 3)).startswith(b"\xff\xd8\xff")
