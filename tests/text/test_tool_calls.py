"""Answers as they stream: the same whole answer however they are cut, and nothing held back without need."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.answers import SYNTAXES, new_parser, read
from verax.text.features.chat_format import ChatFormat
from verax.text.features.tool_calls import WholeAnswer, read_functions
from verax.text.tokens.lenient_json import as_json

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": "boolean"},
                "unit": {"type": ["string", "null"]},
                "where": {"$ref": "#/$defs/place"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "either": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
                "any": {"description": "no type"},
                "maybe": {"anyOf": [{}, {"type": "null"}]},
                "both": {"allOf": [{"type": ["integer", "object"]}, {"description": "one"}]},
                "real": {"type": "number"},
                "dict": {"type": "dict"},
            },
            "required": ["city"],
            "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
PROMPTS = {"none": "", "open": "<|im_start|>assistant\n", "inside": "<|im_start|>assistant\n<think>\n"}


def of_syntax(syntax, reasoning="none", tools=TOOLS):
    """Format, tools and prompt of an answer."""
    return ChatFormat(syntax, reasoning != "none", turn_tokens=("<|im_start|>",)), tools, PROMPTS[reasoning]


def parse(pieces, *given, **options):
    return read(pieces, *of_syntax(*given, **options))


def shown(answer: WholeAnswer):
    """The answer without its random ids."""
    return answer.content, answer.reasoning, [(call.name, call.arguments) for call in answer.tool_calls]


def calls(answer):
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bergen", "days": 3}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nBergen\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
LLAMA = '{"name": "weather", "parameters": {"city": "Bergen", "days": 3}}'
BERGEN = ("weather", {"city": "Bergen", "days": 3})

FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<function=weather>", "<function=other>",
    "<function=", "</function>", "<parameter=city>", "<parameter=days>", "<parameter=", "</parameter>", "<", "</", ">",
    '{"name": "weather", "arguments": {', '{"name": "clock", "parameters": {', '{"name": "other", "arguments": {',
    '{"arguments": {}, "name": "clock"}', '{"name": ', '"city": ', '"Ber\\"gen"', '"\\ud83d', "{", "}", "[", "]", '"',
    "\\", ",", ":", ";", "\n", " ", "3", "-1.5e3", "tru", "true", "null", "text", "💥é", "```xml\n", "a < b",
    "<parameter=x\n", "None", "NaN", "'", "\\x", "\\u00", "\t", HERMES, CODER, LLAMA,
]  # fmt: skip


@st.composite
def cut(draw):
    """A text of adversarial fragments, and the pieces that it is cut into."""
    text = "".join(draw(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14)))
    marks = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *marks], [*marks, len(text)], strict=True)]
    return text, draw(st.sampled_from([pieces, list(text)]))


@pytest.mark.parametrize("reasoning", PROMPTS)
@pytest.mark.parametrize("syntax", SYNTAXES)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(cut())
def test_deltas_of_any_cut_join_to_the_whole_answer(syntax, reasoning, given_cut):
    text, pieces = given_cut
    whole = shown(parse([text], syntax, reasoning))
    assert shown(parse(pieces, syntax, reasoning)) == whole


@pytest.mark.parametrize("syntax", SYNTAXES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(cut())
def test_without_tools_and_reasoning_the_content_is_the_text(syntax, given_cut):
    text, pieces = given_cut
    assert shown(parse(pieces, syntax, tools=None)) == (text, "", [])


@pytest.mark.parametrize("syntax", SYNTAXES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(cut())
def test_no_tag_or_text_is_lost_where_no_call_is_found(syntax, given_cut):
    text, pieces = given_cut
    answer = parse(pieces, syntax)
    assert answer.tool_calls or answer.content == text


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        ("hermes", f"Let me look.\n{HERMES}\n{HERMES}"),
        ("qwen3_coder", f"Let me look.\n\n{CODER}\n{CODER}\n"),
        ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA}"),
        ("hermes", HERMES[12:] + f"\n{HERMES}"),  # nicedreamzapp/claude-code-local#43
        ("llama3_json", f"{LLAMA}\n{LLAMA};"),
    ],
)
def test_several_calls_after_text_are_found_in_each_syntax(syntax, text):
    answer = parse([text], syntax)
    assert calls(answer) == [BERGEN, BERGEN]
    assert answer.content == ("Let me look." if text.startswith("Let") else "")
    assert answer.tool_calls[0].id.startswith("call_")
    assert answer.tool_calls[0].id != answer.tool_calls[1].id


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        ("hermes", HERMES.replace("weather", "storm")),
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": [}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"city": "Bergen"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "weather"'),
        ("hermes", "Write `<tool_call>` around it, and </tool_call> after it."),
        ("hermes", CODER),
        ("qwen3_coder", CODER.replace("weather", "storm")),
        ("qwen3_coder", HERMES),
        ("qwen3_coder", "In HTML, <function=f> means nothing. <tool_call"),
        ("llama3_json", LLAMA.replace("weather", "storm")),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", '{"city": "Bergen"}'),
        ("llama3_json", f"The call is {LLAMA}"),
        ("llama3_json", "{" * 5000),
    ],
)
def test_what_only_looks_like_a_call_is_content_as_it_was_written(syntax, text):
    assert shown(parse([text], syntax)) == (text, "", [])


def test_json_calls_may_have_another_order_no_arguments_or_arguments_in_a_string():
    for call in (
        '{"arguments": {"city": "Bergen", "days": 3}, "name": "weather"}',
        '{"name": "weather", "arguments": "{\\"city\\": \\"Bergen\\", \\"days\\": 3}"}',
        '{"type": "function", "name": "weather", "parameters": {"city": "Bergen", "days": 3}}',
        '{"name": "weather", "arguments": {"city": "Bergen", "days": 3}}},',
        '{"name": "weather", "arguments": {"city": "Bergen", "days": 3}',
    ):
        answer = parse([f"<tool_call>{call}</tool_call>"], "hermes")
        assert (answer.content, calls(answer)) == ("", [BERGEN]), call
    assert calls(parse(['<tool_call>{"name": "clock"}</tool_call>'], "hermes")) == [("clock", {})]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"city": "a\nb\t\x01"}', {"city": "a\nb\t\x01"}),
        ("{'city': 'it\\'s \"so\"', 'days': None}", {"city": 'it\'s "so"', "days": None}),
        ('{"a": .5, "b": +1, "c": [2., -.5e3, +.5]}', {"a": 0.5, "b": 1, "c": [2.0, -500.0, 0.5]}),
        ('{"days": NaN, "far": [-Infinity, True, False, None],}', {"days": None, "far": [None, True, False, None]}),
        ('{"city": "he said "so"", "days": 3}', {"city": 'he said "so"', "days": 3}),
        ('{"city": "say "a", then "b".", "far": ["x "y" z"]}', {"city": 'say "a", then "b".', "far": ['x "y" z']}),
        ("{'city': 'it's here', 'days': 3}", {"city": "it's here", "days": 3}),
        (f'{{"city": "a"{" " * 200}, "days": 3{" " * 200}}}', {"city": "a", "days": 3}),
        ('{"city": "C:\\dir \\d \\x41 \\u12 \\\\"}', {"city": "C:\\dir \\d \\x41 \\u12 \\"}),
    ],
)
@pytest.mark.parametrize("form", ['{"name": "weather", "arguments": @}', '{"arguments": @, "name": "weather"}'])
def test_arguments_that_are_almost_json_reach_the_client_as_json(form, written, arguments):
    text = f"<tool_call>\n{form.replace('@', written)}\n</tool_call>"
    for pieces in ([text], list(text)):
        assert calls(parse(pieces, "hermes")) == [("weather", arguments)]


def test_arguments_that_break_after_they_began_to_stream_are_text_of_a_whole_answer():
    text = 'So: <tool_call>\n{"name": "weather", "arguments": {"city": Ber"gen}}\n</tool_call>\nDone.'
    assert shown(parse([text], "hermes")) == (text, "", [])
    assert shown(parse([f"<think>Hm.</think>\n\n{text}"], "hermes", "open")) == (text, "Hm.", [])
    (call,) = [part for delta in fed(new_parser(*of_syntax("hermes")), [text]) for part in delta.tool_calls]
    assert call.arguments == '{"city": Ber"gen}}'


def test_a_closing_tag_in_an_argument_is_part_of_it():
    text = HERMES.replace("Bergen", "</tool_call> <tool_call>")
    assert calls(parse([text], "hermes")) == [("weather", {"city": "</tool_call> <tool_call>", "days": 3})]
    code = CODER.replace("Bergen", "<a>\n</function>\n</tool_call>")
    assert calls(parse([code], "qwen3_coder"))[0][1]["city"] == "<a>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    "value", ["</parameter> x", "<p>\n  </parameter>\n</p>", "\n</parameter>.", "<parameter=x></parameter>1"]
)
def test_a_value_may_have_the_tag_that_ends_values(value):
    for size in (1, 1000):
        text = CODER.replace("Bergen", value)
        answer = parse([text[i : i + size] for i in range(0, len(text), size)], "qwen3_coder")
        assert (answer.content, calls(answer)) == ("", [("weather", {"city": value, "days": 3})])
    objects = CODER.replace("city", "tags").replace("Bergen", '["</parameter>"]')
    assert calls(parse([objects], "qwen3_coder")) == [("weather", {"tags": ["</parameter>"], "days": 3})]


XML_VALUES = {
    "days": {"3": 3, "three": "three", "3.5": "3.5", "1e400": "1e400"},
    "exact": {"True": True, "false": False, "1": True, "0": False, "2": "2"},
    "unit": {"None": None},
    "where": {'{"lat": 60.4}': {"lat": 60.4}, "{'lat': 1}": {"lat": 1}},
    "tags": {'["a", "b"]': ["a", "b"], "['a', None, NaN, True,]": ["a", None, None, True], '["a\nb"]': ["a\nb"]},
    "real": {"NaN": "NaN", "-Infinity": "-Infinity"},
    "either": {"3": 3, "007": "007", "True": "True", "null": None},
    "any": {'{"a": [1]}': {"a": [1]}, "{'a': None}": {"a": None}, "1.5": 1.5, "text": "text", '"quoted"': '"quoted"'},
    "maybe": {"[1]": [1], "None": None},
    "dict": {'{"a": 1}': {"a": 1}},
    "both": {"3": 3, "3.5": "3.5"},
    "city": {"3": "3", ' "quoted" \\ text\n\n': ' "quoted" \\ text\n\n'},
    "unknown": {"true": "true"},
}
"""Values by text for each parameter."""


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [(name, text, value) for name, values in XML_VALUES.items() for text, value in values.items()],
)
def test_values_of_xml_parameters_are_cast_by_the_schema(parameter, text, value):
    text = f"<function=weather>\n<parameter={parameter}>\n{text}\n</parameter>\n</function>"
    assert calls(parse([text], "qwen3_coder")) == [("weather", {parameter: value})]


@pytest.mark.parametrize("more", [0, 1])
def test_a_forgotten_tag_of_a_parameter_costs_no_more_than_that(more):
    middle, end = "</parameter>\n<parameter=days>", "</parameter>\n</function>"
    broken = CODER.replace("=days>\n3\n</parameter>", "=days")  # vLLM#39771
    for text, rest in ((CODER.replace(middle, middle[13:]), ""), (CODER.replace(end, end[13:]), ""), (broken, "=days")):
        first = ("weather", {"city": "Bergen"}) if rest else BERGEN
        for pieces in ([text + more * CODER], list(text + more * CODER)):
            answer = parse(pieces, "qwen3_coder")
            assert calls(answer) == [first, *more * [BERGEN]]
            assert answer.content == (rest and "<parameter=days\n</function>\n</tool_call>")


@pytest.mark.parametrize("reasoning", ["open", "inside"])
def test_reasoning_is_split_from_content_and_calls(reasoning):
    opening = "<think>\n" if reasoning == "open" else ""
    text = f"{opening}2 < 3, so\nyes.\n</think>\n\nYes.\n{HERMES}"
    answer = parse([text], "hermes", reasoning)
    assert (answer.content, answer.reasoning, calls(answer)) == ("Yes.", "2 < 3, so\nyes.", [BERGEN])


def test_a_call_ends_the_reasoning_but_what_only_looks_like_one_does_not():
    answer = parse([f"I write <tool_call> now.\n{HERMES}\nDone."], "hermes", "inside")
    assert (answer.reasoning, answer.content, calls(answer)) == ("I write <tool_call> now.", "Done.", [BERGEN])


def test_the_end_of_a_reasoning_in_which_a_call_was_is_not_content():
    text = f"<think>Hm. {HERMES} So.</think>\nDone."  # lmstudio-bug-tracker#1592
    assert shown(parse(list(text), "hermes", "open"))[:2] == ("So.\nDone.", "Hm.")


def test_without_a_tag_an_answer_is_content_if_the_prompt_opened_no_reasoning():
    assert shown(parse([" Hello <think>"], "hermes", "open")) == (" Hello <think>", "", [])
    assert shown(parse(["Hello"], "hermes", "inside")) == ("", "Hello", [])


def fed(parser, pieces):
    return [parser.feed(piece) for piece in pieces]


def test_content_before_a_tag_streams_at_once():
    deltas = fed(new_parser(*of_syntax("hermes")), ["Hel", "lo <", "b> ", "x", " <tool", "s>"])
    assert [delta.content for delta in deltas] == ["Hel", "lo", " <b>", " x", "", " <tools>"]


@pytest.mark.parametrize(
    ("syntax", "pieces", "expected"),
    [
        (
            "hermes",
            ['<tool_call>\n{"name": "w', 'eather", "arguments": ', '{"ci', 'ty": "Ber', 'gen"', "}", "}\n</tool"],
            ["", "", '{"ci', 'ty": "Ber', "gen", '"}', ""],
        ),
        (
            "qwen3_coder",
            [
                *("<tool_call>\n<func", "tion=weather>", "\n<parameter=city>"),
                *('\nA "', 'b"\n', "c\n</p", "arameter>\n</function>"),
            ],
            ["", "{", '"city": ', '"A \\"', 'b\\"', "\\nc", '"}'],
        ),
    ],
)  # fmt: skip
def test_arguments_stream_as_they_arrive(syntax, pieces, expected):
    deltas = fed(new_parser(*of_syntax(syntax)), pieces)
    assert ["".join(part.arguments for part in delta.tool_calls) for delta in deltas] == expected
    parts = [part for delta in deltas for part in delta.tool_calls]
    assert (parts[0].name, parts[0].index) == ("weather", 0)
    assert all(part.id is None and part.name is None for part in parts[1:])


def test_an_unknown_name_is_given_back_as_soon_as_it_is_known():
    deltas = fed(new_parser(*of_syntax("llama3_json")), ['{"name": "sto', 'rm"', ', "parameters"'])
    assert [delta.content for delta in deltas] == ["", '{"name": "storm"', ', "parameters"']
    deltas = fed(new_parser(*of_syntax("llama3_json")), ['{"ci', 'ty"', ": 1"])
    assert [delta.content for delta in deltas] == ["", '{"city"', ": 1"]


def test_a_call_that_was_cut_short_keeps_the_arguments_so_far():
    assert shown(parse([HERMES[:-3]], "hermes"))[0] == shown(parse([CODER[:-3]], "qwen3_coder"))[0] == ""
    assert shown(parse([HERMES[:60]], "hermes")) == ("", "", [("weather", '{"city": "Berge')])
    assert shown(parse([CODER[: CODER.index("n\n</par")]], "qwen3_coder")) == ("", "", [("weather", '{"city": "Berge')])


def test_hostile_answers_take_linear_time():
    # Hundreds of thousands of characters each, in pieces, with nothing to be found before the end.
    for text in ("<tool_call>" * 20_000, '<tool_call>{"arguments": "' + "<tool_call>" * 20_000, "<" * 200_000):
        assert parse([text[i : i + 1000] for i in range(0, len(text), 1000)], "hermes").content == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_json_is_read_as_it_is_and_nothing_shorter_or_longer_is(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert as_json(text) == text
    assert as_json(text + "]") is None
    if isinstance(value, (dict, list, str)):
        assert not any(as_json(text[:end]) for end in range(len(text)))


@pytest.mark.parametrize(
    "text",
    [
        "", "{", '{"a" 1}', '{"a": 01}', '{"a": --1}', '{"a": .}', '{"a": tru}', "{,}", "[1 2]", '{"a"}', "[1]]", "[}",
        "{a: 1}", '{"a":: 1}', '{"a": }', "[,1]", '{"a": 1,, "b": 2}', '"a', "nope", "1 2",
    ],
)  # fmt: skip
def test_what_has_no_plain_meaning_is_not_json(text):
    assert as_json(text) is None


def test_types_of_parameters_follow_references_but_not_in_circles():
    schema = {"properties": {"a": {"$ref": "#/$defs/a"}, "b": {"anyOf": [{"type": "null"}, {"const": 1}]}}}
    function = read_functions([{"name": "f", "parameters": {**schema, "$defs": {"a": {"$ref": "#/$defs/a"}}}}])["f"]
    assert "object" in function.types("a")
    assert function.types("b") == {"null", "integer", "number"}
    many = {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}}  # each reference is followed once
    function = read_functions([{"name": "f", "parameters": {**many["a"], "properties": many, "$defs": many}}])["f"]
    assert "object" in function.types("a")
    assert function.types("unknown") == {"string"}
    others = {"type": "object", "additionalProperties": {"type": "boolean"}}
    assert read_functions([{"name": "f", "parameters": others}])["f"].types("unknown") == {"boolean"}
