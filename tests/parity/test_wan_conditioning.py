"""First and last frame, and VACE's control condition, against diffusers' transformers and whole pipelines."""

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
PIL = pytest.importorskip("PIL.Image")

from tests.support.tiny_video import diffusers_pipeline
from tests.support.torch_weights import from_torch
from verax.checkpoint.video.parts import WAN
from verax.models.video_model import Control
from verax.models.wan.model import WanConfig, WanModel
from verax.video.pipeline import VideoPipeline

SIZE: dict[str, Any] = dict(height=32, width=48)
PROMPTS: dict[str, Any] = dict(
    prompt="A red circle floats left over a blue gradient", negative_prompt="blurred, static"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Function from a kind to a pipeline of diffusers and ours on its checkpoint."""

    @cache
    def get(kind):
        folder = tmp_path_factory.mktemp(kind)
        theirs = diffusers_pipeline(kind, folder)
        return theirs, VideoPipeline(folder, dtype="float32", reference="diffusers", show_progress=False)

    return get


def picture(seed, height=70, width=50):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def noise(latents, seed=1):
    return np.random.default_rng(seed).normal(size=(1, 16, latents, 4, 6)).astype(np.float32)


@pytest.mark.parametrize(("kind", "guidance_scale"), [("flf2v", 4.0), ("flf2v-skyreels", 1.0), ("i2v-a14b", 4.0)])
def test_frames_between_a_first_and_a_last_frame_match_diffusers(pair, kind, guidance_scale):
    theirs, ours = pair(kind)
    options: dict[str, Any] = dict(**SIZE, num_frames=13, num_inference_steps=3, guidance_scale=guidance_scale)
    arrays = {"image": picture(0), "last_image": picture(5, 41, 90)}
    images = {name: PIL.fromarray(array) for name, array in arrays.items()}
    want = theirs(latents=torch.from_numpy(noise(4)), output_type="np", **images, **PROMPTS, **options).frames[0]
    got = ours(latents=noise(4), output_type="np", **arrays, **PROMPTS, **options)
    assert want.std() > 0.05
    np.testing.assert_allclose(got.frames, want, atol=1e-4)


def clip(seed, height=80, width=120, frames=9):
    """A clip of the aspect of SIZE; diffusers takes no other."""
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), np.uint8)


def masks(frames=9):
    """Gray masks, whose middle is new in later frames."""
    levels = np.random.default_rng(3).integers(0, 256, (frames, 80, 120, 1), np.uint8)
    levels[2:, 20:60, 30:90] = 255
    return np.repeat(levels, 3, axis=-1)


@pytest.mark.parametrize(
    ("guidance_scale", "output", "given"),
    [
        (1.0, "np", {}),
        (4.0, "latent", {"video": clip(2), "mask": masks(), "conditioning_scale": [0.7, -1.5]}),
        (1.0, "np", {"reference_images": [picture(7), picture(8, 33, 95)], "conditioning_scale": 0.5}),
        (4.0, "np", {"video": clip(2), "reference_images": [picture(7, 64, 31)]}),
        (
            4.0,
            "latent",
            {"video": clip(2), "mask": masks(), "reference_images": [picture(7, 64, 31), picture(8), picture(9)]},
        ),
    ],
    ids=["nothing", "mask", "references", "two transformers", "all"],
)
def test_a_controlled_clip_matches_diffusers(pair, given, output, guidance_scale):
    theirs, ours = pair("vace-a14b" if "mask" not in given and "video" in given else "vace")
    options: dict[str, Any] = dict(**SIZE, num_frames=9, num_inference_steps=3, guidance_scale=guidance_scale)
    references = len(given.get("reference_images", ()))
    images = {
        name: value if name == "conditioning_scale" else [PIL.fromarray(one) for one in value]
        for name, value in given.items()
    }
    start = noise(3 + references)
    want = theirs(latents=torch.from_numpy(start), output_type=output, **images, **PROMPTS, **options).frames
    got = ours(latents=start, output_type=output, **given, **PROMPTS, **options).frames
    # Their latents begin with the references'.
    want = want[0] if output == "np" else want.numpy()[:, :, references:]
    assert want.std() > 0.05
    np.testing.assert_allclose(got, want, atol=1e-4)


SMALL = dict(num_attention_heads=3, attention_head_dim=12, in_channels=16, out_channels=16, text_dim=20, freq_dim=64)
SMALL |= dict(ffn_dim=56, num_layers=5, rope_max_seq_len=32)


def loaded(model):
    """Our model with diffusers' weights, of real spread; all of them, and no other."""
    torch.manual_seed(0)
    for name, weight in model.eval().named_parameters():
        if weight.ndim > 1 and "table" not in name and "pos_embed" not in name:
            weight.data.normal_(std=1.5 * weight[0].numel() ** -0.5)
        else:
            weight.data.normal_(mean=float("norm" in name and name.endswith("weight")), std=0.3)
    config = WanConfig.from_hf(dict(model.config, _class_name=type(model).__name__))
    return from_torch(lambda: WanModel(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), WAN, model.state_dict())


def inputs(*channels):
    rng = np.random.default_rng(1)
    latents = [rng.standard_normal((2, 5, 6, 10, count), np.float32) for count in channels]
    return *latents, np.array([968, 216]), rng.standard_normal((2, 512, 20), np.float32)


def torch_inputs(*latents):
    return [torch.from_numpy(np.moveaxis(one, -1, 1).copy()) for one in latents]


def assert_near(got, want):
    want = np.moveaxis(want[0].numpy(), 1, -1)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).mean()


@nnx.jit
def velocity(model, latents, timesteps, *context):
    return model(latents, timesteps, model.encode_context(*context))


def test_control_blocks_match_diffusers():
    theirs = diffusers.WanVACETransformer3DModel(**SMALL, vace_layers=[0, 1, 3], vace_in_channels=96)
    ours = loaded(theirs)
    latents, control, timesteps, text = inputs(16, 96)
    scale = np.array([0.8, 1.3, -0.5], np.float32)
    with torch.no_grad():
        x, c = torch_inputs(latents, np.repeat(control[:1], 2, axis=0))
        more = {"control_hidden_states_scale": torch.from_numpy(scale), "return_dict": False}
        want = theirs(x, torch.from_numpy(timesteps), torch.from_numpy(text), control_hidden_states=c, **more)
    assert_near(velocity(ours, latents, timesteps, text, None, Control(control[:1], scale)), want)


def test_positions_of_two_pictures_match_diffusers():
    sizes = dict(SMALL, in_channels=36, image_dim=24, added_kv_proj_dim=36, pos_embed_seq_len=22)
    theirs = diffusers.WanTransformer3DModel(**sizes)
    ours = loaded(theirs)
    latents, timesteps, text = inputs(36)
    states = np.random.default_rng(2).standard_normal((2, 22, 24), np.float32)
    with torch.no_grad():
        each = torch.from_numpy(states.reshape(4, 11, 24))
        want = theirs(
            *torch_inputs(latents), torch.from_numpy(timesteps), torch.from_numpy(text), each, return_dict=False
        )
    assert_near(velocity(ours, latents, timesteps, text, states), want)
