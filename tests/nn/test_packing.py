"""Weights that are packed once for all calls: which layers, and what an engine makes of them."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.cpu import needs_library
from tests.support.tiny import tiny_checkpoint
from tests.text.conftest import make_llm
from verax import LLM, SamplingParams, ops
from verax.checkpoint import Checkpoint
from verax.loading import load_causal_lm
from verax.nn import Embedding, Linear, pack_linear_weights
from verax.ops.cpu import library

pytestmark = needs_library

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [np.random.default_rng(0).integers(3, 200, n).tolist() for n in (1, 5, 40)]


def load(folder, dtype="float32", **options) -> Any:
    return load_causal_lm(Checkpoint.open(folder), dtype=dtype, **options)


def packed_layers(model):
    """Paths of the layers with packed weights."""
    layers = [(path, each) for path, each in nnx.iter_modules(model) if isinstance(each, (Linear, Embedding))]
    return {path for path, layer in layers if isinstance(layer.weight.get_value(), ops.PackedWeight)}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), tie_word_embeddings=request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_layers_and_a_table_that_is_the_head_are_packed(folder, dtype):
    model = load(folder, dtype)
    linear = {path for path, each in nnx.iter_modules(model) if isinstance(each, Linear)}
    pack_linear_weights(model, few_rows=True)
    table = {("model", "embed_tokens")} if model.config.tie_word_embeddings else set()
    takes = library.has("bf16_dot") and not (dtype == "bfloat16" and library.has("bf16_tiles"))
    assert packed_layers(model) == (linear | table if takes else set())


@pytest.mark.parametrize("config", [None, SimpleNamespace(vocab_size=96)], ids=["no config", "no field"])
def test_a_table_is_no_head_unless_a_config_ties_it(config):
    class Model(nnx.Module):
        def __init__(self):
            self.table = Embedding(96, 64, dtype=jnp.float32, rngs=nnx.Rngs(0))
            self.out = Linear(64, 96, dtype=jnp.float32, rngs=nnx.Rngs(0))
            if config is not None:
                self.config = config

    model = Model()
    pack_linear_weights(model, few_rows=True)
    assert packed_layers(model) == ({("out",)} if library.has("bf16_dot") else set())


def test_the_table_of_an_encoder_stays_an_array(folder):
    model = load(folder)
    linear = {path for path, each in nnx.iter_modules(model) if isinstance(each, Linear)}
    pack_linear_weights(model)
    assert packed_layers(model) == (linear if library.has("fma") else set())


def test_quantised_weights_stay_as_they_are(folder):
    model = load(folder, quantization="int8")
    before = jax.tree.leaves(nnx.state(model))
    pack_linear_weights(model, few_rows=True)
    heads = {("model", "embed_tokens")} if model.config.tie_word_embeddings else set()
    assert packed_layers(model) <= heads
    assert len(jax.tree.leaves(nnx.state(model))) == len(before)


def test_hidden_states_are_those_of_the_weights_that_were_packed(folder):
    model = load(folder)
    tokens = jnp.asarray([PROMPTS[2]])
    expected = model(tokens)
    pack_linear_weights(model, few_rows=True)
    np.testing.assert_allclose(model(tokens), expected, rtol=1e-5, atol=1e-6)


def test_an_engine_packs_weights_and_leaves_those_of_a_module_as_they_are(folder):
    model = load(folder)
    before = jax.tree.leaves(nnx.state(model))
    llm = LLM.from_module(model, max_num_seqs=2, max_model_len=64, use_tqdm=False)
    after = jax.tree.leaves(nnx.state(model))
    assert all(one is other for one, other in zip(before, after, strict=True))
    loaded = make_llm(folder, max_num_seqs=2)
    panels = [{w.ndim for w in each.engine.runner._weights if w.ndim == 4} for each in (llm, loaded)]
    assert panels == [{4} if library.has("bf16_dot") else set()] * 2
    with ops.use_implementations(pack_weight="reference"):
        plain = make_llm(folder, max_num_seqs=2)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    tokens = [[out.outputs[0].token_ids for out in one.generate(prompts, GREEDY)] for one in (llm, loaded, plain)]
    assert tokens[0] == tokens[1] == tokens[2]
