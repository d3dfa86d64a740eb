"""Wan 2.2's pipelines against diffusers': two transformers in turn, and text and image by one model, in float32."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
PIL = pytest.importorskip("PIL.Image")

from tests.support.tiny_video import BOUNDARY, diffusers_pipeline
from verax.models.wan.family import DIFFUSERS
from verax.video.pipeline import VideoPipeline
from verax.video.schedule import noise_levels

SIZE: dict[str, Any] = dict(height=32, width=64, num_frames=9, num_inference_steps=5)
PROMPTS: dict[str, Any] = dict(
    prompt="A red circle floats left over a blue gradient", negative_prompt="blurred, static"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    pairs = {}

    def get(kind):
        if kind not in pairs:
            folder = tmp_path_factory.mktemp(kind)
            theirs = diffusers_pipeline(kind, folder)
            pairs[kind] = theirs, VideoPipeline(folder, dtype="float32", reference="diffusers")
        return pairs[kind]

    return get


@pytest.fixture(autouse=True)
def exact_times(monkeypatch):
    """Times embedded in float64: diffusers' float32 angles of a thousand are off by 3e-5."""
    module = import_module("diffusers.models.transformers.transformer_wan")
    embed = module.Timesteps.forward

    def forward(self, timesteps):
        half = self.num_channels // 2
        angles = timesteps.double()[:, None] * 10000.0 ** -(torch.arange(half).double() / half)
        exact = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
        torch.testing.assert_close(exact, embed(self, timesteps), atol=1e-3, rtol=0)
        return exact

    monkeypatch.setattr(module.Timesteps, "forward", forward)


def picture():
    return np.random.default_rng(0).integers(0, 256, (70, 50, 3), np.uint8)


def noise(ours):
    channels, scale = ours.geometry.channels, ours.geometry.pixels_per_latent
    shape = (1, channels, 3, SIZE["height"] // scale, SIZE["width"] // scale)
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def latents(theirs, ours, *, image=None, **options):
    """Latents after all steps of both."""
    pictures = {} if image is None else {"image": PIL.fromarray(image)}
    want = theirs(latents=torch.from_numpy(noise(ours)), output_type="latent", **pictures, **SIZE, **PROMPTS, **options)
    pictures = {} if image is None else {"image": image}
    got = ours(latents=noise(ours), output_type="latent", **pictures, **SIZE, **PROMPTS, **options)
    return got.frames, want.frames.numpy()


@pytest.mark.parametrize(
    ("kind", "scales"),
    [("t2v-a14b", {"guidance_scale": 4.0, "guidance_scale_2": 2.0}), ("i2v-a14b", {"guidance_scale": 4.0})],
)
def test_latents_of_two_transformers_match_diffusers(made, kind, scales):
    theirs, ours = made(kind)
    first = noise_levels(5, ours.settings.shift, DIFFUSERS.sigmas).timesteps >= 1000 * BOUNDARY
    assert 0 < first.sum() < 5
    got, want = latents(theirs, ours, image=picture() if kind == "i2v-a14b" else None, **scales)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).mean()


@pytest.mark.parametrize("image", [None, picture()], ids=["text", "image"])
def test_latents_of_text_and_image_match_diffusers(made, image):
    theirs, ours = made("ti2v")
    if image is not None:
        parts = {name: part for name, part in theirs.components.items() if name != "transformer_2"}
        theirs = diffusers.WanImageToVideoPipeline(**parts, expand_timesteps=True)
        theirs.set_progress_bar_config(disable=True)
    got, want = latents(theirs, ours, image=image, guidance_scale=4.0)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).mean()
    if image is not None:
        frame = ours.parts.model.rules.resize["ti2v"](image, SIZE["height"], SIZE["width"])
        held = np.asarray(ours.stages.encode(frame[None, None]))
        np.testing.assert_array_equal(got[:, :, 0], held[:, 0].transpose(0, 3, 1, 2))


def test_frames_match_diffusers(made):
    theirs, ours = made("ti2v")
    want = theirs(latents=torch.from_numpy(noise(ours)), output_type="np", **SIZE, **PROMPTS, guidance_scale=4.0)
    got = ours(latents=noise(ours), output_type="np", **SIZE, **PROMPTS, guidance_scale=4.0)
    assert got.frames.shape == (9, 32, 64, 3)
    assert got.frames.std() > 0.05
    np.testing.assert_allclose(got.frames, want.frames[0], atol=1e-4)
