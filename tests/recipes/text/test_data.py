"""The training text: deterministic, true, consistent, and without what it holds out."""

import re
from itertools import islice
from random import Random

import pytest

from recipes.text.arithmetic import is_held_out
from recipes.text.data import END_OF_TEXT, documents
from recipes.text.stories import story, story_is_held_out
from recipes.text.words import BOYS, GIRLS, STORY_ANIMALS, is_girl

_COUNT = 20_000

_SUM = (r"(\d+) ?\+ ?(\d+)", r"(\d+) plus (\d+)", r"(?:[Aa]dd|[Ss]um of) (\d+) and (\d+)")
_WORD_PROBLEM = r"has (\d+) \w+\. (?:She|He) \w+ (\d+) more"
_DIFFERENCE = r"(\d+) ?(?:-|minus) ?(\d+)"
_OTHER = r"(\d+) (?:\*|times|divided by) (\d+)"
_COMPARISON = (r"(\d+) or (\d+)\?", r"(\d+) is (?:larger|smaller) than (\d+)")


@pytest.fixture(scope="module")
def train():
    return list(islice(documents(3), _COUNT))


@pytest.fixture(scope="module")
def held_out():
    return list(islice(documents(3, split="held_out"), _COUNT))


def _pairs(text, *patterns):
    return [(int(a), int(b)) for pattern in patterns for a, b in re.findall(pattern, text)]


def test_every_kind_occurs_and_every_document_ends_once(train):
    assert {document.kind for document in train} == {"story", "arithmetic", "facts", "json", "chat"}
    assert all(document.text.count(END_OF_TEXT) == 1 and document.text.endswith(END_OF_TEXT) for document in train)


def test_no_held_out_pair_occurs_in_training_in_any_phrasing(train):
    for document in train:
        pairs = _pairs(document.text, *_SUM, _WORD_PROBLEM, _DIFFERENCE, _OTHER, *_COMPARISON)
        assert not [pair for pair in pairs if is_held_out(*pair)], document.text


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_every_arithmetic_statement_is_true(split, train, held_out):
    checked = 0
    for document in train if split == "train" else held_out:
        text = document.text
        for sign, a, b, c in (
            *((1, *found) for found in re.findall(r"(\d+) \+ (\d+) = (\d+)", text)),
            *((1, *found) for found in re.findall(r"(\d+) plus (\d+) (?:is|equals) (\d+)", text)),
            *((1, *found) for found in re.findall(r"(?:sum of|add) (\d+) and (\d+)(?: is|, you get) (\d+)", text)),
            *((1, *found) for found in re.findall(r"What is (\d+) \+ (\d+)\?\nA: (\d+)\b(?! \+)", text)),
            *((-1, *found) for found in re.findall(r"(\d+) - (\d+) = (\d+)", text)),
        ):
            assert int(a) + sign * int(b) == int(c), text
            checked += 1
        for a, word, b in re.findall(r"(\d+) is (larger|smaller) than (\d+)", text):
            assert (int(a) > int(b)) == (word == "larger"), text
    assert checked > _COUNT / 4


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_story_keeps_its_names_animals_things_and_pronouns(split):
    rng = Random(5)
    people = {*GIRLS, *BOYS}
    for _ in range(4000):
        drawn = story(rng, split)
        words = set(re.findall(r"\w+", drawn.text))
        assert story_is_held_out(drawn.name, drawn.kind, drawn.thing) is (split == "held_out")
        assert {drawn.name, drawn.friend, drawn.kind, drawn.friend_kind} <= words
        assert drawn.thing in drawn.text
        assert "{" not in drawn.text
        assert words & people <= {drawn.name, drawn.friend}
        assert words & set(STORY_ANIMALS) <= {drawn.kind, drawn.friend_kind}
        if is_girl(drawn.name) and is_girl(drawn.friend):
            assert not {"he", "He", "him", "his", "His"} & words, drawn.text
        if not is_girl(drawn.name) and not is_girl(drawn.friend):
            assert not {"she", "She", "her", "Her"} & words, drawn.text
