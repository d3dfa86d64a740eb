"""The video VAE against diffusers' AutoencoderKLWan, which runs one latent at a time: random weights, every chunk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from verax.checkpoint.names.wan_vae import name_table
from verax.models.wan.vae import WanVae, WanVaeConfig

CONFIGS = {
    "as in diffusers' tests": dict(base_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
    "with shortcuts": dict(base_dim=8, dim_mult=[1, 2, 4, 4], num_res_blocks=2),
}


def reference(name):
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLWan(z_dim=16, temperal_downsample=[False, True, True], **CONFIGS[name]).eval()
    for key, weight in model.named_parameters():
        if key.endswith("gamma"):
            weight.data.normal_(mean=1.0, std=0.3)
        elif key.endswith("bias"):
            weight.data.normal_(std=0.3)
        else:
            weight.data.normal_(std=weight[0].numel() ** -0.5)
    return model


def ported(model, dtype=jnp.float32):
    table = name_table(model.config.num_res_blocks)
    weights = {table.backward(key)[0]: value.float().numpy() for key, value in model.state_dict().items()}
    config = WanVaeConfig.from_hf(model.config)
    graph, state = nnx.split(nnx.eval_shape(lambda: WanVae(config, dtype=dtype, rngs=nnx.Rngs(0))))
    filled = []
    for path, leaf in nnx.to_flat_state(state):
        weight = weights.pop(".".join(map(str, path)))
        assert weight.shape == leaf.shape
        filled.append((path, leaf.replace(jnp.asarray(weight, dtype))))
    assert not weights
    return nnx.merge(graph, nnx.from_flat_state(filled))


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request):
    model = reference(request.param)
    return model, ported(model)


def statistics(model):
    return (torch.tensor(getattr(model.config, name)).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))


def encode(model, frames):
    mean, std = statistics(model)
    with torch.no_grad():
        latents = model.encode(torch.from_numpy(frames).permute(0, 4, 1, 2, 3)).latent_dist
    return ((latents.mean - mean) / std).permute(0, 2, 3, 4, 1).numpy(), latents.logvar.permute(0, 2, 3, 4, 1).numpy()


def decode(model, latents):
    mean, std = statistics(model)
    with torch.no_grad():
        frames = model.decode(torch.from_numpy(latents).permute(0, 4, 1, 2, 3) * std + mean).sample
    return frames.permute(0, 2, 3, 4, 1).float().numpy()


def clip(frames, height=24, width=16, batch=1):
    return np.random.default_rng(frames).uniform(-1, 1, (batch, frames, height, width, 3)).astype(np.float32)


def latents(count, height=3, width=2, batch=1):
    return np.random.default_rng(count).standard_normal((batch, count, height, width, 16)).astype(np.float32)


def relative(ours, theirs):
    return np.linalg.norm(np.asarray(ours, np.float64) - theirs) / np.linalg.norm(theirs)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_latents_are_those_of_diffusers_at_every_chunk(pair, count):
    theirs, ours = pair
    frames = clip(4 * count - 3)
    expected, _ = encode(theirs, frames)
    for chunk in (None, *range(1, count)):
        got = jax.jit(lambda x, chunk=chunk: ours.encode(x, chunk=chunk))(frames)
        assert got.dtype == jnp.float32
        assert relative(got, expected) < 1e-5, chunk


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_frames_are_those_of_diffusers_at_every_chunk(pair, count):
    theirs, ours = pair
    expected = decode(theirs, latents(count))
    for chunk in (None, *range(1, count)):
        got = jax.jit(lambda z, chunk=chunk: ours.decode(z, chunk=chunk))(latents(count))
        assert got.shape == (1, 4 * count - 3, 24, 16, 3)
        assert relative(got, expected) < 1e-5, chunk
