"""Tool calls as models write them, and what the parser makes of an answer that arrives in pieces."""

import json
import random

from verax.text.features.chat_format import parser_for
from verax.text.features.tool_calls import join

SYNTAXES = ("hermes", "qwen3_coder", "llama3_json", "none")
"""Syntaxes of tool calls that `written` knows."""


def written(syntax, name, **arguments):
    """A call as a model writes it."""
    if syntax == "qwen3_coder":
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
    text = json.dumps({"name": name, "arguments" if syntax == "hermes" else "parameters": arguments})
    return f"<tool_call>\n{text}\n</tool_call>" if syntax == "hermes" else text


def new_parser(form, tools, prompt="", *, parse_tool_calls=True, parse_reasoning=True):
    """A parser of an answer to a prompt."""
    return parser_for(
        form, tools=tools, prompt=prompt, parse_tool_calls=parse_tool_calls, parse_reasoning=parse_reasoning
    )


def read(pieces, *arguments, **options):
    """The whole answer that the pieces of a text are, by a new parser."""
    parser = new_parser(*arguments, **options)
    deltas = [parser.feed(piece) for piece in pieces]
    return join([*deltas, parser.finish()], parser.text)


def read_cut(text, *arguments, seed=None, **options):
    """Content, reasoning and calls of a text, cut at random places if there is a seed."""
    draw, pieces = random.Random(seed), []
    while text:
        size = len(text) if seed is None else draw.randint(1, 5)
        pieces.append(text[:size])
        text = text[size:]
    whole = read(pieces, *arguments, **options)
    return whole.content, whole.reasoning, [(call.name, call.arguments) for call in whole.tool_calls]
