"""`/v1/completions`: prompts in all forms, echo, log-probabilities, streams that equal whole answers; tokens."""

import time

import numpy as np
import pytest

from tests.serve.conftest import error_of, joined, named
from verax.serve.text.completions import CompletionLogprobs
from verax.text.engine.async_llm import AsyncLLM
from verax.text.engine.outputs import Logprob

PATH = "/v1/completions"
BODY = {"prompt": "once upon", "max_tokens": 8, "seed": 3, "ignore_eos": True}


def test_an_answer_has_openais_fields_and_16_tokens_by_default(api):
    body = api.ok(PATH, {"prompt": "abc", "ignore_eos": True})
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2, "prompt": ["once", "the fox", "abc"]},
        {"echo": True, "logprobs": 2, "return_token_ids": True},
        {"prompt": [[5, 6, 7], [8, 9]], "logprobs": 0},
        {"prompt": [5, 6, 7], "echo": True},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"stop": "e", "max_tokens": 40},
    ],
)
def test_a_stream_joined_is_the_whole_answer(api, more):
    body = {**BODY, **more}
    whole = api.ok(PATH, body)
    chunks = api.stream(PATH, {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert chunks[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    for choice in whole["choices"]:
        result = joined(chunks, choice["index"])
        # Two prompts may be in one step or in two, whose programs round differently.
        scores = [lists.pop("token_logprobs") for lists in (result["logprobs"], choice["logprobs"]) if lists]
        if scores:
            np.testing.assert_allclose(*(np.asarray(values, np.float64) for values in scores), rtol=1e-5)
        for name in ("text", "logprobs", "finish_reason"):
            assert result[name] == choice[name]


def test_an_engine_without_a_tokenizer_gives_tokens_and_refuses_what_needs_their_text(make_api, new_llm):
    llm = new_llm()
    llm.tokenizer = None
    api, body = make_api(AsyncLLM.from_llm(llm)), {**BODY, "prompt": [5, 6], "return_token_ids": True}
    (choice,) = api.ok(PATH, body)["choices"]
    assert (choice["text"], len(choice["token_ids"])) == ("", 8)
    assert api.refused(PATH, {**body, "logprobs": 0})["param"] == "logprobs"
    assert api.refused(PATH, {**body, "echo": True})["param"] == "echo"


def test_choices_of_several_prompts_are_in_their_order(api):
    one_by_one = [api.ok(PATH, {**BODY, "prompt": prompt})["choices"][0]["text"] for prompt in ("once", "abc")]
    body = api.ok(PATH, {**BODY, "prompt": ["once", "abc"], "n": 2})
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [body["choices"][i]["text"] for i in (0, 2)] == one_by_one
    assert body["usage"]["completion_tokens"] == 4 * BODY["max_tokens"]


def test_the_log_line_counts_the_tokens_of_all_prompts(api, caplog):
    with caplog.at_level("INFO", logger="verax.serve.access"):
        usage = api.ok(PATH, {**BODY, "prompt": ["once upon", "abc"], "n": 2})["usage"]
    fields = caplog.records[-1].fields
    for name in ("prompt_tokens", "completion_tokens"):
        assert fields[name] == usage[name]


def test_no_tokens_at_all_end_by_their_number_whatever_the_next_one_is(api):
    body = {**BODY, "return_token_ids": True}
    (token,) = api.ok(PATH, {**body, "max_tokens": 1})["choices"][0]["token_ids"]
    (choice,) = api.ok(PATH, {**body, "max_tokens": 0, "stop_token_ids": [token]})["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("length", None, [])


def test_an_echo_of_nothing_more_is_the_prompt_with_its_logprobs(api):
    body = api.ok(PATH, {**BODY, "echo": True, "max_tokens": 0, "logprobs": 1})
    (choice,) = body["choices"]
    assert choice["text"] == "once upon"
    assert body["usage"]["completion_tokens"] == 0
    lists = choice["logprobs"]
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    assert all(value < 0 for value in lists["token_logprobs"][1:])
    assert "".join(lists["tokens"]) == "once upon"
    offsets = [len("".join(lists["tokens"][:i])) for i in range(len(lists["tokens"]))]
    assert lists["text_offset"] == offsets


def test_logprobs_have_as_many_best_tokens_as_asked_for(api):
    lists = api.ok(PATH, {**BODY, "logprobs": 3})["choices"][0]["logprobs"]
    assert len(lists["tokens"]) == 8
    for token, logprob, best in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
        assert 3 <= len(best) <= 4
        assert best[token] == logprob  # of the sampled token, whatever its rank


def test_offsets_are_in_the_text_that_is_returned(api, engine):
    text = "a 😀 fox"
    body = {**BODY, "prompt": text, "echo": True, "logprobs": 1, "stop": "e", "max_tokens": 40}
    (choice,) = api.ok(PATH, {**body, "logit_bias": {"40": 5}})["choices"]
    lists = choice["logprobs"]
    offsets = lists["text_offset"]
    assert offsets == sorted(offsets)
    assert max(offsets) <= len(choice["text"])
    for i, (token, offset) in enumerate(zip(lists["tokens"], offsets, strict=True)):
        if "\ufffd" not in token and i < len(engine.tokenizer.encode(text)):
            assert choice["text"].startswith(token, offset)


def test_tokens_of_one_text_stand_side_by_side(engine):
    tokenizer = engine.tokenizer
    first, second = [token for token in range(tokenizer.vocab_size) if tokenizer.decode([token]) == "\ufffd"][:2]
    logprobs = CompletionLogprobs(1, tokenizer)
    entry = {first: Logprob(-0.1, 1, "\ufffd"), second: Logprob(-3.0, 2, "\ufffd")}
    logprobs.add([first, second], [entry, entry])
    expected = [{"\ufffd": -0.1}, {f"token_id:{first}": -0.1, "\ufffd": -3.0}]
    assert logprobs.take()["top_logprobs"] == expected


@pytest.mark.parametrize(
    ("change", "param"),
    [
        *named("prompt", None, [], "", [[]], ["a", 1], [10**6], [-1], "fox " * 300),
        *named("suffix", "x"),
        *named("best_of", 2),
        *named("logprobs", 6),
        *named("messages", [{"role": "user", "content": "a"}]),
        *named("max_completion_tokens", 4),
        *named("chat_template_kwargs", {"enable_thinking": False}),
        *named("repeat_penalty", 1.3),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(api, change, param):
    for stream in (False, True):
        assert api.refused(PATH, {**BODY, "stream": stream, **change})["param"] == param


def test_more_prompts_than_the_queue_holds_are_a_429_and_leave_nothing(api, engine):
    response = api.post(PATH, {**BODY, "prompt": ["once"] * 60})
    error = error_of(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert response.headers["retry-after"]
    end = time.monotonic() + 60
    while engine.stats().num_requests_waiting and time.monotonic() < end:  # the engine's thread aborts what was queued
        time.sleep(0.01)
    assert engine.stats().num_requests_waiting == 0
    api.ok(PATH, BODY)


def test_a_text_goes_to_tokens_and_back(api):
    for prefix in ("", "/v1"):
        result = api.ok(f"{prefix}/tokenize", {"prompt": "the café 🦊", "return_token_strs": True})
        assert result["count"] == len(result["tokens"]) == len(result["token_strs"])
        assert result["max_model_len"] == 128
        assert api.ok(f"{prefix}/detokenize", {"tokens": result["tokens"]}) == {"prompt": "the café 🦊"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 10**6]}, "tokens[1]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_a_wrong_field_of_the_tokenizer_is_named(api, path, body, param):
    assert api.refused(path, body)["param"] == param
