"""Log-probabilities in OpenAI's forms, with the bytes of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verax.text.engine.outputs import Logprob
from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["CompletionLogprobs", "chat_logprobs", "prompt_logprobs", "token_bytes"]

_SPACE = "\u2581"
"""Character that stands for a space in vocabularies of sentencepiece."""

_UNDECODABLE = "\ufffd"


def _byte_characters() -> dict[str, int]:
    """Byte of each character in GPT-2's byte-level vocabularies: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()


def token_bytes(tokenizer: Tokenizer, token_id: int, text: str) -> list[int]:
    """Bytes of a token, exact for those that are a part of a character.

    Args:
        tokenizer: of the vocabulary.
        token_id: the token.
        text: the token by itself, decoded.
    """
    if token_id in tokenizer.byte_tokens:
        return [tokenizer.byte_tokens[token_id]]
    spelled = tokenizer.token(token_id) or ""
    if _UNDECODABLE in text and all(char in _BYTES for char in spelled):
        return [_BYTES[char] for char in spelled]
    if spelled.startswith(_SPACE) and not text.startswith(" "):
        text = " " + text  # a decoder strips the first space of a text
    return list(text.encode("utf-8", "replace"))


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]], num_top: int
) -> list[dict[str, Any]]:
    """Entries of `logprobs.content`: each token with its bytes and the likeliest ones at its place."""

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        text = logprob.decoded_token or ""
        return {"token": text, "logprob": logprob.logprob, "bytes": token_bytes(tokenizer, token, text)}

    return [
        {
            **entry(token, found[token]),
            "top_logprobs": [entry(other, logprob) for other, logprob in _best(found, num_top)],
        }
        for token, found in zip(token_ids, entries, strict=True)
    ]


def prompt_logprobs(
    entries: Sequence[Mapping[int, Logprob] | None] | None,
) -> list[dict[str, dict[str, Any]] | None] | None:
    """Log-probabilities of a prompt's tokens in vLLM's form, by token id."""
    if entries is None:
        return None
    return [
        None
        if found is None
        else {
            str(token): {"logprob": item.logprob, "rank": item.rank, "decoded_token": item.decoded_token}
            for token, item in found.items()
        }
        for found in entries
    ]


@dataclass
class CompletionLogprobs:
    """Log-probabilities of a completion in OpenAI's old form: four lists, and where each token begins in the text."""

    num_top: int
    offset: int = 0
    """Number of the text's characters before the next token."""
    _lists: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]]) -> None:
        """Add tokens of an answer, or of a prompt behind its first."""
        for token, found in zip(token_ids, entries, strict=True):
            self._add(found[token].decoded_token or "", found[token].logprob, found)

    def add_first(self, text: str) -> None:
        """Add the first token of a prompt, which has no context that would give it a probability."""
        self._add(text, None, None)

    def take(self) -> dict[str, list[Any]]:
        """The lists since the last call."""
        taken, self._lists = self._lists, {}
        return {name: taken.get(name, []) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}

    def _add(self, text: str, logprob: float | None, found: Mapping[int, Logprob] | None) -> None:
        best = None
        if found is not None:
            best = {item.decoded_token or "": item.logprob for _, item in _best(found, self.num_top)}
        values = {"tokens": text, "token_logprobs": logprob, "top_logprobs": best, "text_offset": self.offset}
        for name, value in values.items():
            self._lists.setdefault(name, []).append(value)
        self.offset += len(text)


def _best(found: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens of a place, in their order."""
    ranked = [(token, item) for token, item in found.items() if item.rank is not None and item.rank <= num_top]
    return sorted(ranked, key=lambda pair: pair[1].rank or 0)
