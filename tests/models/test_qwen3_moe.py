"""Mixtures of experts by themselves: configurations that are read or refused, keys, the router."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.tiny import HYBRID, tiny_config
from verax.errors import CheckpointError, UnsupportedModelError
from verax.models import causal_lm

MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
SHARED = {**MOE, **HYBRID, "shared_expert_intermediate_size": 40}


def build(family="qwen3_moe", **changes):
    architecture, config = causal_lm(tiny_config(family, **{**MOE, **changes}))
    return architecture(config, rngs=nnx.Rngs(0))


def shapes(model):
    return {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(model))}


def test_experts_are_stacks_and_other_paths_are_the_keys_of_published_checkpoints():
    found = shapes(build())
    assert found["model.layers.1.mlp.experts.gate_up_proj"] == (4, 96, 64)
    assert found["model.layers.1.mlp.experts.down_proj"] == (4, 64, 48)
    assert found["model.layers.0.mlp.gate.weight"] == (4, 64)
    assert not any("mlp.gate_proj" in name or "shared" in name for name in found)


def test_layers_without_experts_have_a_feed_forward_part():
    found = shapes(build(num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [i for i in range(5) if f"model.layers.{i}.mlp.gate.weight" in found] == [1]
    assert found["model.layers.3.mlp.gate_proj.weight"] == (96, 64)
    assert causal_lm(tiny_config("qwen3_moe", num_experts=0))[1].experts is None


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_hybrid_models_have_a_shared_expert(family):
    found = shapes(build(family, **SHARED))
    assert found["model.layers.0.mlp.shared_expert.down_proj.weight"] == (64, 40)
    assert found["model.layers.0.mlp.shared_expert_gate.weight"] == (1, 64)
    assert found["model.layers.2.mlp.experts.gate_up_proj"] == (4, 96, 64)


def test_the_width_of_dense_layers_is_needed_only_where_there_are_some():
    file = tiny_config("qwen3_5_moe_text", **SHARED)
    del file["intermediate_size"]
    outer = {"model_type": "qwen3_5_moe", "text_config": file, "tie_word_embeddings": False}
    assert causal_lm(outer)[1].experts.num_experts == 4


def test_a_window_is_that_of_every_layer():
    read = causal_lm(tiny_config("qwen3_moe", **MOE, use_sliding_window=True, sliding_window=8, max_window_layers=2))[1]
    assert read.sliding_windows == (8, 8)


def test_the_router_takes_the_largest_probabilities_over_all_experts():
    scores = jnp.asarray([[0.5, 2.0, -1.0, 1.0]])
    exact = np.exp(scores) / np.exp(scores).sum()
    for normalised in (True, False):
        router = build(norm_topk_prob=normalised).model.layers[0].mlp.gate
        router.weight[...] = jnp.zeros((4, 64)).at[:, 0].set(scores[0])
        _, weights, experts = router(jnp.zeros((1, 64)).at[0, 0].set(1.0))
        assert experts.tolist() == [[1, 3]]
        expected = exact[:, [1, 3]]
        np.testing.assert_allclose(weights, expected / expected.sum() if normalised else expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts_per_tok": 5}, CheckpointError, "num_experts_per_tok 5 is more than num_experts 4"),
        ({"num_experts": "many"}, CheckpointError, "num_experts: expected a whole number"),
        ({"decoder_sparse_step": 0}, CheckpointError, "decoder_sparse_step"),
        ({"layer_types": ["linear_attention"] * 2}, UnsupportedModelError, "layers of type linear_attention"),
    ],
)
def test_what_makes_no_model_is_refused_by_name(changes, error, message):
    with pytest.raises(error, match=message):
        causal_lm(tiny_config("qwen3_moe", **{**MOE, **changes}))


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3_moe", {}), ("qwen3_next", HYBRID), ("qwen3_5_moe_text", HYBRID)]
)
def test_missing_sizes_are_named(family, changes):
    with pytest.raises(UnsupportedModelError, match="lacks num_experts, num_experts_per_tok, moe_intermediate_size"):
        causal_lm(tiny_config(family, **changes))
