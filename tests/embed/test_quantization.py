"""Encoders and rerankers with `quantization="int8"`: close to float32, and equal to a reference of their arithmetic."""

from functools import partial

import numpy as np
import pytest

from tests.support.tiny import tiny_checkpoint
from tests.support.tiny_encoder import qwen_tokenizer, random_sentences, tiny_encoder, tiny_reranker
from verax import Encoder, Reranker, ops

SENTENCES = random_sentences(20, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_encoder(tmp_path_factory.mktemp("encoder"), hidden_size=64, intermediate_size=96)


@pytest.fixture(scope="module")
def vectors(folder):
    return Encoder(folder, quantization="int8").encode(SENTENCES)


def test_vectors_are_close_to_float32(folder, vectors):
    cosines = (vectors * Encoder(folder).encode(SENTENCES)).sum(1)
    assert 0.999 < cosines.min() < 1 - 1e-6


def test_vectors_match_the_reference_of_the_same_arithmetic(folder, vectors):
    with ops.use_implementations(linear="reference"):
        expected = Encoder(folder, quantization="int8").encode(SENTENCES)
    # An input that lies between two integers may be rounded to the other one, after sums in another order.
    np.testing.assert_allclose(vectors, expected, atol=2e-3)
    assert np.median(np.abs(vectors - expected)) < 1e-5


@pytest.mark.parametrize("rule", ["hierarchical", "local", "gated"])
def test_vectors_of_a_lam_are_close_to_float32(rule, tmp_path):
    tiny_encoder(tmp_path, model_type="lam", lam_config={"rule": rule}, hidden_size=64, intermediate_size=96)
    cosines = (Encoder(tmp_path).encode(SENTENCES) * Encoder(tmp_path, quantization="int8").encode(SENTENCES)).sum(1)
    assert 0.99 < cosines.min() < 1 - 1e-6


def test_vectors_of_the_built_in_encoder_are_close_to_float32():
    cosines = (Encoder().encode(SENTENCES) * Encoder(quantization="int8").encode(SENTENCES)).sum(1)
    assert 0.9999 < cosines.min() < 1 - 1e-6


def cross_encoder(folder):
    return tiny_reranker(folder, hidden_size=64, intermediate_size=96)


def language_model(folder, *, tied):
    size = qwen_tokenizer(folder)
    tiny_checkpoint(folder, vocab_size=size, tie_word_embeddings=tied, max_position_embeddings=512)
    qwen_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    "make",
    [cross_encoder, partial(language_model, tied=True), partial(language_model, tied=False)],
    ids=["cross-encoder", "tied", "untied"],
)
def test_scores_of_rerankers_are_close_to_float32(make, tmp_path):
    folder = make(tmp_path / "reranker")
    exact = Reranker(folder).score("who sat on the mat ?", SENTENCES)
    scores = Reranker(folder, quantization="int8").score("who sat on the mat ?", SENTENCES)
    assert 1e-6 < np.abs(scores - exact).max() < 0.05
    assert np.corrcoef(scores, exact)[0, 1] > 0.99
