"""Options of speculative decoding, by vLLM's names (`SpeculativeConfig` there)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from verax.errors import InvalidParameterError

__all__ = ["METHODS", "SpeculativeConfig"]

METHODS = ("ngram", "draft_model")

LOOKUP = 5
"""Tokens that `"ngram"` looks up if neither bound is given; vLLM's default."""

MOST_DRAFTS = 32
"""Most drafts of a sequence in a step: longer ones hardly ever hold."""

_FORM = '{"method": "ngram", "num_speculative_tokens": 4} or {"method": "draft_model", "model": ..., ...}'


@dataclass(frozen=True)
class SpeculativeConfig:
    """Options of speculative decoding.

    Attributes:
        method: `"ngram"` (prompt lookup) or `"draft_model"`. If None: `"draft_model"` where `model` is given.
        model: the draft model: a folder, a GGUF file, a hub id.
        num_speculative_tokens: most drafts of a sequence in a step, 1 to 32.
        prompt_lookup_max: `"ngram"`: most tokens at the end of the text that are looked up in it.
        prompt_lookup_min: `"ngram"`: fewest. If one bound is left out it is the other; if both are, they are 5.

    Raises:
        InvalidParameterError: for an unknown method or a number out of range, with the field's name.
    """

    num_speculative_tokens: int
    method: str | None = None
    model: str | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        self._check_method()
        lowest, highest = self.prompt_lookup_min, self.prompt_lookup_max
        for name, value, most in (
            ("num_speculative_tokens", self.num_speculative_tokens, MOST_DRAFTS),
            ("prompt_lookup_min", lowest, None),
            ("prompt_lookup_max", highest, None),
        ):
            if value is None and name != "num_speculative_tokens":
                continue
            if not _is_whole(value, most):
                bounds = "of at least 1" if most is None else f"from 1 to {most}"
                raise _wrong(f"{name}: expected a whole number {bounds}, got {value!r}")
        if self.method != "ngram":
            if lowest is not None or highest is not None:
                raise _wrong('prompt_lookup_min and prompt_lookup_max belong to the method "ngram"')
            return
        low = lowest or highest or LOOKUP
        high = highest or low
        if low > high:
            raise _wrong(f"prompt_lookup_min: {low} is more than prompt_lookup_max ({high})")
        object.__setattr__(self, "prompt_lookup_min", low)
        object.__setattr__(self, "prompt_lookup_max", high)

    def _check_method(self) -> None:
        if self.model is not None and not isinstance(self.model, str):
            raise _wrong(f"model: expected a folder, a GGUF file or a hub id, got {self.model!r}")
        method = self.method or ("draft_model" if self.model is not None else None)
        if method not in METHODS:
            given = "none" if method is None else repr(method)
            raise _wrong(f"method: expected one of {', '.join(METHODS)}, got {given}")
        if method == "draft_model" and self.model is None:
            raise _wrong('model: the method "draft_model" needs one')
        if method == "ngram" and self.model is not None:
            raise _wrong('model: the method "ngram" has none')
        object.__setattr__(self, "method", method)

    @classmethod
    def from_value(cls, value: SpeculativeConfig | Mapping[str, Any] | str) -> SpeculativeConfig:
        """The record itself, a dictionary of its fields, or JSON text of one.

        Raises:
            InvalidParameterError: if it is none of these, or a field is unknown, missing or wrong.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise _wrong(f"expected JSON such as {_FORM}: {error}") from error
        if not isinstance(value, Mapping):
            raise _wrong(f"expected {_FORM}, got {value!r}")
        known = [field.name for field in fields(cls)]
        if unknown := sorted(str(name) for name in value if name not in known):
            raise _wrong(f"{', '.join(unknown)}: no such field; the fields are {', '.join(known)}")
        if "num_speculative_tokens" not in value:
            raise _wrong("num_speculative_tokens: how many tokens to draft in a step is not given")
        given = dict(value)
        if isinstance(given.get("model"), Path):
            given["model"] = str(given["model"])
        return cls(**given)


def _is_whole(value: object, most: int | None) -> bool:
    """True for a whole number from 1 to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= (value if most is None else most)


def _wrong(message: str) -> InvalidParameterError:
    return InvalidParameterError(f"speculative_config: {message}")
