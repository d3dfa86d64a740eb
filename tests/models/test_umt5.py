"""UMT5's encoder by itself: sizes, names, padding, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from verax._compat import compiler_options
from verax.checkpoint.video.parts import UMT5
from verax.errors import UnsupportedModelError
from verax.models.umt5 import UMT5Config, UMT5EncoderModel

SIZES = dict(vocab_size=50, d_model=12, d_kv=4, d_ff=20, num_layers=2, num_heads=3)


def parameters(config, dtype=jnp.float32):
    abstract = nnx.eval_shape(lambda: UMT5EncoderModel(config, dtype=dtype, rngs=nnx.Rngs(0)))
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(abstract))}


def test_umt5_xxl_has_its_published_size():
    shapes = parameters(UMT5Config())
    assert sum(leaf.size for leaf in shapes.values()) == 5_680_910_336
    assert shapes["blocks.23.pos_embedding.embedding.weight"].shape == (32, 64)
    assert shapes["blocks.0.ffn.gate.0.weight"].shape == (10240, 4096)


def test_every_parameter_has_one_name_in_the_other_layout():
    for name in parameters(UMT5Config(**SIZES)):
        (other,) = UMT5.forward(name)
        assert UMT5.backward(other) == (name, 0)


def test_padding_is_zeros_and_changes_nothing():
    model = UMT5EncoderModel(UMT5Config(**SIZES), rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 9)), jnp.int32)
    lengths = jnp.asarray([4, 7])
    states = model(tokens, lengths)
    np.testing.assert_array_equal(states[0, 4:], 0)
    np.testing.assert_array_equal(states[1, 7:], 0)
    np.testing.assert_array_equal(model(tokens.at[0, 4:].set(3).at[1, 7:].set(8), lengths), states)
    np.testing.assert_allclose(model(tokens[:1, :4], lengths[:1])[0], states[0, :4], atol=1e-6)
    assert jnp.abs(states[0, :4]).min() > 0


def test_no_weight_is_copied_while_it_runs():
    config = UMT5Config(vocab_size=20_000, d_model=256, d_kv=64, d_ff=512, num_layers=2, num_heads=4)
    graph, state = nnx.split(nnx.eval_shape(lambda: UMT5EncoderModel(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))

    def run(state, tokens, lengths):
        return nnx.merge(graph, state)(tokens, lengths)

    arguments = state, jax.ShapeDtypeStruct((1, 64), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    memory = jax.jit(run).lower(*arguments).compile(compiler_options=compiler_options("cpu")).memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4e6  # the table of words alone has 10e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "t5"}, "model_type 't5'"),
        ({"feed_forward_proj": "relu"}, "feed_forward_proj 'relu'"),
        ({"relative_attention_num_buckets": 30}, "relative_attention_num_buckets 30"),
        ({"relative_attention_max_distance": 8}, "relative_attention_max_distance 8"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        UMT5Config.from_hf({**SIZES, **changes})


def test_a_missing_size_is_named():
    with pytest.raises(UnsupportedModelError, match="lacks d_kv, num_heads"):
        UMT5Config.from_hf({key: size for key, size in SIZES.items() if key not in ("d_kv", "num_heads")})
