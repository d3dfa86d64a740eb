"""Replicas: the choice of one, bursts over several, and their end."""

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest

from tests.support.engine import LONG, as_replicas, finish, generate, until_idle
from tests.support.invariants import check_engine
from tests.text.conftest import make_llm
from verax import AsyncLLM, SamplingParams
from verax.errors import EngineDeadError
from verax.text.engine import replicas as routing
from verax.text.engine.replicas import ReplicaRouter

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 200, 9).tolist() for _ in range(8)]


@pytest.fixture(scope="module")
def pair(tiny_folder, llm):
    return as_replicas(make_llm(tiny_folder), make_llm(tiny_folder))


@pytest.fixture
def served(pair):
    served = AsyncLLM.from_llm(pair)
    yield served
    asyncio.run(served.shutdown())
    for engine in pair.engines:
        check_engine(engine)
        assert engine.scheduler.blocks.usage == 0


async def test_a_burst_is_spread_and_answered_as_by_one_engine(llm, served, pair):
    prompts = [*PROMPTS, "once upon a time", "a small fox", "the river"]
    expected = generate(llm, prompts, GREEDY)
    before = [engine.num_generated_tokens for engine in pair.engines]
    outputs = await asyncio.gather(*(served.collect(prompt, GREEDY) for prompt in prompts))
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    assert [output.prompt for output in outputs] == [output.prompt for output in expected]
    served_by = [engine.num_generated_tokens - count for engine, count in zip(pair.engines, before, strict=True)]
    assert sum(served_by) == 12 * 11
    assert min(served_by) >= 12 * 5


def test_the_synchronous_engine_spreads_requests_and_ends_them_by_id(pair):
    names = [pair.add_request(prompt, GREEDY) for prompt in PROMPTS]
    assert len(set(names)) == 8
    assert [len(engine.scheduler.waiting) for engine in pair.engines] == [4, 4]
    with pytest.raises(ValueError, match=r"request_id: .* in use"):
        pair.add_request(PROMPTS[0], GREEDY, request_id=names[0])
    for name in names[2:]:
        assert pair.abort(name).outputs[0].finish_reason == "abort"
    assert sorted(output.request_id for output in finish(pair)) == sorted(names[:2])
    (output,) = generate(pair, "once upon a time", GREEDY)
    assert "".join(pair.stream("once upon a time", GREEDY)) == output.outputs[0].text


async def test_a_prompt_goes_where_its_prefix_is_cached(served):
    prefix, before = RNG.integers(3, 200, 48).tolist(), served.replica_stats()
    busy = served.generate(PROMPTS[0], LONG)
    await anext(busy)  # at the first replica
    first = await served.collect([*prefix, 5], GREEDY)
    await busy.aclose()
    await until_idle(served)
    second = await served.collect([*prefix, 6, 7], GREEDY)
    other = await served.collect(RNG.integers(3, 200, 48).tolist(), GREEDY)
    assert (first.num_cached_tokens, second.num_cached_tokens, other.num_cached_tokens) == (0, 48, 0)
    after = served.replica_stats()
    read = [now.prompt_tokens - then.prompt_tokens for now, then in zip(after, before, strict=True)]
    assert read == [len(PROMPTS[0]) + 48, 49 + 50]


async def test_aborted_closed_and_finished_requests_end_at_their_replica(served):
    streams = [served.generate(prompt, LONG, request_id=str(i)) for i, prompt in enumerate([*PROMPTS, "a text"])]
    for stream in streams:
        await anext(stream)
    served.abort("3")
    parts = [output async for output in streams[3]]
    assert parts[-1].outputs[0].finish_reason == "abort"
    preparing = served.generate("another text", LONG, request_id="late")
    await preparing.aclose()
    for stream in streams[4:]:
        await stream.aclose()
    rest = await asyncio.gather(*(served.collect(prompt, GREEDY) for prompt in PROMPTS))
    assert all(len(output.outputs[0].token_ids) == 12 for output in rest)
    for stream in streams[:3]:
        await stream.aclose()
    await until_idle(served)


async def test_an_error_of_one_replica_fails_every_request_and_refuses_new_ones(tiny_folder):
    pair = as_replicas(make_llm(tiny_folder), make_llm(tiny_folder))
    served = AsyncLLM.from_llm(pair)
    broken = ZeroDivisionError("planted")

    def advance():
        raise broken

    streams = [served.generate(prompt, LONG) for prompt in PROMPTS]
    for stream in streams:
        await anext(stream)
    streams += [served.generate("a text", LONG), *(served.generate(PROMPTS[0], LONG) for _ in range(12))]
    pair.engines[1].advance = advance
    for stream in streams:
        with pytest.raises(EngineDeadError, match="planted") as raised:
            _ = [output async for output in stream]
        assert raised.value.__cause__ is broken
    assert served.error is broken
    assert not served.is_running
    with pytest.raises(EngineDeadError, match="planted"):
        served.generate(PROMPTS[1], GREEDY)
    await served.shutdown()
    assert not any(thread._thread.is_alive() for thread in served._replicas.threads)
    assert not pair.engines[0].has_unfinished_requests


PREFIX = list(range(100, 164))


@dataclass(eq=False)
class Replica:
    load: int = 0


def test_the_memory_of_prompts_is_bounded(monkeypatch):
    replicas = [Replica(), Replica(), Replica()]
    router = ReplicaRouter(replicas, block_size=16)
    monkeypatch.setattr(routing, "MOST_PREFIXES", 8)
    assert router.choose(PREFIX) is replicas[0]
    router.choose(range(1000, 1064))
    router.choose(PREFIX)  # used again: the other one is forgotten first
    router.choose(range(2000, 2064))
    replicas[0].load = 40
    assert router.choose(PREFIX) is replicas[0]
    assert router.choose(range(1000, 1064)) is replicas[1]
    assert len(router._readers) <= 8
