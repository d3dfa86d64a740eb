"""Grammars of tool calls: they take what the parser reads as the demanded calls, and nothing else."""

import json

import pytest

from verax.errors import InvalidParameterError
from verax.text.features.chat_format import ChatFormat, parser_for, tool_grammar
from verax.text.features.tool_calls import join, read_functions

llguidance = pytest.importorskip("llguidance")

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"$ref": "#/$defs/count"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"count": {"type": "integer"}},
    },
}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
SYNTAXES = ("hermes", "qwen3_coder", "llama3_json", "none")
NAMED = {"type": "function", "function": {"name": "clock"}}
INSIDE = "<|im_start|><think>\n"


def tools(*, strict=False):
    return [{"type": "function", "function": {**function, "strict": strict}} for function in (WEATHER, CLOCK)]


def written(syntax, name, **arguments):
    """A call as a model writes it."""
    if syntax == "qwen3_coder":
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
    key = "arguments" if syntax == "hermes" else "parameters"
    text = json.dumps({"name": name, key: arguments})
    return f"<tool_call>\n{text}\n</tool_call>" if syntax == "hermes" else text


def accepts(grammar, text):
    lark = llguidance.LLMatcher.grammar_from_lark(grammar["grammar"])
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, lark, log_level=0)
    assert not matcher.get_error()
    tokens = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def parsed(template, text):
    parser = parser_for(template, tools=tools(), prompt="", parse_tool_calls=True, parse_reasoning=True)
    return join([parser.feed(text), parser.finish()])


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_required_takes_calls_of_the_functions_and_nothing_else(syntax):
    template = ChatFormat(syntax)
    grammar = tool_grammar(template, tools(), "required")
    call = written(syntax, "weather", city='"Bergen" <b>', unit="C", days=3)
    two = call + ("\n" if "<" in call[:1] else "; ") + written(syntax, "clock")
    for text in (call, written(syntax, "weather", city="Oslo"), two):
        assert accepts(grammar, text)
        assert len(parsed(template, text).tool_calls) == (2 if text == two else 1)
        assert parsed(template, text).content == ""
    assert parsed(template, call).tool_calls[0].arguments == '{"city": "\\"Bergen\\" <b>", "unit": "C", "days": 3}'
    for text in ("Hello", "", written(syntax, "storm"), written(syntax, "weather", unit="C"), f"Well: {call}"):
        assert not accepts(grammar, text)
    assert not accepts(grammar, written(syntax, "weather", city="Oslo", unit="K"))
    assert not accepts(grammar, written(syntax, "weather", city="Oslo", days="many"))


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_a_named_function_is_the_only_one(syntax):
    grammar = tool_grammar(ChatFormat(syntax), tools(), NAMED, parallel=False)
    assert accepts(grammar, written(syntax, "clock"))
    assert not accepts(grammar, written(syntax, "weather", city="Oslo"))


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_without_parallel_calls_one_call_is_all(syntax):
    call = written(syntax, "clock")
    two = call + ("\n" if "<" in call[:1] else "; ") + call
    for choice in ("required", "auto"):
        grammar = tool_grammar(ChatFormat(syntax), tools(), choice, parallel=False)
        assert accepts(grammar, call)
        assert not accepts(grammar, two)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_auto_leaves_text_free_and_checks_the_arguments_of_strict_functions(syntax):
    grammar = tool_grammar(ChatFormat(syntax), tools(strict=True))
    call = written(syntax, "weather", city="Oslo", days=3)
    before = "" if syntax in ("llama3_json", "none") else "Let me <look>.\n"
    for text in ("Hello, <you>\nthere", "", before + call):
        assert accepts(grammar, text)
    assert not accepts(grammar, before + written(syntax, "weather", days=3))
    assert not accepts(grammar, before + written(syntax, "storm"))


def test_auto_without_strict_functions_needs_no_grammar():
    assert tool_grammar(ChatFormat("hermes"), tools()) is None
    assert tool_grammar(ChatFormat("hermes"), None) is None
    assert tool_grammar(ChatFormat("hermes"), tools(strict=True), "none") is None


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_the_model_may_reason_before_a_demanded_call(syntax):
    template = ChatFormat(syntax, True, turn_tokens=("<|im_start|>",))
    call = written(syntax, "clock")
    grammar = tool_grammar(template, tools(), "required", prompt="<|im_start|>")
    for text in (call, f"<think>\nWhich <one>?\n</think>\n\n{call}"):
        assert accepts(grammar, text)
    assert not accepts(grammar, f"<think>\n</think>Hello {call}")
    inside = tool_grammar(template, tools(), "required", prompt=INSIDE)
    assert inside["after"] == "</think>"
    assert accepts(inside, call)


def test_special_tokens_stand_in_the_grammar_by_their_names():
    template = ChatFormat("hermes", special_tokens=frozenset({"<tool_call>", "</tool_call>"}))
    assert ": <tool_call> inner" in tool_grammar(template, tools(), "required")["grammar"]


@pytest.mark.parametrize(
    ("choice", "given", "message"),
    [
        ("required", None, "tool_choice: there are no tools"),
        ("sometimes", tools(), "tool_choice: expected none, auto, required"),
        ({"type": "function", "function": {"name": "storm"}}, tools(), "tool_choice: tools has no function 'storm'"),
        ("auto", [{"type": "function"}], r"tools\[0\]: expected a function with a name"),
        ("auto", tools() + tools(), r"tools\[2\]: there is another function"),
        ("auto", [{"name": "f", "parameters": "x"}], r"tools\[0\].function.parameters: expected a JSON schema"),
    ],
)
def test_wrong_choices_and_tools_are_named(choice, given, message):
    with pytest.raises(InvalidParameterError, match=message):
        tool_grammar(ChatFormat("hermes"), given, choice)


def test_types_of_parameters_follow_references_but_not_in_circles():
    schema = {"properties": {"a": {"$ref": "#/$defs/a"}, "b": {"anyOf": [{"type": "null"}, {"const": 1}]}}}
    function = read_functions([{"name": "f", "parameters": {**schema, "$defs": {"a": {"$ref": "#/$defs/a"}}}}])["f"]
    assert function.types("a") == set()
    assert function.types("b") == {"null", "integer"}
