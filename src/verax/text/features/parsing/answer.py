"""Incremental parser of an answer: reasoning, content and tool calls, each as soon as it is certain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verax.text.features.parsing.calls import CallReader, CallSink, Outcome
from verax.text.features.parsing.chat_format import (
    CLOSE_CALL,
    CLOSE_REASONING,
    OPEN_CALL,
    OPEN_REASONING,
    PYTHON_TAG,
    ChatFormat,
    ReasoningState,
)
from verax.text.features.parsing.deltas import Delta
from verax.text.features.parsing.functions import Function, read_functions
from verax.text.features.parsing.json_calls import JsonCallReader
from verax.text.features.parsing.tags import find_tag
from verax.text.features.parsing.xml_calls import XmlCallReader, function_tag

__all__ = ["AnswerParser", "parser_for"]


class AnswerParser:
    """Parser of one answer. The deltas joined do not depend on how the text was cut into pieces.

    - Reasoning is one block at the beginning. `</think>` ends it, and so does a tool call.
    - A tool call names a known function. What only looks like one is text, as it was written.
    - White space around a tag belongs to the tag.
    - Held back are white space, what may become a tag, and a call until it is certain to be one.
    """

    def __init__(
        self,
        reader: Callable[[str], CallReader] | None = None,
        *,
        call_tags: Sequence[str] = (),
        reasoning: ReasoningState = "none",
    ):
        """Begin an answer.

        Args:
            reader: makes the reader of a call from the tag that begins it; None if calls are not parsed.
            call_tags: tags that begin a call. Without any, only an answer that begins with JSON is a call.
            reasoning: state of the reasoning at the end of the prompt; "none" if it is not parsed.
        """
        self._new_reader = reader
        self._call_tags = tuple(call_tags)
        self._prompt_state = reasoning
        self._pending = ""
        self._in_reasoning = False
        self._calls = CallSink()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._has_content = False
        self._space = ""
        """White space behind a tag: dropped unless it stands between two pieces of content."""
        self._behind_tag = False
        self._raw: list[str] = []
        """Text of what may be a call, to be given back if it is none."""
        self._reader: CallReader | None = None
        self._step = self._begin if reasoning in ("open", "inside") else self._begin_content()

    def feed(self, text: str) -> Delta:
        """Take a further piece of the answer; the delta of what is certain now."""
        self._pending += text
        return self._run(final=False)

    def finish(self) -> Delta:
        """End the answer; the delta of the rest."""
        return self._run(final=True)

    def _run(self, final: bool) -> Delta:
        while self._step(final):
            pass
        delta = Delta("".join(self._content), "".join(self._reasoning), self._calls.take())
        self._content, self._reasoning = [], []
        return delta

    def _begin(self, final: bool) -> bool:
        """The reasoning's tag, which a model may write though the prompt has it already."""
        rest = self._pending.lstrip()
        if not final and rest != OPEN_REASONING and OPEN_REASONING.startswith(rest):
            return False
        opened = rest.startswith(OPEN_REASONING)
        if opened or self._prompt_state == "inside":
            self._pending = rest.removeprefix(OPEN_REASONING)
            self._in_reasoning = self._behind_tag = True
            self._step = self._text
        else:
            self._step = self._begin_content()
        return True

    def _begin_content(self) -> Callable[[bool], bool]:
        """Step that the content begins with."""
        return self._text if self._new_reader is None or self._call_tags else self._begin_json

    def _begin_json(self, final: bool) -> bool:
        """A call without tags, at the beginning of the content or behind another one."""
        rest = self._pending.lstrip("; \t\r\n" if self._calls.count else " \t\r\n")
        if not final and rest != PYTHON_TAG and PYTHON_TAG.startswith(rest):
            return False
        tagged = rest.removeprefix(PYTHON_TAG).lstrip()
        if not final and not tagged:
            return False
        if tagged.startswith("{"):
            self._begin_call(self._pending[: -len(tagged)], "", tagged)
        else:
            self._pending = rest if self._calls.count and not rest else self._pending
            self._stop_calls()
        return True

    def _stop_calls(self) -> None:
        """From now on everything is content."""
        self._new_reader = None
        self._step = self._text

    def _text(self, final: bool) -> bool:
        """Reasoning or content, up to the next tag."""
        tags = (*((CLOSE_REASONING,) if self._in_reasoning else ()), *self._call_tags)
        if not tags:
            self._emit(self._pending)
            self._pending = ""
            return False
        at, tag = find_tag(self._pending, tags, final=final)
        before = self._pending[:at]
        kept = before if final and tag is None else before.rstrip()
        self._emit(kept)
        if tag is None:
            self._pending = self._pending[len(kept) :]
            return False
        rest = self._pending[at + len(tag) :]
        if tag == CLOSE_REASONING:
            self._pending = rest
            self._pass_tag()
            self._step = self._begin_content()
        else:
            self._begin_call(before[len(kept) :] + tag, tag, rest)
        return True

    def _begin_call(self, raw: str, tag: str, rest: str) -> None:
        assert self._new_reader is not None
        self._raw = [raw]
        self._pending = rest
        self._reader = self._new_reader(tag)
        self._step = self._call

    def _call(self, final: bool) -> bool:
        assert self._reader is not None
        read, outcome = self._reader.read(self._pending, self._calls, final=final)
        if not self._reader.committed:
            self._raw.append(self._pending[:read])
        self._pending = self._pending[read:]
        if outcome is Outcome.OPEN:
            return False
        if outcome is Outcome.REFUSED:
            self._emit("".join(self._raw))
            if self._call_tags:
                self._step = self._text
            else:
                self._stop_calls()
            return True
        self._pass_tag()
        self._step = self._begin_content()
        return True

    def _pass_tag(self) -> None:
        """Go on with content behind a tag."""
        self._in_reasoning = False
        self._behind_tag = True
        self._space = ""

    def _emit(self, text: str) -> None:
        """Put text into the reasoning or the content."""
        if self._behind_tag:
            stripped = text.lstrip()
            if not stripped:
                self._space += text
                return
            text = self._space + text if self._has_content else stripped
            self._behind_tag = False
            self._space = ""
        if self._in_reasoning:
            self._reasoning.append(text)
        elif text:
            self._content.append(text)
            self._has_content = True


def parser_for(
    template: ChatFormat,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    prompt: str,
    parse_tool_calls: bool,
    parse_reasoning: bool,
) -> AnswerParser:
    """Parser of one answer to a prompt.

    Args:
        template: format of the checkpoint's answers.
        tools: functions that the request offers, in OpenAI's form; only calls of these are parsed.
        prompt: rendered by the chat template.
        parse_tool_calls: False leaves calls in the content.
        parse_reasoning: False leaves the reasoning and its tags in the content.

    Raises:
        InvalidParameterError: if `tools` are no functions.
    """
    reasoning = template.reasoning_state(prompt) if parse_reasoning else "none"
    functions = read_functions(tools) if parse_tool_calls else {}
    if not functions:
        return AnswerParser(reasoning=reasoning)
    reader, tags = _calls_of(template, functions)
    return AnswerParser(reader, call_tags=tags, reasoning=reasoning)


def _calls_of(
    template: ChatFormat, functions: Mapping[str, Function]
) -> tuple[Callable[[str], CallReader], Sequence[str]]:
    """Factory of readers of the format's calls, and the tags that begin a call."""
    match template.tools:
        case "hermes":
            return lambda tag: JsonCallReader(functions, CLOSE_CALL), (OPEN_CALL,)
        case "qwen3_coder":
            # Models forget the outer tag now and then.
            return lambda tag: XmlCallReader(functions, tag), (OPEN_CALL, *map(function_tag, functions))
        case _:
            return lambda tag: JsonCallReader(functions), ()
