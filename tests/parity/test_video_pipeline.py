"""Whole pipelines against diffusers': from prompt, picture and noise to frames, in float32."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
PIL = pytest.importorskip("PIL.Image")

from tests.support.tiny_video import diffusers_pipeline
from verax.video.pipeline import VideoPipeline

SIZE: dict[str, Any] = dict(height=32, width=48)
PROMPTS: dict[str, Any] = dict(
    prompt="A red circle floats left over a blue gradient", negative_prompt="blurred, static"
)


LATENTS = (4, 6)  # of a frame of SIZE


@pytest.fixture(scope="module", params=["t2v", "i2v", "df"])
def pair(request, tmp_path_factory):
    return made(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def forcing(tmp_path_factory):
    _, theirs, ours = made("df", tmp_path_factory)
    with_image = diffusers.SkyReelsV2DiffusionForcingImageToVideoPipeline(**theirs.components)
    with_image.set_progress_bar_config(disable=True)
    return theirs, with_image, ours


def made(kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp(kind)
    return kind, diffusers_pipeline(kind, folder), VideoPipeline(folder, dtype="float32", reference="diffusers")


def picture(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (70, 50, 3), np.uint8)


def noise(frames, seed=1):
    return np.random.default_rng(seed).normal(size=(1, 16, (frames - 1) // 4 + 1, *LATENTS)).astype(np.float32)


def theirs_frames(theirs, noises, monkeypatch, *, image=None, last_image=None, **options):
    """Frames of diffusers' pipeline, whose noise is handed to it where it would draw it."""
    queue = [torch.from_numpy(np.array(one)) for one in noises]
    monkeypatch.setattr(f"{type(theirs).__module__}.randn_tensor", lambda *_, **__: queue.pop(0))
    arrays = {"image": image, "last_image": last_image}
    images = {name: PIL.fromarray(array) for name, array in arrays.items() if array is not None}
    found = theirs(output_type="np", **images, **SIZE, **PROMPTS, **options)
    assert not queue
    frames = np.asarray(found.frames[0])
    assert frames.std() > 0.05
    return frames


@pytest.mark.parametrize("guidance", ["batch", "sequential"])
def test_frames_match_diffusers(pair, guidance, monkeypatch):
    kind, theirs, ours = pair
    options: dict[str, Any] = dict(num_frames=17, num_inference_steps=5, guidance_scale=4.0)
    images: dict[str, Any] = {"image": picture()} if kind == "i2v" else {}
    want = theirs_frames(theirs, [noise(17)], monkeypatch, **images, **options)
    got = ours(latents=noise(17), output_type="np", guidance=guidance, **images, **SIZE, **PROMPTS, **options)
    assert got.frames.shape == (17, 32, 48, 3)
    np.testing.assert_allclose(got.frames, want, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"fps": 16},
        {"ar_step": 2, "causal_block_size": 2},
        {"image": picture()},
        {"image": picture(), "ar_step": 1, "causal_block_size": 1},
        {"image": picture(), "ar_step": 2, "causal_block_size": 2},
        {"image": picture(), "last_image": picture(5)},
    ],
    ids=["16 fps", "blocks in turn", "image", "frames in turn", "image and blocks", "last image"],
)
def test_diffusion_forcing_matches_diffusers(forcing, options, monkeypatch):
    alone, with_image, ours = forcing
    theirs = with_image if "image" in options else alone
    theirs.transformer._set_ar_attention(options.get("causal_block_size", 1))
    rest: dict[str, Any] = dict(num_frames=21, num_inference_steps=4, guidance_scale=3.0)
    want = theirs_frames(theirs, [noise(21)], monkeypatch, **rest, **options)
    got = ours(latents=noise(21), output_type="np", **SIZE, **PROMPTS, **rest, **options)
    np.testing.assert_allclose(got.frames, want, atol=1e-4)


# With an image, diffusers fails where the last segment is shorter than the others.
@pytest.mark.parametrize(("image", "frames"), [(None, 37), (picture(), 41)], ids=["text", "image"])
def test_long_clips_match_diffusers(forcing, image, frames, monkeypatch):
    alone, with_image, ours = forcing
    theirs = alone if image is None else with_image
    theirs.transformer._set_ar_attention(1)
    rest: dict[str, Any] = dict(
        num_frames=frames, base_num_frames=17, overlap_history=5, num_inference_steps=3, guidance_scale=3.0
    )
    # Latents: 5, 3 new, and 2 or 3 new, each after the 2 that it shares.
    sizes = 5, (frames - 1) // 4 + 1 - 6
    later = [ours.stages.noise(7, i, (1, size, *LATENTS, 16)) for i, size in enumerate(sizes, start=1)]
    noises = [noise(17), *(np.asarray(one).transpose(0, 4, 1, 2, 3) for one in later)]
    want = theirs_frames(theirs, noises, monkeypatch, image=image, **rest)
    rest.update(latents=noise(17), seed=7, image=image, output_type="np", **SIZE, **PROMPTS)
    got = ours(**rest)
    assert got.frames.shape == (frames, 32, 48, 3)
    np.testing.assert_allclose(got.frames, want, atol=1e-4)

    # Decoded as one clip at the end; before that, the callback sees each segment decoded by itself.
    seen = []

    def stop_in_the_third(now):
        seen.append(now)
        return now.segment < 2

    stopped = ours(callback=stop_in_the_third, **rest)
    assert not stopped.complete
    np.testing.assert_allclose(stopped.frames, want[:29], atol=1e-4)
    latents = [now.latents.transpose(0, 2, 3, 4, 1) for now in seen if now.done == now.total == 3]
    alone = [ours.stages.decode_call(one)(one) for one in latents]
    previews = [now.frames for now in seen if now.stage == "decode"]
    for preview, decoded, skip in zip(previews, alone, (0, 5), strict=True):
        np.testing.assert_array_equal(preview, ours.stages.finish(decoded[:, skip:]))


def test_latents_and_embeddings_have_the_layout_of_diffusers(pair):
    kind, theirs, ours = pair
    words = theirs.encode_prompt(**PROMPTS, max_sequence_length=512)
    embeds: dict[str, Any] = dict(
        zip(("prompt_embeds", "negative_prompt_embeds"), (one.numpy() for one in words), strict=True)
    )
    options: dict[str, Any] = dict(num_frames=5, num_inference_steps=2, image=picture() if kind == "i2v" else None)
    by_embeds = ours(**embeds, latents=noise(5), output_type="latent", **SIZE, **options)
    by_prompt = ours(**PROMPTS, latents=noise(5), output_type="latent", **SIZE, **options)
    assert by_embeds.frames.shape == (1, 16, 2, *LATENTS)
    np.testing.assert_allclose(by_embeds.frames, by_prompt.frames, atol=1e-4)
