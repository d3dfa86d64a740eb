"""Chat templates: jinja2 in its sandbox, set up as in transformers, so that templates render alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from verax.errors import InvalidParameterError, TemplateError
from verax.text.tokens.template_limits import BoundedEnvironment, bounded

__all__ = ["check_messages", "render"]

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's reasoning goes by; templates read the first, a few the second."""

_END_OF_MESSAGE = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put behind a message to find its end in the prompt; the space shows whether the template strips."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training: passed through."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers: what the body sets is not set behind it.
        return nodes.CallBlock(self.call_method("_pass"), [], [], body).set_lineno(line)

    def _pass(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dictionary:
    """`dict` in templates: makes one, and leads nowhere else in Python."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _SafeNamespace(Namespace):
    """`namespace` in templates, without Python's own attributes, which lead out of the sandbox."""

    # Without names, so that a template can have an attribute `self`.
    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")


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
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.bound_filters()
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _Dictionary()
    environment.globals["namespace"] = _SafeNamespace
    return environment.from_string(template)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what no template could render.

    Raises:
        InvalidParameterError: naming the message that has no role or no content.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidParameterError(
            f'messages: expected a list such as [{{"role": "user", "content": "Hello"}}], got {messages!r}'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidParameterError(f"messages[{i}]: expected a dictionary with a role, got {message!r}")
        if "content" not in message and "tool_calls" not in message:
            raise InvalidParameterError(f"messages[{i}]: a message of role {message['role']!r} needs content")


def render(
    template: str, messages: Sequence[Mapping[str, Any]], *, continue_final_message: bool = False, **variables: Any
) -> str:
    """The prompt that a template makes of a conversation; with `continue_final_message`, up to the end of its text.

    Raises:
        InvalidParameterError: if `messages` is not a list of messages, or the last has no text to continue.
        TemplateError: if the template is invalid, refuses these messages (with its own words), or goes beyond the
            limits of `template_limits`.
    """
    check_messages(messages)
    conversation = [_normalised(message) for message in messages]
    final = _mark_end(conversation) if continue_final_message else None
    try:
        with bounded():
            prompt = _compile(template).render(messages=conversation, **variables)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"the checkpoint's chat template is not valid jinja: line {error.lineno}: {error.message}"
        ) from error
    except Exception as error:  # a template runs whatever its author wrote
        raise TemplateError(f"the checkpoint's chat template refuses these messages: {error}") from error
    return prompt if final is None else _cut_at_end(prompt, final)


def _normalised(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that are None, which templates would spell out, and with the reasoning under each of its names."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _mark_end(conversation: list[dict[str, Any]]) -> str:
    """Put the mark behind the last message's text; that text."""
    content = conversation[-1].get("content")
    if isinstance(content, str):
        conversation[-1]["content"] = content + _END_OF_MESSAGE
        return content
    parts = list(content) if isinstance(content, (list, tuple)) else []
    for i in reversed(range(len(parts))):
        if isinstance(parts[i], Mapping) and isinstance(parts[i].get("text"), str):
            text = parts[i]["text"]
            conversation[-1]["content"] = [*parts[:i], {**parts[i], "text": text + _END_OF_MESSAGE}, *parts[i + 1 :]]
            return text
    raise InvalidParameterError(f"messages[{len(conversation) - 1}]: there is no text to continue, got {content!r}")


def _cut_at_end(prompt: str, final: str) -> str:
    if final.strip() not in prompt or _END_OF_MESSAGE.strip() not in prompt:
        raise TemplateError(
            "the checkpoint's chat template leaves out or changes the last message's text, so that it cannot be "
            f"continued: {final.strip()!r}"
        )
    end = prompt.rindex(_END_OF_MESSAGE.strip())
    kept = prompt[:end]
    return kept if prompt.startswith(_END_OF_MESSAGE, end) else kept.rstrip()
