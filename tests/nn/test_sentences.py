"""`Sentences`: the places of packed and of padded sentences, and their pooled states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verax.nn import Sentences

LENGTHS = [3, 1, 4, 0, 0]
"""Two of five are not there."""

LAYOUTS = {
    "packed": (Sentences.packed, (1, 11), [(0, slice(0, 3)), (0, slice(3, 4)), (0, slice(4, 8))]),
    "padded": (Sentences.padded, (5, 6), [(0, slice(0, 3)), (1, slice(0, 1)), (2, slice(0, 4))]),
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    make, shape, places = LAYOUTS[request.param]
    return make(jnp.asarray(LENGTHS), shape[1]), shape, places


def test_each_token_has_its_sentence_and_its_position_in_it(layout):
    sentences, shape, places = layout
    segments = np.full(shape, 5)
    positions = np.zeros(shape) if shape[0] == 1 else np.broadcast_to(np.arange(shape[1]), shape).copy()
    for number, (row, tokens) in enumerate(places):
        segments[row, tokens] = number
        positions[row, tokens] = np.arange(LENGTHS[number])
    np.testing.assert_array_equal(sentences.segments, segments)
    np.testing.assert_array_equal(sentences.positions, positions)


def test_states_are_pooled_by_sentence_whatever_is_next_to_it(layout):
    sentences, shape, places = layout
    hidden = np.random.default_rng(0).standard_normal((*shape, 7)).astype(np.float32)
    expected = [hidden[place].copy() for place in places]
    hidden[np.asarray(sentences.segments) == 5] = np.inf
    hidden[places[1]] = np.nan
    hidden = jnp.asarray(hidden)
    for pooled, rule in (
        (sentences.first(hidden), lambda states: states[0]),
        (sentences.last(hidden), lambda states: states[-1]),
        (sentences.mean(hidden), lambda states: states.mean(axis=0)),
        (sentences.mean(hidden, 2), lambda states: states[2:].mean(axis=0)),
        (sentences.maximum(hidden), lambda states: states.max(axis=0)),
    ):
        assert pooled.shape == (5, 7)
        np.testing.assert_allclose(pooled[0], rule(expected[0]), atol=1e-6)
        np.testing.assert_allclose(pooled[2], rule(expected[2]), atol=1e-6)
        np.testing.assert_array_equal(pooled[3:], 0)
    np.testing.assert_array_equal(sentences.maximum(hidden, 3)[0], 0)


def test_packed_sentences_may_fill_their_row_and_may_be_none():
    full = Sentences.packed(jnp.array([2, 3]), 5)
    np.testing.assert_array_equal(full.segments, [[0, 0, 1, 1, 1]])
    np.testing.assert_array_equal(full.cu_seqlens, [0, 2, 5])
    empty = Sentences.packed(jnp.array([0, 0]), 4)
    np.testing.assert_array_equal(empty.segments, [[2, 2, 2, 2]])
    np.testing.assert_array_equal(empty.last(jnp.ones((1, 4, 3))).shape, (2, 3))


@pytest.mark.parametrize("by_position", [False, True])
def test_means_need_no_promotion_of_integers(layout, by_position):
    sentences, shape, _ = layout
    hidden = jnp.ones((*shape, 7))
    with jax.numpy_dtype_promotion("strict"):
        means = sentences.mean(hidden, by_position=by_position)
    np.testing.assert_array_equal(means, sentences.mean(hidden, by_position=by_position))
