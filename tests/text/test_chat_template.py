"""Chat templates rendered: what templates can use, where a continued message ends, what is refused."""

import json
import tracemalloc

import pytest

from verax.errors import InvalidParameterError, TemplateError
from verax.text.tokens.chat_template import render

HELLO = [{"role": "user", "content": "Hello"}]
PREFILLED = [*HELLO, {"role": "assistant", "content": "The answer is "}]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def test_what_is_set_inside_of_generation_stays_there():
    template = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert render(template, HELLO) == "21"


CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": None, "function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("content is none", "True"),
        ("content is not none", "False"),
        ("content == none", "True"),
        ("content is defined", "False"),
        ("content is string", "False"),
        ("content is undefined", "True"),
        ("get('content') is none", "True"),
        ("content", ""),
        ("content + '!'", "!"),
        ("content.strip().split('</think>')[-1]", ""),
        ("content | trim ~ '!'", "!"),
        ("content | tojson", "null"),
        ("content[0]['text'] + '.'", "."),
        ("missing is none", "False"),
        ("tool_calls[0] | tojson", '{"id": null, "function": {"name": "f", "arguments": {}}}'),
    ],
)
def test_null_content_is_missing_and_none_and_an_empty_text(expression, text):
    before = {**CALLED}
    assert render("{{ messages[0].@ }}".replace("@", expression), [CALLED]) == text
    assert before == CALLED


AS_TEXT = "{{ a if a is string else a | tojson }}"
AS_OBJECT = "{% if a is mapping %}{% for key, value in a | items %}{{ key }}={{ value }};{% endfor %}{% endif %}"


@pytest.mark.parametrize(
    ("arguments", "as_text", "as_object", "as_json"),
    [
        ('{"x":1, "y": "a"}', '{"x":1, "y": "a"}', "x=1;y=a;", '{"x": 1, "y": "a"}'),
        ({"x": None}, '{"x": null}', "x=None;", '{"x": null}'),
        ('{"x": "It was a da', '{"x": "It was a da', "x=It was a da;", '{"x": "It was a da"}'),
        ('{"x": [1, {"y": "a", "z', '{"x": [1, {"y": "a", "z', "x=[1, {'y': 'a'}];", '{"x": [1, {"y": "a"}]}'),
        ('{"x": "a\\ud83d', '{"x": "a\\ud83d', "x=a?;", '{"x": "a?"}'),
        ("not json", "not json", "", "{}"),
        ("[" * 9999, "[" * 9999, "", "{}"),
        ('{"x":' * 9999, '{"x":' * 9999, "", "{}"),
        ("", "{}", "", "{}"),
        (None, "{}", "", "{}"),
    ],
)
def test_arguments_are_text_or_an_object_as_the_template_wants(arguments, as_text, as_object, as_json):
    for call in ({"name": "f", "arguments": arguments}, {"function": {"name": "f", "arguments": arguments}}):
        messages = [{"role": "assistant", "tool_calls": [call]}]
        read = "{% set a = (messages[0].tool_calls[0].function or messages[0].tool_calls[0]).arguments %}"
        assert render(read + AS_TEXT, messages) == as_text
        assert render(read + AS_OBJECT, messages) == as_object
        assert render(read + "{{ a | tojson }}", messages) == as_json
        assert render(read + "{{ '<' + a + '>' ~ a }}", messages) == f"<{as_text}>{as_text}"


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content"])
def test_reasoning_is_found_under_each_of_its_names(name):
    messages = [{"role": "assistant", "content": "4", name: "2 + 2"}]
    assert render("{{ messages[0].reasoning_content }}", messages) == "2 + 2"


def test_a_continued_message_ends_the_prompt_with_its_own_spaces():
    prompt = render(CHATML, PREFILLED, continue_final_message=True)
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nThe answer is "
    assert PREFILLED[-1]["content"] == "The answer is "


def test_a_continued_message_ends_the_prompt_where_the_template_strips_it():
    prompt = render(CHATML.replace("m.content", "m.content | trim"), PREFILLED, continue_final_message=True)
    assert prompt.endswith("assistant\nThe answer is")


def test_a_continued_message_can_have_parts():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}, {"type": "thinking"}]
    template = "{% for p in messages[0].content %}{{ p.text }}|{% endfor %}"
    assert render(template, [{"role": "a", "content": parts}], continue_final_message=True) == "one |two"


@pytest.mark.parametrize(
    "text",
    [
        "{{ m.content }}",
        "{{ m.content | trim }}",
        "{{ m.content | tojson }}",
        "{{ '' + m.content }}",
        "{{ m.content if m.content is string else '' }}",
        "{{ m.content.split('</think>')[-1] }}",
        "{% if m.role == 'tool' %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_text_in_parts_is_one_text_where_the_template_reads_no_parts(text, role):
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]
    template = f"{{% for m in messages %}}{text}{{% endfor %}}"
    assert render(template, [{"role": role, "content": parts}]).strip('"') == "Hi you"


def test_parts_reach_a_template_that_reads_them():
    template = "{% for m in messages %}{% for p in m.content %}[{{ p.text | trim }}]{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": " a "}, {"type": "text", "text": " b "}]
    assert render(template, [{"role": "user", "content": parts}]) == "[a][b]"
    results = [{"temperature": 21}]
    assert render("{{ messages[0].content | tojson }}", [{"role": "tool", "content": results}]) == json.dumps(results)


def test_a_message_that_the_template_drops_cannot_be_continued():
    with pytest.raises(TemplateError, match="cannot be continued: 'The answer is'"):
        render("{{ messages[0].content }}", PREFILLED, continue_final_message=True)


@pytest.mark.parametrize("content", [None, [], [{"type": "thinking"}]])
def test_a_message_without_text_cannot_be_continued(content):
    with pytest.raises(InvalidParameterError, match=r"messages\[0\]: there is no text to continue"):
        render(CHATML, [{"role": "assistant", "content": content}], continue_final_message=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ dict.__mro__[1] }}",
        "{{ missing.attribute }}",
        "{{ range(10 ** 9) | list }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('refuses') }}",
    ],
)
def test_whatever_a_template_does_wrong_is_a_template_error(template):
    with pytest.raises(TemplateError, match="chat template refuses these messages"):
        render(template, HELLO)


def test_an_invalid_template_is_refused_with_its_line():
    with pytest.raises(TemplateError, match="not valid jinja: line 2"):
        render("\n{% for %}", HELLO)


@pytest.mark.parametrize("messages", [5, None, "", b"x", [], {"role": "user", "content": "x"}, [3]])
def test_no_conversation_is_refused_by_name(messages):
    with pytest.raises(InvalidParameterError, match=r"^messages"):
        render("", messages)


@pytest.mark.parametrize("kind", ["image", "image_url", "video", "input_audio"])
def test_a_part_that_is_not_text_is_refused_by_its_type(kind):
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind}]
    with pytest.raises(InvalidParameterError, match=rf"messages\[1\]: content: .*'{kind}'"):
        render("{{ messages[1].content[0].text }}", [*HELLO, {"role": "user", "content": parts}])


@pytest.mark.parametrize("message", [{"content": "x"}, {"role": "user"}, {"role": 1}])
def test_a_message_without_role_or_content_is_refused_by_name(message):
    with pytest.raises(InvalidParameterError, match=r"^messages"):
        render("", [message])


GROW = "{% set n = namespace(x=@) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * 10**10 }}", "more than"),
        ("{{ 10**10 * 'a' }}", "more than"),
        ("{{ [0] * 10**9 }}", "more than"),
        ("{{ 10 ** (10 ** 8) }}", "bits"),
        (GROW.replace("@", "'ab'"), "more than"),
        (GROW.replace("@", "[1]"), "more than"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}", "pieces"),
        ("{% for i in range(99999) %}" + 99_999 * "x" + "{% endfor %}", "more than"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
        ("{{ lipsum(10**9) }}", "undefined"),
    ],
)
def test_a_template_that_would_make_too_much_is_refused_and_makes_little(template, reason):
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError, match=reason):
            render(template, HELLO)
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()


def test_a_conversation_of_a_thousand_long_messages_is_rendered():
    messages = [{"role": "user", "content": "word " * 1000}] * 1000
    template = "{% for m in messages %}{{ '<' + m.role ~ '>' + m.content | trim }}{{ m | tojson }}\n{% endfor %}"
    prompt = render(template, messages)
    assert prompt.count("<user>") == 1000
    assert len(prompt) > 10e6


def test_sums_products_and_powers_within_the_limits_are_computed():
    template = "{{ 'a' * 3 + 'b' }}{{ 2 * 3 + 2 ** 10 }}{{ [1] + [2] }}{{ 2 ** 0.5 > 1 }}"
    assert render(template, HELLO) == "aaab1030[1, 2]True"
