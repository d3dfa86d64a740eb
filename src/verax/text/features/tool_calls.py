"""Tool calls in a growing text: parts of an answer, the functions that a request offers, a reader of each syntax.

JSON objects are the calls of Hermes and Qwen (`{"name": ..., "arguments": {...}}`) and of Llama 3 (`parameters`), lists
of them those of Granite 3, Phi-4-mini and Mistral, whose later models write `NAME[ARGS]{...}`. Qwen3-Coder and Qwen3.5
write `<function=name>` with a `<parameter=key>` for each argument.

A reader is a generator: it yields where it needs more text, and returns whether the text is a call. It decides that
once. Until then the text is held back, to be given back; from then on the call stands, and its arguments stream.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verax.errors import InvalidParameterError
from verax.text.features.json_schema import referenced
from verax.text.tokens.lenient_json import JsonScanner, as_json, may_become_json


@dataclass(frozen=True)
class ToolCall:
    """Call of a function by the model."""

    id: str
    name: str
    arguments: str
    """JSON text of the arguments. Cut short if the answer was, and not checked by a schema."""


@dataclass(frozen=True)
class ToolCallDelta:
    """Part of a tool call. The first part of a call has its id and name, and no later part has."""

    index: int
    """Number of the call in the answer, from 0."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """Next piece of the JSON text of the arguments."""


OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
OPEN_REASONING, CLOSE_REASONING = "<think>", "</think>"
OPEN_THOUGHT, CLOSE_THOUGHT = "<|channel>thought", "<channel|>"
"""Tags around Gemma 4's reasoning."""

OPEN_THINK, CLOSE_THINK = "[THINK]", "[/THINK]"
"""Tags around the reasoning of Mistral's models."""


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


def join(deltas: Iterable[Delta], text: str = "") -> WholeAnswer:
    """The whole answer that deltas make together.

    If the arguments of a call are not JSON, nor its beginning as in an answer that was cut short, there are no calls,
    and the content is what the model wrote.

    Args:
        deltas: deltas of the answer.
        text: the answer as the model wrote it.
    """
    deltas = list(deltas)
    calls: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        for part in delta.tool_calls:
            calls.setdefault(part.index, []).append(part)
    joined = tuple(
        ToolCall(parts[0].id or "", parts[0].name or "", "".join(part.arguments for part in parts))
        for parts in calls.values()
    )
    content, reasoning = ("".join(getattr(delta, name) for delta in deltas) for name in ("content", "reasoning"))
    if not all(may_become_json(call.arguments) for call in joined):
        rest = next(
            (text.partition(tag)[2] for tag in (CLOSE_REASONING, CLOSE_THOUGHT, CLOSE_THINK) if tag in text), ""
        )
        return WholeAnswer((reasoning and rest.lstrip()) or text, reasoning)
    return WholeAnswer(content, reasoning, joined)


_MAX_REFERENCES = 16
"""References that are followed from one to the next: they may lead in a circle."""

_ANY_TYPE = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})


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
        """Schema of each parameter by its name, of the schemas that the function's combines too."""
        return _properties(self.schema, self.schema, _MAX_REFERENCES, {})

    def types(self, parameter: str) -> frozenset[str]:
        """JSON Schema's names of the types that a parameter can have; a text if the schema does not know it."""
        schema = self.parameters.get(parameter, self.schema.get("additionalProperties"))
        if parameter not in self.parameters and not isinstance(schema, Mapping):
            return frozenset({"string"})
        return _types(schema, self.schema, _MAX_REFERENCES, {})


def read_functions(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Function]:
    """Functions by name.

    `tools`: `{"type": "function", "function": {"name", "parameters", "strict"}}`, or what `function` holds by itself.
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
        if isinstance(target := referenced(str(schema.get("$ref")), schema), Mapping):
            schema = {**schema, **target}
        if "object" not in _types(schema, schema, _MAX_REFERENCES, {}):
            raise InvalidParameterError(
                f"tools[{i}].function.parameters: expected type object, as arguments have names"
            )
        functions[name] = Function(name, schema, strict=function.get("strict") is True)
    return functions


def _properties(
    schema: Any, root: Mapping[str, Any], references: int, known: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Schema of each property of an object, whichever of the schemas that are combined has it.

    `references`: number of schemas that may be within each other. `known`: results by reference, each found once.
    """
    if not isinstance(schema, Mapping) or references == 0:
        return {}
    given, reference = schema.get("properties"), schema.get("$ref")
    properties = dict(given) if isinstance(given, Mapping) else {}
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = {}
            known[reference] = _properties(referenced(reference, root), root, references - 1, known)
        properties |= known[reference]
    for key in ("allOf", "anyOf", "oneOf"):
        members = schema.get(key)
        for member in members if isinstance(members, (list, tuple)) else ():
            for name, value in _properties(member, root, references - 1, known).items():
                other = properties.get(name, value)
                properties[name] = value if other == value else {key: [other, value]}
    return properties


def _types(schema: Any, root: Mapping[str, Any], references: int, known: dict[str, frozenset[str]]) -> frozenset[str]:
    """Types that a schema allows; all where it does not say. Arguments as of `_properties`."""
    if not isinstance(schema, Mapping) or references == 0:
        return _ANY_TYPE
    given = schema.get("type")
    if isinstance(given, (str, list, tuple)):
        names = [given] if isinstance(given, str) else [name for name in given if isinstance(name, str)]
        return _ANY_TYPE.intersection(names) or _ANY_TYPE
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, (list, tuple)):
        return frozenset().union(*(_types_of(json.dumps(value)) or {"string"} for value in values))
    types, reference = _ANY_TYPE, schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = _ANY_TYPE
            known[reference] = _types(referenced(reference, root), root, references - 1, known)
        types = known[reference]
    for key, combined in (("anyOf", frozenset.union), ("oneOf", frozenset.union), ("allOf", frozenset.intersection)):
        members = schema.get(key)
        if isinstance(members, (list, tuple)) and members:
            types &= combined(*(_types(member, root, references - 1, known) for member in members))
    return types


class CallSink:
    """Tool calls of an answer, as they are found."""

    def __init__(self) -> None:
        self._new: dict[int, list[ToolCallDelta]] = {}
        self.count = 0

    def start(self, name: str) -> None:
        """Begin the next call."""
        self._new[self.count] = [ToolCallDelta(self.count, id=f"call_{uuid.uuid4().hex[:24]}", name=name)]
        self.count += 1

    def add(self, arguments: str) -> None:
        """Continue the arguments of the last call."""
        if arguments:
            index = self.count - 1
            self._new.setdefault(index, []).append(ToolCallDelta(index, arguments=arguments))

    def take(self) -> tuple[ToolCallDelta, ...]:
        """Additions to each call since the last time."""
        new, self._new = self._new, {}
        return tuple(
            ToolCallDelta(index, parts[0].id, parts[0].name, "".join(part.arguments for part in parts))
            for index, parts in new.items()
        )


class GrowingText:
    """Text of an answer as it arrives, read from left to right."""

    def __init__(self) -> None:
        self.text = ""
        """Text that is not read or may be given back, and all that has come since."""
        self.at = 0
        """Number of characters of `text` that were read."""
        self.mark: int | None = None
        """Beginning of what is given back if it is not a call; None while nothing is."""
        self.final = False

    def append(self, piece: str) -> None:
        """Add what has come."""
        kept = self.at if self.mark is None else self.mark
        self.text = self.text[kept:] + piece
        self.at -= kept
        self.mark = None if self.mark is None else 0

    def expect(self, tags: Sequence[str], space: str = r"\s*") -> Generator[None, None, str | None]:
        """Read white space and the tag after it.

        Returns:
            The tag. Nothing is read without one: None if other text follows, "" if the text ends before that is known.
        """
        while True:
            before = re.compile(space).match(self.text, self.at)
            start = self.at if before is None else before.end()
            for tag in tags:
                if self.text.startswith(tag, start):
                    self.at = start + len(tag)
                    return tag
            if not any(tag.startswith(self.text[start : start + len(tag)]) for tag in tags):
                return None
            if self.final:
                return ""
            yield

    def end(self, tags: Sequence[str], space: str = r"\s*") -> Generator[None, None, None]:
        """Read white space and the tag after it, or its beginning where the text ends within it."""
        if (yield from self.expect(tags, space)) == "":
            self.at = len(self.text)

    def up_to(
        self, tags: Sequence[str], put: Callable[[str], None], strip: Callable[[str], str] = str.rstrip
    ) -> Generator[None, None, str | None]:
        """Hand text on as it arrives, up to the first tag, which is read. All tags begin with `<` or `[`.

        `tags`: what the text ends with. `put`: takes the text, without what `strip` removes before the tag. The mark is
        set there.

        Result: the tag; None if the text ended without one.
        """
        while True:
            at, tag = _find_tag(self.text, self.at, tags, final=self.final)
            text = self.text[self.at : at]
            if tags and (tag is not None or not self.final):
                text = strip(text)
            put(text)
            self.at += len(text)
            if tag is not None:
                self.mark, self.at = self.at, at + len(tag)
                return tag
            if self.final:
                return None
            yield


_TAG_BEGIN = re.compile(r"[<\[]")


def _find_tag(text: str, start: int, tags: Sequence[str], *, final: bool) -> tuple[int, str | None]:
    """Position of the first tag from `start` on, and the tag; without it the position of what may become one."""
    for begin in _TAG_BEGIN.finditer(text, start) if tags else ():
        at = begin.start()
        for tag in tags:
            if text.startswith(tag, at):
                return at, tag
        if not final and any(tag.startswith(text[at : at + len(tag)]) for tag in tags):
            return at, None
    return len(text), None


_OPENING = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"'
    r'(\s*,\s*"(?:arguments|parameters)"\s*:\s*\{)?'
)
_KEYS = ('"name"', '"arguments"', '"parameters"', '"type"', '"id"')
"""Keys of a call. An object with another key is not a call."""

_BEFORE_CLOSE = r"[\s},]*"
"""Text between a call's object and its closing tag. Models like to write a brace or a comma too many."""


class AnswerParser:
    """Base of a parser of one answer. The deltas joined do not depend on how the text was cut into pieces.

    A subclass sets `_steps`, the generator that reads `_source`, fills `_content`, `_reasoning` and `_calls`, and
    yields where more of the answer is needed.
    """

    _steps: Generator[None, None, None]

    def __init__(self) -> None:
        self._source = GrowingText()
        self._pieces: list[str] = []
        self._calls = CallSink()
        self._content: list[str] = []
        self._reasoning: list[str] = []

    @property
    def text(self) -> str:
        """The answer so far, as the model wrote it."""
        return "".join(self._pieces)

    def feed(self, text: str) -> Delta:
        """Take a further piece of the answer; the delta of what is certain now."""
        self._source.append(text)
        self._pieces.append(text)
        next(self._steps, None)
        delta = Delta("".join(self._content), "".join(self._reasoning), self._calls.take())
        self._content, self._reasoning = [], []
        return delta

    def finish(self) -> Delta:
        """End the answer; the delta of the rest."""
        self._source.final = True
        return self.feed("")


class JsonCallReader:
    """Reader of a call as a JSON object, or of several: in a list, or one after the other up to a closing tag.

    The text is a call

    - once the name of a known function and the `{` of its arguments were read, in this order. From then on the
      arguments stream. If they turn out not to be JSON, they stream unchanged up to the closing tag, since what was
      streamed cannot be taken back; `join` makes the answer text;
    - or, in any other order of keys, once the object is complete. Arguments may then be JSON in a string, or missing.
    """

    def __init__(self, names: Collection[str], close: str | None = None) -> None:
        """Read calls of the functions `names`, which end with the tag `close`."""
        self._names = names
        self._tags = () if close is None else (close,)

    def read(self, source: GrowingText, calls: CallSink) -> Generator[None, None, bool]:
        """Read the calls and the tag after them into the sink. True for a first call; if not, the sink is unchanged."""
        ends = self._tags
        if (yield from source.expect(("[",))):
            ends = ("]",)
        whole = yield from self._object(source, calls)
        if whole is None:
            return False
        while whole and ends:
            source.mark = source.at
            tag = yield from source.expect(("{", *ends), _BEFORE_CLOSE)
            if tag == "{":
                source.at -= 1
                whole = yield from self._object(source, calls)
                source.at = source.at if whole is not None else source.mark
            elif tag == "":
                source.at = len(source.text)
            ends = self._tags if tag == "]" else ends if tag == "{" else ()
        source.mark = None
        return True

    def _object(self, source: GrowingText, calls: CallSink) -> Generator[None, None, bool | None]:
        """Read a call. None, with nothing given to the sink, if it is not one; False if its arguments are not JSON."""
        scanner = JsonScanner(repairs_from=2)  # in arguments
        before: list[str] = []
        is_call = in_arguments = False
        while not scanner.complete:
            end = scanner.read(source.text, source.at, final=source.final)
            if end == source.at and not source.final:
                yield
                continue
            if end is None or end == source.at:
                break
            source.at = end
            if in_arguments:
                calls.add(scanner.written)
                in_arguments = scanner.depth > 1
            elif not is_call:
                before.append(scanner.written)
                if self._refutes(scanner, before):
                    return None
                is_call = in_arguments = self._opens(scanner, before, calls)
                source.mark = None if is_call else source.mark
        if not is_call and not (scanner.complete and self._whole("".join(before), calls)):
            return None
        source.mark = None
        if in_arguments:
            yield from source.up_to(self._tags, calls.add)
        return not in_arguments

    def _refutes(self, scanner: JsonScanner, before: Sequence[str]) -> bool:
        """True if the string that has just ended is a key that no call has, or the name of no function."""
        if before[-1] != '"' or scanner.depth != 1 or scanner.state not in ("colon", "next"):
            return False
        text = "".join(before)
        if scanner.state == "colon":
            return not text.endswith(_KEYS)
        named = _OPENING.fullmatch(text)
        return named is not None and named[1] not in self._names

    def _opens(self, scanner: JsonScanner, before: Sequence[str], calls: CallSink) -> bool:
        """Begin the call if the brace that has just been read opens its arguments."""
        opening = _OPENING.fullmatch("".join(before)) if before[-1] == "{" and scanner.depth == 2 else None
        if opening is None or opening[1] not in self._names:
            return False
        calls.start(opening[1])
        calls.add("{")
        return True

    def _whole(self, text: str, calls: CallSink) -> bool:
        """Make the call of a complete object: arguments are an object, the JSON text of one, or missing."""
        try:
            call = json.loads(text)
            given = call.get("arguments", call.get("parameters"))
            written = json.dumps(given or {}, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            return False
        written = as_json(given, "start") if isinstance(given, str) and given.strip() else written
        if call.get("name") not in self._names or written is None or not written.startswith("{"):
            return False
        calls.start(call["name"])
        calls.add(written)
        return True


MISTRAL_CALL, MISTRAL_ARGS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
"""Tags of Mistral's calls: before a call or a list of them, before its arguments, and before its id if it has one."""


class MistralCallReader:
    """Reader of the calls after `[TOOL_CALLS]`: JSON objects, as older models write, or one call as `NAME[ARGS]{...}`.

    Between name and arguments there may be `[CALL_ID]` with an id, or no tag at all. The text is a call once the name
    of a known function and the tag after it were read. Arguments stream as they arrive, JSON or not.
    """

    def __init__(self, names: Collection[str]) -> None:
        """Read calls of the functions `names`."""
        self._names = names
        self._openings = {f"{name}{tag}": name for name in names for tag in (MISTRAL_ARGS, MISTRAL_ID, "{")}

    def read(self, source: GrowingText, calls: CallSink) -> Generator[None, None, bool]:
        """Read the calls into the sink. True for a first call; if not, the sink is unchanged."""
        opening = yield from source.expect((*self._openings, "[", "{"))
        if opening in ("[", "{"):
            source.at -= 1
            return (yield from JsonCallReader(self._names).read(source, calls))
        if not opening:
            return False
        calls.start(self._openings[opening])
        if opening.endswith(MISTRAL_ID):
            yield from source.up_to((MISTRAL_ARGS,), lambda text: None)
        source.at -= opening.endswith("{")
        source.mark = None
        scanner, is_json = JsonScanner(), True
        while is_json and not scanner.complete:
            end = scanner.read(source.text, source.at, final=source.final)
            is_json = end is not None and not (end == source.at and source.final)
            if end == source.at and is_json:
                yield
            elif is_json:
                assert end is not None
                source.at = end
                calls.add(scanner.written)
        if not is_json and (yield from source.up_to((MISTRAL_CALL,), calls.add)):
            assert source.mark is not None
            source.at = source.mark
        source.mark = None
        return True


_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_END_FUNCTION = "</function>"
_END_FUNCTION_AND_CALL = f"{_END_FUNCTION}\n{CLOSE_CALL}"
_AFTER_END = {
    _END_PARAMETER: (_PARAMETER, _END_PARAMETER, _END_FUNCTION, CLOSE_CALL, OPEN_CALL, "<function="),
    _END_FUNCTION_AND_CALL: (OPEN_CALL,),
}
"""Tags that may follow a tag that ends a value; where another text follows, it is a part of the value."""

_KEY_END = re.compile(r"[>\n]")


def function_tag(name: str) -> str:
    """Tag that begins a call of a function."""
    return f"<function={name}>"


class XmlCallReader:
    """Reader of one call after its first tag, `<tool_call>` or the function's.

    The text is a call once the tag of a known function was read. The arguments are written as JSON. Texts stream as
    they arrive. Values of other types are cast by the function's schema when they are complete; a value that is not of
    its type stays a text.
    """

    def __init__(self, functions: Mapping[str, Function], tag: str) -> None:
        """Read a call of one of the functions after the tag."""
        self._functions = {function_tag(name): function for name, function in functions.items()}
        self._tag = tag

    def read(self, source: GrowingText, calls: CallSink) -> Generator[None, None, bool]:
        """Read the function and the tag after it into the sink. True if it is a call; if not, the sink is unchanged."""
        tag: str | None = self._tag
        if tag not in self._functions:
            tag = yield from source.expect(tuple(self._functions))
        if not tag:
            return False
        function = self._functions[tag]
        calls.start(function.name)
        calls.add("{")
        separator = ""
        while True:
            source.mark = None
            tag = yield from source.expect((_PARAMETER, _END_FUNCTION, CLOSE_CALL))
            key = (yield from self._key(source)) if tag == _PARAMETER else None
            if tag == "" or key == "":
                # An answer that was cut short leaves its arguments open, so that nobody takes them for whole.
                source.at = len(source.text)
                return True
            if key is None:
                break
            calls.add(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._value(source, calls, function, key)
        calls.add("}")
        if tag != CLOSE_CALL:
            yield from source.end((CLOSE_CALL,))
        return True

    def _key(self, source: GrowingText) -> Generator[None, None, str | None]:
        """Read the name of a parameter. None, with nothing read, if the tag is not one; "" if the text ended."""
        source.mark = source.at - len(_PARAMETER)
        while (end := _KEY_END.search(source.text, source.at)) is None:
            if source.final:
                return ""
            yield
        key = source.text[source.at : end.start()]
        is_key = key and end[0] == ">"
        source.at, source.mark = end.end() if is_key else source.mark, None
        return key if is_key else None

    def _value(self, source: GrowingText, calls: CallSink, function: Function, key: str) -> Generator[None, None, None]:
        """Read a value and the tag after it, without the line breaks next to the tags.

        A value may be about these tags: its own ends it where a tag follows, or nothing. Models forget it now and then.
        Then the next parameter ends the value, or the end of the call, if nothing or another call follows.
        """
        while source.at == len(source.text):
            if source.final:
                return
            yield
        source.at += source.text[source.at] == "\n"
        others = (f"{_PARAMETER}{name}>\n" for name in function.parameters if name != key)
        tags = (_END_PARAMETER, _END_FUNCTION_AND_CALL, *others)
        value: list[str] = []
        is_text = (types := function.types(key)) == {"string"}
        put = (lambda text: calls.add(json.dumps(text, ensure_ascii=False)[1:-1])) if is_text else value.append
        calls.add('"' if is_text else "")
        while (tag := (yield from source.up_to(tags, put, _without_newline))) in _AFTER_END:
            if (yield from source.expect(_AFTER_END[tag])) is not None:
                break
            put(source.text[source.mark : source.at])
        if tag is None:
            return
        calls.add('"' if is_text else _cast("".join(value), types))
        assert source.mark is not None
        source.at = source.mark
        if tag == _END_PARAMETER:
            yield from source.expect((tag,))


def _without_newline(text: str) -> str:
    return text.removesuffix("\n")


def _cast(value: str, types: frozenset[str]) -> str:
    """JSON text of a value: the type that its text looks like where the schema allows that, else a text."""
    word = value.strip()
    written = as_json(word)
    if written is not None and _types_of(written) & types:
        return written
    if "boolean" in types and word in ("0", "1"):
        return "true" if word == "1" else "false"
    return json.dumps(value, ensure_ascii=False)


def _types_of(written: str) -> set[str]:
    """JSON Schema's types of a JSON text; none for strings, and for numbers that overflow."""
    types = {"{": {"object"}, "[": {"array"}, '"': set(), "t": {"boolean"}, "f": {"boolean"}, "n": {"null"}}
    if written[0] in types:
        return types[written[0]]
    number = float(written)
    return {"number", "integer"} if number.is_integer() else {"number"} if math.isfinite(number) else set()
