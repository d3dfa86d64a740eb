"""The model by itself: configurations that are read or refused, and attention passed in from outside."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.tiny import tiny_config
from verax import ops
from verax.errors import CheckpointError, UnsupportedModelError
from verax.models import causal_lm


def build(**changes):
    architecture, config = causal_lm(tiny_config(**changes))
    return architecture(config, rngs=nnx.Rngs(0))


def test_paths_are_the_keys_of_published_checkpoints():
    keys = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(build(tie_word_embeddings=False)))}
    assert {
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    } <= keys
    assert not any("bias" in key for key in keys)


def test_a_token_does_not_see_the_future():
    model = build()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 300, (1, 12)))
    whole = model(tokens)
    np.testing.assert_allclose(model(tokens[:, :7]), whole[:, :7], atol=1e-5)
    changed = model(tokens.at[0, 7].set(5))
    np.testing.assert_allclose(changed[:, :7], whole[:, :7], atol=1e-5)
    assert np.abs(changed[:, 7:] - whole[:, 7:]).max() > 1e-3


def test_attention_comes_from_outside():
    model, seen = build(), []

    def attend(layer, q, k, v, **options):
        seen.append((layer, q.shape, k.shape, v.shape))
        return ops.attention(q, k, v, **options)

    tokens = jnp.zeros((2, 5), jnp.int32)
    np.testing.assert_array_equal(model(tokens, attend=attend), model(tokens))
    assert seen == [(i, (2, 5, 4, 16), (2, 5, 2, 16), (2, 5, 2, 16)) for i in range(2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "gpt2"}, "model_type 'gpt2'; language models supported are qwen3, qwen2, llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "no sliding window is in use"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layers of type chunked_attention"),
        ({"use_sliding_window": True}, "lacks sliding_window"),
        ({"family": "mistral"}, "lacks sliding_window"),
        (
            {"family": "llama", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            "llama with layers of type sliding_attention",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        causal_lm(tiny_config(**changes))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, (None, None)),
        ({"use_sliding_window": True, "sliding_window": 8}, (None, None)),  # the first 28 layers see everything
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
        ({"family": "mistral", "sliding_window": 8}, (8, 8)),
        ({"family": "mistral", "sliding_window": None}, (None, None)),
    ],
)
def test_sliding_windows_are_read_by_layer(changes, windows):
    assert causal_lm(tiny_config(**changes))[1].sliding_windows == windows


def test_a_layer_passes_its_window_to_attention():
    model = build(use_sliding_window=True, sliding_window=3, max_window_layers=1)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 300, (1, 12)))
    whole = model(tokens)
    seen = []
    model(tokens, attend=lambda layer, q, k, v, **options: seen.append(options) or ops.attention(q, k, v, **options))
    assert seen == [{"window": None}, {"window": 3}]
    np.testing.assert_allclose(build()(tokens)[:, :3], whole[:, :3], atol=1e-5)
    assert np.abs(build()(tokens)[:, 3:] - whole[:, 3:]).max() > 1e-3


def test_a_wrong_number_of_layer_types_is_refused():
    with pytest.raises(CheckpointError, match="layer_types has 1 entries for 2 layers"):
        causal_lm(tiny_config(layer_types=["full_attention"]))


def test_a_missing_size_is_named():
    config = tiny_config()
    del config["hidden_size"]
    with pytest.raises(UnsupportedModelError, match="lacks hidden_size"):
        causal_lm(config)


def test_old_and_new_spellings_of_rotary_settings_agree():
    old = causal_lm(tiny_config(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}))[1]
    new = causal_lm(tiny_config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}))[1]
    assert old.rotary == new.rotary
