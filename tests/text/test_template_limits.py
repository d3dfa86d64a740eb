"""Templates of a checkpoint that would exhaust the machine are refused, quickly and without its memory."""

import time
import tracemalloc

import pytest

from verax.errors import TemplateError
from verax.text.tokens import template_limits
from verax.text.tokens.chat_template import render

HELLO = [{"role": "user", "content": "Hello"}]
GROW = "{% set n = namespace(x=@) %}{% for i in range(99) %}{% set n.x = # %}{% endfor %}"

WIDTH, LENGTH, WORK = "more than 1000", "more than", "operations|seconds"


def grow(first, step):
    return GROW.replace("@", first).replace("#", step)


HOSTILE = [
    ("{{ 'a' * 10**10 }}", LENGTH),
    ("{{ [0] * 10**9 }}", LENGTH),
    ("{{ 10 ** (10 ** 8) }}", "bits"),
    ("{% set x = 'a' * 10**6 %}{{ x | replace('', x) }}", LENGTH),
    ("{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}", LENGTH),
    ("{{ ('y' * 10**6) | join('x' * 10**6) }}", LENGTH),
    ("{{ ('x' * 10**6).join('y' * 10**6) }}", LENGTH),
    ("{{ ('\t' * 10**6).expandtabs(1000) }}", LENGTH),
    ("{{ ('a' * 10**6).encode('punycode') }}", "encode"),
    ("{{ ('<!--' * 10**6) | striptags }}", "striptags"),
    ("{{ '%999999999d' % 1 }}", WIDTH),
    ("{{ '%*d' % (999999999, 1) }}", WIDTH),
    ("{{ '{:>999999999}'.format(1) }}", WIDTH),
    ("{{ '{:>{}}'.format(1, 999999999) }}", WIDTH),
    ("{{ '%.999999999f' | format(1.0) }}", WIDTH),
    ("{{ 'a' | center(10**9) }}", WIDTH),
    ("{% filter center(10**9) %}x{% endfilter %}", WIDTH),
    ("{{ ['a'] | map('center', 10**9) | list }}", WIDTH),
    ("{{ 'a'.zfill(10**9) }}", WIDTH),
    ("{{ 'a\nb' | indent(10**9) }}", WIDTH),
    ("{{ [1] | batch(10**9, 0) | list }}", WIDTH),
    ("{{ [1] | slice(10**9) | list }}", WIDTH),
    ("{{ [1] | tojson(indent=10**9) }}", WIDTH),
    ("{% set x = range(9999) | list %}{{ ([x] * 9999) | sum(start=[]) }}", LENGTH),
    (grow("'ab'", "n.x ~ n.x"), LENGTH),
    (grow("'ab'", "n.x + n.x"), LENGTH),
    (grow("[1]", "n.x + n.x"), LENGTH),
    (grow("[1]", "[n.x, n.x]") + "{{ n.x }}", "elements|seconds"),
    (grow("[1]", "[n.x, n.x]") + "{{ n.x | tojson }}", "elements|seconds"),
    (grow("[1]", "[n.x, n.x]") + "{{ n.x == messages }}", "elements|seconds"),
    (grow("(1,)", "(n.x, n.x)"), "elements|seconds"),
    ("{% set n = namespace(l=[]) %}{% for i in range(999) %}{% set n.l = n.l + ['a' * 10**7] %}{% endfor %}", LENGTH),
    ("{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}", WORK),
    ("{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(50) }}", WORK),
    ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
    ("{% for i in range(99999) %}" + 99_999 * "x" + "{% endfor %}", LENGTH),
    ("{{ lipsum(10**9) }}", "undefined"),
]


@pytest.mark.parametrize(("template", "message"), HOSTILE)
def test_a_template_that_would_exhaust_the_machine_is_refused_within_a_second(template, message):
    begin = time.thread_time()
    with pytest.raises(TemplateError, match=message):
        render(template, HELLO)
    assert time.thread_time() - begin < 1


@pytest.mark.parametrize("template", [template for template, message in HOSTILE if message == LENGTH])
def test_a_value_that_would_be_too_large_is_not_made(template):
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError):
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


def test_each_rendering_has_a_budget_of_its_own(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_OPERATIONS", 50)
    template = "{% for i in range(40) %}x{% endfor %}"
    assert [render(template, HELLO) for _ in range(3)] == ["x" * 40] * 3


def test_formats_and_padding_within_the_limits_are_those_of_python():
    assert render("{{ '%-8s|%5.2f' % ('ab', 3.14159) }}", HELLO) == "ab      | 3.14"
    assert render("{{ '{:>6} {}'.format('ab', 20261122) }}", HELLO) == "    ab 20261122"
    assert render("{{ '12345: %s' % 1 }}{{ 'a' | center(5) }}{{ '\n' ~ 2 ** 10 }}", HELLO) == "12345: 1  a  \n1024"
