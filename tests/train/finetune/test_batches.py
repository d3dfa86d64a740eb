"""Batches of examples: padded, weighted by trained tokens, in an order that depends on seed and step only."""

from itertools import islice

import numpy as np

from verax.train.finetune.data import Example, shuffled_batches, validation_batches


def example(length, trained):
    """Tokens 1, 2, ... of which the last so many are trained."""
    return Example(np.arange(1, length + 1, dtype=np.int32), np.arange(length) >= length - trained)


EXAMPLES = [example(length, trained) for length, trained in ((5, 2), (9, 9), (40, 1), (12, 4), (3, 1))]


def take(start, count, *, rows=2, parts=1, seed=0):
    found = shuffled_batches(EXAMPLES, seed=seed, rows=rows, parts=parts, max_length=50, start=start)
    return list(islice(found, count))


def test_each_trained_token_has_the_same_weight_and_those_of_a_step_add_up_to_one():
    (batch,) = take(0, 1, rows=5)
    weights = batch["weights"]
    assert np.count_nonzero(weights) == 2 + 8 + 1 + 4 + 1  # nothing predicts a first token
    np.testing.assert_allclose(weights[weights > 0], 1 / 16)
    row = batch["lengths"].tolist().index(4)
    assert batch["tokens"][row, :5].tolist() == [1, 2, 3, 4, 0]
    assert batch["targets"][row, :5].tolist() == [2, 3, 4, 5, 0]
    assert np.flatnonzero(weights[row]).tolist() == [2, 3]


def test_rows_have_a_length_of_a_short_list():
    assert {batch["tokens"].shape[1] for batch in take(0, 20)} == {32, 50}


def test_every_example_comes_once_before_any_comes_again():
    lengths = np.concatenate([batch["lengths"] for batch in take(0, 5)])
    assert sorted(lengths[:5]) == sorted(lengths[5:]) == [2, 4, 8, 11, 39]
    assert lengths[:5].tolist() != lengths[5:].tolist()


def test_a_run_goes_on_with_the_batches_that_it_would_have_had():
    for whole, resumed in zip(take(0, 7)[3:], take(3, 4), strict=True):
        np.testing.assert_equal(whole, resumed)
    assert not np.array_equal(take(0, 1)[0]["lengths"], take(0, 1, seed=1)[0]["lengths"])


def test_parts_of_a_step_are_the_rows_of_one_large_batch():
    (whole,), (parts,) = take(0, 1, rows=4), take(0, 1, rows=2, parts=2)
    assert parts["tokens"].shape == (2, 2, whole["tokens"].shape[1])
    for name, array in whole.items():
        np.testing.assert_array_equal(parts[name].reshape(array.shape), array)


def test_validation_takes_every_example_once_and_fills_up_with_empty_rows():
    batches = list(validation_batches(EXAMPLES, rows=2, max_length=50))
    assert sorted(np.concatenate([batch["lengths"] for batch in batches])) == [0, 2, 4, 8, 11, 39]
    np.testing.assert_allclose(sum(batch["weights"].sum() for batch in batches), 1, rtol=1e-6)
