"""The encoders of video models by themselves, UMT5 and CLIP: sizes, names, padding, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from verax._compat import compiler_options
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.models.clip import CLIPVisionConfig, CLIPVisionModel
from verax.models.umt5 import UMT5Config, UMT5EncoderModel

WORDS = dict(vocab_size=50, d_model=12, d_kv=4, d_ff=20, num_layers=2, num_heads=3)
IMAGES = dict(
    **dict(hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3),
    **dict(image_size=28, patch_size=14, hidden_act="gelu"),
)


def parameters(model, config):
    abstract = nnx.eval_shape(lambda: model(config, rngs=nnx.Rngs(0)))
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(abstract))}


def test_published_encoders_have_their_published_sizes():
    shapes = parameters(UMT5EncoderModel, UMT5Config())
    assert sum(leaf.size for leaf in shapes.values()) == 5_680_910_336
    assert shapes["blocks.23.pos_embedding.embedding.weight"].shape == (32, 64)
    assert shapes["blocks.0.ffn.gate.0.weight"].shape == (10240, 4096)
    shapes = parameters(CLIPVisionModel, CLIPVisionConfig())
    head = 1280 * 1024  # the projection to CLIP's common space, which is left in the file
    assert sum(leaf.size for leaf in shapes.values()) + head == 632_076_800
    assert shapes["visual.pos_embedding"].shape == (1, 257, 1280)
    assert shapes["visual.patch_embedding.weight"].shape == (1280, 3, 14, 14)
    assert shapes["visual.transformer.31.attn.to_qkv.bias"].shape == (3840,)


def test_padding_is_zeros_and_changes_nothing():
    model = nnx.jit(UMT5EncoderModel(UMT5Config(**WORDS), rngs=nnx.Rngs(0)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 9)), jnp.int32)
    lengths = jnp.asarray([4, 7])
    states = model(tokens, lengths)
    np.testing.assert_array_equal(states[0, 4:], 0)
    np.testing.assert_array_equal(states[1, 7:], 0)
    np.testing.assert_array_equal(model(tokens.at[0, 4:].set(3).at[1, 7:].set(8), lengths), states)
    np.testing.assert_allclose(model(tokens[:1, :4], lengths[:1])[0], states[0, :4], atol=1e-6)
    assert jnp.abs(states[0, :4]).min() > 0


def test_an_image_of_another_size_is_refused():
    model = nnx.eval_shape(lambda: CLIPVisionModel(CLIPVisionConfig(**IMAGES), rngs=nnx.Rngs(0)))
    with pytest.raises(InvalidParameterError, match=r"expected images of 28 x 28, got \(42, 28\)"):
        nnx.eval_shape(lambda model: model(jnp.zeros((1, 42, 28, 3))), model)


def test_the_image_encoder_of_a_whole_clip_is_read():
    nested = {"model_type": "clip", "text_config": {"hidden_size": 8}, "vision_config": IMAGES}
    assert CLIPVisionConfig.from_hf(nested) == CLIPVisionConfig.from_hf(IMAGES)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (UMT5Config, {**WORDS, "model_type": "t5"}, "model_type 't5'"),
        (UMT5Config, {**WORDS, "relative_attention_num_buckets": 30}, "relative_attention_num_buckets 30"),
        (UMT5Config, {**WORDS, "relative_attention_max_distance": 8}, "relative_attention_max_distance 8"),
        (UMT5Config, {key: WORDS[key] for key in ("vocab_size", "d_model", "d_ff", "num_layers")}, "d_kv, num_heads"),
        (CLIPVisionConfig, {**IMAGES, "model_type": "siglip_vision_model"}, "model_type 'siglip_vision_model'"),
        (CLIPVisionConfig, {"model_type": "clip"}, "model_type 'clip'"),
        (CLIPVisionConfig, {**IMAGES, "num_attention_heads": 5}, "12 is not a multiple of num_attention_heads 5"),
        (CLIPVisionConfig, {**IMAGES, "image_size": 30}, "image_size 30 is not a multiple of patch_size 14"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config, settings, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config.from_hf(settings)


def test_no_weight_is_copied_while_it_runs():
    config = UMT5Config(vocab_size=20_000, d_model=256, d_kv=64, d_ff=512, num_layers=2, num_heads=4)
    graph, state = nnx.split(nnx.eval_shape(lambda: UMT5EncoderModel(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))

    def run(state, tokens, lengths):
        return nnx.merge(graph, state)(tokens, lengths)

    arguments = state, jax.ShapeDtypeStruct((1, 64), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    memory = jax.jit(run).lower(*arguments).compile(compiler_options=compiler_options("cpu")).memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4e6  # the table of words alone has 10e6
