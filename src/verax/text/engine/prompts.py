"""Forms of a prompt: a text, token ids, or vLLM's dictionaries of either."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Mapping
from typing import Any

from verax.errors import InvalidParameterError

__all__ = ["Message", "Prompt", "batch_of", "content"]

Prompt = str | abc.Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's dictionaries: `{"prompt": text}` or `{"prompt_token_ids": ids}`."""

Message = Mapping[str, Any]
"""One turn of a conversation: `{"role": "user", "content": text}`, and what else the chat template reads."""


def batch_of(prompts: Prompt | abc.Sequence[Prompt]) -> list[str | abc.Sequence[int]]:
    """Texts and token ids of a batch. One text, one dictionary or one list of token ids is a batch of one.

    Raises:
        InvalidParameterError: for anything else.
    """
    if isinstance(prompts, (str, Mapping)):
        return [content(prompts)]
    if not isinstance(prompts, Iterable):
        raise InvalidParameterError(f"prompts: expected texts or lists of token ids, got {prompts!r}")
    items: list[Any] = list(prompts)
    if items and not isinstance(items[0], (str, Mapping)) and not hasattr(items[0], "__len__"):
        return [items]
    return [content(item) for item in items]


def content(prompt: Any) -> str | abc.Sequence[int]:
    """Text or token ids of one prompt; `prompt_token_ids` of a dictionary before its `prompt`.

    Raises:
        InvalidParameterError: for a dictionary that has neither.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    for key in ("prompt_token_ids", "prompt"):
        if prompt.get(key) is not None:
            return prompt[key]
    raise InvalidParameterError(f"prompts: expected prompt or prompt_token_ids in a dictionary, got {sorted(prompt)}")
