"""Messages of a conversation in the forms that chat templates take, so that each answer can come back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any


def with_instructions_in_text(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Messages for templates without a system: instructions, the first message, begin the text of the user's first."""
    instructions, *others = messages
    for i, message in enumerate(others):
        if message["role"] == "user":
            text = f"{instructions['content']}\n\n{message['content'] or ''}"
            return [*others[:i], {**message, "content": text}, *others[i + 1 :]]
    return [{**instructions, "role": "user"}, *others]


def with_functions_in_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Messages for templates that leave functions out: the instructions have them, and how to call them."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    # Short, since models without functions have short contexts.
    text = (
        f'Functions:\n{functions}\nTo call one, answer with this JSON alone: {{"name": "...", "parameters": {{...}}}}'
    )
    first, others = ("", messages)
    if messages[0]["role"] == "system":
        first, others = f"{messages[0]['content']}\n\n", messages[1:]
    return [{"role": "system", "content": first + text}, *others]


def with_results_in_text(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages for templates without results of calls: results in a row are one text of the user."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    names = {call.get("id"): call["function"]["name"] for call in calls}
    told: list[Mapping[str, Any]] = []
    for before, message in zip([{}, *messages], messages, strict=False):
        if message["role"] != "tool":
            told.append(message)
            continue
        name = names.get(message.get("tool_call_id"), message.get("name", "the function"))
        text = f"Result of {name}:\n{message['content'] or ''}"
        if before.get("role") == "tool":
            text = f"{told.pop()['content']}\n\n{text}"
        told.append({"role": "user", "content": text})
    return told


def joined_by_role(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages for templates in which user and assistant alternate.

    Messages of one role in a row become one, if they have nothing but text. Where coding agents send a message of the
    user right after the result of a call, an answer is put between the two.
    """
    joined: list[Mapping[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if last.keys() == message.keys() == {"role", "content"} and last["role"] == message["role"]:
            joined[-1] = {**last, "content": f"{last['content'] or ''}\n\n{message['content'] or ''}"}
            continue
        if last.get("role") == "tool" and message["role"] == "user":
            joined.append({"role": "assistant", "content": "Done."})
        joined.append(message)
    return joined


def with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of the assistant with its reasoning and its text as parts of its content, which may be empty."""
    thoughts, content = message.get("reasoning_content"), message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str | None):
        return message
    parts = [{"type": "thinking", "thinking": thoughts}] if thoughts else []
    if content is not None or not (parts or message.get("tool_calls")):
        parts.append({"type": "text", "text": content or ""})
    return {**message, "content": parts or None}


def with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with ids of nine letters and digits, as Mistral's templates want, in the place of others."""

    def short(given: Any) -> Any:
        fits = not isinstance(given, str) or (len(given) == 9 and given.isascii() and given.isalnum())
        return given if fits else hashlib.sha256(given.encode()).hexdigest()[:9]

    if message.get("tool_calls"):
        return {**message, "tool_calls": [{**call, "id": short(call.get("id"))} for call in message["tool_calls"]]}
    return {**message, "tool_call_id": short(message["tool_call_id"])} if "tool_call_id" in message else message


def calls_as_text(message: Mapping[str, Any], opening: str, closing: str, *, in_list: bool) -> Mapping[str, Any]:
    """A message whose calls are a part of its text, as JSON between tags, each by itself or all in a list.

    Without tags they are as a model without a syntax of its own writes them.
    """
    key = "arguments" if opening else "parameters"
    calls: list[str] = []
    for call in message.get("tool_calls") or ():
        given = call["function"].get("arguments") or {}
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        calls.append(f'{{"name": {json.dumps(call["function"]["name"])}, "{key}": {arguments}}}')
    if not calls:
        return message
    if in_list:
        text = f"{opening}[{', '.join(calls)}]{closing}"
    else:
        text = "\n".join(f"{opening}\n{call}\n{closing}" for call in calls) if opening else "; ".join(calls)
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    content = message.get("content") or ""
    return {**others, "content": f"{content}\n{text}" if content and not opening else content + text}


def one_call_each(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages of a conversation with one call each, which its result follows, for templates that take no more."""
    told: list[Mapping[str, Any]] = []
    for message in messages:
        calls, call_id = message.get("tool_calls") or (), message.get("tool_call_id")
        if len(calls) > 1:
            told.append({**message, "tool_calls": calls[:1]})
            told += [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[1:]]
        elif message["role"] == "tool" and call_id is not None:
            own = (i for i in reversed(range(len(told))) if _call_id(told[i]) == call_id)
            told.insert(next(own, len(told) - 1) + 1, message)
        else:
            told.append(message)
    return told


def _call_id(message: Mapping[str, Any]) -> Any:
    return message["tool_calls"][0].get("id") if message.get("tool_calls") else None
