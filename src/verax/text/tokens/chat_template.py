"""Chat templates: jinja2 in its sandbox, set up as in transformers, so that templates render alike.

A template belongs to the checkpoint or to the operator; the server refuses templates of clients. The sandbox keeps a
template from Python's attributes and bounds, by amounts alone, what templates do by mistake: ranges (jinja2's own
limit), the results of `+`, `*` and `**`, and the length and the number of the pieces that a template writes. It bounds
neither the time of a template nor macros that call themselves up to Python's limit, concatenation by `~`, or the widths
and repetitions of filters and methods such as `center`, `format` and `replace`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from verax.errors import InvalidParameterError, TemplateError
from verax.text.tokens.lenient_json import object_so_far

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's reasoning goes by; templates read the first, a few the second."""

_MEDIA = ("image", "video", "audio")
"""Words in the types of message parts that are not text, such as `image_url` and `input_audio`."""

_END_OF_MESSAGE = "CONTINUE_FINAL_MESSAGE_TAG "
"""Text put after a message to find its end in the prompt; the space shows whether the template strips."""


MAX_LENGTH = 1 << 24
"""Characters of a prompt or a text: four times a prompt of a million tokens. An element of a list counts as 8."""

MAX_PIECES = 1 << 18
"""Pieces that a template may write: a conversation of 1,000 messages has about 20,000."""

MAX_BITS = 1024


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox that checks the size of a sum, a product or a power before it is computed."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        length, bits = _length(left), _bits(left)
        if operator == "+" and length is not None:
            _check_length(length + (_length(right) or 0))
        elif operator == "**":
            _check_bits(bits * right if isinstance(right, int) else 0)
        elif operator == "*":
            _check_bits(bits + _bits(right))
            for size, times in ((length, right), (_length(right), left)):
                if size is not None and isinstance(times, int):
                    _check_length(size * times)
        return super().call_binop(context, operator, left, right)


def _length(value: Any) -> int | None:
    """Characters of a text, or the bytes of a list's references; None for other values."""
    if isinstance(value, (str, bytes)):
        return len(value)
    return 8 * len(value) if isinstance(value, (list, tuple)) else None


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise SecurityError(f"a text or list would have more than {MAX_LENGTH} characters, or elements of 8")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise SecurityError(f"a number would have more than {MAX_BITS} bits")


def _bounded(pieces: Iterable[str]) -> str:
    """The text of a template's pieces, which are taken one by one, so that an endless template ends early."""
    kept: list[str] = []
    length = 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece)
        _check_length(length)
        if len(kept) > MAX_PIECES:
            raise SecurityError(f"it writes more than {MAX_PIECES} pieces")
    return "".join(kept)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training: passed through."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers: what the body sets is not set after it.
        return nodes.CallBlock(self.call_method("_pass"), [], [], body).set_lineno(line)

    def _pass(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dictionary:
    """`dict` in templates, which makes one and leads nowhere else in Python."""

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
        raise SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML and non-ASCII text, which models were not trained on."""
    value = None if isinstance(value, _Null) else value
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    defined, string = environment.tests["defined"], environment.tests["string"]
    environment.tests["none"] = lambda value: value is None or isinstance(value, _Null)
    environment.tests["defined"] = lambda value: defined(value) and not isinstance(value, _Null)
    environment.tests["undefined"] = lambda value: not defined(value) or isinstance(value, _Null)
    environment.tests["string"] = lambda value: (
        isinstance(value, _Arguments) or (string(value) and not isinstance(value, _Null))
    )
    environment.globals.pop("lipsum")
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _Dictionary()
    environment.globals["namespace"] = _SafeNamespace
    return environment.from_string(template)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what no template could render."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidParameterError(
            f'messages: expected a list such as [{{"role": "user", "content": "Hello"}}], got {messages!r}'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidParameterError(f"messages[{i}]: expected a dictionary with a role, got {message!r}")
        if "content" not in message and "tool_calls" not in message:
            raise InvalidParameterError(f"messages[{i}]: a message of role {message['role']!r} needs content")
        parts = message.get("content")
        for part in parts if isinstance(parts, (list, tuple)) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and any(word in kind for word in _MEDIA):
                raise InvalidParameterError(f"messages[{i}]: content: expected text, got a part of type {kind!r}")


def render(
    template: str, messages: Sequence[Mapping[str, Any]], *, continue_final_message: bool = False, **variables: Any
) -> str:
    """The prompt that a template makes of a conversation; with `continue_final_message`, up to the end of its text.

    Raises:
        InvalidParameterError: if `messages` is not a list of messages, or the last has no text to continue.
        TemplateError: if the template is invalid, refuses these messages (in its own words), or exceeds the limits.
    """
    check_messages(messages)
    conversation = [_normalised(message) for message in messages]
    for message in conversation:
        texts = _texts(message.get("content"))
        if texts and not _reads_parts(template, message["role"]):
            message["content"] = "".join(texts)
    final = _mark_end(conversation) if continue_final_message else None
    try:
        prompt = _bounded(_compile(template).generate(messages=conversation, **variables))
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"the checkpoint's chat template is not valid jinja: line {error.lineno}: {error.message}"
        ) from error
    except Exception as error:  # a template runs whatever its author wrote
        raise TemplateError(f"the checkpoint's chat template refuses these messages: {error}") from error
    return prompt if final is None else _cut_at_end(prompt, final)


def _texts(content: Any) -> list[str]:
    """Texts of a message's parts; nothing where it has no parts, or others."""
    parts = content if isinstance(content, (list, tuple)) else ()
    found = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    return texts if len(texts) == len(found) else []


@lru_cache(maxsize=64)
def _reads_parts(template: str, role: str) -> bool:
    """True for a template that writes the text of a message of this role where it comes in parts.

    Others leave it out (Qwen3's), write the list as Python or JSON does, or fail.
    """
    message = {"role": role, "content": [{"type": "text", "text": _END_OF_MESSAGE}]}
    user = {"role": "user", "content": "x"}
    conversation = {"user": [message], "system": [message, user]}.get(role, [user, message])
    try:
        prompt = _bounded(_compile(template).generate(messages=[_Message(one) for one in conversation]))
    except Exception:  # a template runs whatever its author wrote
        return False
    before, mark, _ = prompt.partition(_END_OF_MESSAGE.strip())
    return bool(mark) and not before.endswith(("'", '"'))


class _Null(str):
    """None of a message's key: not defined for templates, as in transformers, but none, and an empty text.

    So is each of its items, for templates that take what is not a text for a list of parts.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or other == ""

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getitem__(self, key: object) -> _Null:
        return self

    __hash__ = str.__hash__


class _Message(dict[str, Any]):
    """Message without its keys that are None. Templates that ask for one of them get a `_Null`."""

    __slots__ = ("_nulls",)

    def __init__(self, message: Mapping[str, Any]):
        super().__init__((key, value) for key, value in message.items() if value is not None)
        self._nulls = frozenset(message) - frozenset(self)

    def __missing__(self, key: str) -> _Null:
        if key in self._nulls:
            return _Null()
        raise KeyError(key)


class _Arguments(dict[str, Any]):
    """Arguments of a call: an object for templates that read one, and JSON text where a template writes it."""

    __slots__ = ("_given", "_text")

    def __init__(self, arguments: Mapping[str, Any] | str | None):
        super().__init__(object_so_far(arguments) if isinstance(arguments, str) else arguments or {})
        self._given = isinstance(arguments, str)
        self._text = arguments if arguments and isinstance(arguments, str) else _to_json(self)

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _normalised(message: Mapping[str, Any]) -> _Message:
    """A message with its reasoning under each name, as in transformers, and arguments of its calls as `_Arguments`."""
    given = _Message(message)
    reasoning = next((given[name] for name in REASONING if given.get(name) is not None), None)
    if reasoning is not None:
        given.update({"thinking": reasoning, **given, "reasoning_content": reasoning})
    if not given.get("tool_calls", True):
        del given["tool_calls"]
    elif isinstance(given.get("tool_calls"), (list, tuple)):
        given["tool_calls"] = [_normalised_call(call) for call in given["tool_calls"]]
    return given


def _normalised_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _normalised_call(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, (str, Mapping, type(None))):
        raise InvalidParameterError(
            f"messages: expected a call's arguments as an object or JSON text, got {arguments!r}"
        )
    return {**call, "arguments": _Arguments(arguments)}


def _mark_end(conversation: list[_Message]) -> str:
    """Put the mark after the last message's text; return that text."""
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
