"""Renaming of a model's parameters: between the original's names and another layout's or implementation's."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["Renaming"]

Rule = tuple[str, str | tuple[str, ...]]


class Renaming:
    """A table of rules that rename parameters in both directions.

    A rule is a pair of dotted beginnings, the original's and the other's: `("blocks.{i}.ffn.0",
    "blocks.{i}.ffn.net.0.proj")`. `{i}` stands for one whole number, the same on both sides. What follows the beginning
    (`.weight`, `.bias`, or nothing) is kept. The first rule whose beginning fits a name at a dot is applied, and no
    other. A tuple on the other side names tensors whose rows, one below the other, are the original's one tensor.
    """

    def __init__(self, rules: Sequence[Rule]):
        self._rules = [(original, (other,) if isinstance(other, str) else other) for original, other in rules]
        self._originals = [_compile(original) for original, _ in self._rules]
        self._others = [[_compile(one) for one in others] for _, others in self._rules]

    def forward(self, name: str) -> tuple[str, ...] | None:
        """The other's names of the original's `name`, several if their rows together are it; None without a rule."""
        for pattern, (_, others) in zip(self._originals, self._rules, strict=True):
            if found := pattern.fullmatch(name):
                return tuple(_fill(other, found) for other in others)
        return None

    def backward(self, name: str) -> tuple[str, int] | None:
        """The original's name of the other's `name`, and its number among the original's parts; None without a rule."""
        for patterns, (original, _) in zip(self._others, self._rules, strict=True):
            for part, pattern in enumerate(patterns):
                if found := pattern.fullmatch(name):
                    return _fill(original, found), part
        return None


def _compile(beginning: str) -> re.Pattern[str]:
    pattern = re.sub(r"\\\{(\w)\\\}", r"(?P<\1>\\d+)", re.escape(beginning))
    return re.compile(rf"{pattern}(?P<rest>(\..*)?)")


def _fill(beginning: str, found: re.Match[str]) -> str:
    return beginning.format_map(found.groupdict()) + found["rest"]
