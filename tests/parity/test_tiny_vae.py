"""TAEHV's tiny decoder against its published architecture in torch, with random weights."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")

from verax.models.wan.tiny_vae import TinyDecoder, TinyDecoderConfig

functional, layers = torch.nn.functional, torch.nn


class Memory(layers.Module):
    """Block that sees its input of the frame before as well."""

    def __init__(self, size):
        super().__init__()
        convs = [layers.Conv2d(width, size, 3, padding=1) for width in (2 * size, size, size)]
        self.conv = layers.Sequential(convs[0], layers.ReLU(), convs[1], layers.ReLU(), convs[2])

    def forward(self, x):
        past = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
        return functional.relu(self.conv(torch.cat([x, past], dim=1)) + x)


class Grow(layers.Module):
    """More frames: of the channels of a convolution of one pixel."""

    def __init__(self, size, factor):
        super().__init__()
        self.conv = layers.Conv2d(size, size * factor, 1, bias=False)

    def forward(self, x):
        return self.conv(x).reshape(-1, *x.shape[1:])


class Reference(layers.Module):
    """Decoder of the published files. Frames are the batch of its convolutions."""

    def __init__(self, config):
        super().__init__()
        a, b, c, d = config.widths
        parts = [layers.Identity(), layers.Conv2d(config.z_dim, a, 3, padding=1), layers.ReLU()]
        for size, size_out, factor in zip((a, b, c), (b, c, d), config.frames, strict=True):
            parts += [Memory(size) for _ in range(3)]
            parts += [layers.Upsample(scale_factor=2), Grow(size, factor)]
            parts += [layers.Conv2d(size, size_out, 3, padding=1, bias=False)]
        parts += [layers.ReLU(), layers.Conv2d(d, 3 * config.patch**2, 3, padding=1)]
        self.decoder, self.config = layers.Sequential(*parts), config
        for weight in self.parameters():
            weight.data.normal_(std=weight[0].numel() ** -0.5 if weight.ndim > 1 else 0.3)
        parts[-1].weight.data *= 0.4
        parts[-1].bias.data += 0.5
        self.requires_grad_(False)

    def forward(self, latents):
        """Frames `[T, 3, H, W]` from 0 to 1 of latents `[F, C, h, w]`."""
        x = self.decoder(torch.tanh(latents / 3) * 3)
        x = functional.pixel_shuffle(x, self.config.patch)
        return x.clamp(0, 1)[self.config.frames_per_latent - 1 :]


CONFIGS = {
    "taew2_1": TinyDecoderConfig(16, (24, 16, 12, 8)),
    "taew2_2": TinyDecoderConfig(48, (20, 12, 8, 8), patch=2),
}


@pytest.fixture(params=CONFIGS)
def pair(request):
    torch.manual_seed(0)
    config = CONFIGS[request.param]
    reference = Reference(config)
    shapes = {name: tuple(weight.shape) for name, weight in reference.state_dict().items()}
    assert TinyDecoderConfig.from_shapes(shapes, Path("file")) == config
    ours = TinyDecoder(config, rngs=nnx.Rngs(0))
    state = nnx.to_flat_state(nnx.state(ours))
    assert {".".join(map(str, path)) for path, _ in state} == set(shapes)
    for path, leaf in state:
        leaf[...] = jnp.asarray(reference.state_dict()[".".join(map(str, path))].numpy())
    return reference, ours


def test_frames_are_the_references_in_chunks_and_tiles_too(pair):
    reference, ours = pair
    latents = np.random.default_rng(0).normal(size=(5, ours.config.z_dim, 3, 5)).astype(np.float32)
    want = 2 * reference(torch.from_numpy(latents)).permute(0, 2, 3, 1).numpy() - 1
    assert (want.shape[0], want.std() > 0.1, (np.abs(want) < 1).mean() > 0.2) == (17, True, True)
    # Two latents at a time leave one, and 2 of 3 and 3 of 5 rows and columns a part of a tile.
    for options in ({}, {"chunk": 2}, {"chunk": 3, "tile": (2, 3)}):
        got = ours.decode(jnp.asarray(latents.transpose(0, 2, 3, 1))[None], **options)[0]
        np.testing.assert_allclose(got, want, atol=1e-4)
