"""The hybrid model by itself: configurations that are read or refused, keys, and what a token depends on."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.tiny import HYBRID, tiny_config
from verax.errors import UnsupportedModelError
from verax.models import causal_lm


def config(family="qwen3_5_text", **changes):
    return tiny_config(family, **{**HYBRID, **changes})


def keys(**changes):
    architecture, sizes = causal_lm(config(**changes))
    abstract = nnx.eval_shape(lambda: architecture(sizes, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(abstract))}


def test_paths_are_the_keys_of_published_checkpoints():
    delta = "model.layers.0.linear_attn."
    shared = {f"{delta}{name}" for name in ("A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight")}
    split = {f"{delta}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")}
    fused = {f"{delta}in_proj_{name}.weight" for name in ("qkvz", "ba")}
    found = set(keys())
    assert shared | split | {"model.layers.1.self_attn.q_norm.weight", "model.norm.weight"} <= found
    assert not fused & found
    found = set(keys(family="qwen3_next", num_experts=0))
    assert shared | fused <= found
    assert not split & found


def test_decays_stay_float32_in_bfloat16_models():
    found = {name: leaf.dtype for name, leaf in keys().items() if "layers.0" in name}
    wide = {name.rpartition("linear_attn.")[2] for name, dtype in found.items() if dtype == jnp.float32}
    assert wide == {"A_log", "dt_bias", "norm.weight"}


def test_a_token_does_not_see_the_future():
    architecture, sizes = causal_lm(config())
    run = nnx.jit(architecture(sizes, rngs=nnx.Rngs(0)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 300, (1, 21)))
    whole, changed = run(tokens), run(tokens.at[0, 7].set(5))
    np.testing.assert_array_equal(changed[:, :7], whole[:, :7])
    assert (np.abs(changed[:, 7:] - whole[:, 7:]).max(-1) > 1e-3).all()


def test_every_fourth_layer_attends_where_the_file_names_none():
    read = causal_lm(config(layer_types=None, num_hidden_layers=8))[1]
    assert [i for i, kind in enumerate(read.layer_types) if kind == "full_attention"] == [3, 7]
    read = causal_lm(config(layer_types=None, num_hidden_layers=8, full_attention_interval=2))[1]
    assert [i for i, kind in enumerate(read.layer_types) if kind == "full_attention"] == [1, 3, 5, 7]
    assert read.rotary.fraction == 0.25


def test_the_text_part_of_a_config_with_a_vision_tower_is_read():
    text = config()
    outer = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    assert causal_lm(outer)[1] == causal_lm({**text, "tie_word_embeddings": False})[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "qwen3_next", "num_experts": 8}, "qwen3_next model lacks num_experts_per_tok"),
        ({"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        causal_lm(config(**changes))


def test_a_missing_size_is_named():
    without = config()
    del without["linear_key_head_dim"]
    with pytest.raises(UnsupportedModelError, match="lacks linear_key_head_dim"):
        causal_lm(without)
