"""Weights that a pipeline packs when it reads them: of which models, in what memory, and that clips stay the same."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from tests.support.cpu import needs_library
from tests.support.tiny_video import video_folder
from verax import VideoPipeline, ops
from verax.models.umt5 import UMT5Config, UMT5EncoderModel
from verax.models.wan.model import WanConfig, WanModel
from verax.ops.cpu import library
from verax.ops.packed import PANEL_ROWS
from verax.video.load import divided_component

pytestmark = needs_library

PACKS = library.has("bf16_dot")
CLIP: dict[str, Any] = dict(height=16, width=32, num_frames=9, num_inference_steps=2)

WAN = WanConfig(dim=64, ffn_dim=112, num_heads=2, num_layers=2, text_dim=32, inject_sample_info=True)
UMT5 = UMT5Config(vocab_size=32, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)


def component_of(kind, dtype, keep, **options):
    config = WAN if kind is WanModel else UMT5
    made = kind(config, dtype=dtype, rngs=nnx.Rngs(0))
    return divided_component("model", kind, config, dtype, lambda _: made, keep=keep, **options)


def panels(arrays):
    """Number of packed weights."""
    return sum(len(array.shape) == 4 for array in arrays)


@pytest.mark.parametrize(
    ("kind", "dtype", "keep", "expected"),
    [
        (WanModel, jnp.bfloat16, None, True),
        (WanModel, jnp.float32, True, False),
        (UMT5EncoderModel, jnp.bfloat16, True, True),
        (UMT5EncoderModel, jnp.bfloat16, None, False),
    ],
)
def test_transformers_and_encoders_that_stay_are_packed_in_bfloat16(kind, dtype, keep, expected):
    component = component_of(kind, dtype, keep)
    assert (panels(component.shapes) > 0) == (expected and PACKS)
    with component.weights() as weights:
        assert [(one.shape, one.dtype) for one in weights] == [(one.shape, one.dtype) for one in component.shapes]
        assert component.size == sum(one.nbytes for one in weights)


def test_packed_weights_take_the_memory_of_those_in_the_file_and_of_the_rows_that_fill_panels():
    component, plain = (component_of(WanModel, dtype, None) for dtype in (jnp.bfloat16, jnp.float32))
    assert component.parameters == plain.parameters == sum(math.prod(one.shape) for one in plain.shapes)
    filled = sum(-one.shape[0] % PANEL_ROWS * one.shape[1] for one in plain.shapes if len(one.shape) == 2)
    assert component.size <= 2 * (plain.parameters + filled)
    assert (component.size > 2 * plain.parameters) == PACKS


def test_weights_for_a_mesh_or_another_device_stay_unpacked():
    mesh = AbstractMesh((2, 1), ("guidance", "sequence"))
    assert panels(component_of(WanModel, jnp.bfloat16, None, mesh=mesh).shapes) == 0
    with ops.use_target("gpu"):
        assert panels(component_of(WanModel, jnp.bfloat16, None).shapes) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return video_folder("df", tmp_path_factory.mktemp("df"), heads=8)


def test_a_clip_equals_the_clip_of_the_weights_in_the_file(folder):
    noise = jax.random.normal(jax.random.key(0), (1, 3, 4, 8, 16))
    text = jax.random.normal(jax.random.key(1), (1, 5, 16))

    def made():
        """Panels of the transformer, one of its results, and the frames of a clip."""
        pipe = VideoPipeline.from_pretrained(folder, show_progress=False)
        component = pipe.denoiser.transformer
        with component.weights() as weights:
            model = component.module(weights)
            velocity = model(noise, jnp.array([500]), model.encode_context(text), fps=jnp.array([16]))
            return panels(weights), np.asarray(velocity), pipe("a red circle", seed=3, **CLIP).frames.astype(float)

    with ops.use_implementations(pack_weight="reference"):
        none, expected, expected_frames = made()
    packed, velocity, frames = made()
    assert (none, packed > 0) == (0, PACKS)
    assert np.linalg.norm(velocity - expected) < 5e-3 * np.linalg.norm(expected)
    assert np.abs(frames - expected_frames).mean() < 1.0
