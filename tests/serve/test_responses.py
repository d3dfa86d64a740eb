"""`/v1/responses`: requests as chats, output items, events in their order, streams that equal whole answers, errors."""

import json

import pytest

from tests.serve.conftest import named
from tests.support.chat_run import ScriptedRun, call, running, scripted
from verax.serve.http.body import decode
from verax.serve.http.errors import ApiError
from verax.serve.text import responses
from verax.serve.text.responses import ResponsesRequest, chat_of
from verax.text.features.tool_calls import Delta

PATH = "/v1/responses"
BODY = {"input": "once upon a time", "max_output_tokens": 8}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


def chat(**fields):
    return chat_of(decode(ResponsesRequest, {**BODY, **fields}))[0]


def streamed(api, body):
    """Data of a stream's events, whose numbers are checked."""
    events = api.events(PATH, body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(response):
    output = [{**item, "id": None} for item in response["output"]]
    return {**response, "id": None, "created_at": None, "output": output}


def test_an_answer_has_openais_fields(api):
    body = api.ok(PATH, {**BODY, "model": "tiny", "metadata": {"a": "b"}, "instructions": "Be brief."})
    assert body["id"].startswith("resp_")
    assert (body["object"], body["model"], body["error"]) == ("response", "tiny", None)
    assert (body["metadata"], body["instructions"]) == ({"a": "b"}, "Be brief.")
    assert body["status"] in ("completed", "incomplete")
    for item in body["output"]:
        assert item["id"].startswith("msg_")
        assert (item["type"], item["role"], item["content"][0]["type"]) == ("message", "assistant", "output_text")
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


DELTAS = [Delta(reasoning="Hm"), Delta(reasoning="."), Delta(content="I loo"), Delta(content="k."),
          *call(0, '{"city": ', '"Oslo"}')]  # fmt: skip


def test_events_come_in_openais_order(api, monkeypatch):
    scripted(monkeypatch, responses, ScriptedRun(DELTAS, "tool_calls"))
    events = streamed(api, BODY)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert events[0]["response"]["output"] == []
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == done[event["output_index"]]["id"]
    reasoning, message, function = done
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "I look."
    assert (function["call_id"], function["name"], function["arguments"]) == ("call_0", "weather", '{"city": "Oslo"}')
    assert events[-2]["item"]["status"] == "completed"
    assert without_ids(events[-1]["response"]) == without_ids(api.ok(PATH, BODY))


def test_an_answer_that_was_cut_short_is_incomplete(api, monkeypatch):
    scripted(monkeypatch, responses, ScriptedRun(DELTAS, "length"))
    body = api.ok(PATH, BODY)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in body["output"]] == ["completed", "completed", "incomplete"]
    assert streamed(api, BODY)[-1]["type"] == "response.incomplete"


def test_an_error_in_mid_stream_fails_the_response(api, monkeypatch):
    scripted(monkeypatch, responses, ScriptedRun([Delta(content="Hi"), ApiError(503, "it broke", code="aborted")]))
    last = streamed(api, BODY)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "aborted", "message": "it broke"}


def test_items_become_messages():
    result = chat(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
            {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "Rain"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Noon"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
            {"role": "assistant", "content": "Done."},
            {"role": "user", "content": "Thanks"},
        ],
    )
    roles = [message.role for message in result.messages]
    assert roles == ["system", "developer", "user", "assistant", "tool", "tool", "assistant", "user"]
    answer, rain, noon, second = result.messages[3:7]
    assert (answer.reasoning_content, answer.content, len(answer.tool_calls)) == ("Hm.", "I look.", 2)
    assert (rain.content, noon.content, noon.tool_call_id) == ("Rain", "Noon", "c2")
    assert (second.reasoning_content, second.content) == ("So.", "Done.")


def test_fields_become_those_of_a_chat():
    result = chat(
        tools=[TOOL], tool_choice={"type": "function", "name": "weather"}, parallel_tool_calls=False, top_logprobs=2,
        temperature=0.5, top_p=0.9, reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}},
    )  # fmt: skip
    assert result.tools[0].function.parameters == TOOL["parameters"]
    assert (result.tool_choice.function.name, result.parallel_tool_calls) == ("weather", False)
    assert (result.logprobs, result.top_logprobs, result.max_completion_tokens) == (True, 2, 8)
    assert (result.temperature, result.top_p, result.reasoning_effort) == (0.5, 0.9, "low")
    assert result.response_format.schema == {"type": "object"}


OTHERS = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, {"type": "namespace", "name": "m"}]


def test_what_coding_agents_send_is_taken_and_what_is_in_vain_is_said(api):
    """The body of a request of Codex, and of a later turn."""
    asked = {
        **{"instructions": "Be brief.", "tools": [OTHERS[0], TOOL, *OTHERS[1:]], "tool_choice": "auto", "store": True},
        **{"reasoning": {"effort": "low", "summary": "detailed"}, "include": ["reasoning.encrypted_content"]},
        **{"text": {"verbosity": "low"}, "parallel_tool_calls": True, "prompt_cache_key": "a", "service_tier": "auto"},
    }
    body = api.ok(PATH, {**BODY, **asked})
    assert [tool["name"] for tool in body["tools"]] == ["weather"]
    fields = [warning.partition(": ")[0] for warning in body["warnings"]]
    assert fields == ["tools[0]", "tools[2]", "tools[3]", "store", "reasoning.summary", "text.verbosity"]
    assert "warnings" not in api.ok(PATH, {**BODY, "reasoning": {"effort": "max"}})
    result = chat(tools=[*OTHERS, TOOL], tool_choice={"type": "allowed_tools", "mode": "required", "tools": [TOOL]})
    assert ([tool.function.name for tool in result.tools], result.tool_choice) == (["weather"], "required")


def test_tools_may_be_items_and_in_the_namespace_functions():
    item = {"type": "additional_tools", "role": "developer", "tools": [{"type": "namespace", "name": "functions"}]}
    item["tools"][0]["tools"] = [OTHERS[1], TOOL]
    result = chat(input=[item, {"role": "user", "content": "A"}], tool_choice={"type": "function", "name": "weather"})
    assert ([tool.function.name for tool in result.tools], len(result.messages)) == (["weather"], 1)


def test_functions_of_a_namespace_are_called_by_both_names(api, monkeypatch):
    """Codex gives those of each MCP server so, and finds the server by the namespace of a call."""
    servers = [{"type": "namespace", "name": name, "tools": [TOOL, OTHERS[1]]} for name in ("mcp__a__", "mcp__b")]
    earlier = {"type": "function_call", "call_id": "c", "name": "weather", "namespace": "mcp__b", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "Rain."}
    chosen = {"type": "function", "name": "weather", "namespace": "mcp__a__"}
    asked = {
        "tools": [TOOL, *servers],
        "tool_choice": chosen,
        "input": [{"role": "user", "content": "A"}, earlier, output],
    }
    result = chat(**asked)
    assert [tool.function.name for tool in result.tools] == ["weather", "mcp__a__weather", "mcp__b__weather"]
    assert result.tool_choice.function.name == "mcp__a__weather"
    assert result.messages[1].tool_calls[0].function.name == "mcp__b__weather"
    for name, expected in (("mcp__b__weather", "mcp__b"), ("mcp__a__weather", "mcp__a__"), ("weather", None)):
        scripted(monkeypatch, responses, ScriptedRun(call(0, "{}", name=name), "tool_calls"))
        body = api.ok(PATH, {**BODY, **asked})
        assert (body["output"][0]["name"], body["output"][0].get("namespace")) == ("weather", expected)
        assert [tool.get("namespace") for tool in body["tools"]] == [None, "mcp__a__", "mcp__b"]
        assert len(body["warnings"]) == 2
        events = [event.get("item") or event for event in streamed(api, {**BODY, **asked})]
        calls = [event for event in events if "arguments" in event and "name" in event]
        assert [(event["name"], event.get("namespace")) for event in calls] == [("weather", expected)] * 3


def test_items_of_other_tools_are_kept_as_text():
    result = chat(
        input=[
            {"role": "user", "content": "A"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "Oslo"}},
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"},
            {"type": "message", "role": "assistant", "content": "B"},
        ]
    )
    assert [message.role for message in result.messages] == ["user", "assistant", "user", "assistant"]
    search, patch = map(json.loads, result.messages[1].content.split("\n"))
    assert search == {"type": "web_search_call", "action": {"query": "Oslo"}}
    assert (patch["name"], patch["input"]) == ("apply_patch", "*** Begin")
    assert json.loads(result.messages[2].content)["output"] == "Done"


def test_log_probabilities_come_with_the_text(api):
    body = api.ok(PATH, {**BODY, "include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0})
    for item in body["output"]:
        entries = item["content"][0]["logprobs"]
        assert entries
        assert all(len(entry["top_logprobs"]) <= 3 for entry in entries)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *named("input", None, [], "word " * 500),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        *named("previous_response_id", "resp_1"),
        *named("background", True),
        *named("conversation", "c"),
        *named("prompt", {"id": "p"}),
        *named("truncation", "auto"),
        ({"include": ["nothing"]}, "include[0]"),
        *named("max_tool_calls", 1),
        *named("seed", 0),
        *named("stop", "a"),
        *named("max_tokens", 4),
        *named("chat_template_kwargs", {"enable_thinking": False}),
        *named("response_format", {"type": "json_object"}),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}, TOOL, TOOL]}, "tools[2]"),
        ({"tool_choice": {"type": "web_search"}, "tools": [TOOL]}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}, "tools": [TOOL]},
            "tool_choice",
        ),
        ({"input": [{"type": "additional_tools", "tools": 5}]}, "input[0].tools"),
        ({"input": [{"type": "additional_tools", "tools": [TOOL, {"type": "function"}]}]}, "input[0].tools[1].name"),
        *named("tool_choice", "required"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {"const": 1}}}}, "text.format.schema"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        *named("max_output_tokens", 0),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_fields_are_named(api, fields, param, stream):
    assert api.refused(PATH, {**BODY, **fields, "stream": stream})["param"] == param


def test_openais_client(make_api, monkeypatch):
    openai = pytest.importorskip("openai")
    with running(make_api().app) as address:
        options = {"base_url": f"{address}/v1", "api_key": "none", "max_retries": 0}
        client = openai.OpenAI(**options, _strict_response_validation=True)
        answer = client.responses.create(model="tiny", **BODY)
        assert answer.status in ("completed", "incomplete")
        counted = client.responses.input_tokens.count(model="tiny", input=BODY["input"])
        assert counted.input_tokens == answer.usage.input_tokens
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(model="tiny", previous_response_id="resp_1", **BODY)
        scripted(monkeypatch, responses, ScriptedRun(DELTAS, "tool_calls"))
        assert client.responses.create(model="tiny", **BODY).output_text == "I look."
        with client.responses.stream(model="tiny", **BODY) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
    assert text == "I look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[2].arguments == '{"city": "Oslo"}'
