"""Texts and vectors compared: against scipy and what was planted."""

import numpy as np
import pytest
from scipy import special, stats

from verax.compare.outputs import candidates, compare_logits, compare_vectors, first_difference
from verax.errors import InvalidParameterError
from verax.text.engine.outputs import Logprob


def logits(rows=6, vocabulary=50, seed=0):
    return np.random.default_rng(seed).normal(0, 3, (rows, vocabulary)).astype(np.float32)


def test_logits_errors_and_divergence_match_scipy():
    a, b = logits(), logits() + 0.01 * logits(seed=1)
    result = compare_logits(a, b, tokens := [3, 1, 4, 1, 5, 9])
    p, q = special.softmax(a.astype(float), -1), special.softmax(b.astype(float), -1)
    kl = [stats.entropy(x, y) for x, y in zip(p, q, strict=True)]
    distance = [abs(np.log(x[t] / y[t])) for x, y, t in zip(p, q, tokens, strict=True)]
    np.testing.assert_allclose((result.mean_kl, result.max_kl), (np.mean(kl), np.max(kl)), rtol=1e-9)
    np.testing.assert_allclose(
        (result.mean_logprob_distance, result.max_logprob_distance), (np.mean(distance), np.max(distance)), rtol=1e-9
    )
    assert result.max_error == pytest.approx(np.abs(a - b.astype(float)).max())
    assert result.relative_error == pytest.approx(np.abs(a - b.astype(float)).max() / np.abs(a).mean())
    assert (result.same_best, result.difference) == (1.0, None)


def test_the_first_other_choice_is_reported_with_both_sides_candidates():
    a = logits()
    b = a.copy()
    best, second_best = np.argsort(-a[4])[:2]
    b[4, second_best] = a[4, best] + 0.1
    result = compare_logits(a, b, top=3)
    assert result.same_best == pytest.approx(5 / 6)
    assert (result.difference.position, result.difference.tokens) == (4, (best, second_best))
    assert [list(side) for side in result.difference.candidates] == [
        list(np.argsort(-a[4])[:3]),
        list(np.argsort(-b[4])[:3]),
    ]
    assert result.difference.close
    assert result.lines()[-1].startswith(f"first other token, at position 4: {best} (")
    b[4, np.argmin(a[4])] = 99  # what the first side holds for impossible
    assert not compare_logits(a, b, top=3).difference.close
    assert compare_logits(a, b, top=3).to_dict()["difference"]["close"] is False


def test_texts_part_where_the_first_token_differs():
    ours, theirs = candidates(logits(4), 5), candidates(logits(4) + 0.01, 5)
    result = first_difference([1, 2, 3, 4], [1, 2, 7, 4], ours, theirs)
    assert (result.position, result.tokens) == (2, (3, 7))
    assert result.candidates == (ours[2], theirs[2])
    assert first_difference([1, 2, 3], [1, 2, 3]) is None


def test_a_text_that_ends_early_differs_there():
    result = first_difference([1, 2], [1, 2, 3])
    assert (result.position, result.tokens, result.close) == (2, (None, 3), False)


def test_candidates_can_come_from_the_text_engine():
    engine = [{7: Logprob(-0.1, 1, "a"), 3: Logprob(-2.5, 2, "b")}]
    result = first_difference([3], [7], candidates(logits(1, 8), 8), engine)
    assert result.candidates[1] == {7: -0.1, 3: -2.5}
    assert result.close


def test_vectors_are_compared_by_direction_and_by_ranking():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(12, 8)).astype(np.float32)
    turn = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    turned = compare_vectors(a, a @ turn)  # all neighbours stay what they were
    assert turned.min_cosine < 0.9
    assert (turned.same_nearest, turned.rank_correlation) == (1.0, pytest.approx(1.0, abs=1e-4))
    b = a + rng.normal(size=a.shape)
    result = compare_vectors(a, b)
    cosines = [np.dot(x, y) / np.linalg.norm(x) / np.linalg.norm(y) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose((result.mean_cosine, result.min_cosine), (np.mean(cosines), np.min(cosines)), rtol=1e-6)
    assert result.rank_correlation < 0.9
    assert result.same_nearest < 1


def test_two_sentences_have_no_ranking():
    result = compare_vectors(np.eye(2), np.eye(2))
    assert (result.min_cosine, result.same_nearest, result.rank_correlation) == (1, None, None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compare_logits(logits(3), logits(4)), r"second: it has shape \[4, 50\], the first \[3, 50\]"),
        (lambda: compare_logits(logits()[0], logits()[0]), r"first: expected an array \[positions, vocabulary\]"),
        (lambda: compare_logits(logits(), logits(), [1, 2]), "tokens: expected 6 tokens from 0 to 49"),
        (lambda: compare_logits(logits(), np.full((6, 50), np.nan)), r"second: not a finite number at \[0, 0\]"),
        (lambda: compare_vectors(np.eye(3), np.zeros((3, 3))), "second: vector 0 is zero"),
    ],
)
def test_what_cannot_be_compared_is_said(call, message):
    with pytest.raises(InvalidParameterError, match=message):
        call()
