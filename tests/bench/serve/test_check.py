"""Checks of answers: what is identical, what has parted, and what belongs to another request."""

import asyncio

from tests.support.fake_server import FakeServer
from verax.bench.serve.check import check_answers, count_answers
from verax.bench.serve.client import Answer, ask
from verax.bench.serve.load import Load, run_load
from verax.bench.serve.traffic import Request, Traffic


def said(text, **changes):
    made = Answer(Request(0, (5,), 1), 0.0, text=text)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_answers_are_identical_part_or_belong_to_another_request():
    references = [said("the cat sat on"), said("a dog ran away"), said("one two three"), said("x", error="timeout")]
    loaded = [said("the cat sat on"), said("a dog ran home"), said("a dog ran away"), said("x")]
    assert count_answers(loaded, references) == {
        "checked": 4,
        "failed": 1,
        "identical": 1,
        "diverged": 1,
        "mixed": 1,
        "distinct": 4,
    }


def checked(server, count=12, most=6):
    async def main():
        async with server.serving() as target:
            send = lambda request: ask(target, request)
            done = await run_load(send, Load("a", concurrency=4, num_requests=count), Traffic(1000).requests())
            return await check_answers(send, done.answers, most=most)

    return asyncio.run(main())


def test_a_faultless_server_loses_and_mixes_nothing():
    assert checked(FakeServer()) == {
        "checked": 6,
        "failed": 0,
        "identical": 6,
        "diverged": 0,
        "mixed": 0,
        "distinct": 6,
        "repeated_ids": 0,
        "lost": 0,
    }


def test_wrong_texts_cut_streams_and_other_ids_are_found():
    report = checked(FakeServer(faults={0: "other text", 1: "cut", 2: "other id", 3: "short"}), count=10, most=100)
    assert (report["checked"], report["identical"], report["diverged"], report["lost"]) == (7, 6, 1, 3)
