"""A family of video models that lives outside of the package: registered, read from a folder, and run to frames.

Its latents have another geometry, and an image enters as its mean colour, in channels after the latents.
"""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import verax
from tests.support.tiny_video import WORDS, word_tokenizer
from verax import VideoPipeline, VideoRequest, models
from verax.checkpoint.video.convert import convert
from verax.checkpoint.video.folder import VideoFolder
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.models.images import resize
from verax.models.video_model import (
    Conditioning,
    LatentGeometry,
    Network,
    ReferenceRules,
    VideoModel,
    VideoSettings,
    flow_sigmas,
)
from verax.video import solvers
from verax.video.load import describe_folder
from verax.video.schedule import noise_levels

IMAGE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
SIZE: dict[str, Any] = dict(height=8, width=12, num_frames=5, num_inference_steps=4)
NOISE = np.random.default_rng(1).normal(size=(1, 3, 3, 2, 3)).astype(np.float32)


@dataclass(frozen=True)
class Sizes:
    """Sizes of all three networks."""

    dim: int
    num_layers: int = 1
    num_heads: int = 1
    patch: int = 1
    takes_fps: bool = False
    control_layers: int = 0
    frames_per_latent: int = 2
    pixels_per_latent: int = 4
    halo: int = 0


class Words(nnx.Module):
    """A state for each token, zeros at pads."""

    def __init__(self, config, *, dtype=jnp.float32, rngs):
        self.config = config
        self.embed = nnx.Param(jnp.zeros((3 + len(WORDS), config.dim), dtype))

    def __call__(self, tokens, lengths):
        present = jnp.arange(tokens.shape[1])[None, :, None] < lengths[:, None, None]
        return jnp.where(present, self.embed[...][tokens], 0).astype(jnp.float32)


class Mixer(nnx.Module):
    """A residual network of each latent, shifted by the mean of the words and by the time."""

    def __init__(self, config, *, dtype=jnp.float32, rngs):
        self.config = config
        self.norm = nnx.Param(jnp.zeros((6, config.dim), dtype))
        self.mix = nnx.Param(jnp.zeros((config.dim, config.dim), dtype))
        self.out = nnx.Param(jnp.zeros((config.dim, 3), dtype))

    def encode_context(self, text, image=None):
        return text.mean(axis=1)

    def embed_time(self, timesteps, fps=None):
        e = timesteps.reshape(len(timesteps), -1, 1) / 1000.0 * jnp.ones(self.config.dim)
        return e, e

    def embed_latents(self, latents):
        return latents @ self.norm[...].astype(jnp.float32)

    def run_blocks(self, x, e0, context, *, causal_block_size=None, attention="auto", sequence=None):
        shift = context[:, None, None, None] + e0[:, :, None, None]
        return x + jnp.tanh(x @ self.mix[...].astype(jnp.float32) + shift)

    def unembed(self, x, e):
        return x @ self.out[...].astype(jnp.float32)


class Average(nnx.Module):
    """Latents are mean colours of 4 x 4 pixels, and of two frames after the first."""

    def __init__(self, config, *, dtype=jnp.float32, rngs):
        self.config = config
        self.gain = nnx.Param(jnp.ones(3, dtype))

    def encode(self, frames, *, chunk=None):
        B, T, H, W, C = frames.shape
        squares = frames.reshape(B, T, H // 4, 4, W // 4, 4, C).mean((3, 5))
        rest = squares[:, 1:].reshape(B, T // 2, 2, H // 4, W // 4, C).mean(2)
        return jnp.concatenate([squares[:, :1], rest], axis=1) / self.gain[...]

    def decode(self, latents, *, chunk=None, tile=None, axes=()):
        pixels = jnp.repeat(jnp.repeat(latents * self.gain[...], 4, axis=2), 4, axis=3)
        return jnp.clip(jnp.concatenate([pixels[:, :1], jnp.repeat(pixels[:, 1:], 2, axis=1)], axis=1), -1, 1)


def mean_colour(vae, pictures, *, frames, chunk):
    """The image's mean colour, in every latent of a clip."""
    latents = vae.encode(pictures.image[:, None], chunk=chunk)
    shape = (1, (frames - 1) // 2 + 1, *latents.shape[2:4], 3)
    return jnp.broadcast_to(latents.mean((1, 2, 3), keepdims=True), shape)


RULES = ReferenceRules(name="own", sigmas=partial(flow_sigmas, begin=0.9, end=0.0), resize={"tint": resize})


class ToyVideoModel(VideoModel):
    """The family."""

    references = {"own": RULES}

    @classmethod
    def from_folder(cls, folder, *, kind=None, rules=None):
        sizes = Sizes(folder.config("transformer")["dim"])
        own = VideoSettings(kind="tint", height=8, width=12, num_frames=5, text_tokens=6, needs_image=False)
        return cls(
            settings=own.updated(folder.own_settings, {"tint": None}),
            rules=rules or RULES,
            geometry=LatentGeometry(2, 4, 4, channels=3, text_width=sizes.dim),
            conditioning=Conditioning(channels=3, encode=mean_colour),
            text_encoder=Network("text_encoder", "words", Words, sizes),
            image_encoder=None,
            transformers=(Network("transformer", "mixer", Mixer, sizes),),
            vae=Network("vae", "average", Average, sizes),
        )


@pytest.fixture(autouse=True)
def own_table(monkeypatch):
    monkeypatch.setattr(models, "_VIDEO_MODELS", dict(models._VIDEO_MODELS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of the family, with random weights. `norm` and `embed` are names that the published tables rename."""
    path, rng = tmp_path_factory.mktemp("toy"), np.random.default_rng(0)
    for name, module in {"transformer": Mixer, "text_encoder": Words, "vae": Average}.items():
        (path / name).mkdir()
        fields = {"_class_name": "Mixer" if name == "transformer" else name, "dim": 8}
        (path / name / "config.json").write_text(json.dumps(fields))
        state = nnx.state(module(Sizes(8), rngs=nnx.Rngs(0)))
        weights = {
            ".".join(map(str, key)): rng.normal(1, 0.3, leaf.shape).astype(np.float32)
            for key, leaf in nnx.to_flat_state(state)
        }
        stem = "model" if name == "text_encoder" else "diffusion_pytorch_model"
        save_file(weights, path / name / f"{stem}.safetensors")
    (path / "model_index.json").write_text(json.dumps({"_class_name": "MixerPipeline"}))
    (path / "verax.json").write_text(json.dumps({"fps": 8}))
    (path / "tokenizer").mkdir()
    word_tokenizer().save(str(path / "tokenizer/tokenizer.json"))
    return path


@pytest.fixture
def pipe(folder):
    verax.register_video_model("Mixer", ToyVideoModel)
    return VideoPipeline(folder, dtype="float32", show_progress=False)


def by_hand(pipe, image):
    """Latents of a loop over steps, with guidance."""
    settings = pipe.settings
    texts = [pipe.parts.prompt_states(prompt) for prompt in ("a red circle", settings.negative_prompt)]
    colour = np.zeros(3) if image is None else resize(image, 8, 12).mean((0, 1)) / 127.5 - 1
    levels = noise_levels(4, settings.shift, RULES.sigmas)
    table, state = solvers.tabulate(levels.sigmas), solvers.start(jnp.asarray(NOISE.transpose(0, 2, 3, 4, 1)))
    transformer, vae = pipe.denoiser.transformer, pipe.stages.vae
    with transformer.weights() as weights, vae.weights() as vae_weights:
        model, gain = transformer.module(weights), np.asarray(vae_weights[0])
        channels = jnp.broadcast_to(jnp.asarray(colour / gain, jnp.float32), state.sample.shape)
        contexts = [model.encode_context(text) for text in texts]
        for i, timestep in enumerate(levels.timesteps):
            x = jnp.concatenate([state.sample, channels], axis=-1)
            e, e0 = model.embed_time(jnp.array([timestep]))
            rows = [model.unembed(model.run_blocks(model.embed_latents(x), e0, one), e) for one in contexts]
            velocity = rows[1] + settings.guidance_scale * (rows[0] - rows[1])
            state = solvers.step(table, jnp.int32(i), state, velocity)
    return np.asarray(state.sample).transpose(0, 4, 1, 2, 3)


@pytest.mark.parametrize("image", [None, IMAGE], ids=["text", "text and image"])
def test_a_registered_family_makes_the_latents_of_its_own_loop(pipe, image):
    made = pipe("a red circle", image=image, latents=NOISE, output_type="latent", **SIZE)
    np.testing.assert_allclose(made.frames, by_hand(pipe, image), atol=1e-4, rtol=1e-4)


def test_its_frames_have_its_geometry_and_its_defaults(pipe, folder):
    clip = pipe("a red circle", num_inference_steps=2)
    assert (clip.frames.shape, clip.frames.dtype, clip.fps) == ((5, 8, 12, 3), np.uint8, 8)
    plan = pipe.plan(VideoRequest("a red circle", image=IMAGE, **SIZE))
    assert [row.stage for row in plan] == ["text", "encode", "denoise", "decode"]
    assert describe_folder(folder)["latents"] == "3 channels for 2 frames of 4 x 4 pixels"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_frames": 4}, r"num_frames: expected 2n \+ 1, got 4"),
        ({"height": 10}, "height: expected a multiple of 4, got 10"),
        ({"cache": "teacache"}, "cache: TeaCache has no coefficients for this family"),
        ({"last_image": IMAGE}, "last_image: needs a model for first and last frame"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(pipe, options, message):
    with pytest.raises(InvalidParameterError, match=message):
        pipe("a red circle", **{**SIZE, **options})


def test_a_folder_of_another_family_is_refused(folder, tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"_class_name 'Mixer'; .*verax.register_video_model adds others"):
        VideoPipeline(folder)
    verax.register_video_model("Mixer", ToyVideoModel)
    with pytest.raises(InvalidParameterError, match="reference: expected one of own, got 'skyreels'"):
        VideoPipeline(folder, reference="skyreels")
    with pytest.raises(CheckpointError, match="a Mixer has one layout"):
        convert(VideoFolder(folder), tmp_path / "converted", "original")


def test_a_class_that_is_not_a_family_or_takes_a_name_is_refused():
    with pytest.raises(InvalidParameterError, match=r"model: expected a subclass of verax\.models\.VideoModel"):
        verax.register_video_model("Mine", Words)
    with pytest.raises(InvalidParameterError, match="class_name: 'WanModel' is the name of WanVideoModel already"):
        verax.register_video_model("WanModel", ToyVideoModel)
