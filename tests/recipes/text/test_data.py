"""The training text: true, without what it holds out; and its documents in rows."""

import re
from itertools import islice
from random import Random

import numpy as np
import pytest

from recipes.text.arithmetic import is_held_out
from recipes.text.data import documents
from recipes.text.recipe import pack, train_tokenizer
from recipes.text.stories import story, story_is_held_out

_COUNT = 20_000

_SUM = (r"(\d+) ?\+ ?(\d+)", r"(\d+) plus (\d+)", r"(?:[Aa]dd|[Ss]um of) (\d+) and (\d+)")
_WORD_PROBLEM = r"has (\d+) \w+\. (?:She|He) \w+ (\d+) more"
_DIFFERENCE = r"(\d+) ?(?:-|minus) ?(\d+)"
_OTHER = r"(\d+) (?:\*|times|divided by) (\d+)"
_COMPARISON = (r"(\d+) or (\d+)\?", r"(\d+) is (?:larger|smaller) than (\d+)")


def _pairs(text, *patterns):
    return [(int(a), int(b)) for pattern in patterns for a, b in re.findall(pattern, text)]


def test_no_held_out_pair_occurs_in_training_in_any_phrasing():
    for document in islice(documents(3), _COUNT):
        pairs = _pairs(document.text, *_SUM, _WORD_PROBLEM, _DIFFERENCE, _OTHER, *_COMPARISON)
        assert not [pair for pair in pairs if is_held_out(*pair)], document.text


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_stories_are_held_out_by_what_they_are_about(split):
    rng = Random(5)
    stories = [story(rng, split) for _ in range(1000)]
    assert {story_is_held_out(drawn.name, drawn.kind, drawn.thing) for drawn in stories} == {split == "held_out"}


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_every_arithmetic_statement_is_true(split):
    checked = 0
    for document in islice(documents(3, split=split), _COUNT):
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


@pytest.fixture(scope="module")
def tokenizer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.text.recipe.TRAINING_DOCUMENTS", 1000)
        return train_tokenizer()


@pytest.mark.parametrize("length", [1, 7, 64, 513])
def test_packing_loses_no_token(tokenizer, length):
    texts = list(islice(documents(9), 150))
    rows = list(pack(texts, tokenizer, length))
    expected = [token for document in texts for token in tokenizer.encode(document.text, add_special_tokens=False).ids]
    assert [int(t) for row in rows for t in row.tokens[row.segments > 0]] == expected
    assert all((row.segments > 0).all() for row in rows[:-1])


def test_segments_and_positions_restart_at_each_document(tokenizer):
    texts = list(islice(documents(9), 50))
    for row in pack(texts, tokenizer, 128):
        begins = np.flatnonzero(row.positions[row.segments > 0] == 0)
        ends = np.flatnonzero(row.tokens[row.segments > 0] == 0)
        assert begins[0] == 0
        assert set(begins[1:] - 1) <= set(ends)
        assert np.array_equal(np.unique(row.segments[row.segments > 0]), np.arange(1, len(begins) + 1))
