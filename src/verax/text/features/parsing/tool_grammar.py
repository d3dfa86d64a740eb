"""Grammars of tool calls, in llguidance's Lark: what an answer has to be under `tool_choice` and strict functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verax.errors import InvalidParameterError
from verax.text.features.parsing.chat_format import (
    CLOSE_CALL,
    CLOSE_REASONING,
    OPEN_CALL,
    OPEN_REASONING,
    ChatFormat,
)
from verax.text.features.parsing.functions import Function, read_functions
from verax.text.features.parsing.xml_calls import function_tag

__all__ = ["ToolChoice", "tool_grammar"]

ToolChoice = str | Mapping[str, Any]
""""none", "auto", "required", or a function: `{"type": "function", "function": {"name": ...}}`."""

_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
"""JSON as templates write it, and models with them."""

_ANY_TEXT = r"/(.|\n)*/"
_END_VALUE = "\n</parameter>\n"


def tool_grammar(
    template: ChatFormat,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: ToolChoice = "auto",
    parallel: bool = True,
    *,
    prompt: str = "",
) -> dict[str, str] | None:
    """Arguments of `StructuredOutputs` that make an answer obey `tool_choice`; None if any answer will do.

    With "auto" only strict functions need a grammar, and `parallel` being False. A grammar leaves the model its
    reasoning.

    Args:
        template: format of the checkpoint's answers.
        tools: functions that the request offers, in OpenAI's form.
        tool_choice: "none", "auto", "required" or a function.
        parallel: False for one call at most.
        prompt: rendered by the chat template.

    Raises:
        InvalidParameterError: naming `tools` or `tool_choice`.
    """
    functions = read_functions(tools)
    chosen = _chosen(tool_choice, functions)
    free = tool_choice == "auto" and parallel and not any(function.strict for function in chosen.values())
    if not chosen or free:
        return None
    lark = _Lark(template, chosen, strict_only=tool_choice == "auto")
    calls = lark.calls(parallel)
    start = lark.text_or_calls(parallel) if tool_choice == "auto" else calls
    if tool_choice != "auto" and template.reasoning_state(prompt) == "open":
        start = lark.reasoning_before(start)
    grammar = {"grammar": lark.text(start)}
    after = template.structured_after(prompt)
    return grammar if after is None else {**grammar, "after": after}


class _Lark:
    """Rules of a grammar."""

    def __init__(self, template: ChatFormat, functions: Mapping[str, Function], *, strict_only: bool):
        """Write the rules of calls of some functions. With `strict_only` the others take any arguments."""
        self._special = template.special_tokens
        self._tagged = template.tools in ("hermes", "qwen3_coder")
        self._rules: dict[str, str] = {}
        write = self._xml if template.tools == "qwen3_coder" else self._json
        key = "arguments" if template.tools == "hermes" else "parameters"
        for i, function in enumerate(functions.values()):
            self._rules[f"function_{i}"] = write(i, function, key, any_arguments=strict_only and not function.strict)
        self._rules["function"] = " | ".join(f"function_{i}" for i in range(len(functions)))

    def text(self, start: str) -> str:
        """The grammar, with the body of its first rule."""
        return "".join(f"{name}: {body}\n" for name, body in {"start": start, **self._rules}.items())

    def calls(self, parallel: bool) -> str:
        """Body that is one call, or one and more."""
        if not self._tagged:
            return 'function ("; " function)*' if parallel else "function"
        self._rules["inner"] = f'"\\n" function "\\n" {self._tag(CLOSE_CALL)}'
        call = f"{self._tag(OPEN_CALL)} inner"
        return f'{call} ("\\n" {call})*' if parallel else call

    def text_or_calls(self, parallel: bool) -> str:
        """Body that is text with calls in it, or without."""
        if not self._tagged:
            self._rules["text"] = r"/([^{\s](.|\n)*)?/"
            return f"{self.calls(parallel)} | text"
        self._rules["text"] = _ANY_TEXT
        before = self._up_to(OPEN_CALL)
        return f"({before} inner)* text" if parallel else f"{before} inner | text"

    def reasoning_before(self, body: str) -> str:
        """Body that begins with the model's reasoning, if the model likes."""
        self._rules["body"] = body
        thought = self._up_to(CLOSE_REASONING)
        return f"({self._tag(OPEN_REASONING)} {thought} /\\s*/)? body"

    def _json(self, number: int, function: Function, key: str, *, any_arguments: bool) -> str:
        """A function's call as JSON."""
        schema = {"type": "object"} if any_arguments else {"type": "object", **function.schema}
        self._rules[f"arguments_{number}"] = _json_of(schema)
        opening = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{key}": '
        return f'{_literal(opening)} arguments_{number} "}}"'

    def _xml(self, number: int, function: Function, key: str, *, any_arguments: bool) -> str:
        """A function's call as XML, with its parameters in the schema's order."""
        required = () if any_arguments else function.schema.get("required", ())
        parts: list[str] = []
        for i, name in enumerate(function.parameters):
            rule = f"parameter_{number}_{i}"
            opening = _literal(f"<parameter={name}>\n")
            self._rules[rule] = f"{opening} {self._value(function, name)}"
            parts.append(rule if name in required else f"{rule}?")
        return " ".join([_literal(function_tag(function.name) + "\n"), *parts, _literal("</function>")])

    def _value(self, function: Function, name: str) -> str:
        """A parameter's value, and the tag behind it."""
        schema = function.parameters[name]
        types = function.types(name)
        values = schema.get("enum")
        if types == {"string"} and values:
            return f"({' | '.join(_literal(value) for value in values)}) {_literal(_END_VALUE)}"
        if not types or "string" in types:
            self._rules["value[lazy]"] = r"/(.|\n)*\n<\/parameter>\n/"
            return "value"
        definitions = {key: function.schema[key] for key in ("$defs", "definitions") if key in function.schema}
        rule = f"json_{len(self._rules)}"
        self._rules[rule] = _json_of({**definitions, **schema})
        return f"{rule} {_literal(_END_VALUE)}"

    def _tag(self, tag: str) -> str:
        """A tag: a special token by its name, or text."""
        return tag if tag in self._special else _literal(tag)

    def _up_to(self, tag: str) -> str:
        """Text up to the first such tag, and the tag."""
        if tag in self._special:
            return f"{_ANY_TEXT} {tag}"
        self._rules["up_to_tag[lazy]"] = _ANY_TEXT[:-1] + tag.replace("/", r"\/") + "/"
        return "up_to_tag"


def _json_of(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({"x-guidance": _JSON_FORM, **schema}, ensure_ascii=False)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _chosen(tool_choice: ToolChoice, functions: Mapping[str, Function]) -> Mapping[str, Function]:
    """Functions that may be called."""
    if tool_choice == "none" or (tool_choice == "auto" and not functions):
        return {}
    if not functions:
        raise InvalidParameterError("tool_choice: there are no tools to choose from")
    if tool_choice in ("auto", "required"):
        return functions
    named = tool_choice.get("function", tool_choice) if isinstance(tool_choice, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else None
    if not isinstance(name, str):
        raise InvalidParameterError(
            f"tool_choice: expected none, auto, required or a function's name, got {tool_choice!r}"
        )
    if name not in functions:
        raise InvalidParameterError(f"tool_choice: tools has no function {name!r}, only {', '.join(functions)}")
    return {name: functions[name]}
