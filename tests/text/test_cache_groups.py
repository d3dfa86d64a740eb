"""Arithmetic of sliding windows over blocks, and the division of memory among cache groups."""

import jax
import jax.numpy as jnp
import pytest

from tests.support.tiny import WINDOWED, tiny_config
from verax.errors import InvalidParameterError
from verax.models import causal_lm
from verax.text.engine.blocks import CachePlan, first_block, most_blocks
from verax.text.engine.engine_config import EngineConfig
from verax.text.step.program import new_cache
from verax.text.step.sizes import block_bytes, plan_sizes

MIB = 1 << 20
GEMMA = {
    "270m": dict(num_hidden_layers=18, hidden_size=640, num_attention_heads=4, num_key_value_heads=1, window=512),
    "1b": dict(num_hidden_layers=26, hidden_size=1152, num_attention_heads=4, num_key_value_heads=1, window=512),
    "4b": dict(num_hidden_layers=34, hidden_size=2560, num_attention_heads=8, num_key_value_heads=4, window=1024),
}
"""Sizes of Gemma 3 that the cache depends on; heads are of 256."""


def gemma(name):
    sizes = dict(GEMMA[name])
    window = sizes.pop("window")
    file = {"model_type": "gemma3_text", "head_dim": 256, "sliding_window": window, "intermediate_size": 2048, **sizes}
    return causal_lm({**file, "max_position_embeddings": 32768})[1]


def held(config, plan):
    """Bytes of the arrays of a cache."""
    shapes = jax.tree.leaves(jax.eval_shape(lambda: new_cache(config, plan)))
    return sum(array.size * array.dtype.itemsize for array in shapes)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("chunk", [1, 2, 5, 8])
@pytest.mark.parametrize("block_size", [1, 4])
def test_most_blocks_is_reached_and_not_exceeded(window, chunk, block_size):
    owned = []
    for computed in range(60):
        first = first_block(computed, window, block_size)
        assert first * block_size <= max(0, computed - window + 1) < (first + 1) * block_size
        owned.append(-(-(computed + chunk) // block_size) - first)
    assert max(owned) == most_blocks(60 + chunk, window, chunk, block_size)


def test_full_attention_keeps_every_block():
    assert first_block(1000, None, 4) == 0
    assert most_blocks(1001, None, 8, 4) == 251


# The numbers of docs/design.md: MiB for one sequence of 32,768 tokens in bfloat16, in steps of 512.
@pytest.mark.parametrize(
    ("name", "all_blocks", "as_planned"), [("270m", 576, 111.5), ("1b", 832, 150.75), ("4b", 4352, 817.9)]
)
def test_a_long_context_of_gemma_takes_a_fifth_of_the_memory(name, all_blocks, as_planned):
    config = gemma(name)
    assert block_bytes(config, 16, jnp.bfloat16) * 2048 / MIB == all_blocks
    options = EngineConfig(max_num_seqs=1, max_num_batched_tokens=512, kv_cache_memory=1 << 33)
    plan = plan_sizes(config, jnp.bfloat16, options)
    assert plan.max_model_len == 32768
    assert held(config, plan) / MIB == pytest.approx(as_planned, abs=0.05)


def test_a_context_that_is_not_given_is_the_longest_that_fits():
    config = gemma("270m")
    options = dict(max_num_seqs=4, max_num_batched_tokens=512, kv_cache_memory=64 * MIB)
    plan = plan_sizes(config, jnp.bfloat16, EngineConfig(**options))
    # Full attention has 3 KiB a token, and windows of 512 with a chunk of 512 take 15 MiB.
    assert plan.max_model_len == 16544
    with pytest.raises(InvalidParameterError, match="64 MiB hold 16544 tokens, but a context of 17000 needs 65 MiB"):
        plan_sizes(config, jnp.bfloat16, EngineConfig(**options, max_model_len=17000))


def test_memory_is_not_exceeded_and_one_sequence_always_fits():
    config = causal_lm(tiny_config(**WINDOWED))[1]
    for memory in range(30_000, 400_000, 7_001):
        plan = plan_sizes(config, "float32", EngineConfig(max_num_seqs=3, block_size=4, kv_cache_memory=memory))
        assert held(config, plan) <= memory
        for group in plan.groups:
            most = most_blocks(plan.max_model_len, group.window, plan.max_num_batched_tokens, 4)
            assert group.num_blocks - 1 >= most


def test_memory_beyond_one_sequence_is_divided_between_windows_and_full_attention():
    plan = CachePlan(windows=(None, 8), block_bytes=(10, 50), block_size=4, chunk=16)
    # One sequence of 100 tokens: 25 blocks and (8 - 1 + 16) tokens in at most 7, besides block 0.
    assert plan.bytes_for(100) == 26 * 10 + 8 * 50
    assert plan.num_blocks(plan.bytes_for(100), 100, 9) == [26, 8]
    assert plan.num_blocks(plan.bytes_for(100) + 800, 100, 9) == [26 + 40, 8 + 8]
    # Windows need 3 blocks for every further sequence; full attention 25.
    assert plan.num_blocks(10_000_000, 100, 9) == [26 + 8 * 25, 8 + 8 * 3]


def test_layers_without_windows_are_planned_as_ever():
    plan = CachePlan(windows=(None,), block_bytes=(10,), block_size=4, chunk=16)
    assert [plan.longest(memory, 400) for memory in (5, 10, 29, 30, 10_000)] == [-1, 0, 1, 2, 100]
    assert plan.num_blocks(500, 100, 3) == [50]
    assert plan.num_blocks(5000, 100, 3) == [76]
