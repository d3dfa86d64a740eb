"""The encoder's made-up sentences: every fact in every phrasing, one-fact near misses, a split by meaning."""

from itertools import islice
from random import Random

from recipes.encoder.domains import KINDS
from recipes.encoder.paraphrases import Meaning, draw, pairs, phrase, vary


def test_meanings_are_held_out_by_what_they_say():
    for split in ("train", "held_out"):
        assert {meaning.split for meaning, _ in islice(pairs(0, split=split), 300)} == {split}
    assert Meaning("travel", (0, 0, 1, 0, 0)).split == Meaning("travel", (0, 0, 1, 0, 0)).split
    rng = Random(0)
    kinds = [Meaning("travel", tuple(rng.randrange(9) for _ in range(5))).split for _ in range(3000)]
    assert 0.07 < kinds.count("held_out") / 3000 < 0.13


def test_a_near_miss_differs_in_one_fact_or_in_who_does_what():
    rng = Random(0)
    for split in ("train", "held_out"):
        for _ in range(300):
            meaning = draw(rng, split)
            other = vary(rng, meaning)
            assert other.kind == meaning.kind
            assert other.split == split
            changed = [i for i, (a, b) in enumerate(zip(meaning.values, other.values, strict=True)) if a != b]
            assert len(changed) == 1 or sorted(meaning.values[i] for i in changed) == sorted(
                other.values[i] for i in changed
            )
            pools = list(KINDS[meaning.kind].slots.values())
            for i, pool in enumerate(pools):  # values of one pool stay different
                assert all(other.values[i] != other.values[j] for j in range(i) if pools[j] == pool)


def test_unseen_patterns_are_in_the_second_phrasing_only():
    meaning = Meaning("distance", (0, 1, 2, 3, 4))
    assert phrase(Random(0), meaning, pattern=KINDS["distance"].unseen).startswith("The map printed in ")
    for unseen in (False, True):
        found = [pair for m, pair in islice(pairs(0, unseen_patterns=unseen), 400) if m.kind == "distance"]
        assert found
        assert {pair.second.startswith("The map printed in ") for pair in found} == {unseen}
        assert not any(pair.first.startswith("The map printed in ") for pair in found)
