"""Tool calls as JSON objects: `{"name": ..., "arguments": {...}}` of Hermes and Qwen, `parameters` in Llama 3."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from verax.text.features.parsing.calls import CallSink, Outcome
from verax.text.features.parsing.json_scanner import JsonScanner
from verax.text.features.parsing.tags import find_tag

__all__ = ["JsonCallReader"]

_NAME = r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"'
_NAMED = re.compile(_NAME)
_OPENING = re.compile(_NAME + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')

_KEYS = ('"name"', '"arguments"', '"parameters"', '"type"', '"id"')
"""Keys of a call. Another key shows that the object is none."""

_BEHIND = re.compile(r"[\s}]*")
"""Text between a call's object and its closing tag. Models like to write a brace too many."""


class JsonCallReader:
    """Reads one call, and the closing tag behind it.

    The text is a call

    - once the name of a known function and the `{` of its arguments were read, in this order. From then on the
      arguments stream. If they turn out not to be JSON, they go on as they are up to the closing tag, since what was
      streamed cannot be taken back;
    - or, in any other order of keys, once the object is complete. Arguments may then be JSON in a string, or missing.
    """

    def __init__(self, names: Collection[str], close: str | None = None) -> None:
        """Read a call of one of the functions `names`, which ends with the tag `close`."""
        self.committed = False
        self._names = names
        self._close = close
        self._scanner = JsonScanner()
        self._seen: list[str] = []
        self._in_arguments = False
        self._read = self._object

    def read(self, text: str, calls: CallSink, *, final: bool) -> tuple[int, Outcome]:
        """Read what was not read before; see `CallReader`."""
        at = 0
        while True:
            step = self._read
            read, outcome = step(text[at:], calls, final)
            at += read
            if outcome is not Outcome.OPEN or self._read == step:
                return at, Outcome.REFUSED if final and not self.committed else outcome

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
        self._read = self._broken if self._in_arguments else self._behind
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
        """Arguments that are no JSON, up to the closing tag."""
        at, tag = find_tag(text, () if self._close is None else (self._close,), final=final)
        kept = text if final and tag is None else text[:at].rstrip()
        calls.add(kept)
        if tag is not None:
            return at + len(tag), Outcome.DONE
        return len(kept), Outcome.DONE if final else Outcome.OPEN

    def _behind(self, text: str, calls: CallSink, final: bool) -> tuple[int, Outcome]:
        """The closing tag, if it follows."""
        if self._close is None:
            return 0, Outcome.DONE
        found = _BEHIND.match(text)
        end = 0 if found is None else found.end()
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
