"""Wan's transformer: published sizes, configurations read or refused, arguments that do not fit, memory of a pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.cpu import needs_library
from verax._compat import compiler_options
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.models.video_model import ATTENTION
from verax.models.wan.layers import Float32Linear, rotary_tables
from verax.models.wan.model import WAN_CONFIGS, WanConfig, WanModel
from verax.ops.memory import ROWS

TINY = WanConfig(
    dim=24, ffn_dim=40, num_heads=2, num_layers=2, in_dim=4, out_dim=3, text_dim=10, freq_dim=16, max_positions=64
)
WITH_IMAGE = dataclasses.replace(TINY, image_dim=6)
TOLD = dataclasses.replace(TINY, inject_sample_info=True)

ORIGINAL = {
    "_class_name": "WanModel",
    "model_type": "i2v",
    "dim": 1536,
    "eps": 1e-06,
    "ffn_dim": 8960,
    "freq_dim": 256,
    "in_dim": 36,
    "num_heads": 12,
    "num_layers": 30,
    "out_dim": 16,
    "text_len": 512,
}
VACE = {**ORIGINAL, "_class_name": "VaceWanModel", "model_type": "vace", "in_dim": 16}
DIFFUSERS = {
    "_class_name": "SkyReelsV2Transformer3DModel",
    "added_kv_proj_dim": 1536,
    "attention_head_dim": 128,
    "cross_attn_norm": True,
    "eps": 1e-06,
    "ffn_dim": 8960,
    "freq_dim": 256,
    "image_dim": 1280,
    "in_channels": 36,
    "inject_sample_info": False,
    "num_attention_heads": 12,
    "num_layers": 30,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
    "text_dim": 4096,
}


def inputs(config=TINY, batch=2, frames=3, height=4, width=6, words=7):
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    image = draw(batch, 5, config.image_dim) if config.image_dim else None
    return draw(batch, frames, height, width, config.in_dim), draw(batch, words, config.text_dim), image


@pytest.mark.parametrize(
    ("name", "billions"),
    [("t2v-1.3b", 1.419), ("i2v-1.3b", 1.564), ("df-1.3b", 1.436), ("t2v-14b", 14.29), ("i2v-14b", 16.39)],
)
def test_published_models_have_as_many_parameters_as_published(name, billions):
    model = nnx.eval_shape(lambda: WanModel(WAN_CONFIGS[name], dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    assert round(count / 1e9, 2 if billions > 10 else 3) == billions


@pytest.mark.parametrize("config", [ORIGINAL, DIFFUSERS, dict(DIFFUSERS, _class_name="WanTransformer3DModel")])
def test_both_layouts_describe_the_same_model(config):
    assert WanConfig.from_hf(config) == WAN_CONFIGS["i2v-1.3b"]


def test_other_sizes_and_diffusion_forcing_are_read_from_the_originals_layout():
    config = WanConfig.from_hf(dict(ORIGINAL, image_dim=20, rope_max_seq_len=32))
    assert (config.image_dim, config.max_positions) == (20, 32)
    assert WanConfig.from_hf(dict(ORIGINAL, model_type="t2v", image_dim=20)).image_dim is None
    assert WanConfig.from_hf(dict(ORIGINAL, image_dim=None)).image_dim is None
    forcing = dict(ORIGINAL, model_type="t2v", in_dim=16, inject_sample_info=True)
    assert WanConfig.from_hf(forcing) == WAN_CONFIGS["df-1.3b"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(ORIGINAL, model_type="vace"), "model_type 'vace' is not supported; those supported are t2v, i2v, "),
        (
            dict(ORIGINAL, _class_name="UNet"),
            "_class_name 'UNet'; transformers supported are WanModel, VaceWan",
        ),
        (dict(VACE, model_type="i2v"), "model_type 'i2v' is not supported; those supported are t2v, vace"),
        ({"_class_name": "WanModel", "dim": 8}, "lacks ffn_dim, num_heads, num_layers"),
        (dict(ORIGINAL, num_heads=7), "dim 1536 does not divide into 7 heads"),
        (dict(ORIGINAL, patch_size=[2, 2, 2]), r"patch_size \[2, 2, 2\]"),
        (dict(ORIGINAL, window_size=[8, 8]), r"window_size \[8, 8\]"),
        (dict(ORIGINAL, text_len=226), "text_len 226"),
        (dict(DIFFUSERS, num_frame_per_block=5), "num_frame_per_block 5"),
        (dict(DIFFUSERS, qk_norm=None), "qk_norm None"),
        (dict(DIFFUSERS, cross_attn_norm=False), "cross_attn_norm False"),
        (dict(DIFFUSERS, image_dim=None, added_kv_proj_dim=None, pos_embed_seq_len=514), "pos_embed_seq_len is for an"),
        (dict(VACE, vace_layers=[2, 4]), r"vace_layers \[2, 4\]"),
        (dict(VACE, vace_layers=[0, 30]), r"vace_layers \[0, 30\] with 30 layers"),
        (dict(DIFFUSERS, added_kv_proj_dim=None), "image_dim 1280 with added_kv_proj_dim None"),
        (dict(DIFFUSERS, image_dim=None), "image_dim None with added_kv_proj_dim 1536"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        WanConfig.from_hf(config)


def test_late_positions_turn_as_in_float64():
    cos, sin = rotary_tables(700, 1, 3, 128)
    angle = 699 * 10000.0 ** -(np.arange(22) / 22)
    np.testing.assert_allclose(cos[-1, :44], np.repeat(np.cos(angle), 2), atol=1e-6)
    np.testing.assert_allclose(sin[-1, 1:44:2], np.sin(angle), atol=1e-6)
    np.testing.assert_allclose(cos[-1, 44:86], 1, atol=0)
    np.testing.assert_allclose(cos[-1, 86:], np.repeat(np.cos(2 * 10000.0 ** -(np.arange(21) / 21)), 2), atol=1e-6)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (TINY, {"attention": "fast"}, "attention: expected one of auto, standard, chunked, flash, got 'fast'"),
        (TINY, {"causal_block_size": 0}, "causal_block_size: expected at least 1 frame, got 0"),
        (TINY, {"fps": jnp.array([16, 16])}, "fps: this model has no use for it"),
        (TOLD, {}, "fps: this model needs the frames per second"),
        (WITH_IMAGE, {}, "image: this model needs an image's states"),
        (TINY, {"image": jnp.ones((2, 5, 6))}, "image: this model has no use for one"),
        (TINY, {"timesteps": jnp.ones((2, 4))}, r"timesteps: expected shape \[2\] or \[2, 3\], got \[2, 4\]"),
        (TINY, {"latents": jnp.ones((2, 3, 4, 6, 5))}, "latents: expected 4 channels in the last axis, got 5"),
        (TINY, {"latents": jnp.ones((2, 3, 4, 5, 4))}, "latents: 4 x 5 does not divide into patches of 2 x 2"),
        (TINY, {"latents": jnp.ones((2, 3, 4, 132, 4))}, "3 frames of 2 x 66 patches; this model has positions for 64"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(config, options, message):
    model = nnx.eval_shape(lambda: WanModel(config, rngs=nnx.Rngs(0)))
    latents, text, _ = inputs()
    arguments = dict(latents=latents, timesteps=jnp.array([1, 2]), text=text, image=None) | options

    def call(model, image, **arguments):
        return model(context=model.encode_context(arguments.pop("text"), image), **arguments)

    static = {key: arguments.pop(key) for key in ("attention", "causal_block_size") if key in arguments}
    with pytest.raises(InvalidParameterError, match=message):
        nnx.eval_shape(lambda model: call(model, **arguments, **static), model)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_float32_layer_is_exact_and_makes_no_copy_of_its_weight(dtype):
    layer = Float32Linear(512, 768, bias=True, dtype=dtype, rngs=nnx.Rngs(3))
    layer.bias[...] = jnp.linspace(-1.0, 1.0, 768).astype(dtype)
    graph, state = nnx.split(layer)
    x = jnp.asarray(np.random.default_rng(4).standard_normal((3, 512), np.float32))
    program = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, x).compile()
    weight, bias = (np.asarray(one[...], np.float64) for one in (layer.weight, layer.bias))
    np.testing.assert_allclose(program(state, x), np.float64(x) @ weight.T + bias, atol=1e-6, rtol=1e-6)
    assert program.memory_analysis().temp_size_in_bytes < 4 * weight.size / 8


def test_chunks_need_no_more_memory_in_many_layers_than_in_few():
    shapes = [jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32) for length in (2000, 8, 8)]

    def temporary(layers):
        def run(q, k, v):
            for _ in range(layers):
                q = q + ATTENTION["chunked"](q, k, v)
            return q

        return jax.jit(run).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporary(6) < 1.2 * temporary(2)


D, F = 128, 1024
WIDE = WanConfig(dim=D, ffn_dim=F, num_heads=8, num_layers=2, in_dim=4, out_dim=1, text_dim=10, freq_dim=16)
FRAMES, SIDE = 16, 64
TOKENS = FRAMES * SIDE**2


def temporary(config, timesteps):
    """Bytes between the layers of a pass in bfloat16."""
    model = nnx.eval_shape(lambda: WanModel(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    shape = jax.ShapeDtypeStruct
    latents = shape((1, FRAMES, 2 * SIDE, 2 * SIDE, config.in_dim), jnp.float32)
    text = shape((1, 7, config.text_dim), jnp.float32)
    context = jax.eval_shape(lambda state, text: nnx.merge(graph, state).encode_context(text), state, text)

    def run(state, latents, timesteps, context):
        return nnx.merge(graph, state)(latents, timesteps, context)

    lowered = jax.jit(run, compiler_options=compiler_options("cpu")).lower(state, latents, timesteps, context)
    return lowered.compile().memory_analysis().temp_size_in_bytes


@needs_library
@pytest.mark.parametrize("shape", [(1,), (1, FRAMES)], ids=["one time", "a time of each frame"])
def test_a_pass_keeps_the_tokens_their_queries_keys_and_values(shape):
    timesteps = jax.ShapeDtypeStruct(shape, jnp.int32)
    tokens = 4 * TOKENS * D
    # Residual stream and queries in float32, keys and values in bfloat16, and the rotary tables. The feed-forward of
    # all tokens alone would be 12 times the residual stream.
    kept = 3.3 * tokens
    block = ROWS * (6 * F + 8 * 4 * D)
    needed = temporary(WIDE, timesteps)
    assert needed < kept + block
    if shape == (1,):
        assert temporary(dataclasses.replace(WIDE, num_layers=4), timesteps) < 1.02 * needed
