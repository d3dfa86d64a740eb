"""Two-digit arithmetic for the built-in model. A tenth of the operand pairs is held out of training.

A pair has no order. A held-out pair is held out of every phrasing: additions, subtractions (also those whose reversal
is a held-out addition), comparisons and word problems.
"""

from collections.abc import Iterator
from hashlib import blake2b
from random import Random
from typing import Literal, NamedTuple

from recipes.text.words import draw_name, is_girl, words

Split = Literal["train", "held_out"]

LARGEST_OPERAND = 99
_HELD_OUT_PERCENT = 10


class Exchange(NamedTuple):
    """Question and answer."""

    question: str
    answer: str


def held_out_hash(key: str) -> bool:
    """True if a key falls into the held-out tenth. The result is the same on every machine and Python."""
    return int.from_bytes(blake2b(key.encode(), digest_size=4).digest(), "big") % 100 < _HELD_OUT_PERCENT


_OPERANDS = range(LARGEST_OPERAND + 1)
_HELD_OUT = frozenset(
    pair for a in _OPERANDS for b in range(a + 1) if held_out_hash(f"{b}+{a}") for pair in ((a, b), (b, a))
)


def is_held_out(a: int, b: int) -> bool:
    """True if training never combines these two operands, in either order."""
    return (a, b) in _HELD_OUT


def _subtraction_is_held_out(a: int, b: int) -> bool:
    return is_held_out(a, b) or is_held_out(b, a - b)


PAIRS: dict[Split, tuple[tuple[int, int], ...]] = {
    "train": tuple((a, b) for a in _OPERANDS for b in _OPERANDS if not is_held_out(a, b)),
    "held_out": tuple((a, b) for a in _OPERANDS for b in _OPERANDS if is_held_out(a, b)),
}
"""Ordered pairs of operands of each split."""

_SMALL_BELOW = 20
_SMALL_SHARE = 0.25
"""Share of draws with small numbers. People try such sums first, and they are few among all pairs."""


class _Operands:
    """Pairs of operands to draw from, with small ones over-represented."""

    def __init__(self, pairs: tuple[tuple[int, int], ...]):
        self._pairs = pairs
        self._small = tuple(pair for pair in pairs if max(pair) < _SMALL_BELOW)

    def draw(self, rng: Random) -> tuple[int, int]:
        return rng.choice(self._small if rng.random() < _SMALL_SHARE else self._pairs)


_SUMS: dict[Split, _Operands] = {split: _Operands(pairs) for split, pairs in PAIRS.items()}
_DIFFERENCES: dict[Split, _Operands] = {
    "train": _Operands(tuple((a, b) for a in _OPERANDS for b in range(a + 1) if not _subtraction_is_held_out(a, b))),
    "held_out": _Operands(tuple((a, b) for a in _OPERANDS for b in range(a + 1) if is_held_out(a, b))),
}

_ADD_QUESTIONS = (
    "What is {a} + {b}?",
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b} = ?",
    "{a} + {b}",
    "{a}+{b}",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "Please add {a} and {b}.",
    "Can you add {a} and {b}?",
    "What is the sum of {a} and {b}?",
    "Calculate {a} + {b}.",
    "Do you know what {a} + {b} is?",
    "Tell me the sum of {a} and {b}.",
)
_ADD_STATEMENTS = (
    "{a} + {b} = {c}",
    "{a} + {b} = {c}",
    "{a} + {b} = {c}",
    "{a} + {b} = {c}",
    "{a} plus {b} is {c}.",
    "{a} plus {b} equals {c}.",
    "The sum of {a} and {b} is {c}.",
    "If you add {a} and {b}, you get {c}.",
    "Q: What is {a} + {b}?\nA: {c}",
    "What is {a} plus {b}? {a} + {b} = {c}.",
)
_SUBTRACT_QUESTIONS = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "{a} - {b} = ?",
    "{a} - {b}",
    "How much is {a} - {b}?",
    "Calculate {a} - {b}.",
)
_COUNTED = words("shells apples stones coins stickers marbles buttons nuts berries stamps cards eggs")
_MORE = ("finds {b} more", "gets {b} more", "buys {b} more")


def addition(rng: Random, split: Split) -> Exchange:
    """Addition in one of many phrasings, with the equation as the answer."""
    a, b = _SUMS[split].draw(rng)
    return Exchange(rng.choice(_ADD_QUESTIONS).format(a=a, b=b), f"{a} + {b} = {a + b}.")


def subtraction(rng: Random, split: Split) -> Exchange:
    """Subtraction with a result that is not negative."""
    a, b = _DIFFERENCES[split].draw(rng)
    return Exchange(rng.choice(_SUBTRACT_QUESTIONS).format(a=a, b=b), f"{a} - {b} = {a - b}.")


def comparison(rng: Random, split: Split) -> Exchange:
    """Question for the larger, or the smaller, of two different numbers."""
    a, b = _SUMS[split].draw(rng)
    while a == b:
        a, b = _SUMS[split].draw(rng)
    word, chosen, other = rng.choice((("larger", max(a, b), min(a, b)), ("smaller", min(a, b), max(a, b))))
    question = rng.choice(("Which is {word}, {a} or {b}?", "Which number is {word}: {a} or {b}?"))
    return Exchange(question.format(word=word, a=a, b=b), f"{chosen} is {word} than {other}.")


def word_problem(rng: Random, split: Split) -> Exchange:
    """Addition as a story of one sentence."""
    a, b = _SUMS[split].draw(rng)
    while min(a, b) < 2:
        a, b = _SUMS[split].draw(rng)
    name, counted = draw_name(rng), rng.choice(_COUNTED)
    pronoun = "She" if is_girl(name) else "He"
    more = rng.choice(_MORE).format(b=b)
    question = f"{name} has {a} {counted}. {pronoun} {more}. How many {counted} does {name} have now?"
    return Exchange(question, f"{a} + {b} = {a + b}. {name} has {a + b} {counted}.")


def arithmetic(rng: Random, split: Split) -> Exchange:
    """Question of any kind; four of five are plain additions."""
    kind = rng.random()
    if kind < 0.80:
        return addition(rng, split)
    if kind < 0.88:
        return subtraction(rng, split)
    if kind < 0.94:
        return word_problem(rng, split)
    return comparison(rng, split)


def arithmetic_text(rng: Random, split: Split) -> str:
    """Plain document of one to eight statements, one per line."""
    lines = []
    for _ in range(rng.choice((1, 1, 2, 3, 4, 6, 8))):
        kind = rng.random()
        if kind < 0.86:
            a, b = _SUMS[split].draw(rng)
            lines.append(rng.choice(_ADD_STATEMENTS).format(a=a, b=b, c=a + b))
        elif kind < 0.93:
            a, b = _DIFFERENCES[split].draw(rng)
            lines.append(f"{a} - {b} = {a - b}")
        else:
            question, answer = arithmetic(rng, split)
            lines.append(f"Q: {question}\nA: {answer}")
    return "\n".join(lines)


def addition_exam(split: Split = "held_out", *, chat: bool = False) -> Iterator[Exchange]:
    """Additions of a split, each once, for evaluation.

    Plain: the prompt `47 + 38 =` and its continuation ` 85`. Chat: `What is 47 + 38?` and the whole answer.
    """
    for a, b in PAIRS[split]:
        if chat:
            yield Exchange(f"What is {a} + {b}?", f"{a} + {b} = {a + b}.")
        else:
            yield Exchange(f"{a} + {b} =", f" {a + b}")


def leading_number(text: str) -> str:
    """Digits at the beginning of a text, after spaces: the answer in a completion of `47 + 38 =`."""
    text = text.strip()
    return text[: next((i for i, letter in enumerate(text) if not letter.isdigit()), len(text))]
