"""Padded batches hold every text once, and vectors keep the order of their texts."""

from functools import partial

import numpy as np
import pytest

from tests.support.tiny_encoder import random_sentences, tiny_encoder
from verax.bench.embed.baselines import _make_batches, encode_in_batches
from verax.text.tokens.tokenizer import Tokenizer

LONGEST = 20
"""Tokens that are read of a text: some of the random sentences are longer."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_folder(tiny_encoder(tmp_path_factory.mktemp("encoder")))


@pytest.fixture(scope="module")
def batches(tokenizer):
    return partial(_make_batches, tokenizer, LONGEST, 7)


def tokens_of(tokenizer, text):
    return list(tokenizer.encode_batch([text], max_length=LONGEST)[0][0])


def test_batches_hold_every_text_once_the_longest_first(batches, tokenizer):
    texts, seen, widths = random_sentences(23), [], []
    for rows, ids, mask in batches(texts, 5):
        seen += rows
        widths.append(ids.shape[1])
        assert len(rows) <= 5
        for row, padded, ones in zip(rows, ids, mask, strict=True):
            tokens = tokens_of(tokenizer, texts[row])
            assert padded.tolist() == tokens + [7] * (len(padded) - len(tokens))
            assert ones.tolist() == [1] * len(tokens) + [0] * (len(padded) - len(tokens))
        assert mask.sum(1).max() == ids.shape[1]  # no wider than its longest text
    assert sorted(seen) == list(range(23))
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == LONGEST


def test_vectors_keep_the_order_of_the_texts_whatever_the_order_of_the_batches(batches, tokenizer):
    texts = random_sentences(9)
    sums = lambda given: reversed([(rows, np.stack([mask.sum(1), ids[:, 0]], 1)) for rows, ids, mask in given])
    vectors = encode_in_batches(batches, sums, 4, texts)
    assert vectors[:, 0].tolist() == [len(tokens_of(tokenizer, text)) for text in texts]
    np.testing.assert_array_equal(vectors, encode_in_batches(batches, sums, 1, texts))
