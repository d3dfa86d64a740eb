"""Linear layers: low-rank adapters, weights that are packed once for all calls, and blocks with divided weights."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from tests.support.cpu import needs_library
from tests.support.gguf import encode
from tests.support.tiny import tiny_checkpoint
from tests.text.conftest import make_llm
from verax import LLM, SamplingParams, ops
from verax.checkpoint import Checkpoint
from verax.loading import load_causal_lm
from verax.nn import Embedding, LayerNorm, Linear, LowRank, fused_linear, pack_linear_weights
from verax.nn.parallel import ShardedBlocks
from verax.ops.cpu import library

D, RANK = 64, 3
RNG = np.random.default_rng(0)
SLOTS = np.asarray([1, -1, 0, 1, 0])


def weight_of(kind, size_out):
    weight = jnp.asarray(RNG.standard_normal((size_out, D)) * D**-0.5, jnp.float32)
    if kind in ("float32", "bfloat16"):
        return weight.astype(kind)
    if kind == "Q8_0":
        return jax.tree.map(jnp.asarray, ops.BlockQuantizedWeight.from_blocks(kind, encode(weight, kind)))
    return ops.quantize(weight, *{"int8": (8, None), "int4": (4, 32)}[kind])


def layer_of(kind, size_out):
    layer = Linear(D, size_out, bias=True, dtype=jnp.float32, rngs=nnx.Rngs(0))
    layer.weight.set_value(weight_of(kind, size_out))
    layer.bias.set_value(jnp.asarray(RNG.standard_normal(size_out), jnp.float32))
    return layer


def matrices(size_out):
    down, up = RNG.standard_normal((2, RANK, D)), RNG.standard_normal((2, size_out, RANK))
    return down.astype(np.float32), up.astype(np.float32)


def attach(layer, down, up):
    """Give a layer the matrices of both slots."""
    chosen = np.repeat(np.arange(2), RANK)[None] == SLOTS[:, None]
    layer.low_rank = LowRank(
        jnp.asarray(down.reshape(-1, D)), jnp.asarray(np.concatenate(up, axis=1)), jnp.asarray(chosen)
    )


def change_of(x, down, up):
    """Sums that adapters add to each token, in float64; zeros for tokens without an adapter."""
    x, change = np.asarray(x, np.float64), np.zeros((*x.shape[:-1], up.shape[1]))
    for index, slot in zip(np.ndindex(x.shape[:-1]), SLOTS, strict=True):
        if slot >= 0:
            change[index] = up[slot].astype(np.float64) @ (down[slot].astype(np.float64) @ x[index])
    return change


@pytest.mark.parametrize("shape", [(5, D), (1, 5, D), (5, 1, D)])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "Q8_0"])
def test_a_layer_adds_what_each_tokens_adapter_says(kind, shape):
    layer, (down, up) = layer_of(kind, 48), matrices(48)
    x = jnp.asarray(RNG.standard_normal(shape), jnp.float32)
    base = np.asarray(layer(x), np.float64)
    attach(layer, down, up)
    np.testing.assert_allclose(np.asarray(layer(x)) - base, change_of(x, down, up), atol=2e-4)


@pytest.mark.parametrize("kind", ["float32", "int8", "Q8_0"])
def test_joined_layers_add_each_its_own(kind):
    layers, pairs = [layer_of(kind, size) for size in (48, 16, 32)], [matrices(size) for size in (48, 16, 32)]
    x = jnp.asarray(RNG.standard_normal((5, D)), jnp.float32)
    base = [np.asarray(y, np.float64) for y in fused_linear(x, *layers)]
    for layer, pair in list(zip(layers, pairs, strict=True))[1:]:
        attach(layer, *pair)
    first, *others = [np.asarray(y) - b for y, b in zip(fused_linear(x, *layers), base, strict=True)]
    np.testing.assert_array_equal(first, 0)
    for got, pair in zip(others, pairs[1:], strict=True):
        np.testing.assert_allclose(got, change_of(x, *pair), atol=2e-4)


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


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_layers_and_a_table_that_is_the_head_are_packed(folder, dtype):
    model = load(folder, dtype)
    linear = {path for path, each in nnx.iter_modules(model) if isinstance(each, Linear)}
    pack_linear_weights(model, few_rows=True)
    table = {("model", "embed_tokens")} if model.config.tie_word_embeddings else set()
    assert packed_layers(model) == (linear | table if library.has("bf16_dot") else set())


@needs_library
@pytest.mark.parametrize("config", [None, SimpleNamespace(vocab_size=96)], ids=["no config", "no field"])
def test_a_table_is_a_head_only_if_a_config_ties_it(config):
    class Model(nnx.Module):
        def __init__(self):
            self.table = Embedding(96, 64, dtype=jnp.float32, rngs=nnx.Rngs(0))
            self.out = Linear(64, 96, dtype=jnp.float32, rngs=nnx.Rngs(0))
            if config is not None:
                self.config = config

    model = Model()
    pack_linear_weights(model, few_rows=True)
    assert packed_layers(model) == ({("out",)} if library.has("bf16_dot") else set())


@needs_library
def test_the_table_of_an_encoder_stays_an_array(folder):
    model = load(folder)
    linear = {path for path, each in nnx.iter_modules(model) if isinstance(each, Linear)}
    pack_linear_weights(model)
    assert packed_layers(model) == (linear if library.has("fma") else set())


@needs_library
def test_weights_of_4_bits_stay_unchanged(folder):
    model = load(folder, quantization="int4")
    before = jax.tree.leaves(nnx.state(model))
    pack_linear_weights(model, few_rows=True)
    heads = {("model", "embed_tokens")} if model.config.tie_word_embeddings else set()
    assert packed_layers(model) <= heads
    assert len(jax.tree.leaves(nnx.state(model))) == len(before)


@needs_library
def test_an_engine_packs_weights_and_leaves_a_modules_own_unchanged(folder):
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


class Block(nnx.Module):  # tests/video/test_mesh.py compares clips with such blocks
    def __init__(self, size, inner, key):
        self.norm = LayerNorm(size, eps=1e-6, dtype=jnp.float32)
        self.ffn = Linear(size, inner, bias=True, dtype=jnp.float32, rngs=nnx.Rngs(key))


def blocks(size, inner):
    return [Block(size, inner, i) for i in range(3)]


@pytest.mark.parametrize(("inner", "axis"), [(16, 1), (6, 2), (5, 2)])
def test_a_matrix_is_divided_along_the_first_axis_that_divides_over_all_devices(inner, axis):
    stack = nnx.eval_shape(lambda: ShardedBlocks(blocks(8, inner), AbstractMesh((2, 4), ("rows", "columns"))))
    found = stack.divisions
    assert list(found) == ["stack.ffn.weight"]
    assert found["stack.ffn.weight"].spec == PartitionSpec(*[None] * axis, ("rows", "columns"))


def test_what_no_axis_divides_is_whole():
    stack = nnx.eval_shape(lambda: ShardedBlocks(blocks(6, 5), AbstractMesh((4,), ("devices",))))
    assert stack.divisions == {}
