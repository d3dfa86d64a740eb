"""Tool calls over HTTP, from the request to the parsed answer and back.

The model has random weights. Grammars make it call, and a grammar with one choice makes it say a given text.
tests/text/test_chat_format.py has the other syntaxes of calls.
"""

import asyncio
import json
from contextlib import contextmanager

import pytest

from tests.serve.conftest import Api, joined, prompt_of
from tests.support.answers import TEMPLATES, written
from tests.support.tiny import tiny_checkpoint
from verax.serve.app import create_app
from verax.serve.http.server import Server
from verax.text.engine.async_llm import AsyncLLM
from verax.text.engine.llm import LLM

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "Rain?"}]

DAYS = {"type": "integer", "enum": [1, 2]}


def function(name, **more):
    schema = {"type": "object", "properties": {"days": DAYS}, "required": ["days"], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


HARMONY = """{% for tool in tools or [] %}{{- "// " + tool.function.description }}{% endfor %}
{%- for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"""

TOOLS = [function("rain"), function("wind")]
BODY = {"messages": USER, "tools": TOOLS, "max_tokens": 200, "temperature": 1.0, "seed": 5}
NAMED = {"type": "function", "function": {"name": "wind"}}


@contextmanager
def serving(folder, template):
    """Server of a model with a chat template."""
    tiny_checkpoint(folder, chat_template=template)
    sizes = {"max_model_len": 384, "max_num_seqs": 1, "max_num_batched_tokens": 32, "block_size": 32}
    engine = AsyncLLM.from_llm(LLM(folder, dtype="float32", use_tqdm=False, structured_outputs=True, **sizes))
    yield Api(create_app(Server(llm=engine)))
    asyncio.run(engine.shutdown())


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    """Server of a model whose template has calls."""
    with serving(tmp_path_factory.mktemp("tools") / "tiny", TEMPLATES["hermes"]) as api:
        yield api


@pytest.fixture(scope="module")
def harmony_api(tmp_path_factory):
    """Server of a model whose template has gpt-oss' channels."""
    with serving(tmp_path_factory.mktemp("harmony") / "tiny", HARMONY) as api:
        yield api


def answer(api, **fields):
    """Text, calls and finish reason of an answer, which is the same whole and streamed."""
    body = {**BODY, **fields}
    (choice,) = api.ok(PATH, body)["choices"]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert "tool_calls" not in message or calls
    whole = joined(api.stream(PATH, body))
    streamed = whole["delta"].get("tool_calls", [])
    assert [(call["index"], call["type"], call["function"]) for call in streamed] == [
        (index, "function", call["function"]) for index, call in enumerate(calls)
    ]
    assert (whole["delta"]["content"], whole["finish_reason"]) == (message["content"] or "", choice["finish_reason"])
    assert message["content"] is None or message["content"] or not calls
    ids = [call["id"] for call in (*calls, *streamed)]
    assert len(set(ids)) == len(ids)
    return message["content"], [_read(call["function"]) for call in calls], choice["finish_reason"]


def _read(function):
    return function["name"], json.loads(function["arguments"])


def says(*calls, text=""):
    """Fields that make the model say a text and calls."""
    text += "\n".join(written("hermes", name, days=days) for name, days in calls)
    return {"structured_outputs": {"choice": [text]}}


def test_a_demanded_call_is_made_and_nothing_else(api):
    content, calls, reason = answer(api, tool_choice="required", parallel_tool_calls=False)
    ((name, arguments),) = calls
    assert (content, reason) == (None, "tool_calls")
    assert name in ("rain", "wind")
    assert arguments["days"] in (1, 2)


def test_calls_are_among_the_allowed_functions(api):
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    assert answer(api, tool_choice=allowed, parallel_tool_calls=False)[1][0][0] == "wind"
    allowed["allowed_tools"]["mode"] = "auto"
    text, wind = written("hermes", "rain", days=1), ("wind", {"days": 2})
    assert answer(api, tool_choice=allowed, **says(text=text)) == (text, [], "stop")
    assert answer(api, tool_choice=allowed, **says(("wind", 2))) == (None, [wind], "tool_calls")


def test_a_demanded_call_is_made_in_channels_too(harmony_api):
    (space,) = harmony_api.ok("/tokenize", {"prompt": " "})["tokens"]
    bias = {str(space): 100}  # so that the model begins with " to=functions.wind" and not with endless reasoning
    (choice,) = harmony_api.ok(PATH, {**BODY, "tool_choice": NAMED, "logit_bias": bias})["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert _read(choice["message"]["tool_calls"][0]["function"])[0] == "wind"


def test_a_response_format_leaves_the_model_its_calls(api):
    schema = {"type": "object", "properties": {"mm": DAYS}, "required": ["mm"], "additionalProperties": False}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "rain", "schema": schema}}}
    body = {**form, "tools": [function("rain", strict=True)], "parallel_tool_calls": False}
    ids = {text: api.ok("/tokenize", {"prompt": text})["tokens"][0] for text in "<{"}
    content, ((name, arguments),), reason = answer(api, **body, logit_bias={str(ids["<"]): 100})
    assert (content, name, arguments["days"] in (1, 2), reason) == (None, "rain", True, "tool_calls")
    content, calls, reason = answer(api, **body, logit_bias={str(ids["{"]): 100})
    assert (json.loads(content)["mm"] in (1, 2), calls, reason) == (True, [], "stop")
    assert answer(api, **form, tool_choice=NAMED, parallel_tool_calls=False)[1][0][0] == "wind"
    wrong = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "hiccup"}}}}
    assert api.refused(PATH, {**BODY, **wrong})["param"] == "response_format"


def test_an_answer_of_gpt_oss_comes_back_as_its_template_reads_it(harmony_api):
    call = {"id": "a", "type": "function", "function": {"name": "rain", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "I look.", "reasoning_content": "Where?", "tool_calls": [call]}
    prompt = prompt_of(harmony_api, [*USER, answer, {"role": "tool", "tool_call_id": "a", "content": "5 mm"}])
    assert "assistant<|message|>Where?\nI look.<|end|><|start|>tool<|message|>5 mm<|end|>" in prompt


def test_arguments_that_a_model_leaves_out_are_an_empty_object(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}[TOOL_CALLS]{% endfor %}{% endfor %}"
    with serving(tmp_path / "tiny", template) as api:
        said = {"structured_outputs": {"choice": ["[TOOL_CALLS]rain[ARGS]"]}}
        assert answer(api, **said) == (None, [("rain", {})], "tool_calls")


def test_gpt_oss_has_no_other_efforts_than_it_was_trained_with(harmony_api):
    plain = {"messages": USER, "max_tokens": 1}
    for effort in ("none", "minimal", "xhigh"):
        assert harmony_api.refused(PATH, {**plain, "reasoning_effort": effort})["param"] == "reasoning_effort"
    harmony_api.ok(PATH, {**plain, "reasoning_effort": "low"})
    harmony_api.ok("/v1/messages", plain)


@pytest.mark.parametrize(("stop", "reason"), [('ys"', "stop"), ("</tool_call>", "tool_calls")])
def test_a_stop_string_that_cuts_a_call_is_the_reason_of_the_end(api, stop, reason):
    body = {**BODY, **says(("rain", 2)), "stop": stop}
    (choice,) = api.ok(PATH, body)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
    assert call["function"]["arguments"] == ('{"da' if reason == "stop" else '{"days": 2}')
    assert joined(api.stream(PATH, body))["finish_reason"] == reason


def test_several_calls_stand_in_one_answer(api):
    content, calls, reason = answer(api, **says(("rain", 2), ("wind", 1)))
    assert (content, reason) == (None, "tool_calls")
    assert calls == [("rain", {"days": 2}), ("wind", {"days": 1})]


def test_the_model_may_answer_in_words_or_with_a_call_after_them(api):
    assert answer(api, **says(text="Rain.")) == ("Rain.", [], "stop")
    result = answer(api, **says(("rain", 1), text="I look.\n"))
    assert result == ("I look.", [("rain", {"days": 1})], "tool_calls")


def test_what_is_written_like_a_call_is_text_without_tools_and_with_none(api):
    text = written("hermes", "rain", days=1)
    assert answer(api, tool_choice="none", **says(text=text)) == (text, [], "stop")
    assert answer(api, tools=None, **says(text=text)) == (text, [], "stop")
    shown = [api.ok(f"{PATH}/input_tokens", {**BODY, **more}) for more in ({"tool_choice": "none"}, {"tools": None})]
    assert shown[0] == shown[1]


def test_a_call_and_its_result_go_back_into_the_conversation(api):
    called = api.ok(PATH, {**BODY, **says(("rain", 2))})["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "5 mm"}
    messages = [*USER, called, result]
    prompt = prompt_of(api, messages, tools=TOOLS)
    assert prompt.startswith("<|im_start|>system\nrain wind ")
    assert "<|im_start|>tool\n5 mm<|im_end|>" in prompt
    assert written("hermes", "rain", days=2) in prompt
    assert answer(api, messages=messages, **says(text="It rains."))[:2] == ("It rains.", [])
    assert answer(api, messages=messages, **says(("wind", 1)))[1] == [("wind", {"days": 1})]


def test_the_other_apis_give_the_same_calls(api):
    (choice,) = api.ok(PATH, {**BODY, "tool_choice": NAMED, "parallel_tool_calls": False})["choices"]
    expected = _read(choice["message"]["tool_calls"][0]["function"])
    shared = {"temperature": 0}
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    response = {"input": "Rain?", "tools": tools, "tool_choice": {"type": "function", "name": "wind"}, **shared}
    (item,) = api.ok("/v1/responses", {**response, "parallel_tool_calls": False})["output"]
    assert item["type"] == "function_call"
    assert item["name"] == expected[0]
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    choice = {"type": "tool", "name": "wind", "disable_parallel_tool_use": True}
    message = {"messages": USER, "max_tokens": 200, "tools": tools, "tool_choice": choice, **shared}
    (block,) = api.ok("/v1/messages", message)["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "wind", json.loads(item["arguments"]))
