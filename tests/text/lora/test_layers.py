"""Layers that adapters can change: found by the forward pass, of any architecture; each slot is filled by itself."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.tiny import HYBRID, tiny_config
from verax.errors import UnsupportedModelError
from verax.models import causal_lm
from verax.text.features.lora import AdaptedLayers, write_adapter
from verax.text.step.program import AbstractModel

ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
DENSE = ATTENTION | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)


def layers_of(family, **changes):
    architecture, config = causal_lm(tiny_config(family, **changes))
    model = AbstractModel.from_module(nnx.eval_shape(lambda: architecture(config, rngs=nnx.Rngs(0))))
    return AdaptedLayers.of(model.build, model.weights, max_loras=2, max_rank=3)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("qwen3", {"tie_word_embeddings": False}, DENSE),
        ("llama", {}, DENSE),
        ("gemma3_text", {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16}, DENSE),
        ("qwen3_moe", EXPERTS, ATTENTION),
    ],
)
def test_layers_are_those_that_every_token_passes_and_the_head_is_none(family, changes, expected):
    layers = layers_of(family, **changes)
    assert set(layers.shapes) == {f"model.layers.{i}.{name}" for i in range(2) for name in expected}
    assert layers.shapes["model.layers.0.self_attn.k_proj"] == (32, 64)


def test_recurrent_layers_have_some_too():
    names = {path.split(".", 3)[3] for path in layers_of("qwen3_5_text", **HYBRID).shapes}
    assert {"linear_attn.in_proj_qkv", "linear_attn.out_proj", "self_attn.q_proj", "mlp.up_proj"} <= names


def test_layers_go_by_their_names_in_every_published_layout():
    layers = layers_of("gemma3_text", hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=16)
    path = "model.layers.1.mlp.up_proj"
    for name in (path, "model.language_model.layers.1.mlp.up_proj", "language_model.model.layers.1.mlp.up_proj"):
        assert layers.names[name] == path


def test_a_model_without_linear_layers_is_refused():
    class Bare(nnx.Module):
        key_aliases = ()
        dtype = jnp.float32

        def __init__(self):
            self.weight = nnx.Param(jnp.zeros((9, 4)))

        def __call__(self, tokens):
            return self.weight.get_value()[tokens]

    graph, state = nnx.split(Bare())
    with pytest.raises(UnsupportedModelError, match=r"Bare has no verax\.nn\.Linear"):
        AdaptedLayers.of(lambda weights: nnx.merge(graph, state), (), max_loras=1, max_rank=1)


def test_writing_a_slot_changes_no_other():
    layers = layers_of("qwen3")
    rng = np.random.default_rng(0)
    shapes = [
        shape
        for size_out, size_in in layers.shapes.values()
        for shape in ((layers.max_rank, size_in), (size_out, layers.max_rank))
    ]
    first, second = ([jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes] for _ in range(2))
    arrays = write_adapter(layers.new_arrays(), tuple(first), jnp.int32(0))
    arrays = write_adapter(arrays, tuple(second), jnp.int32(1))
    for i, (array, a, b) in enumerate(zip(arrays, first, second, strict=True)):
        np.testing.assert_array_equal(array, np.concatenate([a, b], axis=i % 2))
