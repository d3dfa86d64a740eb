"""JSON as models write it, read token by token and written by RFC 8259.

Models write some things otherwise, whose meaning is plain: control characters in strings, strings in single quotes,
escapes that JSON lacks, literals of Python, numbers such as `.5`, and a comma after the last member. What is not a
finite number is null. A quote within a string value that nothing follows as after a value is part of the text.
"""

from __future__ import annotations

import json
import re
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]+")
_PLAIN = re.compile(r"""[^"'\\\x00-\x1f]+""")
"""Characters of a string that stand for themselves (RFC 8259), quotes apart."""

_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"""[^\s{}\[\]:,"']{1,1000}""")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_AFTER_VALUE = {
    "}": re.compile(r"""\s{64}|\s{0,63}([}\]:]|,(\s{64}|\s{0,63}(["'}]|\w{1,64}\s{0,64}:)))"""),
    "]": re.compile(r"\s{64}|\s{0,63}[}\]:,]"),
}
"""Text that follows a string value within an object and an array; also much white space, and an unquoted key, which is
an error of its own."""

_MAY_FOLLOW = re.compile(r"\s{0,64}(,\s{0,64}(\w{1,64}\s{0,64})?)?")
"""Beginning of it, which is bounded so that reading takes linear time."""

_WORDS = {
    **{"true": "true", "false": "false", "null": "null", "none": "null"},
    **dict.fromkeys(("nan", "inf", "-inf", "infinity", "-infinity"), "null"),
}
"""JSON of a word in small letters."""


class JsonScanner:
    """Reader of one JSON value, token by token, which writes what it reads by RFC 8259."""

    def __init__(self, state: str = "start", repairs_from: int = 1) -> None:
        """Begin before an object ("start") or before any value ("value").

        Quotes within strings are told from their ends, for which a token after them is awaited, from the depth
        `repairs_from` on.
        """
        self.state = state
        """Expected next: start, key, colon, value, item (of an array), next (comma or end), complete (nothing)."""
        self.written = ""
        self._closers: list[str] = []
        self._repairs_from = repairs_from
        self._quote = ""
        """Quote that ends the string that is being read."""
        self._comma = ""
        """Comma and white space that are written once a member follows."""

    @property
    def depth(self) -> int:
        """Number of objects and arrays that are open."""
        return len(self._closers)

    @property
    def complete(self) -> bool:
        """True if the value is closed."""
        return self.state == "complete"

    @property
    def can_be_closed(self) -> bool:
        """True where `closing` makes a whole value of the text so far: no member is begun but its text."""
        return self.state != "key" if self._quote else self.state in ("key", "item", "next", "complete")

    def closing(self, quoted: bool, depth: int) -> str:
        """Text that ends a string, if `quoted`, and the outermost `depth` objects and arrays that are open."""
        return '"' * quoted + "".join(reversed(self._closers[:depth]))

    @property
    def quoted(self) -> bool:
        """True within a string."""
        return bool(self._quote)

    def read(self, text: str, at: int, *, final: bool = False) -> int | None:
        """Read a token, or a part of a string.

        Result: position after it; `at` if more text is needed; None if no JSON value continues so.
        """
        if at == len(text):
            return at
        self.written = ""
        if self._quote:
            return self._string(text, at, final)
        space = _SPACE.match(text, at)
        if space is not None:
            self._comma, self.written = (self._comma + space[0], "") if self._comma else ("", space[0])
            return space.end()
        char = text[at]
        if char in ("}", "]"):
            return self._close(at) if self.depth and char == self._closers[-1] else None
        if char == ":" and self.state == "colon":
            self.state, self.written = "value", char
            return at + 1
        if char == "," and self.state == "next":
            self.state, self._comma = "key" if self._closers[-1] == "}" else "item", char
            return at + 1
        return self._member(text, at, final)

    def _close(self, at: int) -> int | None:
        if self.state not in ("key", "item", "next"):
            return None
        self.written = self._comma[1:] + self._closers.pop()
        self._comma = ""
        self._end_value()
        return at + 1

    def _member(self, text: str, at: int, final: bool) -> int | None:
        """Read the beginning of a key or of a value."""
        char, is_value = text[at], self.state in ("value", "item")
        if char == "{" and (is_value or self.state == "start"):
            self._closers.append("}")
            self.state, written, end = "key", "{", at + 1
        elif char == "[" and is_value:
            self._closers.append("]")
            self.state, written, end = "item", "[", at + 1
        elif char in "\"'" and (is_value or self.state == "key"):
            self._quote, written, end = char, '"', at + 1
        elif is_value and (word := _WORD.match(text, at)):
            if word.end() == len(text) and not final:
                return at
            # Python and JavaScript write +1, .5 and 2. too.
            number = re.sub(r"^(-?)\.(?=\d)", r"\g<1>0.", word[0].removeprefix("+"))
            number = re.sub(r"(?<=\d)\.(?=$|[eE])", ".0", number)
            written, end = number if _NUMBER.fullmatch(number) else _WORDS.get(word[0].lower(), ""), word.end()
            if not written:
                return None
            self._end_value()
        else:
            return None
        self.written, self._comma = self._comma + written, ""
        return end

    def _string(self, text: str, at: int, final: bool) -> int:
        """Read a part of a string: plain characters, an escape, or its end."""
        plain, char = _PLAIN.match(text, at), text[at]
        if plain is not None:
            self.written = plain[0]
            return plain.end()
        if char == self._quote:
            repairs = self.state != "key" and self.depth >= max(self._repairs_from, 1)
            if repairs and not _AFTER_VALUE[self._closers[-1]].match(text, at + 1):
                follows = _MAY_FOLLOW.match(text, at + 1)
                if follows is None or follows.end() < len(text):
                    self.written = json.dumps(char)[1:-1]
                    return at + 1
                if not final:
                    return at
            self._quote, self.written = "", '"'
            if self.state == "key":
                self.state = "colon"
            else:
                self._end_value()
        elif char == "\\":
            escape, begun = _ESCAPE.match(text, at), _BEGUN_ESCAPE.match(text, at)
            if escape is not None:
                self.written = escape[0]
                return escape.end()
            if begun is not None and begun.end() == len(text):
                return at
            if text[at + 1] == "'":
                self.written = "'"
                return at + 2
            self.written = "\\\\"
        else:
            self.written = json.dumps(char)[1:-1]
        return at + 1

    def _end_value(self) -> None:
        self.state = "next" if self._closers else "complete"


def as_json(text: str, state: str = "value") -> str | None:
    """The text of a JSON value as RFC 8259 has it; None if it is not one. `state` is "start" for objects only."""
    scanner, at = JsonScanner(state), 0
    written: list[str] = []
    while not scanner.complete:
        end = scanner.read(text, at, final=True)
        if end is None or end == at:
            return None
        at = end
        written.append(scanner.written)
    return None if text[at:].strip() else "".join(written).strip()


def may_become_json(text: str) -> bool:
    """True for an object as JSON has it, and for its beginning, such as of an answer that was cut short."""
    scanner, at = JsonScanner(), 0
    while not scanner.complete and at < len(text):
        end = scanner.read(text, at)
        if end is None:
            return False
        if end == at:
            return True
        at = end
    return not text[at:].strip()


def object_so_far(text: str) -> dict[str, Any]:
    """The object of a JSON text; of a text that was cut short or turns out not to be JSON, the members before."""
    scanner, at = JsonScanner(), 0
    written, count, quoted, depth = list[str](), 0, False, 0
    while (end := scanner.read(text, at, final=True)) is not None and end > at:
        at = end
        written.append(scanner.written)
        if scanner.can_be_closed:  # and so where an object ends: later ones are within those that are open here
            count, quoted, depth = len(written), scanner.quoted, scanner.depth
    try:
        value = json.loads("".join(written[:count]) + scanner.closing(quoted, depth) or "{}")
    except RecursionError:
        return {}
    # The first half of a character of UTF-16, where the text was cut after it, is not text.
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
