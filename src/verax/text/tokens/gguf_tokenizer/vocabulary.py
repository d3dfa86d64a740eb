"""Tokens of a GGUF file with their types, the numbers of llama.cpp's `llama_token_type`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tokenizers

__all__ = ["BYTE", "CONTROL", "NORMAL", "UNKNOWN", "USER_DEFINED", "Vocabulary"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


class Vocabulary(NamedTuple):
    """Tokens in the order of their ids, and the type of each."""

    tokens: Sequence[str]
    types: Sequence[int]

    def numbers(self) -> dict[str, int]:
        """Ids by token."""
        return {token: number for number, token in enumerate(self.tokens)}

    def controls(self) -> Iterator[tuple[int, str]]:
        """Ids and texts of control tokens, such as the end of a turn."""
        pairs = enumerate(zip(self.tokens, self.types, strict=True))
        return ((number, token) for number, (token, kind) in pairs if kind == CONTROL)

    def added_tokens(self) -> list[tokenizers.AddedToken]:
        """Tokens that are found in a text before anything else: control tokens, and those defined by users."""
        return [
            tokenizers.AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
