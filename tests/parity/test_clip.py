"""CLIP's image encoder against transformers' CLIPVisionModel, with random weights."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.layouts import from_torch, spread
from verax.checkpoint.video.names import CLIP
from verax.models.clip import CLIPVisionConfig, CLIPVisionModel

SIZES = dict(
    hidden_size=24,
    intermediate_size=52,
    num_hidden_layers=3,
    num_attention_heads=3,
    image_size=35,
    patch_size=7,
    hidden_act="gelu",
)


def reference(**changes):
    return spread(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**{**SIZES, **changes})))


def ours(theirs, dtype=jnp.float32, prefix=""):
    config = CLIPVisionConfig.from_hf(theirs.config.to_dict())
    state = {prefix + key: tensor for key, tensor in theirs.state_dict().items()}
    return from_torch(lambda: CLIPVisionModel(config, dtype=dtype, rngs=nnx.Rngs(0)), CLIP, state, dtype)


def pixels():
    return np.random.default_rng(1).standard_normal((2, 35, 35, 3)).astype(np.float32)


def run(theirs):
    images = torch.from_numpy(pixels()).permute(0, 3, 1, 2)
    with torch.no_grad():
        states = theirs(images, output_hidden_states=True).hidden_states[-2]
    return states.float().numpy()


@pytest.mark.parametrize("prefix", ["", "vision_model."])
@pytest.mark.parametrize("changes", [{}, {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-2}])
def test_float32_states_are_those_of_transformers(changes, prefix):
    theirs = reference(**changes)
    expected = run(theirs)
    got = np.asarray(ours(theirs, prefix=prefix)(jnp.asarray(pixels())))
    assert got.shape == (2, 26, 24)
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


def test_bfloat16_is_no_further_from_float32_than_transformers_bfloat16():
    # The weights are rounded to bfloat16 first, so that the float32 run is the truth of both.
    rounded = reference().bfloat16()
    theirs = run(rounded)
    got = np.asarray(ours(rounded, jnp.bfloat16)(jnp.asarray(pixels())))
    truth = run(rounded.float())
    assert np.linalg.norm(got - truth) <= 1.1 * np.linalg.norm(theirs - truth)
