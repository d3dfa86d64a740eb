import re

import pytest

from verax.errors import InvalidParameterError
from verax.serve.page import page as markdown
from verax.serve.page.page import render_markdown as render


def test_code_has_classes_and_no_styles():
    html = render("```python\ndef f():\n    return 1\n```\n\n| a |\n|--:|\n| 1 |\n")
    assert '<span class="k">def</span>' in html
    assert '<td class="align-right">1</td>' in html
    assert "style" not in html


@pytest.mark.parametrize("language", sorted(markdown._LANGUAGES))
def test_every_language_of_the_list_is_highlighted(language):
    assert "<span" in render(f"```{language}\n[1] 'x' # = 2 <a>\nFROM x; if\n+a\n$ ls\n```\n")


def test_another_language_and_a_long_block_are_shown_as_they_are():
    long = "a = 1\n" * (markdown.MAX_HIGHLIGHTED // 6 + 1)
    for html in (render("```brainfuck\n+++<b>\n```"), render(f"```python\n{long}```")):
        assert "<span" not in html
        assert "<code" in html


@pytest.mark.parametrize(
    "hostile",
    [
        '<img src=x onerror="alert(1)">',
        "<script>alert(1)</script>",
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt:alert(1))",
        "[a](java\tscript:alert(1))",
        "[a](data:text/html,<script>alert(1)</script>)",
        "[a](vbscript:x)",
        "![a](https://elsewhere.example/x.png)",
        "![a](data:image/svg+xml,<svg onload=alert(1)>)",
        '![a](x "onerror=alert(1)")',
        "<svg onload=alert(1)>",
        "<a href=javascript:alert(1)>x</a>",
        "<style>body{display:none}</style>",
        '```"><script>alert(1)</script>\nx\n```',
        '[a](https://x.example "\\"><script>alert(1)</script>")',
        "<javascript:alert(1)>",
        "|a|\n|--:|\n|<b onclick=alert(1)>|",
    ],
)
def test_a_hostile_text_makes_no_element_that_does_anything(hostile):
    html = render(hostile)
    tags = re.findall(r"<([a-z]+\d?)((?:\s[^<>]*)?)>", html)
    assert {name for name, _ in tags} <= markdown._TAGS
    for _, attributes in tags:
        names = set(re.findall(r'([\w-]+)="', re.sub(r'="[^"]*"', '="', attributes)))
        assert names <= {"href", "title", "class", "target", "rel", "start"}
        href = re.search(r'href="([^"]*)"', attributes)
        assert href is None or href[1].startswith(("http://", "https://", "mailto:"))


def test_links_open_elsewhere_and_say_nothing_of_the_page():
    html = render("[a](https://example.com) [b](/v1/models)")
    assert '<a href="https://example.com" target="_blank" rel="noopener noreferrer">a</a>' in html
    assert "/v1/models" not in html


def test_a_picture_is_a_link_to_it():
    assert '<a href="https://example.com/x.png"' in render("![a cat](https://example.com/x.png)")


def test_a_text_over_the_limit_is_refused_by_name():
    with pytest.raises(InvalidParameterError, match=r"^text: 131073 characters, at most 131072"):
        render("x" * (markdown.MAX_CHARACTERS + 1))


@pytest.mark.parametrize("piece", ["[", "*a_", "> ", "- ", "`", "![](", "<", "|a", "&", "\\", "[a](", "~~", "1. "])
def test_texts_that_repeat_a_mark_are_rendered(piece):
    assert render(piece * (20_000 // len(piece)))


def test_what_the_parser_would_let_through_is_cleaned_once_more():
    html = markdown._clean(
        '<script>a()</script><img src=x onerror="b()"><a href="javascript:c()">d</a><a href="data:text/html,e">f</a>'
        '<p style="g" onclick="h()" class="i">j</p><iframe src="k"></iframe><a href="/l">m</a>'
    )
    for name in ("script", "img", "onerror", "data:", "style", "onclick", "iframe", "/l", "class="):
        assert name not in html
    assert all(text in html for text in ("d", "f", "j", "m"))
