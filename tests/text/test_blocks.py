"""Blocks: allocation, eviction, shared prefixes, windows, and the division of memory among cache groups."""

import jax
import jax.numpy as jnp
import pytest

from tests.support.invariants import check_blocks
from tests.support.sequences import admit, make_sequence
from tests.support.tiny import WINDOWED, tiny_config
from verax.errors import InvalidParameterError
from verax.models import causal_lm
from verax.text.engine.blocks import BlockManager, first_block, most_blocks
from verax.text.engine.engine_config import EngineConfig
from verax.text.step.program import new_cache
from verax.text.step.sizes import plan_sizes


def serve(blocks, sequence, *, others=()):
    """Admit a sequence next to running ones, as if all of its tokens were computed; the number that was cached."""
    assert admit(blocks, sequence, len(sequence.tokens))
    assert blocks.grow(sequence, len(sequence.tokens)) is not None
    cached, sequence.num_computed = sequence.num_computed, len(sequence.tokens)
    blocks.register(sequence)
    check_blocks(blocks, [sequence, *others])
    return cached


def found(blocks, tokens, **options):
    """Number of tokens of a prompt that a new sequence finds in the cache."""
    sequence = make_sequence(tokens)
    assert admit(blocks, sequence, len(sequence.tokens), **options)
    computed = sequence.num_computed
    assert sequence.num_to_compute >= 1
    blocks.release(sequence)
    return computed


def test_a_prefix_is_shared_block_by_block():
    blocks = BlockManager([20], 4)
    first, second = make_sequence(range(10)), make_sequence([*range(8), 99, 98])
    assert serve(blocks, first) == 0
    assert admit(blocks, second, 10)
    assert second.num_computed == 8
    assert second.tables == [first.tables[0][:2]]
    check_blocks(blocks, [first, second])


@pytest.mark.parametrize("length", [1, 4, 8, 9])
def test_the_last_token_is_always_computed(length):
    blocks = BlockManager([20], 4)
    serve(blocks, make_sequence(range(length)))
    assert found(blocks, range(length)) == (length - 1) // 4 * 4


def test_equal_hashes_of_different_tokens_do_not_mix():
    class Colliding(int):
        def __hash__(self):
            return 1

    blocks = BlockManager([20], 2)
    serve(blocks, make_sequence([Colliding(i) for i in (5, 6, 7)]))
    assert found(blocks, [Colliding(i) for i in (6, 5, 7)]) == 0


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    blocks = BlockManager([5], 4)
    first = make_sequence(range(13))
    serve(blocks, first)
    blocks.release(first)
    other = make_sequence([50, 51])  # takes the block that nobody cached
    serve(blocks, other)
    third = make_sequence([60, 61])  # takes the end of the prefix
    serve(blocks, third, others=[other])
    again = make_sequence(range(13))
    assert admit(blocks, again, 8)
    assert again.num_computed == 8


def test_idle_cached_blocks_are_not_counted_twice_as_room():
    blocks = BlockManager([4], 4)  # three usable
    first = make_sequence(range(12))
    serve(blocks, first)
    blocks.release(first)
    # 8 of its tokens are cached in idle blocks; with them it needs 4 blocks in all, and there are 3.
    assert not admit(blocks, make_sequence([*range(8), 1, 2, 3, 4, 5]), 13)


@pytest.mark.parametrize("caching", [True, False])
def test_caching_can_be_off_and_a_reset_forgets_prefixes_and_keeps_running_sequences(caching):
    blocks = BlockManager([20], 4, enable_prefix_caching=caching)
    serve(blocks, first := make_sequence(range(10)))
    assert found(blocks, range(10)) == 8 * caching
    blocks.reset_prefix_cache()
    check_blocks(blocks, [first])
    assert serve(blocks, make_sequence(range(10)), others=[first]) == 0


# Groups: blocks before a sliding window are given back, blocks of full attention stay.


def compute(blocks, sequence, *, chunk):
    """Admit a sequence and pretend that it is computed in chunks."""
    assert admit(blocks, sequence, len(sequence.tokens), chunk=chunk)
    while sequence.num_to_compute:
        computed = min(sequence.num_computed + chunk, len(sequence.tokens))
        assert blocks.grow(sequence, computed) is not None
        sequence.num_computed = computed
        blocks.register(sequence)
        check_blocks(blocks, [sequence])


def test_a_prefix_is_found_as_long_as_its_last_window_is_cached():
    blocks = BlockManager([20, 6], 4, windows=[None, 6])  # five usable with the window
    sequence = make_sequence(range(33))
    compute(blocks, sequence, chunk=4)
    blocks.release(sequence)
    # Blocks 4 to 8 are cached. A text of n blocks needs the two before n.
    assert found(blocks, range(33), chunk=4) == 32
    assert found(blocks, [*range(24), 99], chunk=4) == 24
    assert found(blocks, [*range(20), 99], chunk=4) == 0
    assert found(blocks, range(9), chunk=4) == 0


def test_a_text_is_found_by_its_end_when_its_beginning_is_gone():
    blocks = BlockManager([6], 4, windows=[6])
    sequence = make_sequence(range(33))
    compute(blocks, sequence, chunk=4)
    blocks.release(sequence)
    assert found(blocks, range(33), chunk=4) == 32
    other = make_sequence([*range(100, 104), *range(4, 33)])  # the same blocks after another beginning
    assert found(blocks, other.tokens, chunk=4) == 0
    again = make_sequence(range(33))
    assert admit(blocks, again, 33, chunk=4)
    assert [bool(block) for block in again.tables[0]] == [False] * 6 + [True] * 2


def test_a_short_prefix_is_found_where_a_group_lacks_the_longer_one():
    blocks = BlockManager([40, 20], 4, windows=[None, 6])
    first = make_sequence(range(17))
    compute(blocks, first, chunk=4)
    blocks.release(first)
    assert found(blocks, [*range(8), 99], chunk=4) == 8  # their blocks are the last ones used
    taken = make_sequence(range(100, 164))
    assert admit(blocks, taken, 64)
    blocks.grow(taken, 64)  # 14 unused blocks before the window, and the blocks of tokens 16 and 12 to 15
    assert [found(blocks, [*range(n), 99], chunk=4) for n in (16, 12, 8, 4)] == [12, 12, 8, 4]


def test_prefixes_that_nothing_uses_are_forgotten():
    blocks = BlockManager([6], 4, windows=[6])
    for begin in range(0, 1000, 100):
        sequence = make_sequence(range(begin, begin + 33))
        compute(blocks, sequence, chunk=4)
        assert len(blocks._prefixes) <= 8 + 8  # of the sequence, and of the one before it whose blocks are left
        blocks.release(sequence)
    blocks.reset_prefix_cache()
    assert len(blocks._prefixes) == 0


MIB = 1 << 20
GEMMA = dict(num_hidden_layers=18, hidden_size=640, num_attention_heads=4, num_key_value_heads=1, head_dim=256) | dict(
    model_type="gemma3_text", sliding_window=512, intermediate_size=2048, max_position_embeddings=32768
)
"""config.json of Gemma 3 270M, as far as the cache depends on it."""


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


def test_a_context_that_is_not_given_is_the_longest_that_fits():
    config = causal_lm(GEMMA)[1]
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
