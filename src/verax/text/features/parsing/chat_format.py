"""Syntax that a checkpoint's chat template teaches the model: tool calls and reasoning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from verax.text.tokens.tokenizer import Tokenizer

__all__ = [
    "CLOSE_CALL",
    "CLOSE_REASONING",
    "OPEN_CALL",
    "OPEN_REASONING",
    "PYTHON_TAG",
    "ChatFormat",
    "ReasoningState",
    "ToolSyntax",
    "chat_format",
]

OPEN_REASONING, CLOSE_REASONING = "<think>", "</think>"
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

ToolSyntax = Literal["hermes", "qwen3_coder", "llama3_json", "none"]
"""Syntax of tool calls, by vLLM's names of its parsers:

- hermes: JSON in `<tool_call>` (Hermes, Qwen2.5, Qwen3);
- qwen3_coder: XML in `<tool_call>` (Qwen3-Coder, Qwen3.5);
- llama3_json: an answer that is JSON (Llama 3.1 and later);
- none: the template has no tool calls. An answer can still be one, as with llama3_json: a grammar can demand it.
"""

ReasoningState = Literal["none", "open", "inside", "over"]
"""State of the reasoning where the answer begins:

- none: the model does not reason;
- open: the answer may begin with `<think>`;
- inside: the prompt ends inside of the reasoning;
- over: the prompt has closed it.
"""

_LLAMA = re.compile(r'\{"name":.*"parameters":', re.DOTALL)


@dataclass(frozen=True)
class ChatFormat:
    """Syntax of a checkpoint's answers."""

    tools: ToolSyntax = "none"
    reasoning: bool = False
    """True if the model can reason in `<think>` before it answers."""
    special_tokens: frozenset[str] = frozenset()
    """Tags above that are special tokens, which a tokenizer leaves out of the text unless told otherwise."""
    turn_tokens: tuple[str, ...] = ()
    """Special tokens of the template: the last one in a prompt stands before the answer."""

    @property
    def sampling_overrides(self) -> dict[str, Any]:
        """Fields of `SamplingParams` that a request needs for its answer to be parsed.

        The token that ends an answer is never part of its text, so that nothing has to be cut off.
        """
        return {"skip_special_tokens": False} if self.special_tokens else {}

    def reasoning_state(self, prompt: str) -> ReasoningState:
        """State of the reasoning at the end of a rendered prompt."""
        if not self.reasoning:
            return "none"
        begin = max((prompt.rfind(token) + len(token) for token in self.turn_tokens if token in prompt), default=0)
        tail = prompt[begin:] if begin else prompt.rstrip()[-len(CLOSE_REASONING) :]
        opened, closed = tail.rfind(OPEN_REASONING), tail.rfind(CLOSE_REASONING)
        if opened == closed:
            return "open"
        return "inside" if opened > closed else "over"

    def structured_after(self, prompt: str) -> str | None:
        """Text behind which a grammar begins, for `StructuredOutputs(after=...)`: the end of the reasoning, or None."""
        return CLOSE_REASONING if self.reasoning_state(prompt) == "inside" else None


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """Format of a checkpoint, from its chat template and its vocabulary."""
    templates = tokenizer.chat_templates
    template = templates.get("tool_use", templates.get("default", ""))
    special = {token for number in tokenizer.special_token_ids if (token := tokenizer.token(number))}
    in_vocabulary = all(tokenizer.token_id(tag) is not None for tag in (OPEN_REASONING, CLOSE_REASONING))
    tags = {OPEN_REASONING, CLOSE_REASONING, OPEN_CALL, CLOSE_CALL, PYTHON_TAG}
    return ChatFormat(
        tools=_tool_syntax(template),
        reasoning=bool(template) and (CLOSE_REASONING in template or in_vocabulary),
        special_tokens=frozenset(tags & special),
        turn_tokens=tuple(sorted(token for token in special - tags if token in template)),
    )


def _tool_syntax(template: str) -> ToolSyntax:
    plain = template.replace('\\"', '"')
    if OPEN_CALL in plain and "<function=" in plain and "<parameter=" in plain:
        return "qwen3_coder"
    # GLM writes keys and values as tags inside of the same tag.
    if OPEN_CALL in plain and "arguments" in plain and "<arg_key>" not in plain:
        return "hermes"
    if _LLAMA.search(plain) and "tool_calls" in plain:
        return "llama3_json"
    return "none"
