"""Limits of the texts that an encoder or a reranker reads, and the errors of those beyond them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from verax.errors import InvalidParameterError
from verax.serve.http.errors import ApiError

__all__ = ["check_characters", "check_limit", "most_characters", "renamed", "too_long"]

CHARACTERS = 64
"""Characters of a text that are read for each token of the model: tokenising megabytes takes many seconds."""


def most_characters(max_length: int) -> int:
    """Characters that are tokenised of a text for a model that reads `max_length` tokens."""
    return CHARACTERS * max_length


def check_characters(field: str, texts: Iterable[str], max_length: int) -> None:
    """Check that texts are short enough to be tokenised whole.

    Raises:
        ApiError: 400, with the field's name.
    """
    longest = max(map(len, texts), default=0)
    if longest > most_characters(max_length):
        raise too_long(field, f"{longest} characters", -(-longest // CHARACTERS), max_length)


def check_limit(name: str, value: int | None, most: int) -> None:
    """Check a number of tokens that a request asks for: 1 to `most`, or -1 for as many as the model reads.

    Raises:
        ApiError: 400, with the field's name.
    """
    if value is not None and not 1 <= value <= most and value != -1:
        raise ApiError(400, f"{name}: expected 1 to {most}, got {value}", param=name)


def too_long(field: str, what: str, size: int, limit: int) -> ApiError:
    """Error of a text that is longer than the model reads.

    Args:
        field: the field of the request.
        what: the text's size, in words.
        size: the same in tokens.
        limit: tokens that the model reads.
    """
    return ApiError(
        400,
        f"{field}: {what} are more than the {limit} tokens that the model reads; see truncate_prompt_tokens",
        **{"param": field, "code": "context_length_exceeded", "n_prompt_tokens": size, "n_ctx": limit},
    )


def renamed(error: InvalidParameterError, names: Mapping[str, str]) -> ApiError:
    """Error of an argument as that of the field that it came from."""
    name, _, message = str(error).partition(": ")
    return ApiError(400, f"{names.get(name, name)}: {message}", param=names.get(name, name))
