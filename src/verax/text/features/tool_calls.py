"""Tool calls in a growing text: parts of an answer, the functions that a request offers, a reader of each syntax.

JSON objects are the calls of Hermes and Qwen (`{"name": ..., "arguments": {...}}`) and of Llama 3 (`parameters`).
Qwen3-Coder and Qwen3.5 write `<function=name>` with a `<parameter=key>` for each argument.
"""

from __future__ import annotations

import json
import math
import re
import string
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from verax.errors import InvalidParameterError

__all__ = [
    "CallReader",
    "CallSink",
    "Delta",
    "Function",
    "JsonCallReader",
    "JsonScanner",
    "Outcome",
    "ToolCall",
    "ToolCallDelta",
    "WholeAnswer",
    "XmlCallReader",
    "find_tag",
    "function_tag",
    "join",
    "read_functions",
]


@dataclass(frozen=True)
class ToolCall:
    """Call of a function by the model."""

    id: str
    name: str
    arguments: str
    """JSON text of the arguments, as the model wrote it. Cut short if the answer was, and not checked by a schema."""


@dataclass(frozen=True)
class ToolCallDelta:
    """Part of a tool call. The first part of a call has its id and name, and no later part has."""

    index: int
    """Number of the call in the answer, from 0."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """Next piece of the JSON text of the arguments."""


@dataclass(frozen=True)
class Delta:
    """New parts of an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        """True if anything is new."""
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(frozen=True)
class WholeAnswer:
    """Whole answer of a model, parsed."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def join(deltas: Iterable[Delta]) -> WholeAnswer:
    """The whole answer that deltas make together."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, tuple[str, str, list[str]]] = {}
    for delta in deltas:
        content.append(delta.content)
        reasoning.append(delta.reasoning)
        for part in delta.tool_calls:
            _, _, arguments = calls.setdefault(part.index, (part.id or "", part.name or "", []))
            arguments.append(part.arguments)
    joined = (ToolCall(key, name, "".join(parts)) for key, name, parts in calls.values())
    return WholeAnswer("".join(content), "".join(reasoning), tuple(joined))


def find_tag(text: str, tags: Sequence[str], *, final: bool = False) -> tuple[int, str | None]:
    """Position of the first tag, and the tag. All tags begin with `<`.

    If the text ends with what may become a tag, its position comes without a tag. Without either it is the text's
    length. With `final` the text is complete, so that only whole tags count.
    """
    at = text.find("<")
    while at >= 0:
        for tag in tags:
            if text.startswith(tag, at):
                return at, tag
        if not final and any(tag.startswith(text[at : at + len(tag)]) for tag in tags):
            return at, None
        at = text.find("<", at + 1)
    return len(text), None


_MAX_REFERENCES = 16
"""References that are followed from one to the next: they may lead in a circle."""

_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
"""JSON Schema's name for the type of a value."""


@dataclass(frozen=True)
class Function:
    """Function that the model may call."""

    name: str
    schema: Mapping[str, Any]
    """JSON Schema of its arguments, an object."""
    strict: bool = False
    """True if the arguments have to follow the schema exactly."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Schema of each parameter by its name."""
        properties = self.schema.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def types(self, parameter: str) -> set[str]:
        """JSON Schema's names of the types that a parameter can have; empty if its schema does not say."""
        return _types(self.parameters.get(parameter), self.schema, _MAX_REFERENCES)


def read_functions(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Function]:
    """Functions by name.

    Args:
        tools: `{"type": "function", "function": {"name", "parameters", "strict"}}`, or what `function` holds by itself.

    Raises:
        InvalidParameterError: naming the tool that is not a function, lacks a name, or has the name of another.
    """
    functions: dict[str, Function] = {}
    for i, tool in enumerate(tools or ()):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise InvalidParameterError(f"tools[{i}]: expected a function with a name, got {tool!r}")
        if name in functions:
            raise InvalidParameterError(f"tools[{i}]: there is another function with the name {name!r}")
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(schema, Mapping):
            raise InvalidParameterError(f"tools[{i}].function.parameters: expected a JSON schema, got {schema!r}")
        functions[name] = Function(name, schema, strict=function.get("strict") is True)
    return functions


def _types(schema: Any, root: Mapping[str, Any], references: int) -> set[str]:
    if not isinstance(schema, Mapping) or references == 0:
        return set()
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, (list, tuple)):
        return {name for name in given if isinstance(name, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, (list, tuple)):
        return {_JSON_TYPES.get(type(value), "object") for value in values}
    if isinstance(schema.get("$ref"), str):
        return _types(_referenced(schema["$ref"], root), root, references - 1)
    types: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        members = schema.get(key)
        for member in members if isinstance(members, (list, tuple)) else ():
            types |= _types(member, root, references - 1)
    return types


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """Part of a schema that a reference such as `#/$defs/Point` names; None if there is none."""
    part: Any = root
    for key in reference.removeprefix("#").strip("/").split("/"):
        part = part.get(key) if isinstance(part, Mapping) else None
    return part


class Outcome(Enum):
    """State of a call after a piece of its text."""

    OPEN = "open"
    """The call continues: more text is needed."""
    REFUSED = "refused"
    """The text is not a call. Nothing of it was put into the sink."""
    DONE = "done"
    """The call is over."""


class CallSink:
    """Tool calls of an answer, as they are found."""

    def __init__(self) -> None:
        self._new: list[ToolCallDelta] = []
        self.count = 0
        """Number of calls so far."""

    def start(self, name: str) -> None:
        """Begin the next call."""
        self._new.append(ToolCallDelta(self.count, id=f"call_{uuid.uuid4().hex[:24]}", name=name))
        self.count += 1

    def add(self, arguments: str) -> None:
        """Continue the arguments of the last call."""
        if not arguments:
            return
        if self._new and self._new[-1].index == self.count - 1:
            last = self._new.pop()
            self._new.append(ToolCallDelta(last.index, last.id, last.name, last.arguments + arguments))
        else:
            self._new.append(ToolCallDelta(self.count - 1, arguments=arguments))

    def take(self) -> tuple[ToolCallDelta, ...]:
        """Parts that were added since the last time."""
        new, self._new = tuple(self._new), []
        return new


class CallReader:
    """Reader of one call's text, in steps that each read a part of it.

    It decides once whether the text is a call. Until then it holds everything back. From then on the call stands, and
    its arguments stream.
    """

    def __init__(self, step: Callable[[str, CallSink, bool], tuple[int, Outcome]]) -> None:
        self.committed = False
        """True if the text is a call."""
        self._step = step

    def read(self, text: str, calls: CallSink, *, final: bool) -> tuple[int, Outcome]:
        """Read what was not read before.

        Args:
            text: what was left over the last time, and what has come since.
            calls: takes the call.
            final: the text is complete.

        Returns:
            Number of characters that were read, and the state of the call.
        """
        at = 0
        while True:
            step = self._step
            read, outcome = step(text[at:], calls, final)
            at += read
            if outcome is not Outcome.OPEN or (self._step == step and not read):
                return at, Outcome.REFUSED if final and not self.committed else outcome


_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
"""Characters of a string that stand for themselves (RFC 8259)."""

_SPACE = " \t\n\r"
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_ESCAPES = '"\\/bfnrt'

_NUMBER = {
    "minus": {"0": "zero", "1-9": "whole"},
    "zero": {".": "point", "e": "exponent"},
    "whole": {"0": "whole", "1-9": "whole", ".": "point", "e": "exponent"},
    "point": {"0": "fraction", "1-9": "fraction"},
    "fraction": {"0": "fraction", "1-9": "fraction", "e": "exponent"},
    "exponent": {"0": "power", "1-9": "power", "+": "sign", "-": "sign"},
    "sign": {"0": "power", "1-9": "power"},
    "power": {"0": "power", "1-9": "power"},
}
"""States of a number, and the classes of characters that lead from one to the next."""

_COMPLETE_NUMBERS = {"zero", "whole", "fraction", "power"}


class JsonScanner:
    """Reader of one JSON object, character by character, by RFC 8259.

    `state` is one of
        value, first value, key, first key, colon, next: what is expected, white space apart;
        string, escape, hex, literal, or a state of a number: what the text is inside of;
        complete: the object is closed.
    """

    def __init__(self) -> None:
        self.state = "start"
        self.depth = 0
        """Number of objects and arrays that are open."""
        self.in_key = False
        """True if the string that was read last is a key."""
        self._closers: list[str] = []
        self._rest = ""

    @property
    def complete(self) -> bool:
        """True if the object is closed."""
        return self.state == "complete"

    def plain_until(self, text: str, start: int) -> int:
        """Position after the characters from `start` on that change nothing, in the middle of a string."""
        if self.state != "string":
            return start
        plain = _PLAIN.match(text, start)
        return start if plain is None else plain.end()

    def push(self, char: str) -> bool:
        """Read a character; False, with nothing changed, if no JSON object continues with it."""
        state = self.state
        if state in _NUMBER:
            following = _NUMBER[state].get(_number_class(char))
            if following is not None:
                self.state = following
                return True
            return state in _COMPLETE_NUMBERS and self._between("next", char)
        if state in ("string", "escape", "hex", "literal"):
            return self._inside(char)
        return self._between(state, char)

    def _inside(self, char: str) -> bool:
        """Read a character of a string or of a literal."""
        if self.state == "string":
            if char == '"':
                self.state = "colon" if self.in_key else "next"
            elif char == "\\":
                self.state = "escape"
            return char >= " "
        if self.state == "escape":
            if char == "u":
                self.state, self._rest = "hex", "0000"
            elif char in _ESCAPES:
                self.state = "string"
            return char == "u" or char in _ESCAPES
        right = char in string.hexdigits if self.state == "hex" else char == self._rest[0]
        if right:
            self._rest = self._rest[1:]
            if not self._rest:
                self.state = "string" if self.state == "hex" else "next"
        return right

    def _between(self, state: str, char: str) -> bool:
        """Read a character outside of strings, literals and numbers."""
        if char in _SPACE:
            self.state = state
            return not self.complete
        match state:
            case "start":
                return char == "{" and self._open("}", "first key")
            case "colon":
                return char == ":" and self._go("value")
            case "next":
                if char == ",":
                    return self._go("key" if self._closers[-1] == "}" else "value")
                return char == self._closers[-1] and self._close()
            case "key" | "first key":
                if char == '"':
                    self.in_key = True
                    return self._go("string")
                return char == "}" and state == "first key" and self._close()
            case "value" | "first value":
                if char == "]" and state == "first value":
                    return self._close()
                return self._value(char)
        return False

    def _value(self, char: str) -> bool:
        if char == '"':
            self.in_key = False
            return self._go("string")
        if char == "{":
            return self._open("}", "first key")
        if char == "[":
            return self._open("]", "first value")
        if char in _LITERALS:
            self._rest = _LITERALS[char][1:]
            return self._go("literal")
        following = {"-": "minus", "0": "zero", "1-9": "whole"}.get(_number_class(char))
        return following is not None and self._go(following)

    def _go(self, state: str) -> bool:
        self.state = state
        return True

    def _open(self, closer: str, state: str) -> bool:
        self._closers.append(closer)
        self.depth += 1
        return self._go(state)

    def _close(self) -> bool:
        self._closers.pop()
        self.depth -= 1
        return self._go("next" if self.depth else "complete")


def _number_class(char: str) -> str:
    if char in "123456789":
        return "1-9"
    return "e" if char == "E" else char


_NAME = r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"'
_NAMED = re.compile(_NAME)
_OPENING = re.compile(_NAME + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')

_KEYS = ('"name"', '"arguments"', '"parameters"', '"type"', '"id"')
"""Keys of a call. An object with another key is not a call."""

_BEFORE_CLOSE = re.compile(r"[\s}]*")
"""Text between a call's object and its closing tag. Models like to write a brace too many."""


class JsonCallReader(CallReader):
    """Reader of one call and of the closing tag after it.

    The text is a call

    - once the name of a known function and the `{` of its arguments were read, in this order. From then on the
      arguments stream. If they turn out not to be JSON, they stream unchanged up to the closing tag, since what was
      streamed cannot be taken back;
    - or, in any other order of keys, once the object is complete. Arguments may then be JSON in a string, or missing.
    """

    def __init__(self, names: Collection[str], close: str | None = None) -> None:
        """Read a call of one of the functions `names`, which ends with the tag `close`."""
        super().__init__(self._object)
        self._names = names
        self._close = close
        self._scanner = JsonScanner()
        self._seen: list[str] = []
        self._in_arguments = False

    def _object(self, text: str, calls: CallSink, final: bool) -> tuple[int, Outcome]:
        scanner = self._scanner
        start = at = 0
        while at < len(text):
            plain = scanner.plain_until(text, at)
            if plain > at:
                at = plain
                continue
            if not scanner.push(text[at]):
                break
            at += 1
            if self._in_arguments:
                if scanner.depth == 1:
                    calls.add(text[start:at])
                    self._in_arguments = False
            elif not self.committed and scanner.depth <= 2:
                if self._refutes(text, at) or (scanner.complete and not self._commit_whole(text[:at], calls)):
                    return at, Outcome.REFUSED
                if self._commit(text, at, calls):
                    start = at - 1
            if scanner.complete:
                break
        if self._in_arguments:
            calls.add(text[start:at])
        elif not self.committed:
            self._seen.append(text[:at])
        if at == len(text) and not scanner.complete:
            return at, Outcome.OPEN
        if not self.committed:
            return at, Outcome.REFUSED
        self._step = self._broken if self._in_arguments else self._after_call
        return at, Outcome.OPEN

    def _so_far(self, text: str, at: int) -> str:
        return "".join([*self._seen, text[:at]])

    def _refutes(self, text: str, at: int) -> bool:
        """True if the string that has just ended is a key that no call has, or the name of no function."""
        if text[at - 1] != '"' or self._scanner.depth != 1 or self._scanner.state not in ("colon", "next"):
            return False
        so_far = self._so_far(text, at)
        if self._scanner.state == "colon":
            return not so_far.endswith(_KEYS)
        named = _NAMED.fullmatch(so_far)
        return named is not None and named[1] not in self._names

    def _commit(self, text: str, at: int, calls: CallSink) -> bool:
        """Begin the call if the brace that has just been read opens its arguments."""
        if text[at - 1] != "{" or self._scanner.depth != 2:
            return False
        opening = _OPENING.fullmatch(self._so_far(text, at))
        if opening is None or opening[1] not in self._names:
            return False
        self.committed = self._in_arguments = True
        calls.start(opening[1])
        return True

    def _commit_whole(self, text: str, calls: CallSink) -> bool:
        """Make the call of a complete object."""
        try:
            call = json.loads(self._so_far(text, len(text)))
            arguments = _arguments(call)
            written = json.dumps(arguments, ensure_ascii=False)
        except (ValueError, RecursionError):
            return False
        if call.get("name") not in self._names or not isinstance(arguments, dict):
            return False
        self.committed = True
        calls.start(call["name"])
        calls.add(written)
        return True

    def _broken(self, text: str, calls: CallSink, final: bool) -> tuple[int, Outcome]:
        """Arguments that are not JSON, up to the closing tag."""
        at, tag = find_tag(text, () if self._close is None else (self._close,), final=final)
        kept = text if final and tag is None else text[:at].rstrip()
        calls.add(kept)
        if tag is not None:
            return at + len(tag), Outcome.DONE
        return len(kept), Outcome.DONE if final else Outcome.OPEN

    def _after_call(self, text: str, calls: CallSink, final: bool) -> tuple[int, Outcome]:
        """The closing tag, if it follows."""
        if self._close is None:
            return 0, Outcome.DONE
        braces = _BEFORE_CLOSE.match(text)
        end = 0 if braces is None else braces.end()
        if text.startswith(self._close, end):
            return end + len(self._close), Outcome.DONE
        if not final and self._close.startswith(text[end:]):
            return 0, Outcome.OPEN
        return 0, Outcome.DONE


def _arguments(call: dict[str, Any]) -> Any:
    """Arguments of a complete call: an object, the JSON text of one, or nothing."""
    given = call.get("arguments", call.get("parameters"))
    if isinstance(given, str) and given.strip():
        return json.loads(given)
    return given or {}


_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_END_FUNCTION, _END_CALL = "</function>", "</tool_call>"


def function_tag(name: str) -> str:
    """Tag that begins a call of a function."""
    return f"<function={name}>"


class XmlCallReader(CallReader):
    """Reader of one call after its first tag, `<tool_call>` or the function's.

    The text is a call once the tag of a known function was read. The arguments are written as JSON. Texts stream as
    they arrive. Values of other types are cast by the function's schema when they are complete; a value that is not of
    its type stays a text.
    """

    def __init__(self, functions: Mapping[str, Function], tag: str) -> None:
        """Read a call of one of the functions after the tag."""
        super().__init__(self._opening)
        self._functions = {function_tag(name): function for name, function in functions.items()}
        self._function = self._functions.get(tag)
        self._types: set[str] = set()
        self._count = 0

    def _opening(self, text: str, calls: CallSink, final: bool) -> tuple[int, Outcome]:
        rest = text.lstrip()
        end = len(text) - len(rest)
        if self._function is None:
            tag = next((tag for tag in self._functions if rest.startswith(tag)), None)
            if tag is None:
                goes_on = not final and any(tag.startswith(rest) for tag in self._functions)
                return (0, Outcome.OPEN) if goes_on else (end, Outcome.REFUSED)
            self._function = self._functions[tag]
            end += len(tag)
        else:
            end = 0
        self.committed = True
        calls.start(self._function.name)
        calls.add("{")
        self._step = self._body
        return end, Outcome.OPEN

    def _body(self, text: str, calls: CallSink, final: bool) -> tuple[int, Outcome]:
        """Parameters, up to the end of the function. Any other text ends the call before it."""
        rest = text.lstrip()
        space = len(text) - len(rest)
        if rest.startswith(_PARAMETER):
            key, closed, _ = rest[len(_PARAMETER) :].partition(">")
            if closed and "\n" not in key:
                self._begin_value(key, calls)
                return space + len(_PARAMETER) + len(key) + 1, Outcome.OPEN
            if "\n" not in key:
                return (len(text), Outcome.DONE) if final else (0, Outcome.OPEN)
        elif any(tag != rest and tag.startswith(rest) for tag in (_PARAMETER, _END_FUNCTION, _END_CALL)):
            # An answer that was cut short leaves its arguments open, so that nobody takes them for whole.
            return (len(text), Outcome.DONE) if final else (0, Outcome.OPEN)
        calls.add("}")
        self._step = self._after_call
        return space + (len(_END_FUNCTION) if rest.startswith(_END_FUNCTION) else 0), Outcome.OPEN

    def _begin_value(self, key: str, calls: CallSink) -> None:
        assert self._function is not None
        calls.add((", " if self._count else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._count += 1
        self._types = self._function.types(key)
        self._step = self._newline

    def _newline(self, text: str, calls: CallSink, final: bool) -> tuple[int, Outcome]:
        """The line break before a value."""
        if not text:
            return 0, Outcome.DONE if final else Outcome.OPEN
        streams = not self._types or ("string" in self._types and "null" not in self._types)
        if streams:
            calls.add('"')
        self._step = self._text if streams else self._value
        return int(text[0] == "\n"), Outcome.OPEN

    def _text(self, text: str, calls: CallSink, final: bool) -> tuple[int, Outcome]:
        """A value that is a text, without the line break after it."""
        at, tag = find_tag(text, (_END_PARAMETER,), final=final)
        kept = text[:at] if final and tag is None else text[:at].removesuffix("\n")
        calls.add(_escaped(kept))
        if tag is None:
            return len(kept), Outcome.DONE if final else Outcome.OPEN
        calls.add('"')
        self._step = self._body
        return at + len(tag), Outcome.OPEN

    def _value(self, text: str, calls: CallSink, final: bool) -> tuple[int, Outcome]:
        """A value of another type, once it is complete."""
        at, tag = find_tag(text, (_END_PARAMETER,), final=final)
        if tag is None:
            return (len(text), Outcome.DONE) if final else (0, Outcome.OPEN)
        calls.add(_cast(text[:at].removesuffix("\n"), self._types))
        self._step = self._body
        return at + len(tag), Outcome.OPEN

    def _after_call(self, text: str, calls: CallSink, final: bool) -> tuple[int, Outcome]:
        """The closing tag, if it follows."""
        rest = text.lstrip()
        if rest.startswith(_END_CALL):
            return len(text) - len(rest) + len(_END_CALL), Outcome.DONE
        if not final and _END_CALL.startswith(rest):
            return 0, Outcome.OPEN
        return 0, Outcome.DONE


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _cast(value: str, types: set[str]) -> str:
    """JSON text of a value. Templates write True, False and None as Python does."""
    word = value.strip()
    if word.lower() in ("true", "false") and "boolean" in types:
        return word.lower()
    if word.lower() in ("null", "none") and "null" in types:
        return "null"
    try:
        read = json.loads(word) if "string" not in types else None
    except (ValueError, RecursionError):
        read = None
    if _is_of(read, types):
        return word
    return json.dumps(value, ensure_ascii=False)


def _is_of(value: Any, types: set[str]) -> bool:
    match value:
        case bool():
            return False
        case int() | float():
            return math.isfinite(value) and ("number" in types or ("integer" in types and value == int(value)))
        case dict():
            return "object" in types
        case list():
            return "array" in types
        case str():
            return False
    return False
