"""One loader for every model: other layouts' keys, tied heads, quantisation, precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.packing import float8
from tests.support.tiny import random_weights, tiny_config
from verax import checkpoint
from verax.checkpoint import Checkpoint
from verax.errors import CheckpointError
from verax.loading import load_causal_lm, load_model, model_shapes
from verax.models import causal_lm
from verax.nn import Embedding, Linear
from verax.ops import QuantizedWeight


class Config:
    pass


class Inner(nnx.Module):
    def __init__(self, dtype, rngs):
        self.up = Linear(32, 5, dtype=dtype, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(5, jnp.float32))  # whatever dtype the rest has


class Model(nnx.Module):
    ignored_weights = (r"^buffer$",)
    key_aliases = ((r"^inner\.", "outer.inner."), (r"gain$", "gamma"))

    def __init__(self, config, *, dtype, rngs):
        self.inner = Inner(dtype, rngs)
        self.embed = Embedding(7, 32, dtype=dtype, rngs=rngs)


def weights(**renamed):
    rng = np.random.default_rng(0)
    shapes = {"inner.up.weight": (5, 32), "inner.gain": (5,), "embed.weight": (7, 32)}
    return {renamed.get(k.replace(".", "_"), k): rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def load(folder, arrays, **options):
    opened = Checkpoint.open(checkpoint.save(arrays, folder, config={}))
    return load_model(opened, Model, Config(), **{"dtype": "float32", **options})


def test_weights_are_found_under_the_keys_of_another_layout(tmp_path):
    arrays = weights(inner_up_weight="outer.inner.up.weight", inner_gain="inner.gamma")
    model = load(tmp_path, {**arrays, "buffer": np.ones(2, np.float32)})
    np.testing.assert_array_equal(model.inner.up.weight[...], arrays["outer.inner.up.weight"])
    np.testing.assert_array_equal(model.inner.gain[...], arrays["inner.gamma"])


def test_the_models_own_key_is_preferred_and_the_other_is_then_unexpected(tmp_path):
    with pytest.raises(CheckpointError, match=r"inner\.gamma unexpected"):
        load(tmp_path, {**weights(), "inner.gamma": np.ones(5, np.float32)})


def test_a_variable_with_a_dtype_of_its_own_keeps_it(tmp_path):
    model = load(tmp_path, weights(), dtype="bfloat16")
    assert model.inner.up.weight[...].dtype == jnp.bfloat16
    assert model.inner.gain[...].dtype == jnp.float32


@pytest.mark.parametrize("differs", [True, False])
def test_a_head_that_differs_from_the_embeddings_is_used_though_the_config_has_them_tied(tmp_path, differs):
    config = tiny_config(num_hidden_layers=1, tie_word_embeddings=True)
    arrays = random_weights(config)
    table = arrays["model.embed_tokens.weight"]
    arrays["lm_head.weight"] = table[::-1].copy() if differs else table
    model = load_causal_lm(Checkpoint.open(checkpoint.save(arrays, tmp_path, config=config)), dtype="float32")
    assert (model.lm_head is not None) == differs
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, table.shape[1])), jnp.float32)
    expected = np.asarray(hidden) @ arrays["lm_head.weight"].T
    np.testing.assert_allclose(model.logits(hidden), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_embeddings_are_found_under_the_name_of_the_head_that_they_are_tied_to(tmp_path, quantization):
    """safetensors' `save_model` keeps the first name of weights that are one in memory."""
    config = tiny_config(num_hidden_layers=1)
    weights = random_weights(config)
    checkpoint.save(weights, tmp_path / "plain", config=config)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    checkpoint.save(weights, tmp_path / "head", config=config)
    states = [
        nnx.state(load_causal_lm(Checkpoint.open(tmp_path / name), dtype="float32", quantization=quantization))
        for name in ("plain", "head")
    ]
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_quantisation_is_of_linear_layers_only(tmp_path):
    model = load(tmp_path, weights(), quantization="int4")
    assert isinstance(model.inner.up.weight.get_value(), QuantizedWeight)
    assert model.embed.weight[...].dtype == jnp.float32


def test_routers_and_gates_that_a_checkpoint_has_quantised_become_floats(tmp_path):
    """AutoRound and GPTQModel quantise them with the other layers; a rounded score can choose another expert."""
    sizes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=40)
    config = tiny_config("qwen2_moe", **sizes)
    weights, rng, expected = random_weights(config), np.random.default_rng(0), {}
    for name in [name for name in weights if name.endswith("gate.weight")]:
        arrays, expected[name] = float8(rng, *weights.pop(name).shape)
        weights |= {name.replace("weight", part): array for part, array in arrays.items()}
    assert len(expected) == 2 * config["num_hidden_layers"]
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    checkpoint.save(weights, tmp_path, config={**config, "quantization_config": scheme})
    opened = Checkpoint.open(tmp_path)
    model = load_causal_lm(opened, dtype="bfloat16")
    found = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}
    for name, weight in expected.items():
        assert found[name].dtype == jnp.float32
        np.testing.assert_allclose(found[name], weight, rtol=1e-6)
    shapes = model_shapes(*causal_lm(config), dtype="bfloat16", opened=opened)
    assert jax.tree.map(jnp.shape, nnx.state(shapes)) == jax.tree.map(jnp.shape, nnx.state(model))
    assert np.isfinite(model(jnp.asarray([[3, 5, 7]]))).all()
