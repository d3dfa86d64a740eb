"""Incremental check of JSON text: how far a text is, or can become, one object."""

from __future__ import annotations

import re
import string

__all__ = ["JsonScanner"]

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
    """Reads one JSON object, character by character, by RFC 8259.

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
        """Position behind the characters from `start` on that change nothing: those in the middle of a string."""
        if self.state != "string":
            return start
        found = _PLAIN.match(text, start)
        return start if found is None else found.end()

    def push(self, char: str) -> bool:
        """Read a character; False, with nothing changed, if no JSON object goes on with it."""
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
