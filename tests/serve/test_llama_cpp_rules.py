"""Rules of llama.cpp's server (`tools/server/tests/unit`) that no other test of this folder holds."""

import math

import pytest
from starlette.testclient import TestClient
from tokenizers.processors import TemplateProcessing

from tests.serve.conftest import prompt_of, text_of
from tests.support.tiny import CHAT_TEMPLATE, END
from verax.serve.app import create_app
from verax.serve.http.server import Server
from verax.serve.http.settings import ServerSettings
from verax.serve.text.run import Usage
from verax.text.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "the river"}]
BODIES = {CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "the river"}}
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}

paths = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def with_template(llm, monkeypatch, ending):
    """Add text after the announcement of an answer in the chat template."""
    template = CHAT_TEMPLATE.replace("{% endif %}", ending + "{% endif %}")
    monkeypatch.setattr(llm.tokenizer, "_chat_templates", {"default": template})


# Answers.


@paths
def test_each_answer_and_chunk_names_the_build(api, path):
    body = {**BODIES[path], **GREEDY}
    names = {part["system_fingerprint"] for part in (api.ok(path, body), *api.stream(path, body))}
    assert len(names) == 1
    assert names.pop().startswith("verax-")


@paths
def test_the_prompts_beginning_is_taken_from_the_cache(api, path):
    text = "1 2 3 4 5 6 7 8 9"
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    _, again = (api.ok(path, {**body, **GREEDY}) for _ in range(2))
    usage, timings = again["usage"], again["timings"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == timings["cache_n"] > 0
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]


# Times.


@paths
def test_times_come_at_the_end_and_are_numbers(api, path):
    body = {**BODIES[path], **GREEDY, "stream_options": {"include_usage": True}}
    chunks = api.stream(path, body)
    assert not any("timings" in chunk for chunk in chunks[:-2])  # a slow server sends all tokens in one
    assert chunks[-1]["choices"] == []
    for times in (chunks[-2]["timings"], chunks[-1]["timings"]):
        assert times["predicted_n"] == 8
        assert all(math.isfinite(value) and value >= 0 for value in times.values())
        assert {"prompt_per_second", "predicted_per_second"} <= set(times)


@pytest.mark.parametrize(
    ("samples", "tokens", "rate", "each"), [(1, 16, 7.5, 133.333), (1, 1, 0, 0), (2, 8, 7, 142.857)]
)
def test_the_rate_leaves_out_first_tokens_which_the_prompts_step_makes(samples, tokens, rate, each):
    parts = [CompletionOutput(index, "", tuple(range(tokens)), None, None, "length") for index in range(samples)]
    metrics = RequestMetrics(arrival_time=1.0, first_token_time=1.5, finished_time=3.5)
    usage = Usage()
    usage.add(RequestOutput("a", "b", tuple(range(10)), None, parts, True, 8, metrics))
    times = usage.timings()
    assert (times["prompt_ms"], times["prompt_per_token_ms"], times["prompt_per_second"]) == (500, 250, 4)
    assert (times["predicted_n"], times["predicted_ms"]) == (samples * tokens, 2000)
    assert (times["predicted_per_second"], times["predicted_per_token_ms"]) == (rate, each)


# Forms of answers.

FOX = {"const": "fox"}
FORMS = [
    ({"response_format": {"type": "json_object", "schema": FOX}}, '"fox"'),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": FOX}}}, '"fox"'),
    ({"response_format": {"type": "json_schema", "schema": FOX}}, '"fox"'),
    ({"json_schema": FOX}, '"fox"'),
    ({"json_schema": '{"const": "fox"}'}, '"fox"'),
    ({"grammar": 'root ::= "a"{5,5}'}, "aaaaa"),
]


@paths
@pytest.mark.parametrize(("form", "expected"), FORMS)
def test_llama_cpps_names_of_forms_are_obeyed(api, path, form, expected):
    assert text_of(api.ok(path, {**BODIES[path], "max_tokens": 20, **form})) == expected


@paths
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "sound"}},
        {"response_format": {"type": "json_object", "schema": 123}},
        {"response_format": {"type": "json_object", "schema": {"type": 123}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "hiccup"}}}},
        {"json_schema": {"type": "hiccup"}},
        {"grammar": "root ::= this is (not valid GBNF"},
    ],
)
def test_a_wrong_form_is_a_400_that_names_the_clients_field(api, path, form):
    for stream in (False, True):
        error = api.refused(path, {**BODIES[path], **form, "stream": stream})
        assert error["param"].partition(".")[0] in form


# Conversations.


def test_a_prompt_can_announce_the_answer_or_not_or_continue_it(api):
    announced = "<|im_start|>assistant\n"
    assert prompt_of(api, USER).endswith(announced)
    assert announced not in prompt_of(api, USER, add_generation_prompt=False)
    begun = [*USER, {"role": "assistant", "content": "It fl"}]
    assert prompt_of(api, begun, continue_final_message=True).endswith(announced + "It fl")


def test_thinking_can_be_switched_off(api, served_llm, monkeypatch):
    off = "<think>\n\n</think>\n\n"
    with_template(served_llm, monkeypatch, "{% if not enable_thinking | default(true) %}" + off + "{% endif %}")
    assert not prompt_of(api, USER).endswith(off)
    assert prompt_of(api, USER, chat_template_kwargs={"enable_thinking": False}).endswith(off)
    asked = {"messages": USER, "max_tokens": 1, "return_token_ids": True, "reasoning_effort": "none"}
    ids = api.ok(CHAT, asked)["prompt_token_ids"]
    assert api.ok("/detokenize", {"tokens": ids})["prompt"].endswith(off)


def test_thoughts_are_kept_apart_from_the_answer(make_api, served_llm, monkeypatch):
    with_template(served_llm, monkeypatch, "{# </think> #}")
    api = make_api()
    body = {"messages": USER, "structured_outputs": {"choice": ["<think>Hm.</think>It floods."]}}
    message = api.ok(CHAT, body)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "It floods.")
    deltas = [chunk["choices"][0]["delta"] for chunk in api.stream(CHAT, body)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "It floods."


def test_thoughts_of_earlier_answers_are_a_part_of_the_prompt(api, served_llm, monkeypatch):
    template = CHAT_TEMPLATE.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
    monkeypatch.setattr(served_llm.tokenizer, "_chat_templates", {"default": template})
    said = [{"type": "text", "text": "Yes."}]
    thought = [{"type": "thinking", "thinking": "Hm, let me see.", "signature": ""}, *said]
    counts = [
        api.ok("/v1/messages/count_tokens", {"messages": [*USER, {"role": "assistant", "content": content}, *USER]})
        for content in (said, thought)
    ]
    assert counts[0]["input_tokens"] < counts[1]["input_tokens"]


def test_special_tokens_are_put_around_a_text_by_default(api, served_llm):
    backend = served_llm.tokenizer._backend
    backend.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    try:
        plain = api.ok("/tokenize", {"prompt": "the river", "add_special_tokens": False})["tokens"]
        assert api.ok("/tokenize", {"prompt": "the river"})["tokens"] == [0, *plain]
        chat = api.ok("/tokenize", {"messages": USER})["tokens"]
        assert 0 not in chat
        for added in (None, False, True):
            body = {"messages": USER, "add_special_tokens": added, "max_tokens": 1, "return_token_ids": True}
            assert api.ok("/v1/chat/completions", body)["prompt_token_ids"] == [0] * bool(added) + chat
            counted = api.ok("/v1/chat/completions/input_tokens", body)["input_tokens"]
            assert counted == bool(added) + len(chat)
    finally:
        backend.post_processor = None


# Origins.


def test_only_allowed_pages_get_permission_before_a_request(make_api):
    settings = ServerSettings(allowed_origins=("https://good.example",), api_keys=("secret",))
    server = Server(settings=settings)
    client = TestClient(create_app(server), base_url="http://127.0.0.1")
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    asked["Access-Control-Request-Private-Network"] = "true"
    allowed = client.options(CHAT, headers={**asked, "Origin": "https://good.example"})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://good.example"
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert allowed.headers["access-control-allow-private-network"] == "true"
    for origin in ("https://evil.example", "https://good.example.evil.example", "http://good.example"):
        refused = client.options(CHAT, headers={**asked, "Origin": origin})
        assert refused.status_code >= 400
        assert "access-control-allow-origin" not in refused.headers
    wrong_key = client.get("/v1/models", headers={"Origin": "https://good.example"})
    assert wrong_key.status_code == 401
    assert wrong_key.headers["access-control-allow-origin"] == "https://good.example"
    assert "retry-after" in wrong_key.headers["access-control-expose-headers"]
    server.draining = True
    ending = client.get("/v1/models", headers={"Origin": "https://good.example"})
    assert ending.status_code == 503
    assert ending.headers["access-control-allow-origin"] == "https://good.example"
