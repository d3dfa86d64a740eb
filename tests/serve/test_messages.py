"""`/v1/messages`: Anthropic's requests as chats, answers as blocks, streams that equal whole answers, errors."""

import json

import pytest

from tests.support.chat_run import ScriptedRun, call, running, scripted
from verax.errors import QueueFullError
from verax.serve.http.body import decode
from verax.serve.http.errors import ApiError
from verax.serve.text import messages
from verax.serve.text.messages import MessagesRequest, chat_of
from verax.text.features.tool_calls import Delta

PATH = "/v1/messages"
USER = [{"role": "user", "content": "once upon a time"}]
BODY = {"messages": USER, "max_tokens": 8}
TOOL = {"name": "weather", "description": "Forecast.", "input_schema": {"type": "object", "properties": {}}}


def chat(**fields):
    return chat_of(decode(MessagesRequest, {**BODY, **fields}))[0]


def test_an_answer_has_anthropics_fields(api):
    body = api.ok(PATH, {**BODY, "model": "tiny"})
    assert body["id"].startswith("msg_")
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "tiny")
    assert all(block["type"] == "text" for block in body["content"])
    assert body["stop_reason"] in ("end_turn", "max_tokens")
    usage = body["usage"]
    assert 0 < usage["output_tokens"] <= 8
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 0


DELTAS = [Delta(reasoning="Let me "), Delta(reasoning="see."), Delta(content="I loo"), Delta(content="k."),
          *call(0, '{"city": ', '"Oslo"}'), *call(1, name="clock")]  # fmt: skip
BLOCKS = [
    {"type": "thinking", "thinking": "Let me see.", "signature": ""},
    {"type": "text", "text": "I look.", "citations": None},
    {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"city": "Oslo"}},
    {"type": "tool_use", "id": "call_1", "name": "clock", "input": {}},
]


def test_reasoning_text_and_calls_are_blocks_whole_and_streamed(api, monkeypatch):
    scripted(monkeypatch, messages, ScriptedRun(DELTAS, "tool_calls"))
    whole = api.ok(PATH, BODY)
    assert whole["content"] == BLOCKS
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"] == {
        "input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 5,
    }  # fmt: skip
    start, ping, *blocks, end, stop = api.events(PATH, BODY)
    assert (start["type"], ping["type"], stop["type"]) == ("message_start", "ping", "message_stop")
    assert {**start["message"], **end["delta"], "usage": end["usage"], "content": BLOCKS} == whole
    begun = [data["content_block"]["type"] for data in blocks if data["type"] == "content_block_start"]
    assert begun == ["thinking", "text", "tool_use", "tool_use"]
    assert [(data["index"], *data["delta"].values()) for data in blocks if data["type"] == "content_block_delta"] == [
        (0, "thinking_delta", "Let me "), (0, "thinking_delta", "see."), (0, "signature_delta", ""),
        (1, "text_delta", "I loo"), (1, "text_delta", "k."),
        (2, "input_json_delta", '{"city": '), (2, "input_json_delta", '"Oslo"}'),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 7, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
    ],
)
def test_why_the_answer_ended(api, monkeypatch, reason, stop, expected):
    scripted(monkeypatch, messages, ScriptedRun([Delta(content="Hi")], reason, stop))
    body = api.ok(PATH, BODY)
    assert (body["stop_reason"], body["stop_sequence"]) == expected


def test_arguments_that_are_not_json_are_given_as_text(api, monkeypatch):
    scripted(monkeypatch, messages, ScriptedRun(call(0, '{"city": "Os'), "length"))
    assert api.ok(PATH, BODY)["content"][0]["input"] == {"INVALID_JSON": '{"city": "Os'}


def test_an_error_in_mid_stream_is_an_event(api, monkeypatch):
    scripted(monkeypatch, messages, ScriptedRun([Delta(content="Hi"), ApiError(503, "it broke")]))
    error = {"type": "overloaded_error", "message": "it broke"}
    assert api.events(PATH, BODY)[-1].items() >= {"type": "error", "error": error}.items()


def test_a_conversation_with_calls_becomes_a_chat():
    result = chat(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"city": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_0", "content": [{"type": "text", "text": "Rain"}]},
                    {"type": "tool_result", "tool_use_id": "call_1", "content": "no", "is_error": True},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    )
    system, user, answer, rain, failed, more = result.messages
    assert (system.role, system.content, user.content) == ("system", "Be brief.", "A\nB")
    assert (answer.reasoning_content, answer.content) == ("Hm.", "I look.")
    assert answer.tool_calls[0].function.arguments == {"city": "Oslo"}
    assert (rain.role, rain.tool_call_id, rain.content) == ("tool", "call_0", "Rain")
    assert (failed.content, more.content) == ("Error: no", "And?")
    assert result.continue_final_message is None


def test_tools_that_a_search_has_found_are_a_result():
    """Claude Code finds tools so, which it gives from the beginning with `defer_loading`."""
    call = {"type": "tool_use", "id": "a", "name": "ToolSearch", "input": {"query": "weather"}}
    found = [{"type": "tool_reference", "tool_name": name} for name in ("weather", "wind")]
    result = [{"type": "tool_result", "tool_use_id": "a", "content": found}]
    answers = chat(messages=[*USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": result}])
    assert answers.messages[-1].content == "weather\nwind"


def test_what_coding_agents_send_is_taken(api):
    """The body of a request of Claude Code, whose instructions stand within the conversation too."""
    mark = {"cache_control": {"type": "ephemeral"}}
    answer = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "B"}]
    asked = {
        "system": [{"type": "text", "text": "Be brief.", **mark}],
        "messages": [
            *USER,
            {"role": "system", "content": [{"type": "text", "text": "Be kind.", **mark}]},
            {"role": "assistant", "content": answer},
            *USER,
        ],
        **{"tools": [{**TOOL, "type": "custom", **mark}], "thinking": {"type": "adaptive"}},
        **{"temperature": 1, "top_p": 0, "metadata": {"user_id": "u"}, "output_config": {"effort": "high"}},
        "context_management": {"edits": []},
    }
    api.ok(PATH, {**BODY, **asked})
    result = chat(**asked)
    assert [message.role for message in result.messages] == ["system", "user", "assistant", "user"]
    assert (result.messages[0].content, result.messages[2].content) == ("Be brief.\nBe kind.", "B")


@pytest.mark.parametrize(
    "system", ["{}\nBe brief.", [{"type": "text", "text": "{}"}, {"type": "text", "text": "Be brief."}]]
)
def test_a_header_that_differs_in_each_request_is_not_a_part_of_the_prompt(system):
    line = "x-anthropic-billing-header: cc_version=2.1.37; cc_entrypoint=cli; cch=a1b2c;"
    given = json.loads(json.dumps(system).replace("{}", line))
    assert chat(system=given).messages[0].content == "Be brief."
    assert [message.role for message in chat(system=line).messages] == ["user"]
    quoted = [{"role": "user", "content": line}]
    assert chat(messages=quoted).messages[0].content == line


def test_fields_become_those_of_a_chat():
    result = chat(
        tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}, stop_sequences=["END"],
        top_k=5, top_p=0.9, temperature=0.5, thinking={"type": "enabled", "budget_tokens": 4},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "max"},
    )  # fmt: skip
    assert result.tools[0].function.name == "weather"
    assert (result.tool_choice, result.parallel_tool_calls, result.stop) == ("required", False, ["END"])
    assert (result.top_k, result.top_p, result.temperature, result.max_tokens) == (5, 0.9, 0.5, 8)
    assert result.chat_template_kwargs == {"enable_thinking": True}
    assert result.response_format.json_schema.schema == {"type": "object"}
    assert result.reasoning_effort == "xhigh"
    plain = chat()
    assert (plain.reasoning_effort, plain.chat_template_kwargs) == (None, {"enable_thinking": False})
    assert chat(output_config={"effort": "low"}).reasoning_effort == "low"
    assert chat(tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}).tool_choice.function.name == "weather"


def test_a_last_message_of_the_assistant_is_continued():
    result = chat(messages=[*USER, {"role": "assistant", "content": "There was"}])
    assert result.continue_final_message is True


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens: it is missing"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]}]}]},
         "messages[0].content[0].content[0].type: "),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
         "messages[0].content[0].type: "),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
         "messages: the last one has a tool call"),
        ({"tools": [{**TOOL, "type": "web_search_20250305"}]}, "tools[0].type: "),
        ({"messages": [{"role": "system", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
         "messages[0].content[0].type: "),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: "),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "clock"}}, "tool_choice: "),
        ({"tools": [TOOL, TOOL]}, "tools[1]: "),
        ({"tools": [{**TOOL, "input_schema": {"type": "hiccup"}}], "tool_choice": {"type": "any"}}, "tools: "),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 1}}}}, "output_config.format"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: there are no tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 8}}, "thinking.budget_tokens: "),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences: "),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers: "),
        ({"temperature": -1}, "temperature: "),
        ({"stop": ["a"]}, "stop: "),
        ({"seed": 0}, "seed: "),
        ({"output_format": {"type": "json_schema", "schema": {"const": 1}}}, "output_format: "),
        ({"messages": [{"role": "user", "content": "word " * 500}]}, "messages: "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_fields_are_named_in_anthropics_shape(api, fields, named, stream):
    response = api.post(PATH, {**BODY, **fields, "stream": stream})
    body = response.json()
    assert response.status_code == 400, body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(named)


def raises(error):
    async def run_chat(*arguments):
        raise error

    return run_chat


@pytest.mark.parametrize(
    ("method", "path", "settings", "raised", "status", "kind"),
    [
        ("POST", PATH, {"api_keys": ("secret",)}, None, 401, "authentication_error"),
        ("POST", PATH, {"allowed_hosts": ("other.example",), "host": "0.0.0.0"}, None, 403, "permission_error"),
        ("POST", f"{PATH}/batches", {}, None, 404, "not_found_error"),
        ("GET", "/messages", {}, None, 405, "invalid_request_error"),
        ("POST", PATH, {"max_body_bytes": 10}, None, 413, "request_too_large"),
        ("POST", "/messages", {}, QueueFullError("the queue is full"), 429, "rate_limit_error"),
        ("POST", PATH, {}, RuntimeError("a secret"), 500, "api_error"),
        ("POST", PATH, {}, ApiError(503, "the server is shutting down"), 503, "overloaded_error"),
    ],
)
def test_every_error_has_anthropics_shape(make_api, monkeypatch, method, path, settings, raised, status, kind):
    monkeypatch.setattr(messages, "run_chat", raises(raised))
    response = make_api(**settings).call(method, path, json=BODY, headers={"x-request-id": "r1"})
    assert response.status_code == status
    body = response.json()
    assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", kind, "r1")
    assert set(body["error"]) == {"type", "message"}
    assert "secret" not in response.text
    assert response.headers["request-id"] == "r1"
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_tokens_of_a_request_are_counted(api):
    counted = api.ok(f"{PATH}/count_tokens", {"messages": USER})["input_tokens"]
    usage = api.ok(PATH, BODY)["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_anthropics_client(make_api, monkeypatch):
    anthropic = pytest.importorskip("anthropic")
    with running(make_api(api_keys=("secret",)).app) as address:
        client = anthropic.Anthropic(base_url=address, api_key="secret", max_retries=0)
        assert client.messages.create(model="tiny", **BODY).stop_reason in ("end_turn", "max_tokens")
        assert client.messages.count_tokens(model="tiny", messages=USER).input_tokens > 0
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            client.messages.create(model="tiny", tool_choice={"type": "any"}, **BODY)
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=address, api_key="wrong", max_retries=0).messages.create(model="tiny", **BODY)
        scripted(monkeypatch, messages, ScriptedRun(DELTAS, "tool_calls"))
        with client.messages.stream(model="tiny", **BODY) as stream:
            assert "".join(stream.text_stream) == "I look."
            final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == BLOCKS
    assert final.stop_reason == "tool_use"
