"""Answers parsed as they stream: reasoning, content and tool calls, by the checkpoint's chat format."""

from verax.text.features.parsing.answer import AnswerParser, parser_for
from verax.text.features.parsing.chat_format import ChatFormat, chat_format
from verax.text.features.parsing.deltas import Delta, ToolCall, ToolCallDelta, WholeAnswer, join
from verax.text.features.parsing.functions import Function, read_functions
from verax.text.features.parsing.tool_grammar import tool_grammar

__all__ = [
    "AnswerParser",
    "ChatFormat",
    "Delta",
    "Function",
    "ToolCall",
    "ToolCallDelta",
    "WholeAnswer",
    "chat_format",
    "join",
    "parser_for",
    "read_functions",
    "tool_grammar",
]
