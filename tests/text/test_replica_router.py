"""Choice of a replica: the least work, less what it has read of the prompt."""

from dataclasses import dataclass

import pytest

from verax.text.engine import replicas as routing
from verax.text.engine.replicas import ReplicaRouter
from verax.text.engine.scheduler import SEQUENCE_TOKENS, work

PREFIX = list(range(100, 164))


@dataclass(eq=False)
class Replica:
    load: int = 0


@pytest.fixture
def replicas():
    return [Replica(), Replica(), Replica()]


@pytest.fixture
def router(replicas):
    return ReplicaRouter(replicas, block_size=16)


def test_work_is_what_waits_and_a_constant_for_each_sequence():
    assert work(50, 0) == 50
    assert work(50, 3) == 50 + 3 * SEQUENCE_TOKENS


def test_the_least_work_is_chosen(router, replicas):
    replicas[0].load, replicas[1].load, replicas[2].load = 30, 10, 20
    assert router.choose([1, 2, 3]) is replicas[1]
    replicas[1].load = 25
    assert router.choose([4, 5, 6]) is replicas[2]


def test_a_prompt_goes_where_its_beginning_was_read(router, replicas):
    replicas[0].load = replicas[1].load = 1
    home = router.choose([*PREFIX, 1, 2])
    assert home is replicas[2]
    replicas[0].load = replicas[1].load = 0
    assert router.choose([*PREFIX, 3, 4, 5]) is home
    assert router.choose(PREFIX[:16]) is home
    assert router.choose(PREFIX[:15]) is replicas[0]  # less than a block is not shared
    assert router.choose([1, *PREFIX]) is replicas[0]


def test_a_prompt_leaves_a_replica_that_has_more_work_than_it_would_save(router, replicas):
    assert router.choose(PREFIX) is replicas[0]
    replicas[0].load = 63
    assert router.choose(PREFIX) is replicas[0]
    replicas[0].load = 65
    assert router.choose(PREFIX) is replicas[1]
    # Now both have read it, and the one with less work is chosen.
    replicas[1].load, replicas[2].load = 66, 3
    assert router.choose([*PREFIX, 7]) is replicas[0]


def test_of_two_that_read_a_beginning_the_longer_one_counts(router, replicas):
    assert router.choose(PREFIX[:32]) is replicas[0]
    replicas[0].load = 40
    assert router.choose(PREFIX) is replicas[1]
    replicas[0].load, replicas[1].load = 0, 31
    assert router.choose(PREFIX) is replicas[1]  # 64 - 31 saved there, 32 here
    replicas[1].load = 33
    assert router.choose(PREFIX) is replicas[0]


def test_adapters_share_no_prefix(router, replicas):
    replicas[0].load = 1
    assert router.choose(PREFIX, adapter=3) is replicas[1]
    replicas[0].load = 0
    assert router.choose(PREFIX) is replicas[0]
    assert router.choose(PREFIX, adapter=4) is replicas[0]
    assert router.choose(PREFIX, adapter=3) is replicas[1]


def test_without_a_prefix_cache_work_alone_decides(replicas):
    router = ReplicaRouter(replicas, block_size=None)
    assert router.choose(PREFIX) is replicas[0]
    replicas[0].load = 1
    assert router.choose(PREFIX) is replicas[1]


def test_a_replica_that_was_lost_has_read_nothing_when_it_is_back(router, replicas):
    replicas[0].load = replicas[1].load = 1
    assert router.choose(PREFIX) is replicas[2]
    router.remove(replicas[2])
    assert router.serving == replicas[:2]
    router.add(replicas[2])
    replicas[0].load = 0
    assert router.choose(PREFIX) is replicas[0]


def test_the_memory_of_prompts_is_bounded(router, replicas, monkeypatch):
    monkeypatch.setattr(routing, "MOST_PREFIXES", 8)
    assert router.choose(PREFIX) is replicas[0]
    router.choose(range(1000, 1064))
    router.choose(PREFIX)  # used again: the other one is forgotten first
    router.choose(range(2000, 2064))
    replicas[0].load = 40
    assert router.choose(PREFIX) is replicas[0]
    assert router.choose(range(1000, 1064)) is replicas[1]
    assert len(router._readers) <= 8
