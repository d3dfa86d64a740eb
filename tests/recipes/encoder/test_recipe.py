"""The built-in encoder as shipped, on sentences that it never saw; and its recipe, for a few steps."""

from itertools import islice

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recipes.encoder import recipe
from recipes.encoder.evaluation import retrieval
from recipes.encoder.paraphrases import pairs
from recipes.encoder.recipe import contrastive_loss, train_builtin
from verax import Encoder


@pytest.fixture(scope="module")
def encoder():
    return Encoder()


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_meanings_are_held_out_by_what_they_say(split):
    assert {meaning.split for meaning, _ in islice(pairs(0, split=split), 300)} == {split}


def test_it_finds_unseen_paraphrases_among_a_thousand(encoder):
    assert retrieval(encoder, count=1000, seed=7, near=0.0, unseen_patterns=False) >= 0.97
    assert encoder.truncated == 0


def test_it_finds_them_among_near_misses_and_in_patterns_that_it_never_saw(encoder):
    assert retrieval(encoder, count=300, seed=7, near=0.5, unseen_patterns=False) >= 0.85
    assert retrieval(encoder, count=300, seed=7, near=0.0, unseen_patterns=True) >= 0.9


def test_the_recipe_resumes_and_exports_what_the_encoder_loads(tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.encoder.recipe.TRAINING_PAIRS", 200)
    monkeypatch.setattr(recipe, "PAIRS", 4)
    monkeypatch.setattr(recipe, "CONFIG", {**recipe.CONFIG, "num_hidden_layers": 1})
    train_builtin(tmp_path, steps=4, stop_at=2, show_progress=False)
    resumed = train_builtin(tmp_path, steps=4, resume=True, show_progress=False)
    assert Encoder(resumed).encode("Tom likes jazz.").shape == (128,)


def test_contrast_is_the_mean_of_both_directions():
    rng = np.random.default_rng(0)
    first, second = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in rng.standard_normal((2, 6, 5)))
    scores = first @ second.T / 0.1
    surprises = [optax.softmax_cross_entropy_with_integer_labels(x, np.arange(6)) for x in (scores, scores.T)]
    expected = np.mean(surprises)
    got = contrastive_loss(jnp.asarray(first, jnp.float32), jnp.asarray(second, jnp.float32), 0.1)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    same = jnp.eye(4)
    assert contrastive_loss(same, same, 0.05) < 1e-6 < contrastive_loss(same, same[::-1], 0.05)
