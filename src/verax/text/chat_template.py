"""Chat templates: jinja2 in its sandbox, set up as in transformers, so that templates render alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from verax.errors import InvalidParameterError, TemplateError

__all__ = ["check_messages", "render"]


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training: passed through."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML and non-ASCII text, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what no template could render.

    Raises:
        InvalidParameterError: naming the message that has no role or no content.
    """
    if isinstance(messages, (str, Mapping)) or not messages:
        raise InvalidParameterError(
            f'messages: expected a list such as [{{"role": "user", "content": "Hello"}}], got {messages!r}'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidParameterError(f"messages[{i}]: expected a dictionary with a role, got {message!r}")
        if "content" not in message and "tool_calls" not in message:
            raise InvalidParameterError(f"messages[{i}]: a message of role {message['role']!r} needs content")


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The prompt that a template makes of a conversation.

    Raises:
        InvalidParameterError: if `messages` is not a list of messages.
        TemplateError: if the template is invalid, or refuses these messages; with its own words.
    """
    check_messages(messages)
    try:
        return _compile(template).render(messages=messages, **variables)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"the checkpoint's chat template is not valid jinja: line {error.lineno}: {error.message}"
        ) from error
    except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise TemplateError(f"the checkpoint's chat template refuses these messages: {error}") from error
