"""OpenAI's harmony format: messages with a channel each, as gpt-oss writes them.

An answer continues `<|start|>assistant`. It is messages, each with a header, a body and an end:

    <|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Answer.<|return|>

The channel `analysis` is reasoning, `final` is content, and so is `commentary`, unless the header names a recipient:
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>` is a tool call. The recipient may
also stand before the channel. Format: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

from verax.text.features.json_schema import literal
from verax.text.features.tool_calls import AnswerParser

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)

FINAL = f"{CHANNEL}final{MESSAGE}"
"""Text after which a message to the user begins."""

FUNCTIONS = "functions."
"""Beginning of a recipient that is a function."""

_ENDS = (END, RETURN, CALL, START, CHANNEL)
"""Tags that end a body. Models forget the end of a message now and then."""

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")
_HEADER = re.compile(r"\s*(assistant)?(\s*to=\S+)?\s*")
"""Text between messages that belongs to the next one's header, whose beginning models forget now and then."""


def history(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages as gpt-oss' template takes them: the reasoning and the content before a call are one text."""
    told: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            thoughts = filter(None, (message.get("reasoning_content"), message.get("content")))
            message = {"role": "assistant", "content": "\n".join(thoughts), "tool_calls": message["tool_calls"]}
        told.append(message)
    return told


class HarmonyParser(AnswerParser):
    """Parser of one answer in messages.

    A call of a function that is not known is content, as it was written. So is an answer without any tag, and text
    between messages. A header that the answer ends in is dropped.
    """

    def __init__(self, functions: Collection[str] = (), *, prompt: str = "", reasoning: bool = True):
        """Begin an answer.

        Args:
            functions: names of the functions whose calls are parsed.
            prompt: text before the answer, whose last message may be open.
            reasoning: False to make content of the channel `analysis`.
        """
        super().__init__()
        self._functions = functions
        self._reasons = reasoning
        self._begun: set[bool] = set()
        self._steps = self._parse(prompt[prompt.rfind(START) :] if START in prompt else "")

    def _parse(self, opened: str) -> Generator[None, None, None]:
        """Read the whole answer; yields where more of it is needed. `opened`: the prompt's last message."""
        header, in_body, rest = opened.partition(MESSAGE)
        tag: str | None = END if any(end in rest for end in (END, RETURN, CALL)) else None
        while True:
            if tag in (END, RETURN, CALL):
                between: list[str] = []
                tag = yield from self._source.up_to((START, CHANNEL), between.append, str)
                before = "".join(between)
                if not _HEADER.fullmatch(before):
                    self._put(("\n" if False in self._begun else "") + before.strip(), reasoning=False)
                    before = ""
                if tag is None:
                    return
                tag = before + tag if tag == CHANNEL else tag
            if tag is not None or not in_body:
                pieces = [tag or header]
                if (yield from self._source.up_to((MESSAGE,), pieces.append, str)) is None:
                    text = "".join(pieces[1:])
                    if tag is None and not any(known in text for known in TAGS):
                        self._put(text, reasoning=False)
                    return
                header = "".join(pieces)
                header = header[max(header.rfind(START), 0) :]  # after a header that led nowhere
            in_body = ""
            tag = yield from self._body(header)
            if tag is None:
                return

    def _body(self, header: str) -> Generator[None, None, str | None]:
        """Read a message after its header, and the tag that ends it."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        name = recipient[1].removeprefix(FUNCTIONS) if recipient else ""
        if name in self._functions:
            self._calls.start(name)
            return (yield from self._source.up_to(_ENDS, self._calls.add, str))
        reasoning = self._reasons and recipient is None and channel is not None and channel[1] == "analysis"
        if reasoning in self._begun:
            self._put("\n", reasoning=reasoning)
        if recipient is not None:
            self._put(header.removeprefix(f"{START}assistant") + MESSAGE, reasoning=False)
        return (yield from self._source.up_to(_ENDS, lambda text: self._put(text, reasoning=reasoning), str))

    def _put(self, text: str, *, reasoning: bool) -> None:
        if text:
            self._begun.add(reasoning)
            (self._reasoning if reasoning else self._content).append(text)


def call_rule(name: str, arguments: str, tag: Callable[[str], str]) -> str:
    """Body of a Lark rule: a call of a function, whose arguments are the rule `arguments`. A call ends the answer.

    `tag`: a tag as the grammar has it.
    """
    recipient = f" to={FUNCTIONS}{name}"
    opening = f'{tag(CHANNEL)} {literal(f"commentary{recipient} ")} | {literal(recipient)} {tag(CHANNEL)} "commentary "'
    return f'({opening}) ({tag(CONSTRAIN)})? "json" {tag(MESSAGE)} {arguments}'


def start_rule(calls: str, tag: Callable[[str], str], thought: str, message: str | None) -> str:
    """Body of a Lark rule: an answer that thinks, then makes one of the calls or answers the user.

    `thought`: text up to the end of a message, and that end. `message`: text for the user; None for calls alone.
    """
    before = f'{tag(CHANNEL)} ("analysis" | "commentary") {tag(MESSAGE)} {thought} {tag(START)} "assistant"'
    final = "" if message is None else f' | {tag(CHANNEL)} "final" {tag(MESSAGE)} {message}'
    return f"({before})* ({calls}{final})"
