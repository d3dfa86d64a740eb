"""Gemma 4's tool calls and reasoning: what an answer becomes, its grammars, and the published template."""

import json
from dataclasses import replace

import pytest
import tokenizers

from tests.support.answers import read_cut
from tests.support.grammar import accepts
from tests.support.published import llama_cpp_source
from verax.errors import InvalidParameterError
from verax.text.features.chat_format import ChatFormat, chat_format, tool_grammar
from verax.text.tokens.tokenizer import Tokenizer

TURN = "<|turn>model\n"
OVER = TURN + "<|channel>thought\n<channel|>"
FORM = ChatFormat("gemma4", True, turn_tokens=("<|turn>", "<turn|>"))
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
}
TOOLS = [{"name": "weather", "parameters": SCHEMA}, {"name": "clock", "parameters": {"type": "object"}}]
THOUGHT = "<|channel>thought\nWhich <city>?\nOslo.<channel|>"


def call(arguments, name="weather"):
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


def parse(answer, *, prompt=TURN, **options):
    return read_cut(answer, FORM, TOOLS, prompt, **options)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("", {}),
        ('city:<|"|>San "F" \\ é{,}\n<|"|>', {"city": 'San "F" \\ é{,}\n'}),
        ("days:-7,x:1.5e10,a:true,b:null", {"days": -7, "x": 1.5e10, "a": True, "b": None}),
        ('l:[<|"|>a<|"|>,[],{k:3}],o:{}', {"l": ["a", [], {"k": 3}], "o": {}}),
        ('<|"|>city<|"|>: Oslo , days : 2', {"city": "Oslo", "days": 2}),
    ],
)
def test_arguments_become_json_however_they_arrive(written, arguments):
    content, reasoning, [(name, text)] = parse(THOUGHT + call(written))
    assert (content, reasoning, name) == ("", "Which <city>?\nOslo.", "weather")
    assert json.loads(text) == arguments


def test_reasoning_content_and_calls_are_told_apart():
    one = ("weather", '{"city": "Oslo"}')
    oslo = call('city:<|"|>Oslo<|"|>')
    assert parse(THOUGHT + "It < rains.") == ("It < rains.", "Which <city>?\nOslo.", [])
    assert parse("<|channel>thought<channel|>Hi") == ("Hi", "", [])
    assert parse("Well." + oslo + call("", "clock"), prompt=OVER) == ("Well.", "", [one, ("clock", "{}")])
    assert parse(call("", "other"), prompt=OVER) == (call("", "other"), "", [])
    assert parse(oslo, parse_tool_calls=False, prompt=OVER) == (oslo, "", [])
    assert parse(oslo[:-18], prompt=OVER)[2] == [("weather", '{"city": "Oslo')]  # cut short
    broken = call("days:[1}")
    assert parse(THOUGHT + broken) == (broken, "Which <city>?\nOslo.", [])


def test_a_demanded_call_has_the_special_tokens_of_the_vocabulary():
    tags = frozenset(("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'))
    grammar = tool_grammar(replace(FORM, special_tokens=tags), TOOLS, "required", prompt=OVER)["grammar"]
    assert "<|tool_call>" in grammar
    assert '"<|tool_call>"' not in grammar


def test_a_demanded_call_has_known_names_and_types():
    grammar = tool_grammar(FORM, TOOLS, "required", prompt=OVER)["grammar"]
    right = call('city:<|"|>a{b<|"|>,days:2,unit:<|"|>C<|"|>')
    for text in (right, right + right, call("", "clock"), call("days:2")):
        assert accepts(grammar, text)
    for text in ("Hi", call('days:<|"|>2<|"|>'), call('unit:<|"|>K<|"|>'), call("", "other"), call("other:1")):
        assert not accepts(grammar, text)
    assert not accepts(tool_grammar(FORM, TOOLS, "required", False, prompt=OVER)["grammar"], right + right)
    assert accepts(tool_grammar(FORM, TOOLS, "required", prompt=TURN)["grammar"], THOUGHT + right)
    assert accepts(tool_grammar(FORM, TOOLS, "auto", False, prompt=OVER)["grammar"], "Hi" + call("any:{k:[1,true]}"))
    with pytest.raises(InvalidParameterError, match=r"'weather'.*strict"):
        tool_grammar(FORM, [{**TOOLS[0], "strict": True}], "auto", prompt=OVER)


def test_the_published_template_writes_what_is_read():
    template = llama_cpp_source("models/templates/google-gemma-4-31B-it.jinja").read_text()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    tags = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|turn>", "<turn|>", "<bos>"]
    backend.add_special_tokens([*tags, "<|tool_response>", "<tool_response|>"])
    tokenizer = Tokenizer(backend, chat_templates={"default": template}, special_tokens={"bos_token": "<bos>"})
    form = chat_format(tokenizer)
    assert (form.tools, form.reasoning) == ("gemma4", True)
    assert form.sampling_overrides == {"skip_special_tokens": False}
    messages = [{"role": "user", "content": "How warm?"}]
    tools = [{"type": "function", "function": {"description": "", **tool}} for tool in TOOLS]
    for thinking, state in ((True, "open"), (False, "over")):
        prompt = tokenizer.apply_chat_template(messages, tools=tools, enable_thinking=thinking)
        assert form.reasoning_state(prompt) == state
    arguments = {"city": "Os\nlo", "days": 3, "unit": {"k": [True, None, "C"]}}
    made = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages += [{"role": "assistant", "content": "", "reasoning_content": "Well.", "tool_calls": [made]}]
    after = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=False)
    answer = after[after.index(TURN) + len(TURN) :].removesuffix("<|tool_response>")
    content, reasoning, [(name, text)] = parse(answer)
    assert (content, reasoning, name) == ("", "Well.", "weather")
    assert json.loads(text.replace('"None"', "null")) == arguments  # the template writes Python's None
