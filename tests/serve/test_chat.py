"""`/v1/chat/completions`: fields, streams that equal whole answers, errors; and what completions have of them too."""

import math

import pytest
import tokenizers
from tokenizers import decoders
from tokenizers.processors import TemplateProcessing

from tests.serve.conftest import error_of, joined, named, prompt_of, text_of
from tests.support.tiny import CHAT_TEMPLATE, END
from verax.serve.http.body import decode
from verax.serve.http.settings import ServerSettings
from verax.serve.text.chat import ChatRequest, template_messages, template_options
from verax.serve.text.run import Usage
from verax.text.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from verax.text.tokens.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "once upon a time"}]
BODY = {"messages": USER, "max_tokens": 12, "seed": 1, "temperature": 1.0}


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_an_answer_has_openais_fields(api):
    body = api.ok(PATH, {**BODY, "model": "tiny"})
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert (choice["message"]["role"], type(choice["message"]["content"])) == ("assistant", str)
    assert choice["finish_reason"] in ("stop", "length")
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["completion_tokens"] <= 12
    assert body["timings"]["predicted_n"] == usage["completion_tokens"]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3},
        {"logprobs": True, "top_logprobs": 3, "return_token_ids": True},
        {"stop": ["e", "zz"], "max_tokens": 40},
        {"temperature": 0, "max_tokens": 30},
    ],
)
def test_the_deltas_of_a_stream_joined_are_the_whole_answer(api, more):
    body = {**BODY, **more}
    whole, chunks = api.ok(PATH, body), api.stream(PATH, body)
    for choice in whole["choices"]:
        result = joined(chunks, choice["index"])
        assert result["delta"] == {key: choice["message"][key] for key in ("role", "content")}
        assert (result["logprobs"] or {}).get("content") == (choice["logprobs"] or {}).get("content")
        for name in ("finish_reason", "token_ids"):
            assert result.get(name) == choice.get(name)


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(api):
    chunks = api.stream(PATH, BODY)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"]
    assert all(chunk["choices"][0]["delta"] for chunk in chunks[1:-1])
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_in_streams(api):
    whole = api.ok(PATH, BODY)["usage"]
    chunks = api.stream(PATH, {**BODY, "stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["completion_tokens"]
    continuous = api.stream(PATH, {**BODY, "stream_options": {"continuous_usage_stats": True}})
    counts = [chunk["usage"]["completion_tokens"] for chunk in continuous]
    assert counts == sorted(counts)
    assert counts[-1] == whole["completion_tokens"]


def test_max_completion_tokens_goes_before_max_tokens(api):
    body = {**BODY, "max_tokens": 9, "max_completion_tokens": 2, "ignore_eos": True}
    assert api.ok(PATH, body)["usage"]["completion_tokens"] == 2


def test_the_bytes_of_all_tokens_joined_are_the_answer(api):
    body = {**BODY, "logprobs": True, "ignore_eos": True, "skip_special_tokens": False, "max_tokens": 30}
    choice = api.ok(PATH, {**body, "top_logprobs": 2})["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 30
    for entry in content:
        assert entry["logprob"] <= 0
        assert entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]
    spelled = bytes(byte for entry in content for byte in entry["bytes"])
    assert spelled.decode(errors="replace") == choice["message"]["content"]


def test_a_seed_may_be_negative_and_minus_one_is_none_as_null_is(api):
    same, others = (
        [api.ok(PATH, {**BODY, "seed": seed})["choices"][0]["message"]["content"] for _ in range(2)]
        for seed in (-5, -1)
    )
    assert same[0] == same[1]
    assert others[0] != others[1]
    api.ok(PATH, {**BODY, "logprobs": False, "top_logprobs": 0, "reasoning_effort": "max"})
    api.ok(PATH, {**BODY, "stop": None, "n": None, "tools": None, "stream": None, "logit_bias": None, "top_p": None})


def test_variables_of_the_template_are_the_servers_where_a_request_does_not_set_them():
    defaults = ServerSettings(chat_template_kwargs='{"enable_thinking": true, "style": "a"}').template_variables

    def variables(**fields):
        options = template_options(decode(ChatRequest, {**BODY, **fields}), defaults)
        return options["enable_thinking"], options["style"]

    assert variables() == (True, "a")
    assert variables(chat_template_kwargs={"style": "b"}) == (True, "b")
    assert variables(reasoning_effort="none") == (False, "a")
    assert ServerSettings().template_variables == {}


def test_logit_bias_has_texts_as_keys(api):
    body = api.ok(PATH, {**BODY, "logit_bias": {"40": 100}, "return_token_ids": True, "temperature": 0})
    assert set(body["choices"][0]["token_ids"]) == {40}


TOOL = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": None}}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        # An answer that was all reasoning, from a client that keeps OpenAI's fields only.
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": None}),
        ({"role": "assistant", "content": None, "refusal": "No."}, {"role": "assistant", "content": "No."}),
        (
            {"role": "assistant", "content": "a", "thinking": "b"},
            {"role": "assistant", "content": "a", "reasoning_content": "b"},
        ),
        (
            {"role": "assistant", "function_call": CALL["function"]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ),
        (
            {"role": "assistant", "content": "a", "tool_calls": [{**CALL, "id": None, "type": None}]},
            {"role": "assistant", "content": "a", "tool_calls": [CALL]},
        ),
        (
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "a"},
                    {"type": "thinking", "thinking": [{"type": "text", "text": "b"}]},
                    {"type": "text", "text": "c"},
                ],
            },
            {"role": "assistant", "content": "c", "reasoning_content": "a\nb"},
        ),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}], "tool_calls": [CALL]},
            {"role": "assistant", "content": None, "reasoning_content": "a", "tool_calls": [CALL]},
        ),
        ({"role": "function", "name": "f", "content": "1"}, {"role": "tool", "name": "f", "content": "1"}),
        (
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "system", "content": "a\nb"},
        ),
    ],
)
def test_messages_have_the_forms_that_clients_keep(given, read):
    assert template_messages(decode(ChatRequest, {"messages": [given]}).messages) == [read]


def test_the_last_message_can_be_continued_and_echoed(api):
    messages = [*USER, {"role": "assistant", "content": "there was"}]
    body = {**BODY, "messages": messages, "continue_final_message": True}
    plain = api.ok(PATH, body)["choices"][0]["message"]["content"]
    assert api.ok(PATH, {**body, "echo": True})["choices"][0]["message"]["content"] == "there was" + plain
    assert joined(api.stream(PATH, {**body, "echo": True}))["delta"]["content"] == "there was" + plain
    parts = [{"type": "text", "text": "there was"}]
    body = {**body, "messages": [*USER, {"role": "assistant", "content": parts}], "echo": True}
    assert api.ok(PATH, body)["choices"][0]["message"]["content"] == "there was" + plain
    error = api.refused(PATH, {**body, "add_generation_prompt": True})
    assert error["param"] == "continue_final_message"


def test_a_continued_message_keeps_the_space_of_its_next_word(api, served_llm, monkeypatch):
    plain = served_llm.tokenizer
    backend = tokenizers.Tokenizer.from_str(plain._backend.to_str())
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])  # as of sentencepiece
    monkeypatch.setattr(served_llm, "tokenizer", Tokenizer(backend, chat_templates=plain.chat_templates))
    (space,) = plain.encode(" ")
    body = {**BODY, "max_tokens": 1, "logit_bias": {str(space): 100}}
    assert api.ok(PATH, body)["choices"][0]["message"]["content"] == ""
    body["messages"] = [*USER, {"role": "assistant", "content": "there"}]
    assert api.ok(PATH, {**body, "continue_final_message": True})["choices"][0]["message"]["content"] == " "


def test_prompt_logprobs_are_for_whole_answers(api):
    body = api.ok(PATH, {**BODY, "prompt_logprobs": 1})
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert api.refused(PATH, {**BODY, "prompt_logprobs": 1, "stream": True})["param"] == "prompt_logprobs"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        *named("messages", [], None, "hi"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*USER, {"role": "assistant", "content": "a", "prefix": True}]}, "messages[1].prefix"),
        ({"messages": [*USER, {"role": "assistant", "content": "a", "partial": True}]}, "messages[1].partial"),
        ({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}, *USER]}, "messages[0].audio"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        *named("n", 9),
        ({"stop": [""]}, "stop[0]"),
        *named("min_tokens", 13),
        *named("logit_bias", {"x": 1}, {"999999": 1}),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        *named("top_logprobs", 2),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        *named("tools", []),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0]"),
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"tools": [{**TOOL, "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
        (
            {"tools": [{**TOOL, "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "snow"}}}, "tool_choice"),
        *named("tool_choice", "required", "always"),
        ({"tools": [TOOL], "tool_choice": allowed("auto", "snow")}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {"const": 1}}}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "text", "schema": {"const": 1}}}, "response_format.schema"),
        *named("chat_template", "{{ 1 }}"),
        *named("chat_template_kwargs", {"messages": []}, {"self": 1}, {"chat_template": "x"}, {"template": "x"}),
        *named("chat_template_kwargs", {"eos_token": "x"}),
        *named("bad_words", ["x"]),
        *named("allowed_token_ids", [1]),
        *named("thinking_token_budget", 0, 1),
        *named("return_tokens_as_token_ids", True),
        *named("mirostat", 2),
        *named("typical_p", 0.5),
        *named("enable_thinking", False, True),
        *named("thinking", {"type": "disabled"}),
        *named("include_reasoning", False),
        *named("web_search_options", {}),
        *named("modalities", ["text", "audio"]),
        *named("max_new_tokens", 8),
        *named("extra_body", {"chat_template_kwargs": {"enable_thinking": False}}),
        *named("repetition_detection", {"max_pattern_size": 4, "min_count": 3}),
        *named("reasoning_budget_tokens", 0, 64),
        *named("parse_tool_calls", False),
        *named("guidance_scale", 1.5),
        *named("cache_salt", "mine"),
        *named("regex", "a+"),
        *named("lora", [{"id": 0, "scale": 1}]),
        *named("options", {"num_predict": 8}),
        *named("prompt", "Once"),
        *named("system", "Be brief."),
        *named("priority", 1),
        *named("reasoning_effort", "huge"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_a_400_that_names_it(api, change, param, stream):
    assert api.refused(PATH, {**BODY, "stream": stream, **change})["param"] == param


def test_streams_outlive_their_connection_only_where_the_page_can_resume_them(api, make_api):
    body, wrong = {**BODY, "stream": True}, {"X-Conversation-Id": "short"}
    assert "X-Conversation-Id" in error_of(api.post(PATH, body, headers=wrong))["message"]
    assert make_api(disable_page=True).post(PATH, body, headers=wrong).status_code == 200


def test_fields_without_a_meaning_here_are_accepted(api):
    absent = {"bad_words": [], "priority": 0, "mirostat": 0, "typical_p": 1.0, "top_n_sigma": -1, "do_sample": True}
    absent |= {"include_reasoning": True, "modalities": ["text"], "reasoning_format": "auto", "extra_body": {}}
    absent |= {"guidance_scale": 1, "parse_tool_calls": True, "reasoning_budget_tokens": -1, "smoothing_factor": 0.0}
    api.ok(PATH, {**BODY, **absent, "store": True, "metadata": {"a": "b"}, "service_tier": "auto"})


GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
BODIES = {PATH: {"messages": USER}, "/v1/completions": {"prompt": "the river"}}
paths = pytest.mark.parametrize("path", BODIES)


@paths
def test_each_answer_and_chunk_names_the_build(api, path):
    body = {**BODIES[path], **GREEDY}
    names = {part["system_fingerprint"] for part in (api.ok(path, body), *api.stream(path, body))}
    assert len(names) == 1
    assert names.pop().startswith("verax-")


@paths
def test_the_prompts_beginning_is_taken_from_the_cache(api, path):
    text = "1 2 3 4 5 6 7 8 9"
    body = {"messages": [{"role": "user", "content": text}]} if path == PATH else {"prompt": text}
    _, again = (api.ok(path, {**body, **GREEDY}) for _ in range(2))
    usage, timings = again["usage"], again["timings"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == timings["cache_n"] > 0
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]


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


def with_template(llm, monkeypatch, ending):
    """Add text after the announcement of an answer in the chat template."""
    template = CHAT_TEMPLATE.replace("{% endif %}", ending + "{% endif %}")
    monkeypatch.setattr(llm.tokenizer, "_chat_templates", {"default": template})


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
    ids = api.ok(PATH, asked)["prompt_token_ids"]
    assert api.ok("/detokenize", {"tokens": ids})["prompt"].endswith(off)


def test_thoughts_are_kept_apart_from_the_answer(make_api, served_llm, monkeypatch):
    with_template(served_llm, monkeypatch, "{# </think> #}")
    api = make_api()
    body = {"messages": USER, "structured_outputs": {"choice": ["<think>Hm.</think>It floods."]}}
    message = api.ok(PATH, body)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "It floods.")
    deltas = [chunk["choices"][0]["delta"] for chunk in api.stream(PATH, body)]
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
            assert api.ok(PATH, body)["prompt_token_ids"] == [0] * bool(added) + chat
            counted = api.ok(f"{PATH}/input_tokens", body)["input_tokens"]
            assert counted == bool(added) + len(chat)
    finally:
        backend.post_processor = None
