"""Markdown of a model's answer to HTML that a page may show: rendered, highlighted and cleaned.

A model's answer is untrusted. Raw HTML in it is text, pictures become links, and what comes out passes nh3 (Rust's
ammonia) once more, with a short list of tags, Pygments' class names and three kinds of links. Styles are classes, since
the page's content security policy forbids inline ones.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Sequence
from typing import Any

from verax._optional import require_optional
from verax.errors import InvalidParameterError

__all__ = ["MAX_CHARACTERS", "render"]

MAX_CHARACTERS = 128 * 1024
"""Length of the longest text that is rendered, about 30,000 tokens. The page shows longer ones as plain text."""

MAX_HIGHLIGHTED = 20_000
"""Length of the longest code block that is highlighted. Lexers are regular expressions, some of them slow."""

# fmt: off
LANGUAGES = frozenset((
    "bash", "c", "c++", "console", "cpp", "cs", "csharp", "css", "diff", "docker", "dockerfile", "go", "html",
    "ini", "java", "javascript", "js", "json", "kotlin", "lua", "make", "makefile", "php", "py", "python", "r",
    "ruby", "rust", "sh", "shell", "sql", "swift", "toml", "ts", "typescript", "xml", "yaml", "yml",
))
# fmt: on
"""Languages that are highlighted. Blocks in others are shown as they are."""

# fmt: off
TAGS = frozenset((
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
))
# fmt: on

SCHEMES = frozenset({"http", "https", "mailto"})

ALIGNMENTS = frozenset({"align-left", "align-center", "align-right"})
"""Classes of table cells."""


def render(text: str) -> str:
    """HTML of a Markdown text: CommonMark with tables and strikethrough.

    Raises:
        InvalidParameterError: if the text is longer than `MAX_CHARACTERS`.
        MissingDependencyError: without nh3.
    """
    if len(text) > MAX_CHARACTERS:
        raise InvalidParameterError(f"text: {len(text)} characters, at most {MAX_CHARACTERS} are rendered")
    return _clean(_parser().render(text))


@functools.cache
def _parser() -> Any:
    markdown_it = require_optional("markdown_it")
    parser = markdown_it.MarkdownIt(
        "js-default", {"html": False, "linkify": False, "maxNesting": 20, "highlight": _highlight}
    )
    parser.add_render_rule("image", _image)
    parser.add_render_rule("th_open", _cell)
    parser.add_render_rule("td_open", _cell)
    return parser


def _image(renderer: Any, tokens: Sequence[Any], index: int, options: Any, env: Any) -> str:
    """A link in place of a picture: the page loads nothing from elsewhere."""
    token = tokens[index]
    label = renderer.renderInlineAsText(token.children or [], options, env) or "picture"
    return f'<a href="{html.escape(str(token.attrGet("src") or ""))}">{html.escape(label)}</a>'


def _cell(renderer: Any, tokens: Sequence[Any], index: int, options: Any, env: Any) -> str:
    """A table cell whose alignment is a class. markdown-it writes a style."""
    style = str(tokens[index].attrGet("style") or "")
    alignment = f' class="align-{style.removeprefix("text-align:")}"' if style else ""
    return f"<{tokens[index].tag}{alignment}>"


def _highlight(code: str, language: str, _attributes: str) -> str:
    """Inner HTML of a code block, with Pygments' classes; empty if markdown-it is to write it plainly."""
    name = language.lower()
    if name not in LANGUAGES or len(code) > MAX_HIGHLIGHTED:
        return ""
    pygments = require_optional("pygments")
    lexer = require_optional("pygments.lexers").get_lexer_by_name(name, stripnl=False)
    formatter = require_optional("pygments.formatters").HtmlFormatter(nowrap=True)
    return pygments.highlight(code, lexer, formatter)


@functools.cache
def _classes() -> dict[str, set[str]]:
    """Class names that each tag may have."""
    pygments_token = require_optional("pygments.token")
    kinds = {name for name in pygments_token.STANDARD_TYPES.values() if name}
    code = {f"language-{name}" for name in LANGUAGES}
    return {"span": kinds, "code": code, "td": set(ALIGNMENTS), "th": set(ALIGNMENTS)}


def _clean(unsafe: str) -> str:
    return require_optional("nh3").clean(
        unsafe,
        tags=set(TAGS),
        attributes={"a": {"href", "title"}, "ol": {"start"}},
        allowed_classes=_classes(),
        set_tag_attribute_values={"a": {"target": "_blank"}},
        url_schemes=set(SCHEMES),
        url_relative="deny",
        link_rel="noopener noreferrer",
    )
