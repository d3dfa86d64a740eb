"""Prompt lookup beside its definition."""

import numpy as np
import pytest

from verax.text.features.drafters import NgramIndex


def by_definition(text, smallest, largest, length):
    """Continuation behind the latest of the longest matches, by trying all of them."""
    for size in range(largest, smallest - 1, -1):
        for at in range(len(text) - 1, size - 1, -1):
            if len(text) > size and text[at - size : at] == text[len(text) - size :]:
                extended = list(text)
                for i in range(length):
                    extended.append(extended[at + i])
                return extended[len(text) :]
    return []


@pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_the_longest_match_is_continued_from_its_latest_place(smallest, largest):
    rng = np.random.default_rng(0)
    for _ in range(20):
        text = rng.integers(0, rng.integers(2, 5), 60).tolist()
        index = NgramIndex(smallest, largest)
        for end in range(1, len(text) + 1, int(rng.integers(1, 4))):
            expected = by_definition(text[:end], smallest, largest, 6)
            assert index.continuation(text[:end], 6) == expected


def test_a_text_without_a_repetition_has_none():
    assert NgramIndex(1, 3).continuation(list(range(50)), 4) == []


def test_a_period_is_continued_past_the_end():
    assert NgramIndex(2, 3).continuation([1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
