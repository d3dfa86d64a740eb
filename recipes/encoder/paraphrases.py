"""Training data of the encoder: paraphrases, and sentences that differ in one fact.

A meaning is a kind of statement and a value for each of its slots. Meanings, not sentences, are divided into training
and held-out ones, so that an evaluated meaning was not seen in any phrasing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from random import Random
from typing import Literal, NamedTuple

from recipes.encoder.domains import KINDS
from recipes.encoder.words import POOLS

Split = Literal["train", "held_out"]

HELD_OUT_BYTES = 26
"""Number of values, out of 256, of a hash's first byte for which a meaning is held out: a tenth of all meanings."""

TRIES = 500
"""Largest number of tries to find a meaning's neighbour in the same split."""

_CHOICE = re.compile(r"\(([^()]*\|[^()]*)\)")
_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou](?!ni))")  # an apple, a university
_KINDS = tuple(KINDS)


class Meaning(NamedTuple):
    """Meaning of a sentence: its kind, and the index of each slot's value in its pool."""

    kind: str
    values: tuple[int, ...]

    @property
    def split(self) -> Split:
        """Split of the meaning, from a hash of it, which is the same on every machine."""
        text = f"{self.kind}:{','.join(map(str, self.values))}"
        return "held_out" if hashlib.sha256(text.encode()).digest()[0] < HELD_OUT_BYTES else "train"


class Pair(NamedTuple):
    """Two phrasings of one meaning."""

    first: str
    second: str


def draw(rng: Random, split: Split) -> Meaning:
    """Random meaning of the split."""
    while True:
        kind = rng.choice(_KINDS)
        pools = list(KINDS[kind].slots.values())
        # Slots of one pool take different values: nobody gives themselves a present.
        fresh = {pool: iter(rng.sample(range(len(POOLS[pool])), pools.count(pool))) for pool in dict.fromkeys(pools)}
        meaning = Meaning(kind, tuple(next(fresh[pool]) for pool in pools))
        if meaning.split == split:
            return meaning


def vary(rng: Random, meaning: Meaning) -> Meaning:
    """Meaning of the same split that differs in one fact: another value, or two exchanged values.

    The result is `meaning` itself if none was found: some held-out meanings have no neighbour.
    """
    pools = list(KINDS[meaning.kind].slots.values())
    for _ in range(TRIES):
        values = list(meaning.values)
        slot = rng.randrange(len(values))
        twins = [i for i, pool in enumerate(pools) if pool == pools[slot] and i != slot]
        if twins and rng.random() < 0.5:
            values[slot], values[twins[0]] = values[twins[0]], values[slot]
        else:
            taken = {values[slot], *(values[i] for i in twins)}
            values[slot] = rng.choice([i for i in range(len(POOLS[pools[slot]])) if i not in taken])
        varied = Meaning(meaning.kind, tuple(values))
        if varied.split == meaning.split:
            return varied
    return meaning


def phrase(rng: Random, meaning: Meaning, *, pattern: str) -> str:
    """Sentence of a meaning by a pattern, with random choices between equivalent words."""
    kind = KINDS[meaning.kind]
    values = {slot: POOLS[pool][i] for (slot, pool), i in zip(kind.slots.items(), meaning.values, strict=True)}
    chosen = _CHOICE.sub(lambda choice: rng.choice(choice[1].split("|")), pattern)
    text = _SLOT.sub(lambda slot: rng.choice(values[slot[1]]), chosen)
    text = _ARTICLE.sub(r"\1n ", text).replace("s's ", "s' ")
    return text[0].upper() + text[1:]


def paraphrase(rng: Random, meaning: Meaning, *, unseen_pattern: bool = False) -> Pair:
    """Two phrasings by different patterns. The second has the held-out pattern if `unseen_pattern`."""
    kind = KINDS[meaning.kind]
    first, second = rng.sample(kind.patterns, 2)
    return Pair(
        phrase(rng, meaning, pattern=first), phrase(rng, meaning, pattern=kind.unseen if unseen_pattern else second)
    )


def pairs(
    seed: int | str, *, split: Split = "train", near: float = 0.5, unseen_patterns: bool = False
) -> Iterator[tuple[Meaning, Pair]]:
    """Endless pairs of a seed, all of different meanings. Equal seeds give equal pairs on every machine.

    `near` is the share of near misses: pairs that differ from the previous pair in one fact only.
    """
    rng = Random(f"verax encoder {split} {seed}")
    seen: set[Meaning] = set()
    last: Meaning | None = None
    while True:
        meaning = vary(rng, last) if last is not None and rng.random() < near else draw(rng, split)
        if meaning in seen:
            last = None
            continue
        seen.add(meaning)
        yield meaning, paraphrase(rng, meaning, unseen_pattern=unseen_patterns)
        last = meaning
