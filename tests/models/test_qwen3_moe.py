"""Mixtures of experts by themselves: configurations that are read or refused, keys, the router, several devices."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.tiny import HYBRID, tiny_checkpoint, tiny_config
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
        ({"use_sliding_window": True}, UnsupportedModelError, "use_sliding_window"),
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


ON_A_MESH = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from verax import ops
from verax.checkpoint import Checkpoint
from verax.loading import load_model
from verax.models import causal_lm

opened = Checkpoint.open(sys.argv[1])
found = {}
for count in (1, 2, 4):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:count]), ("tensor",))
    with ops.use_target("cpu", num_devices=count):
        model = load_model(opened, *causal_lm(opened.config), dtype="float32", mesh=mesh)
        graph, state = nnx.split(model)

        @jax.jit
        def generate(state):
            model = nnx.merge(graph, state)
            def step(tokens, at):
                scores = model.logits(model(tokens)[:, at - 1])
                return tokens.at[:, at].set(jnp.argmax(scores, -1)), None
            tokens = jnp.zeros((1, 24), jnp.int32).at[0, :4].set(jnp.asarray([5, 9, 200, 31]))
            return jax.lax.scan(step, tokens, jnp.arange(4, 24))[0]

        stack = model.model.layers[0].mlp.experts.gate_up_proj[...]
        found[count] = generate(state)[0].tolist(), stack.addressable_shards[0].data.shape[0]
print(json.dumps(found))
"""


def test_experts_are_divided_over_devices_and_the_tokens_are_the_same(tmp_path):
    folder = tiny_checkpoint(tmp_path, family="qwen3_moe", **MOE, num_key_value_heads=4)
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", ON_A_MESH, str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {count: held for count, (_, held) in found.items()} == {"1": 4, "2": 2, "4": 1}
    assert found["1"][0] == found["2"][0] == found["4"][0]
    assert len(set(found["1"][0][4:])) > 3
