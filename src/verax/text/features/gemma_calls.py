"""Gemma 4's tool calls: `<|tool_call>call:NAME{key:value,...}<tool_call|>`.

A value is a text between two `<|"|>`, an object `{key:value}`, a list `[value,...]`, or true, false, null or a number.
Keys are bare; a model may put them between `<|"|>` too. Follows the published chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping

from verax.text.features.json_schema import literal
from verax.text.features.tool_calls import CallSink, Function, GrowingText
from verax.text.tokens.lenient_json import as_json

OPEN_CALL, CLOSE_CALL, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'

_BARE_END = re.compile(r"[,}\]]")
_CLOSE = {"{": "}", "[": "]"}


class GemmaCallReader:
    """Reader of one call after `<|tool_call>`.

    The text is a call once the name of a known function and its brace were read. The arguments are written as JSON, and
    texts stream as they arrive. An answer that was cut short leaves its arguments open, so that nobody takes them for
    whole, and so does a bracket that closes nothing.
    """

    def __init__(self, names: Collection[str]) -> None:
        """Read a call of one of the functions `names`."""
        self._openings = {f"call:{name}{{": name for name in names}

    def read(self, source: GrowingText, calls: CallSink) -> Generator[None, None, bool]:
        """Read the call and the tag after it into the sink. True if it is a call; if not, the sink is unchanged."""
        opening = yield from source.expect(tuple(self._openings))
        if not opening:
            return False
        calls.start(self._openings[opening])
        source.mark = None
        if (yield from self._arguments(source, calls.add)):
            yield from source.end((CLOSE_CALL,))
        else:
            yield from source.up_to((CLOSE_CALL,), calls.add, str)
        source.mark = None
        return True

    def _arguments(self, source: GrowingText, put: Callable[[str], None]) -> Generator[None, None, bool]:
        """Write the arguments as JSON, after their brace. False if the text ended, or a bracket does not fit."""
        put("{")
        closes, sizes = ["}"], [0]
        while closes:
            symbol = yield from source.expect((",", "}", "]"))
            if symbol == "":
                return False
            if symbol == closes[-1]:
                put(closes.pop())
                sizes.pop()
                continue
            if symbol is not None:
                if symbol != ",":
                    source.at -= 1
                    return False
                continue
            put(", " if sizes[-1] else "")
            sizes[-1] += 1
            if closes[-1] == "}" and not (yield from self._key(source, put)):
                return False
            opening = yield from source.expect((QUOTE, "{", "["))
            if opening == QUOTE:
                put('"')
                write = lambda text: put(json.dumps(text, ensure_ascii=False)[1:-1])
                if (yield from source.up_to((QUOTE,), write, str)) is None:
                    return False
                source.mark = None
                put('"')
            elif opening:
                put(opening)
                closes.append(_CLOSE[opening])
                sizes.append(0)
            elif opening == "" or not (yield from self._bare(source, put)):
                return False
        return True

    def _key(self, source: GrowingText, put: Callable[[str], None]) -> Generator[None, None, bool]:
        """Write a key and its colon. False if the text ended."""
        while (end := source.text.find(":", source.at)) < 0:
            if source.final:
                return False
            yield
        put(json.dumps(source.text[source.at : end].strip().removeprefix(QUOTE).removesuffix(QUOTE).strip('"')) + ": ")
        source.at = end + 1
        return True

    def _bare(self, source: GrowingText, put: Callable[[str], None]) -> Generator[None, None, bool]:
        """Write a value without quotes: JSON where it is, else a text. False if the text ended."""
        while (end := _BARE_END.search(source.text, source.at)) is None:
            if source.final:
                return False
            yield
        word = source.text[source.at : end.start()].strip()
        put(as_json(word) or json.dumps(word, ensure_ascii=False))
        source.at = end.start()
        return True


_VALUES = {
    "string": "gemma_text",
    "number": "gemma_number",
    "integer": "gemma_integer",
    "boolean": '("true" | "false")',
    "null": '"null"',
    "array": "gemma_list",
    "object": "gemma_object",
}
"""Rule of a value by its type in JSON Schema."""


def call_rule(function: Function, rules: dict[str, str], quoted: str, *, any_arguments: bool) -> str:
    """Body of a Lark rule: a call of a function, whose arguments have the names and types of its schema.

    The call itself says no more: which arguments there are, and what is in objects and lists, is the model's.

    Args:
        function: the function.
        rules: rules of the grammar, to which the rules of values are added.
        quoted: body of a text between two quotes.
        any_arguments: True for arguments that the schema does not know.
    """
    rules |= {
        "gemma_text": quoted,
        "gemma_integer": r"/-?(0|[1-9][0-9]*)/",
        "gemma_number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
        "gemma_value": " | ".join(_VALUES.values()),
        "gemma_list": '"[" (gemma_value ("," gemma_value)*)? "]"',
        "gemma_object": '"{" (gemma_member ("," gemma_member)*)? "}"',
        "gemma_member": '/[^:{}\\[\\],<]+/ ":" gemma_value',
    }
    if any_arguments:
        return f"{literal(f'call:{function.name}')} gemma_object"
    members = [_member(name, schema, function) for name, schema in function.parameters.items() if schema is not False]
    others = function.schema.get("additionalProperties", False)
    if others is True or isinstance(others, Mapping):
        members.append("gemma_member")
    written = f'(({" | ".join(members)}) ("," ({" | ".join(members)}))*)' if members else '""'
    if members and not function.schema.get("required"):
        written += "?"
    return f'{literal(f"call:{function.name}{{")} {written} "}}"'


def _member(name: str, schema: object, function: Function) -> str:
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    types = function.types(name)
    if types == {"string"} and isinstance(values, list | tuple) and values:
        rule = f"({' | '.join(f'gemma_quote {literal(str(value))} gemma_quote' for value in values)})"
    else:
        rule = f"({' | '.join(_VALUES[kind] for kind in sorted(types))})"
    return f"{literal(f'{name}:')} {rule}"
