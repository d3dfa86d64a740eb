"""Decoding in tiles: the same frames as in one piece."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from verax.checkpoint.video.parts import VAE_2_2
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.models.wan.vae import WanVae, WanVaeConfig
from verax.video.networks import tile_at_once

CONFIG = WanVaeConfig(base_dim=4, dim_mult=(1, 2), num_res_blocks=1, temperal_downsample=(True,))
RESIDUAL = replace(CONFIG, dim_mult=(2, 2), is_residual=True, patch_size=2, in_channels=12, out_channels=12)


@pytest.fixture(scope="module", params=[CONFIG, RESIDUAL], ids=["Wan 2.1", "Wan 2.2"])
def decoded(request):
    """A model, latents larger than a tile with its halo, and their frames."""
    graph, state = nnx.split(nnx.eval_shape(lambda: WanVae(request.param, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    weights = jax.tree.map(lambda leaf: draw(*leaf.shape) * max(3, np.prod(leaf.shape[1:])) ** -0.5, state)
    model = nnx.merge(graph, weights)
    latents = draw(1, 3, 23, 21, request.param.z_dim)
    return model, latents, np.asarray(jax.jit(model.decode)(latents))


@pytest.mark.parametrize("tile", [(5, 4), (23, 6)])
def test_tiles_give_the_frames_of_the_whole(decoded, tile):
    model, latents, whole = decoded
    got = jax.jit(lambda z: model.decode(z, chunk=1, tile=tile))(latents)
    assert whole.std() > 0.1
    np.testing.assert_allclose(got, whole, atol=1e-6)
    assert model.config.halo == 7  # so that these frames are larger than a tile with its halo


def test_an_empty_tile_is_refused(decoded):
    with pytest.raises(InvalidParameterError, match=r"tile: expected a height and a width from 1, got \(0, 3\)"):
        decoded[0].decode(decoded[1], tile=(0, 3))


def test_a_published_model_decodes_frames_up_to_720p_whole():
    assert WanVaeConfig().halo == 13
    assert tile_at_once(WanVaeConfig(), 720, 1280) is None
    assert tile_at_once(WanVaeConfig(), 1088, 1920) == (68, 120)
    assert (large := WanVaeConfig.from_hf(VAE_2_2)).halo == 13
    assert tile_at_once(large, 704, 1280) is None


def test_devices_get_the_tiles_with_the_fewest_pixels_around_them():
    config = WanVaeConfig()
    assert [tile_at_once(config, 544, 960, devices) for devices in (2, 4, 8)] == [(68, 60), (68, 30), (68, 15)]
    assert tile_at_once(config, 2176, 3840, 4) == (68, 120)  # and as small as the memory wants them
    assert tile_at_once(config, 64, 64, 4) is None  # with what is around it, a tile is the whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 2}, "in_channels 3 with patch_size 2 is not supported: expected 12"),
        ({"is_residual": True, "dim_mult": [3, 5]}, "dim_mult: 32 channels of a resampled copy do not divide into 12"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    settings = {"base_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True], **changes}
    with pytest.raises(UnsupportedModelError, match=message):
        WanVae(WanVaeConfig.from_hf(settings), rngs=nnx.Rngs(0))
