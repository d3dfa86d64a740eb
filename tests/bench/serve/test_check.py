"""Checks of answers: what is identical, what parts by a near tie, and what belongs to another request."""

import asyncio
import zlib
from dataclasses import replace

import pytest

from tests.support.fake_server import FakeServer
from verax.bench.serve.check import MOST_TIES, check_answers
from verax.bench.serve.client import Answer, ask
from verax.bench.serve.load import Load, run_load
from verax.bench.serve.traffic import Request, Traffic

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTH = 12


def continued(tokens, count, ties=()):
    """Greedy answer of a toy model: each letter follows from all before; at each of `ties` it is the second best."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append((zlib.crc32(bytes(tokens)) + (len(tokens) in ties)) % 26)
    return tokens[-count:]


def text_of(tokens):
    return "".join(LETTERS[token] for token in tokens)


def answered(number, prompt, ties=()):
    request = Request(number, prompt, LENGTH, slow=number == 0, leave_after=9 if number == 1 else None)
    made = Answer(request, 0.0, text=text_of(continued(prompt, LENGTH, ties)))
    made.completion_tokens = LENGTH
    return made


async def ask_toy(request):
    assert not request.slow
    assert request.leave_after is None
    return Answer(request, 0.0, text=text_of(continued(request.prompt, request.max_tokens)))


async def spell(text):
    return [LETTERS.index(letter) for letter in text]


async def cannot_spell(text):
    return None


def counted(*answers, tokenize=spell):
    report = asyncio.run(check_answers(ask_toy, tokenize, answers, most=100))
    return {name: report[name] for name in ("identical", "diverged", "mixed", "failed")}


def test_answers_of_slow_and_leaving_clients_are_asked_for_by_patient_ones():
    found = counted(answered(0, (1, 2)), answered(1, (3, 4)))
    assert found == {"identical": 2, "diverged": 0, "mixed": 0, "failed": 0}


@pytest.mark.parametrize("ties", [(2,), (5,), (LENGTH + 1,), (3, 9), (2, 3, 6)])
def test_an_answer_that_parts_at_near_ties_follows_from_its_prompt(ties):
    assert counted(answered(0, (1, 2), ties))["diverged"] == 1


def test_an_answer_of_another_request_or_with_a_part_of_one_is_mixed():
    own, other = answered(0, (1, 2)), answered(1, (7, 15))
    assert counted(replace(own, text=other.text))["mixed"] == 1
    assert counted(replace(own, text=own.text[:4] + other.text[4:]))["mixed"] == 1
    assert MOST_TIES < LENGTH - 4


def test_without_tokens_the_beginnings_of_the_texts_are_compared():
    own, other = answered(0, (1, 2)), answered(1, (7, 15))
    assert counted(answered(0, (1, 2), (5,)), other, tokenize=cannot_spell)["diverged"] == 1
    assert counted(replace(own, text=other.text), other, tokenize=cannot_spell)["mixed"] == 1


def checked(server, count=12, most=6):
    async def main():
        async with server.serving() as target:
            send = lambda request: ask(target, request)
            done = await run_load(send, Load("a", concurrency=4, num_requests=count), Traffic(1000).requests())
            return await check_answers(send, cannot_spell, done.answers, most=most)

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


def test_a_request_that_fails_when_it_is_asked_again_is_counted():
    assert checked(FakeServer(faults=dict.fromkeys(range(12, 99), "429")))["failed"] == 6
