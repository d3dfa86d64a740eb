"""Clips by TAEHV's tiny decoder, and the errors of files that are none; pictures of clips that are being made."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from verax import VideoPipeline, VideoRequest
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.models.wan.tiny_vae import TinyDecoder, TinyDecoderConfig
from verax.video.pipeline import fit_colors

CLIP: dict[str, Any] = dict(height=16, width=32, num_frames=9, num_inference_steps=2)


def decoder_file(path, config=None, **more):
    """File of a random decoder, with the encoder's weights that published files have too."""
    module = TinyDecoder(config or TinyDecoderConfig(16, (12, 8, 6, 6)), rngs=nnx.Rngs(0))
    weights = {".".join(map(str, place)): np.asarray(leaf[...]) for place, leaf in nnx.to_flat_state(nnx.state(module))}
    weights = {name: 1.7 * weight for name, weight in weights.items()}
    weights["decoder.22.bias"] += 0.5
    save_file({**weights, "encoder.0.weight": np.zeros((4, 3, 3, 3), np.float32), **more}, path)
    return path


@pytest.fixture(scope="module")
def pipe(folders, tmp_path_factory):
    path = decoder_file(tmp_path_factory.mktemp("tiny") / "taew2_1.safetensors")
    return VideoPipeline(folders("t2v"), dtype="float32", vae=f"tiny={path}", show_progress=False)


def decoded(pipe, latents):
    """Frames from 0 to 1 of latents `[1, C, F, h, w]` by the decoder of a pipeline."""
    with pipe.stages.decoder.weights() as weights:
        frames = pipe.stages.decoder.module(weights).decode(jnp.asarray(latents.transpose(0, 2, 3, 4, 1)))
    return np.asarray(frames)[0] / 2 + 0.5


def test_the_tiny_decoder_decodes_the_clips_latents(pipe, pipes):
    latents = pipes("t2v")("a red circle", output_type="latent", **CLIP).frames
    clip = pipe("a red circle", output_type="np", **CLIP)
    assert clip.frames.shape == (9, 16, 32, 3)
    assert clip.frames.std() > 0.01
    np.testing.assert_allclose(clip.frames, decoded(pipe, latents), atol=1e-5)
    stages = pipe.plan(VideoRequest("a red circle", **CLIP))
    assert {stage.stage: stage.weights for stage in stages}["decode"] == pipe.stages.decoder.size


def test_lightx2vs_tiny_decoder_decodes_latents_that_are_not_normalised(pipe, folders, tmp_path):
    path = decoder_file(tmp_path / "lighttaew2_1.safetensors")
    other = VideoPipeline(folders("t2v"), dtype="float32", vae=f"tiny={path}", show_progress=False)
    vae, draw = other.parts.model.vae.config, np.random.default_rng(0)
    latents = draw.standard_normal((1, 16, 3, 2, 4)).astype(np.float32)
    mean, std = (np.array(values, np.float32)[:, None, None, None] for values in (vae.latents_mean, vae.latents_std))
    np.testing.assert_allclose(decoded(other, latents), decoded(pipe, latents * std + mean), atol=1e-5)
    assert np.abs(decoded(other, latents) - decoded(pipe, latents)).max() > 0.1


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        ("tiny", InvalidParameterError, "vae: there is no file .*taew2_1.safetensors or taew2_1.pth"),
        ("tiny=no such", InvalidParameterError, "vae: there is no file no such"),
        ("small", InvalidParameterError, "vae: expected tiny, or tiny=FILE, got 'small'"),
        ("tiny={super}", UnsupportedModelError, "super decoder is not implemented"),
        ("tiny={other}", CheckpointError, "not a decoder of TAEHV: it has no decoder.1.weight"),
        ("tiny={large}", InvalidParameterError, "is for latents of 48 channels, 4 frames and 16 pixels.*taew2_1 fits"),
    ],
)
def test_a_choice_that_does_not_fit_is_one_error(folders, tmp_path, choice, error, message):
    files = {name: tmp_path / f"{name}.safetensors" for name in ("super", "other", "large")}
    decoder_file(files["super"], **{"decoder.1.conv.0.weight": np.zeros((2, 1, 7, 7), np.float32)})
    save_file({"a": np.zeros(1, np.float32)}, files["other"])
    decoder_file(files["large"], TinyDecoderConfig(48, (12, 8, 6, 6), patch=2))
    with pytest.raises(error, match=message):
        VideoPipeline(folders("t2v"), vae=choice.format(**files), show_progress=False)


@pytest.mark.parametrize("tiny", [True, False], ids=["tiny decoder", "linear map"])
def test_a_callback_gets_pictures_of_the_middle_of_the_predicted_clip(pipe, pipes, tiny):
    one, steps, pictures = pipe if tiny else pipes("t2v"), [], []

    def show(now):
        assert (now.preview is None) == (now.stage != "denoise")
        if now.preview is not None:
            steps.append(now.latents)
            pictures.append(now.preview())

    clip = one("a red circle", callback=show, **CLIP)
    shape = (16, 32, 3) if tiny else (128, 256, 3)
    assert [(picture.dtype, picture.shape) for picture in pictures] == 2 * [(np.uint8, shape)]
    assert (pictures[0] != pictures[1]).any()
    np.testing.assert_array_equal(clip.frames, one("a red circle", **CLIP).frames)
    if tiny:  # the last step's prediction is what it leaves, and its first one another clip than its noisy latents
        left, noisy = (decoded(one, latents[:, :, 1:2]) for latents in (steps[1], steps[0]))
        np.testing.assert_allclose(pictures[1], 255 * left[0], atol=1)
        assert np.abs(pictures[0] - 255 * noisy[0]).max() > 5


def test_a_linear_map_finds_the_colours_of_latents_that_are_linear_in_them():
    rng = np.random.default_rng(0)
    mix, colours = rng.standard_normal((3, 16)), rng.integers(0, 256, (5, 3))
    factors = fit_colors(lambda image: image[:, :, ::8, ::8] / 255 @ mix + 0.3, 8)
    latents = np.concatenate([colours / 255 @ mix + 0.3, np.ones((5, 1))], axis=1)
    np.testing.assert_allclose(latents @ factors, colours, atol=1e-2)
