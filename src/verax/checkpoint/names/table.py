"""One model, two published layouts: a table between the original's parameter names and diffusers'."""

from __future__ import annotations

import re
from collections.abc import Sequence

from verax.errors import CheckpointError

__all__ = ["NameTable"]

Rule = tuple[str, str | tuple[str, ...]]


class NameTable:
    """Translates parameter names both ways.

    A rule is a pair of dotted beginnings, the original's and diffusers': `("blocks.{i}.ffn.0",
    "blocks.{i}.ffn.net.0.proj")`. `{i}` stands for one whole number, the same on both sides; what follows the beginning
    (`.weight`, `.bias`, or nothing) is kept. The first rule whose beginning fits a name at a dot is the only one
    applied. A tuple on diffusers' side names tensors whose rows, one below the other, are the original's one tensor.
    """

    def __init__(self, rules: Sequence[Rule]):
        self._rules = [(original, (other,) if isinstance(other, str) else other) for original, other in rules]
        self._original = [_compile(original) for original, _ in self._rules]
        self._diffusers = [[_compile(one) for one in others] for _, others in self._rules]

    def to_diffusers(self, name: str) -> tuple[str, ...]:
        """Diffusers' names of what the original calls `name`: one, or several whose rows together are it.

        Raises:
            CheckpointError: if no rule fits.
        """
        for pattern, (_, others) in zip(self._original, self._rules, strict=True):
            if found := pattern.fullmatch(name):
                return tuple(_fill(other, found) for other in others)
        raise CheckpointError(f"{name} is not a name of the original layout")

    def to_original(self, name: str) -> tuple[str, int]:
        """The original's name of what diffusers calls `name`, and which of its parts that is (0 if it is all of it).

        Raises:
            CheckpointError: if no rule fits.
        """
        for patterns, (original, _) in zip(self._diffusers, self._rules, strict=True):
            for part, pattern in enumerate(patterns):
                if found := pattern.fullmatch(name):
                    return _fill(original, found), part
        raise CheckpointError(f"{name} is not a name of diffusers' layout")


def _compile(beginning: str) -> re.Pattern[str]:
    pattern = re.sub(r"\\\{(\w)\\\}", r"(?P<\1>\\d+)", re.escape(beginning))
    return re.compile(rf"{pattern}(?P<rest>(\..*)?)")


def _fill(beginning: str, found: re.Match[str]) -> str:
    return beginning.format_map(found.groupdict()) + found["rest"]
