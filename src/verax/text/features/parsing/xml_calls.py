"""Tool calls of Qwen3-Coder and Qwen3.5: `<function=name>` with a `<parameter=key>` for each argument."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from verax.text.features.parsing.calls import CallSink, Outcome
from verax.text.features.parsing.functions import Function
from verax.text.features.parsing.tags import find_tag

__all__ = ["XmlCallReader", "function_tag"]

_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_END_FUNCTION, _END_CALL = "</function>", "</tool_call>"


def function_tag(name: str) -> str:
    """Tag that begins a call of a function."""
    return f"<function={name}>"


class XmlCallReader:
    """Reads one call behind its first tag, `<tool_call>` or the function's.

    The text is a call once the tag of a known function was read. The arguments are written as JSON. Texts stream as
    they arrive. Values of other types are cast by the function's schema when they are complete; a value that is not of
    its type stays a text.
    """

    def __init__(self, functions: Mapping[str, Function], tag: str) -> None:
        """Read a call of one of the functions behind the tag."""
        self.committed = False
        self._functions = {function_tag(name): function for name, function in functions.items()}
        self._function = self._functions.get(tag)
        self._types: set[str] = set()
        self._count = 0
        self._read = self._opening

    def read(self, text: str, calls: CallSink, *, final: bool) -> tuple[int, Outcome]:
        """Read what was not read before; see `CallReader`."""
        at = 0
        while True:
            step = self._read
            read, outcome = step(text[at:], calls, final)
            at += read
            if outcome is not Outcome.OPEN or (self._read == step and not read):
                return at, outcome

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
        self._read = self._body
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
        self._read = self._behind
        return space + (len(_END_FUNCTION) if rest.startswith(_END_FUNCTION) else 0), Outcome.OPEN

    def _begin_value(self, key: str, calls: CallSink) -> None:
        assert self._function is not None
        calls.add((", " if self._count else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._count += 1
        self._types = self._function.types(key)
        self._read = self._newline

    def _newline(self, text: str, calls: CallSink, final: bool) -> tuple[int, Outcome]:
        """The line break before a value."""
        if not text:
            return 0, Outcome.DONE if final else Outcome.OPEN
        streams = not self._types or ("string" in self._types and "null" not in self._types)
        if streams:
            calls.add('"')
        self._read = self._text if streams else self._value
        return int(text[0] == "\n"), Outcome.OPEN

    def _text(self, text: str, calls: CallSink, final: bool) -> tuple[int, Outcome]:
        """A value that is a text, without the line break behind it."""
        at, tag = find_tag(text, (_END_PARAMETER,), final=final)
        kept = text[:at] if final and tag is None else text[:at].removesuffix("\n")
        calls.add(_escaped(kept))
        if tag is None:
            return len(kept), Outcome.DONE if final else Outcome.OPEN
        calls.add('"')
        self._read = self._body
        return at + len(tag), Outcome.OPEN

    def _value(self, text: str, calls: CallSink, final: bool) -> tuple[int, Outcome]:
        """A value of another type, once it is complete."""
        at, tag = find_tag(text, (_END_PARAMETER,), final=final)
        if tag is None:
            return (len(text), Outcome.DONE) if final else (0, Outcome.OPEN)
        calls.add(_cast(text[:at].removesuffix("\n"), self._types))
        self._read = self._body
        return at + len(tag), Outcome.OPEN

    def _behind(self, text: str, calls: CallSink, final: bool) -> tuple[int, Outcome]:
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
