"""The video VAE against diffusers' AutoencoderKLWan, which runs one latent at a time: random weights, every chunk."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from tests.support.torch_weights import from_torch, spread
from verax.checkpoint.video.parts import VAE, VAE_2_2, wan_vae_names
from verax.models.wan.vae import WanVae, WanVaeConfig

CONFIGS = {
    "as in diffusers' tests": dict(base_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
    "with shortcuts": dict(base_dim=8, dim_mult=[1, 2, 4, 4], num_res_blocks=2),
    "as in Wan 2.2": dict(
        base_dim=4, decoder_base_dim=6, dim_mult=[1, 2, 4, 4], num_res_blocks=1, is_residual=True, patch_size=2
    )
    | dict(in_channels=12, out_channels=12, scale_factor_spatial=16),
}
LATENTS = 3, 2


def reference(name):
    return spread(diffusers.AutoencoderKLWan(z_dim=16, temperal_downsample=[False, True, True], **CONFIGS[name]))


def ported(model, dtype=jnp.float32):
    config = WanVaeConfig.from_hf(model.config)
    build = lambda: WanVae(config, dtype=dtype, rngs=nnx.Rngs(0))
    return from_torch(build, wan_vae_names(model.config), model.state_dict(), dtype)


@pytest.fixture(scope="module")
def pairs():
    """Function from a name of `CONFIGS` to both models."""

    @cache
    def get(name):
        model = reference(name)
        return model, ported(model)

    return get


def statistics(model):
    return (torch.tensor(getattr(model.config, name)).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))


def encode(model, frames):
    mean, std = statistics(model)
    with torch.no_grad():
        latents = model.encode(torch.from_numpy(frames).permute(0, 4, 1, 2, 3)).latent_dist
    return ((latents.mean - mean) / std).permute(0, 2, 3, 4, 1).numpy()


def decode(model, latents):
    mean, std = statistics(model)
    with torch.no_grad():
        frames = model.decode(torch.from_numpy(latents).permute(0, 4, 1, 2, 3) * std + mean).sample
    return frames.permute(0, 2, 3, 4, 1).float().numpy()


def clip(model, frames):
    height, width = (side * model.config.scale_factor_spatial for side in LATENTS)
    return np.random.default_rng(frames).uniform(-1, 1, (1, frames, height, width, 3)).astype(np.float32)


def latents(count):
    return np.random.default_rng(count).standard_normal((1, count, *LATENTS, 16)).astype(np.float32)


def relative(ours, theirs):
    return np.linalg.norm(np.asarray(ours, np.float64) - theirs) / np.linalg.norm(theirs)


# Latents at a time: all, one, and those after which fewer or one are left.
@pytest.mark.parametrize(
    ("name", "count", "chunk"),
    [
        *(("as in diffusers' tests", count, chunk) for count, chunk in ((1, None), (5, None), (5, 3))),
        *(("with shortcuts", count, chunk) for count, chunk in ((2, 1), (5, 4))),
        *(("as in Wan 2.2", count, chunk) for count, chunk in ((1, None), (4, 1), (5, 3))),
    ],
)
def test_latents_and_frames_match_diffusers_at_every_chunk(pairs, name, count, chunk):
    theirs, ours = pairs(name)
    frames, z = clip(theirs, 4 * count - 3), latents(count)
    encoded = jax.jit(lambda x: ours.encode(x, chunk=chunk))(frames)
    assert encoded.dtype == jnp.float32
    assert relative(encoded, encode(theirs, frames)) < 1e-5
    decoded = jax.jit(lambda z: ours.decode(z, chunk=chunk))(z)
    assert decoded.shape == frames.shape
    assert relative(decoded, decode(theirs, z)) < 1e-5


def test_the_published_sizes_have_as_many_parameters():
    large = dict(base_dim=160, decoder_base_dim=256, z_dim=48, is_residual=True, in_channels=12, out_channels=12)
    for settings, published in ((VAE, {}), (VAE_2_2, dict(large, patch_size=2))):
        with torch.device("meta"):
            theirs = diffusers.AutoencoderKLWan(**published)
        config = WanVaeConfig.from_hf(settings)
        ours = nnx.state(nnx.eval_shape(lambda config=config: WanVae(config, rngs=nnx.Rngs(0))))
        assert sum(leaf.size for leaf in jax.tree.leaves(ours)) == sum(x.numel() for x in theirs.parameters())


def test_bfloat16_is_no_further_from_float32_than_diffusers_bfloat16():
    # The weights are rounded to bfloat16 first, so that the float32 run is the truth of both.
    model = reference("as in Wan 2.2").to(torch.bfloat16)
    ours, z = ported(model, jnp.bfloat16), latents(2)
    mean, std = statistics(model)
    given = (torch.from_numpy(z).permute(0, 4, 1, 2, 3) * std + mean).bfloat16()
    with torch.no_grad():
        rounded = model.decode(given).sample.permute(0, 2, 3, 4, 1).float().numpy()
    truth = decode(model.float(), z)
    got = np.asarray(jax.jit(lambda z: ours.decode(z, chunk=1))(z))
    assert np.linalg.norm(got - truth) <= 0.8 * np.linalg.norm(rounded - truth)
