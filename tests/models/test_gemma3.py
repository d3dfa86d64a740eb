"""Gemma 3 and Gemma 2 by themselves: configurations that are read or refused, keys, and what a token sees."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.tiny import random_weights, tiny_config
from verax.errors import CheckpointError, UnsupportedModelError
from verax.models import causal_lm

SLIDING, GLOBAL = "sliding_attention", "full_attention"


def config(family="gemma3_text", **changes):
    return tiny_config(family, **{"num_hidden_layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 16, **changes})


def build(**changes):
    architecture, sizes = causal_lm(config(**changes))
    graph, state = nnx.split(nnx.eval_shape(lambda: architecture(sizes, rngs=nnx.Rngs(0))))
    weights = random_weights(config(**changes))
    filled = [
        (path, leaf.replace(jnp.asarray(weights[".".join(map(str, path))]))) for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def keys(**changes):
    architecture, sizes = causal_lm(config(**changes))
    abstract = nnx.eval_shape(lambda: architecture(sizes, rngs=nnx.Rngs(0)))
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(abstract))}


def test_paths_are_the_keys_of_published_checkpoints():
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    layer = {f"model.layers.2.{name}_layernorm.weight" for name in norms}
    found = keys()
    assert layer | {"model.layers.0.self_attn.q_norm.weight", "model.norm.weight"} <= found
    assert "lm_head.weight" not in found
    assert not any("q_norm" in key for key in keys(family="gemma2"))


def test_published_sizes_are_those_that_a_short_file_leaves_out():
    """gemma-3-4b's config.json has these values and no others for its language model."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    read = causal_lm({"model_type": "gemma3", "text_config": text, "vision_config": {}})[1]
    assert (read.vocab_size, read.num_attention_heads, read.num_key_value_heads, read.head_dim) == (262208, 8, 4, 256)
    assert (read.query_pre_attn_scalar, read.max_position_embeddings) == (256, 131072)
    assert read.sliding_windows == (1024, 1024, 1024, 1024, 1024, None) * 5 + (1024,) * 4
    assert (read.rotary.theta, read.rotary.kind, dict(read.rotary.scaling)["factor"]) == (1e6, "linear", 8)
    assert (read.local_rotary.theta, read.local_rotary.kind) == (1e4, "default")
    assert read.tie_word_embeddings
    assert read.attn_logit_softcapping is None


def test_gemma_2_has_caps_unless_its_file_says_otherwise():
    read = causal_lm({"model_type": "gemma2"})[1]
    assert (read.attn_logit_softcapping, read.final_logit_softcapping) == (50, 30)
    assert read.sliding_windows == (4096, None) * 13
    assert read.rotary == read.local_rotary
    assert causal_lm({"model_type": "gemma2", "final_logit_softcapping": None})[1].final_logit_softcapping is None


def test_rotary_settings_by_kind_of_layer_are_read():
    by_kind = {GLOBAL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e5}, SLIDING: {"rope_theta": 7e3}}
    read = causal_lm(config(rope_parameters=by_kind))[1]
    assert (read.rotary.theta, read.rotary.kind, read.local_rotary.theta) == (3e5, "linear", 7e3)


def reach(model):
    """By position, the tokens whose hidden states change with token 9."""
    run = nnx.jit(model)
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, 300, (1, 30)))
    difference = np.abs(run(tokens.at[0, 9].add(1)) - run(tokens)).max(-1)[0]
    return np.flatnonzero(difference > 1e-4)


def test_a_token_reaches_as_far_as_windows_carry_it():
    """Three layers of a window of 5 carry it 3 x 4 tokens; one global layer carries it to the end."""
    assert reach(build(layer_types=[SLIDING] * 3)).tolist() == list(range(9, 22))
    assert reach(build(layer_types=[SLIDING, SLIDING, GLOBAL])).tolist() == list(range(9, 30))


def test_scores_stay_below_the_cap():
    model = build(family="gemma2", final_logit_softcapping=2.5)
    scores = model.logits(100 * model(jnp.asarray([[3, 4, 5]])))
    assert 2 < np.abs(scores).max() <= 2.5


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_activation": "silu"}, UnsupportedModelError, "hidden_activation 'silu'"),
        ({"layer_types": [SLIDING, GLOBAL, "linear_attention"]}, UnsupportedModelError, "type linear_attention"),
        ({"layer_types": [SLIDING]}, CheckpointError, "layer_types has 1 entries for 3 layers"),
        ({"sliding_window": None}, UnsupportedModelError, "lacks sliding_window"),
        ({"sliding_window": -1}, CheckpointError, "sliding_window: expected a whole number"),
        ({"use_bidirectional_attention": True}, UnsupportedModelError, "use_bidirectional_attention"),
        ({"num_key_value_heads": 3}, UnsupportedModelError, "num_attention_heads 4 is not a multiple"),
        ({"head_dim": 15}, UnsupportedModelError, "head_dim 15 is odd"),
        ({"final_logit_softcapping": 0}, CheckpointError, "final_logit_softcapping: expected a number above 0"),
        ({"rope_local_base_freq": "high"}, CheckpointError, "rope_theta: expected a number above 1"),
        ({"rope_scaling": {"rope_type": "longrope"}}, UnsupportedModelError, "rope_type 'longrope'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, error, message):
    with pytest.raises(error, match=message):
        causal_lm(config(**changes))
