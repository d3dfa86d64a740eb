"""Requests that ask for more work than a request may: each is one error, and nobody else waits for it."""

import concurrent.futures
import json
import threading
import time

import httpx
import pytest

from verax.errors import StructuredOutputError
from verax.text.features import grammar

PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("av")

ASKED = {"messages": [{"role": "user", "content": "abc"}], "ignore_eos": True}
CHAT, COMPLETE, EMBED, VIDEOS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/videos"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def api(http, new_server):
    with http(new_server()) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (COMPLETE, {"prompt": "a" * 5_000_000}, 400, "prompt"),
        (COMPLETE, {"prompt": [1] * 2_000_000}, 400, "prompt"),
        (COMPLETE, {"prompt": ["a"] * 257}, 400, "prompt"),
        (COMPLETE, {"prompt": ["a"] * 256, "n": 8}, 429, None),
        (COMPLETE, {"prompt": "a", "n": 128}, 400, "n"),
        (COMPLETE, {"prompt": "a", "stop": "z" * 1025}, 400, "stop"),
        (COMPLETE, {"prompt": "a", "stop": ["a"] * 17}, 400, "stop"),
        (COMPLETE, {"prompt": "a", "stop_token_ids": [1] * 100_000}, 400, "stop_token_ids"),
        (COMPLETE, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(100_000)), 1)}, 400, "logit_bias"),
        (COMPLETE, {"prompt": "a", "guided_choice": ["a" * i for i in range(1, 1000)]}, 400, "guided_choice"),
        (COMPLETE, {"prompt": "a", "guided_regex": "(a{1000}){1000}"}, 400, "guided_regex"),
        (COMPLETE, {"prompt": "a", "guided_regex": "(" * 30_000 + ")" * 30_000}, 400, "guided_regex"),
        (COMPLETE, {"prompt": "a", "guided_regex": "a" * 100_000}, 400, "guided_regex"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 10_000}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 10_000}]}, 400, "messages"),
        (CHAT, {**ASKED, "stop": ["z" * 500_000] * 4}, 400, "stop"),
        (CHAT, {**ASKED, "tools": [TOOL] * 10_000, "tool_choice": "required"}, 400, None),
        (CHAT, {**ASKED, "chat_template_kwargs": {f"a{i}": 1 for i in range(65)}}, 400, "chat_template_kwargs"),
        (CHAT, {**ASKED, "chat_template_kwargs": {"__class__": 1}}, 400, "chat_template_kwargs"),
        (CHAT, {**ASKED, "chat_template_kwargs": {"a": "b" * 9_000_000}}, 413, "body"),
        (EMBED, {"input": ["a"] * 2049}, 400, "input"),
        (EMBED, {"input": "a " * 1_000_000}, 400, "input"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_too_much_work_is_one_error(api, path, body, status, param):
    response = api.post(path, json=body)
    assert response.status_code == status, response.text[:500]
    error = response.json()["error"]
    assert error["param"] == param or param is None
    assert len(error["message"]) < 1000
    assert after_the_queue(api).status_code == 200


def after_the_queue(api):
    """A short answer, as soon as what was refused in part has left the queue."""
    for _ in range(1000):
        answer = api.post(CHAT, json={**ASKED, "max_tokens": 1})
        if answer.status_code != 429:
            break
        time.sleep(0.01)
    return answer


def test_megabytes_of_text_are_not_tokenised_for_a_vector(api, served_encoder, monkeypatch):
    tokenised, tokenize = [], served_encoder.tokenize

    def watched(texts, **options):
        tokenised.extend(map(len, texts))
        return tokenize(texts, **options)

    monkeypatch.setattr(served_encoder, "tokenize", watched)
    long = "the cat " * 500_000
    error = api.post(EMBED, json={"input": ["a", long]}).json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert error["n_prompt_tokens"] > error["n_ctx"] == 16
    cut = api.post(EMBED, json={"input": long, "truncate_prompt_tokens": -1}).json()
    assert cut["usage"]["prompt_tokens"] == 16
    assert max(tokenised) < 2000


def test_as_many_texts_as_openai_takes_are_embedded(api):
    found = api.post(EMBED, json={"input": ["a"] * 2048}).json()["data"]
    assert [one["index"] for one in found] == list(range(2048))


def test_a_prompt_of_megabytes_is_refused_without_being_tokenised(api, served_llm, monkeypatch):
    tokenised = []
    encode = type(served_llm.tokenizer).encode
    monkeypatch.setattr(
        type(served_llm.tokenizer),
        "encode",
        lambda self, text, **options: tokenised.append(len(text)) or encode(self, text, **options),
    )
    long = "a" * 1_000_000
    for path, body in {CHAT: {"messages": [{"role": "user", "content": long}]}, COMPLETE: {"prompt": long}}.items():
        error = api.post(path, json=body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["n_prompt_tokens"] > error["n_ctx"] == 128
    assert not tokenised
    assert api.post("/tokenize", json={"prompt": "a" * 100_000}).json()["count"] > 128


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_takes_too_long_ends_its_request_alone(api, monkeypatch, stream):
    def fail(*_):
        raise StructuredOutputError("structured_outputs: the grammar is too ambiguous")

    monkeypatch.setattr(grammar.GrammarMatcher, "fill", fail)
    form = {"max_tokens": 50, "structured_outputs": {"grammar": 'start: s\ns: s s | "a" | "b" | "ab"'}}
    with api.stream("POST", COMPLETE, json={"prompt": "abc", "max_tokens": 100, "stream": True}) as other:
        lines = other.iter_lines()
        next(lines)
        response = api.post(COMPLETE, json={"prompt": "abc", "stream": stream, **form})
        rest = [line for line in lines if line]
    # The first mask fails, so that a stream, too, has its real status.
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "structured_outputs"
    assert "ambiguous" in error["message"]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] in ("stop", "length")


def test_nobody_waits_for_grammars_that_compile(api, monkeypatch):
    done, compile_grammar = threading.Event(), grammar.GrammarCompiler.compile

    def slow(self, wanted):
        assert done.wait(60)
        return compile_grammar(self, wanted)

    monkeypatch.setattr(grammar.GrammarCompiler, "compile", slow)
    formed = {"prompt": "abc", "max_tokens": 2, "guided_choice": ["a", "b"]}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        try:
            waiting = [pool.submit(api.post, COMPLETE, json=formed) for _ in range(4)]
            assert api.post(CHAT, json={**ASKED, "max_tokens": 1}).status_code == 200
            assert not any(answer.done() for answer in waiting)
        finally:
            done.set()
        assert [answer.result().status_code for answer in waiting] == [200] * 4
