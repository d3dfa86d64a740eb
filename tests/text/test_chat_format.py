"""Format of a checkpoint's answers, the grammars of its tool calls, and both on published chat templates.

`make real-tokenizers` fetches the published tokenizers into build/tokenizers.
"""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import tokenizers

from tests.support.answers import SYNTAXES, TEMPLATES, read, read_cut, written
from tests.support.grammar import accepts as accepts_lark
from tests.support.published import llama_cpp_source, published_tokenizer
from verax.text.engine.sampling_params import StructuredOutputs
from verax.text.features.chat_format import ChatFormat, chat_format, tool_grammar
from verax.text.features.grammar import GrammarCompiler
from verax.text.tokens.chat_template import render
from verax.text.tokens.tokenizer import Tokenizer

GLM = "<tool_call>{{ call.name }}<arg_key>{{ key }}</arg_key> arguments"
PLAIN = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"


def tokenizer_with(templates, special=(), added=()):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.add_special_tokens(list(special))
    backend.add_tokens(list(added))
    return Tokenizer(backend, chat_templates=templates)


@pytest.mark.parametrize(
    ("template", "expected"),
    [*((template, syntax) for syntax, template in TEMPLATES.items()), (GLM, "none"), (PLAIN, "none")],
)
def test_the_template_shows_the_syntax_of_tool_calls(template, expected):
    assert chat_format(tokenizer_with({"default": template})).tools == expected


def test_a_template_for_tools_is_read_before_the_default_one():
    assert chat_format(tokenizer_with({"default": PLAIN, "tool_use": TEMPLATES["hermes"]})).tools == "hermes"
    assert chat_format(tokenizer_with({})) == ChatFormat()


def test_reasoning_shows_in_the_template_or_in_the_vocabulary():
    assert chat_format(tokenizer_with({"default": PLAIN + "</think>"})).reasoning
    assert chat_format(tokenizer_with({"default": PLAIN}, added=["<think>", "</think>"])).reasoning
    assert not chat_format(tokenizer_with({"default": PLAIN}, added=["<think>"])).reasoning


def test_mistrals_reasoning_stands_in_brackets():
    special = ["[INST]", "[/INST]", "[THINK]", "[/THINK]"]
    template = llama_cpp_source("models/templates/mistralai-Ministral-3-14B-Reasoning-2512.jinja").read_text()
    tokenizer = tokenizer_with({"default": template.replace("eos_token", "'</s>'")}, special=special)
    form, prompt = (
        chat_format(tokenizer),
        tokenizer.apply_chat_template([{"role": "user", "content": "What is [THINK]?"}]),
    )
    assert (form.reasoning, form.reasoning_state(prompt)) == (True, "open")
    assert form.sampling_overrides == {"skip_special_tokens": False}
    for answer, expected in (
        ("[THINK]Which [x]?\nThat.[/THINK]It is [THIS].", ("It is [THIS].", "Which [x]?\nThat.", [])),
        ("It is [THINK].", ("It is [THINK].", "", [])),
    ):
        assert read_cut(answer, form, None, prompt) == expected
    for content in ("That.", None):
        said = {"role": "assistant", "content": content, "reasoning_content": "Which?"}
        told = form.history([{"role": "user", "content": "a"}, said, {"role": "user", "content": "b"}])
        assert f"[/INST][THINK]Which?[/THINK]{content or ''}</s>[INST]b" in tokenizer.apply_chat_template(told)
    assert "<[/THINK]>" in tool_grammar(form, None, prompt=prompt, form={"json_object": True})["grammar"]
    form = replace(form, special_tokens=frozenset())
    grammar = tool_grammar(form, None, prompt=prompt, form={"json_object": True})
    for text in ("{}", "[THINK]a[/THINK]\n{}"):
        assert accepts(grammar, text)
    assert not accepts(grammar, "[THINK]a{}")


def test_special_tags_are_kept_in_the_text_and_others_need_nothing():
    form = chat_format(tokenizer_with({"default": TEMPLATES["llama3_json"]}, special=["<|python_tag|>", "<|im_end|>"]))
    assert form.sampling_overrides == {"skip_special_tokens": False}
    assert form.turn_tokens == ("<|im_end|>",)
    assert chat_format(tokenizer_with({"default": TEMPLATES["hermes"]}, added=["<tool_call>"])).sampling_overrides == {}


REFUSING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first!') }}{% endif %}"
    "{{ m.role }}: {{ m.content }};{% endfor %}"
)
DROPPING = "{{ messages[0].content }};{% for m in messages if m.role != 'system' %}{{ m.content }};{% endfor %}"


@pytest.mark.parametrize(("template", "first"), [(REFUSING, True), (DROPPING, True), (PLAIN, False)])
def test_instructions_stand_first_where_the_template_takes_no_others(template, first):
    tokenizer = tokenizer_with({"default": template})
    form = chat_format(tokenizer)
    assert form.instructions_first == first
    messages = [{"role": role, "content": text} for role, text in (("system", "a"), ("user", "b"), ("system", "c"))]
    told = form.history(messages)
    assert told == ([{"role": "system", "content": "a\nc"}, messages[1]] if first else messages)
    assert "c" in tokenizer.apply_chat_template(told)
    assert form.history(messages[1:])[0]["role"] == ("system" if first else "user")
    assert form.history(messages[1:2]) == messages[1:2]


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles!') }}"
    "{% endif %}{{ m.content }};{% endfor %}"
)


def test_texts_of_one_role_in_a_row_are_one_message_where_the_template_wants_it():
    given = [{"role": role, "content": text} for role, text in (("user", "a"), ("user", "b"), ("assistant", "c"))]
    for template, expected in ((ALTERNATING, "a\n\nb;c;"), (REFUSING, "user: a;user: b;assistant: c;")):
        tokenizer = tokenizer_with({"default": template})
        form = chat_format(tokenizer)
        assert form.alternates == (template == ALTERNATING)
        assert tokenizer.apply_chat_template(form.history(given)) == expected
    called = [given[2], {**given[2], "tool_calls": [{"function": {"name": "f"}}]}]
    assert ChatFormat(alternates=True).history(called) == called


def test_instructions_begin_the_users_text_where_the_template_has_no_system():
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('system!') }}{% endif %}" + ALTERNATING
    dropping = "{% for m in messages if m.role != 'system' %}{{ m.content }};{% endfor %}"
    given = [{"role": role, "content": text} for role, text in (("system", "a"), ("user", "b"), ("system", "c"))]
    for template in (refusing, dropping):
        tokenizer = tokenizer_with({"default": template})
        form = chat_format(tokenizer)
        assert form.no_instructions
        assert "a\nc\n\nb" in tokenizer.apply_chat_template(form.history(given))
        assert "a" in tokenizer.apply_chat_template(form.history(given[:1]))
    assert not chat_format(tokenizer_with({"default": PLAIN})).no_instructions


def test_an_answer_stands_between_a_result_and_the_users_next_message_where_they_alternate():
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    given = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    given += [{"role": "tool", "tool_call_id": "call_1", "content": "b"}, {"role": "user", "content": "c"}]
    given += [{"role": "assistant", "content": ""}, {"role": "user", "content": "d"}]
    roles = [message["role"] for message in ChatFormat("mistral", alternates=True).history(given)]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant", "user"]
    assert ChatFormat("hermes").history(given) == given
    for name in ("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Ministral-3-14B-Reasoning-2512"):
        template = llama_cpp_source(f"models/templates/{name}.jinja").read_text()
        tokenizer = tokenizer_with({"default": template.replace("bos_token", "''").replace("eos_token", "'</s>'")})
        told = tokenizer.apply_chat_template(chat_format(tokenizer).history(given))
        assert "b[/TOOL_RESULTS]Done.</s>[INST]c[/INST]</s>[INST]d[/INST]" in told


WITHOUT_CALLS = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
DROPPING_TOOLS = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }};{% endfor %}"


@pytest.mark.parametrize("template", [ALTERNATING, DROPPING_TOOLS, WITHOUT_CALLS])
def test_functions_calls_and_results_are_text_where_the_template_has_none(template):
    tokenizer = tokenizer_with({"default": template})
    form = chat_format(tokenizer)
    tools = [{"type": "function", "function": tool} for tool in (WEATHER, CLOCK)]
    calls = [{"id": name, "function": {"name": name, "arguments": '{"a": 1}'}} for name in ("weather", "clock")]
    results = [{"role": "tool", "tool_call_id": name, "content": f"{name}!"} for name in ("weather", "clock")]
    messages = [
        *({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}),
        *({"role": "assistant", "content": None, "tool_calls": calls}, *results, {"role": "user", "content": "So?"}),
    ]
    assert form.functions(tools) is None
    told = tokenizer.apply_chat_template(form.history(messages, tools))
    written = '{"name": "weather", "parameters": {"a": 1}}; {"name": "clock", "parameters": {"a": 1}}'
    shown = ["Be brief.", json.dumps(WEATHER), json.dumps(CLOCK), "Rain?", written, "weather!", "clock!", "So?"]
    places = [told.index(text) for text in shown]
    assert places == sorted(places)
    assert read_cut(written, form, tools) == ("", "", [("weather", '{"a": 1}'), ("clock", '{"a": 1}')])
    without = tokenizer.apply_chat_template(form.history(messages))
    assert json.dumps(CLOCK) not in without
    assert written in without
    assert chat_format(tokenizer_with({"default": TEMPLATES["none"]})).functions(tools) == tools


def test_calls_of_one_answer_come_back_one_by_one_where_templates_take_one():
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("rain", "wind")]
    results = [{"role": "tool", "tool_call_id": name, "content": f"{name}!"} for name in ("wind", "rain")]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a", "tool_calls": calls}, *results]
    assert ChatFormat("hermes").history(messages) == messages
    template = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.id }} {% endfor %}{{ m.content }};{% endfor %}"
    told = ChatFormat("llama3_json").history(messages)
    assert [len(message["tool_calls"]) for message in told if "tool_calls" in message] == [1, 1]
    assert render(template, told) == "?;rain a;rain!;wind ;wind!;"
    template = llama_cpp_source("models/templates/meta-llama-Llama-3.1-8B-Instruct.jinja").read_text()
    assert '"parameters": {}}<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"wind!"' in render(template, told)


NAMED_CALLS = """{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for c in m.tool_calls or [] %}
{%- if c.id | length != 9 %}{{ raise_exception('nine!') }}{% endif -%}
[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"""
LISTED_CALLS = """{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% if m.tool_calls %}[TOOL_CALLS] [
{%- for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ ", " if not loop.last }}
{%- endfor %}]{% endif %};{% endfor %}"""
GRANITE = "{{ 'Respond with <|tool_call|> followed by a JSON list.' if tools }}" + WITHOUT_CALLS
HERMES = "{{ '<tool_call>{name, arguments}' if tools }}" + WITHOUT_CALLS
PHI = "{% if messages[0].tools %}<|tool|>{{ messages[0].tools }}<|/tool|>{% endif %}" + WITHOUT_CALLS


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        (NAMED_CALLS, "mistral"),
        (LISTED_CALLS, "mistral_json"),
        (GRANITE, "granite"),
        (PHI, "phi4_mini_json"),
        (HERMES, "hermes"),
        ("Mistral-Small-3.2-24B-Instruct-2506.jinja", "mistral"),
        ("mistralai-Ministral-3-14B-Reasoning-2512.jinja", "mistral"),
        ("mistralai-Mistral-Nemo-Instruct-2407.jinja", "mistral_json"),
        ("ibm-granite-granite-3.3-2B-Instruct.jinja", "granite"),
    ],
)
def test_calls_come_back_as_the_model_wrote_them(template, syntax):
    if template.endswith(".jinja"):
        template = llama_cpp_source(f"models/templates/{template}").read_text()
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer = Tokenizer(backend, chat_templates={"default": template}, special_tokens=ends)
    form = chat_format(tokenizer)
    assert (form.tools, form.loses_calls) == (syntax, syntax not in ("mistral", "mistral_json"))
    given = [{"type": "function", "function": {"description": "", **tool}} for tool in (WEATHER, CLOCK)]
    arguments = {"city": "Oslo [x]", "days": 2}
    called = [("weather", json.dumps(arguments)), ("clock", "{}")]
    made = [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": text}}
        for name, text in called
    ]
    results = [{"role": "tool", "tool_call_id": f"call_{name}", "content": f"{name}!"} for name, _ in called]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": made}, *results]
    prompt = tokenizer.apply_chat_template(form.history(messages[:1], given), tools=given)
    whole = tokenizer.apply_chat_template(form.history(messages, given), tools=given)
    if syntax == "phi4_mini_json":
        assert '<|tool|>[{"description": "", "name": "weather"' in prompt
    shown = whole[next(i for i, (a, b) in enumerate(zip(prompt + "!", whole, strict=False)) if a != b) :]
    answer = shown[: shown.rindex("weather!")]
    assert [(name, json.loads(text)) for name, text in read_cut(answer, form, given)[2]] == [
        ("weather", arguments),
        ("clock", {}),
    ]


@pytest.mark.parametrize(
    ("syntax", "one", "two"),
    [
        ("mistral", "[TOOL_CALLS]clock[ARGS]{}", "[TOOL_CALLS]clock[ARGS]{}"),
        ("mistral", '[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{"city": "A"}', None),
        ("mistral", '[TOOL_CALLS]weather{"city": "A"}', None),
        ("mistral", '[TOOL_CALLS] [{"name": "clock", "arguments": {}}]', None),
        ("mistral_json", '[TOOL_CALLS][{"name": "clock", "arguments": {}}', ', {"name": "clock", "arguments": {}}'),
        ("granite", '<|tool_call|>[{"name": "clock", "arguments": {}}', ', {"name": "clock", "arguments": {}}'),
        ("granite", '<tool_call>[{"arguments": {}, "name": "clock"}]', None),
        ("phi4_mini_json", '<|tool_call|>[{"name": "clock", "arguments": {}}', ', {"name": "clock", "arguments": {}}'),
        ("hermes", '<tool_call>\n{"name": "clock", "arguments": {}}\n', '{"name": "clock", "arguments": {}}\n'),
        ("hermes", '<tool_call>\n[{"name": "clock"}', ', {"name": "clock"}'),
    ],
)
def test_lists_of_calls_and_named_calls_are_read(syntax, one, two):
    form = ChatFormat(syntax)
    end = {"phi4_mini_json": "<|/tool_call|>", "hermes": "</tool_call>"}.get(syntax, "")
    end = "]" * (one.count("[{") - one.count("]", one.find("[{"))) + end
    for text, count in ((one + end, 1), (one + (two or "") + end, 1 + (two is not None))):
        content, _, calls = read_cut(f"Well.\n{text}", form, tools())
        assert (content, len(calls)) == ("Well.", count)
        assert all(json.loads(arguments) in ({}, {"city": "A"}) for _, arguments in calls)
    assert read_cut(f"{one}{end} So.", form, tools())[0] == "So."
    other = one.replace("clock", "other").replace("weather", "other") + end
    assert read_cut(other, form, tools()) == (other, "", [])


@pytest.mark.parametrize("syntax", ["mistral", "mistral_json", "granite", "phi4_mini_json"])
def test_grammars_of_lists_and_named_calls(syntax):
    def call(name, **arguments):
        if syntax == "mistral":
            return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"
        return json.dumps({"name": name, "arguments": arguments})

    def of(*calls):
        if syntax == "mistral":
            return "".join(calls)
        opening = "[TOOL_CALLS]" if syntax == "mistral_json" else "<|tool_call|>"
        return f"{opening}[{', '.join(calls)}]{'<|/tool_call|>' if syntax == 'phi4_mini_json' else ''}"

    one, two = of(call("weather", city="A")), of(call("weather", city="A", days=2), call("clock"))
    grammar = tool_grammar(ChatFormat(syntax), tools(), "required")
    for text in (one, two):
        assert accepts(grammar, text)
        assert len(read_cut(text, ChatFormat(syntax), tools())[2]) == 1 + (text == two)
    for text in ("Hello", of(call("weather", days=2)), of(call("other")), f"Well. {one}"):
        assert not accepts(grammar, text)
    assert not accepts(tool_grammar(ChatFormat(syntax), tools(), "required", False), two)
    strict = tool_grammar(ChatFormat(syntax), tools(strict=True))
    assert accepts(strict, f"Well. {two}")
    assert accepts(strict, "Hello.")
    assert not accepts(strict, f"Well. {of(call('weather', days=2))}")


def test_a_demanded_call_has_mistrals_special_tokens():
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"])
    tokenizer = Tokenizer(backend, chat_templates={"default": NAMED_CALLS + "{# [THINK] #}"})
    grammar = StructuredOutputs.from_value(tool_grammar(chat_format(tokenizer), tools(), "required"))
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[256])
    for thought in ("", "[THINK]Now.[/THINK]"):
        tokens = tokenizer.encode(thought + '[TOOL_CALLS]weather[ARGS]{"city": "A"}', add_special_tokens=False)
        assert {257, 258} <= set(tokens)
        assert compiler.compile(grammar).matcher().num_allowed(tokens) == len(tokens)


TURN = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        (TURN, "open"),
        (f"{TURN}<think>\n", "inside"),
        (f"{TURN}<think>\n\n</think>\n\n", "over"),
        (f"{TURN}<think>\nWhat if", "inside"),
        (f"{TURN}<think>\nSo.\n</think>\n\nThe answ", "over"),
        (f"<|im_start|>user\nWhat is <think>?<|im_end|>\n{TURN}", "open"),
        ("", "open"),
    ],
)
def test_the_last_turn_shows_the_state_of_the_reasoning(prompt, state):
    form = ChatFormat("hermes", True, turn_tokens=("<|im_end|>", "<|im_start|>"))
    assert form.reasoning_state(prompt) == state
    assert form.structured_after(prompt) == ("</think>" if state == "inside" else None)
    assert ChatFormat("hermes").reasoning_state(prompt) == "none"


def test_without_turn_tokens_only_the_very_end_of_the_prompt_counts():
    form = ChatFormat(reasoning=True)
    assert form.reasoning_state("What is <think>? Say so.") == "open"
    assert form.reasoning_state("Assistant: <think>\n") == "inside"
    assert form.reasoning_state("Assistant: <think>\n\n</think>\n\n") == "over"


WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"$ref": "#/$defs/count"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"count": {"type": "integer"}},
    },
}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
NAMED = {"type": "function", "function": {"name": "clock"}}
INSIDE = "<|im_start|><think>\n"


def tools(*, strict=False):
    return [{"type": "function", "function": {**function, "strict": strict}} for function in (WEATHER, CLOCK)]


def accepts(grammar, text):
    return accepts_lark(grammar["grammar"], text)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_required_takes_calls_of_the_functions_and_nothing_else(syntax):
    template = ChatFormat(syntax)
    grammar = tool_grammar(template, tools(), "required")
    call = written(syntax, "weather", city='"Bergen" <b>', unit="C", days=3)
    two = call + ("\n" if "<" in call[:1] else "; ") + written(syntax, "clock")
    for text in (call, written(syntax, "weather", city="Oslo"), two):
        assert accepts(grammar, text)
        answer = read([text], template, tools())
        assert (answer.content, len(answer.tool_calls)) == ("", 2 if text == two else 1)
    assert answer.tool_calls[0].arguments == '{"city": "\\"Bergen\\" <b>", "unit": "C", "days": 3}'
    for text in ("Hello", "", written(syntax, "storm"), written(syntax, "weather", unit="C"), f"Well: {call}"):
        assert not accepts(grammar, text)
    assert not accepts(grammar, written(syntax, "weather", city="Oslo", unit="K"))
    assert not accepts(grammar, written(syntax, "weather", city="Oslo", days="many"))


COLOR = {"$defs": {"color": {"enum": ["red"]}}}
PART = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"properties": {"a": True, "b": False}}, {"a": "x"}, {"b": "x"}),  # of Rust's schemars
        ({"properties": {"a": {"$ref": "#/$defs/color"}}, "required": ["a"], **COLOR}, {"a": "red"}, {"a": "blue"}),
        ({"$ref": "#/$defs/part", "$defs": {"part": PART}}, {"a": 1}, {}),
        ({"anyOf": [PART, {"type": "object", "required": ["b"]}]}, {"a": 1}, {"a": 0.5}),
        ({"additionalProperties": {"type": "integer"}}, {"x y": 3}, {"x": "y"}),
        ({"properties": {"a": {"type": "integer"}}, "required": ["b"]}, {"b": "x"}, {"a": 1}),
    ],
)
@pytest.mark.parametrize("syntax", SYNTAXES)
def test_a_demanded_call_has_arguments_by_schemas_of_all_forms(syntax, schema, right, wrong):
    given = [{"name": "f", "parameters": {"type": "object", **schema}}]
    grammar = tool_grammar(ChatFormat(syntax), given, "required")
    assert accepts(grammar, written(syntax, "f", **right))
    assert not accepts(grammar, written(syntax, "f", **wrong))
    (call,) = read([written(syntax, "f", **right)], ChatFormat(syntax), given).tool_calls
    assert json.loads(call.arguments) == right


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


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_auto_with_a_form_takes_calls_or_text_of_the_form(syntax):
    form = {"json": {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}}
    call = written(syntax, "weather", city="Oslo", days=3)
    json_text = '{"sum": 3}' if syntax in ("llama3_json", "none") else '{"sum":3}'
    for text, calls in ((call, 1), (json_text, 0)):
        assert accepts(tool_grammar(ChatFormat(syntax), tools(), form=form), text)
        answer = read([text], ChatFormat(syntax), tools())
        assert (len(answer.tool_calls), answer.content) == (calls, "" if calls else text)
    for text in ("Hello", "", '{"sum":"a"}', '{"total":3}', json_text + call):
        assert not accepts(tool_grammar(ChatFormat(syntax), tools(), form=form), text)
    assert tool_grammar(ChatFormat(syntax), tools(), "required", form=form) == tool_grammar(
        ChatFormat(syntax), tools(), "required"
    )


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_the_model_may_reason_before_text_of_a_form(syntax):
    template = ChatFormat(syntax, True, turn_tokens=("<|im_start|>",))
    for given, choice in ((tools(), "auto"), (tools(), "none"), (None, "none")):
        grammar = tool_grammar(template, given, choice, form={"json": {"const": 3}}, prompt="<|im_start|>")
        for text in ("3", "<think>\nA <sum>.\n</think>\n\n3"):
            assert accepts(grammar, text)
        for text in ("<think>\n</think>", "<think>\nA sum.\n</think>\n\n4", "A sum: 3"):
            assert not accepts(grammar, text)
    assert tool_grammar(template, None, "none", form={"json": {"const": 3}}, prompt=INSIDE) is None
    assert tool_grammar(ChatFormat(syntax), None, "none", form={"json": {"const": 3}}) is None


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


CALLS = [
    ("weather", {"city": 'Brønnøysund "50%" <b>\n\\t 💥', "days": 3, "exact": True, "where": {"lat": [65.5, -1e-3]}}),
    ("clock", {}),
]
CONTENT = "I look it up: a < b."


@pytest.fixture(scope="module")
def qwen3():
    return published_tokenizer("qwen3")


@pytest.fixture(scope="module")
def llama():
    return published_tokenizer("llama3_1")


def with_template(tokenizer, syntax):
    """The tokenizer with a chat template of another syntax."""
    return Tokenizer(tokenizer._backend, chat_templates={"default": TEMPLATES[syntax]})


def round_trip(tokenizer, calls, *, reasoning="", content=CONTENT):
    """The parsed answer, rendered by the template and decoded token by token as an engine does."""
    question = [{"role": "user", "content": "What is the weather in <tool_call>?"}]
    called = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    answer = {"role": "assistant", "content": content, "tool_calls": called}
    if reasoning:
        answer["reasoning_content"] = reasoning
    prompt = tokenizer.apply_chat_template(question, tools=tools())
    whole = tokenizer.apply_chat_template([*question, answer], tools=tools(), add_generation_prompt=False)
    assert whole.startswith(prompt)
    text = whole[len(prompt) :].removesuffix("<|im_end|>\n")
    form = chat_format(tokenizer)
    skip = form.sampling_overrides.get("skip_special_tokens", True)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens, skip_special_tokens=skip) == text
    ends = range(1, len(tokens) + 1)
    prefixes = ["", *(tokenizer.decode(tokens[:end], skip_special_tokens=skip).rstrip("\ufffd") for end in ends)]
    return read([now[len(before) :] for before, now in pairwise(prefixes)], form, tools(), prompt)


def shown(answer):
    return answer.content, answer.reasoning, [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


@pytest.mark.parametrize("reasoning", ["", "Which city?\nThat one."])
@pytest.mark.parametrize("calls", [CALLS, CALLS[1:], []], ids=["two", "one", "none"])
def test_qwen3s_template_makes_what_the_parser_reads(qwen3, calls, reasoning):
    assert chat_format(qwen3).tools == "hermes"
    assert chat_format(qwen3).sampling_overrides == {}
    answer = round_trip(qwen3, calls, reasoning=reasoning)
    assert shown(answer) == (CONTENT, reasoning, calls)


def test_qwen3s_prompts_show_where_the_reasoning_stands(qwen3):
    form = chat_format(qwen3)
    messages = [{"role": "user", "content": "What does <think> mean?"}]
    assert form.reasoning_state(qwen3.apply_chat_template(messages)) == "open"
    assert form.reasoning_state(qwen3.apply_chat_template(messages, enable_thinking=False)) == "over"
    begun = [*messages, {"role": "assistant", "content": "", "reasoning_content": "It"}]
    whole = qwen3.apply_chat_template(begun, add_generation_prompt=False)
    assert form.reasoning_state(whole[: whole.rindex("It") + 2]) == "inside"


def test_qwen3_coders_calls_go_through_qwen3s_tokens(qwen3):
    tokenizer = with_template(qwen3, "qwen3_coder")
    assert chat_format(tokenizer).tools == "qwen3_coder"
    assert shown(round_trip(tokenizer, CALLS)) == (CONTENT, "", CALLS)


def test_a_demanded_call_has_qwen3s_tokens(qwen3):
    pytest.importorskip("llguidance")
    prompt = qwen3.apply_chat_template([{"role": "user", "content": "What is the time?"}], tools=tools())
    grammar = StructuredOutputs.from_value(tool_grammar(chat_format(qwen3), tools(), "required", prompt=prompt))
    compiler = GrammarCompiler(qwen3, vocab_size=qwen3.vocab_size, eos_token_ids=qwen3.eos_token_ids)
    answer = '<think>\nThe clock.\n</think>\n\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    tokens = qwen3.encode(answer)
    assert compiler.compile(grammar).matcher().num_allowed(tokens) == len(tokens)


def test_llama_3s_published_template_has_no_calls(llama):
    form = chat_format(llama)
    assert (form.tools, form.reasoning) == ("none", False)
    assert "<|start_header_id|>" in form.turn_tokens


@pytest.mark.parametrize("call", CALLS)
def test_llama_3_1s_calls_go_through_its_tokens(llama, call):
    tokenizer = with_template(llama, "llama3_json")
    assert chat_format(tokenizer).tools == "llama3_json"
    assert shown(round_trip(tokenizer, [call], content="")) == ("", "", [call])
