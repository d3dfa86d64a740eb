"""Blocks: allocation, sharing by prefix, eviction. The invariants under random use are in test_scheduler.py."""

import pytest

from tests.support.sequences import make_sequence
from verax.text.block_manager import BlockManager


def serve(blocks, sequence, *, beside=()):
    """Admit a sequence `beside` running ones and pretend that all of its tokens were computed; how many were cached."""
    assert blocks.admit(sequence, len(sequence.tokens))
    assert blocks.grow(sequence, len(sequence.tokens)) is not None
    cached, sequence.num_computed = sequence.num_computed, len(sequence.tokens)
    blocks.register(sequence)
    blocks.check([sequence, *beside])
    return cached


def test_a_prefix_is_shared_block_by_block():
    blocks = BlockManager([20], 4)
    first = make_sequence(range(10))
    second = make_sequence([*range(8), 99, 98])
    assert serve(blocks, first) == 0
    assert blocks.admit(second, 10)
    assert second.num_computed == 8
    assert second.tables == [first.tables[0][:2]]
    blocks.check([first, second])


@pytest.mark.parametrize("length", [1, 4, 8, 9])
def test_the_last_token_is_always_computed(length):
    blocks = BlockManager([20], 4)
    serve(blocks, make_sequence(range(length)))
    again = make_sequence(range(length))
    assert blocks.admit(again, length)
    assert again.num_computed == (length - 1) // 4 * 4
    assert again.num_to_compute >= 1


def test_a_block_is_found_only_behind_its_own_prefix():
    blocks = BlockManager([20], 4)
    serve(blocks, make_sequence([1, 1, 1, 1, 2, 2, 2, 2, 3]))
    other = make_sequence([7, 7, 7, 7, 2, 2, 2, 2, 3])
    assert blocks.admit(other, 9)
    assert other.num_computed == 0


def test_equal_hashes_of_different_tokens_do_not_mix():
    class Colliding(int):
        def __hash__(self):
            return 1

    blocks = BlockManager([20], 2)
    serve(blocks, make_sequence([Colliding(i) for i in (5, 6, 7)]))
    other = make_sequence([Colliding(i) for i in (6, 5, 7)])
    assert blocks.admit(other, 3)
    assert other.num_computed == 0


def test_released_blocks_stay_cached_until_they_are_needed():
    blocks = BlockManager([5], 4)  # four usable
    first = make_sequence(range(9))
    serve(blocks, first)
    blocks.release(first)
    again = make_sequence(range(9))
    assert serve(blocks, again) == 8
    blocks.release(again)
    serve(blocks, big := make_sequence(range(100, 116)))  # takes all four
    blocks.release(big)
    assert serve(blocks, make_sequence(range(9))) == 0


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    blocks = BlockManager([5], 4)
    first = make_sequence(range(13))
    serve(blocks, first)
    blocks.release(first)
    other = make_sequence([50, 51])  # takes the block that nobody cached
    serve(blocks, other)
    third = make_sequence([60, 61])  # takes the end of the prefix
    serve(blocks, third, beside=[other])
    again = make_sequence(range(13))
    assert blocks.admit(again, 8)
    assert again.num_computed == 8


def test_no_room_changes_nothing():
    blocks = BlockManager([4], 4)
    serve(blocks, running := make_sequence(range(8)))
    assert not blocks.admit(make_sequence(range(50, 59)), 9)
    assert blocks.grow(running, 40) is None
    assert len(running.tables[0]) == 2
    blocks.check([running])


def test_idle_cached_blocks_are_not_counted_twice_as_room():
    blocks = BlockManager([4], 4)  # three usable
    first = make_sequence(range(12))
    serve(blocks, first)
    blocks.release(first)
    # 8 of its tokens are cached in idle blocks; with them it needs 4 blocks in all, and there are 3.
    assert not blocks.admit(make_sequence([*range(8), 1, 2, 3, 4, 5]), 13)


def test_caching_can_be_off():
    blocks = BlockManager([20], 4, enable_prefix_caching=False)
    serve(blocks, first := make_sequence(range(10)))
    assert serve(blocks, make_sequence(range(10)), beside=[first]) == 0


def test_reset_forgets_prefixes_and_keeps_running_sequences():
    blocks = BlockManager([20], 4)
    first = make_sequence(range(10))
    serve(blocks, first)
    blocks.reset_prefix_cache()
    blocks.check([first])
    assert serve(blocks, make_sequence(range(10)), beside=[first]) == 0


def test_check_notices_a_lost_block():
    blocks = BlockManager([20], 4)
    first = make_sequence(range(10))
    serve(blocks, first)
    first.num_computed = 8
    first.tables[0].pop()
    with pytest.raises(AssertionError, match="references"):
        blocks.check([first])
