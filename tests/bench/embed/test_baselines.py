"""Padded batches hold every text once, and a side runs in the fastest of its ways, whose vectors keep their order."""

import time

import numpy as np
import pytest

from tests.support.tiny_encoder import random_sentences, tiny_encoder
from verax.bench.embed.baselines import Batches, fastest_way, one_by_one
from verax.text.tokens.tokenizer import Tokenizer

LONGEST = 20
"""Tokens that are read of a text: some of the random sentences are longer."""


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    return Batches(Tokenizer.from_folder(tiny_encoder(tmp_path_factory.mktemp("encoder"))), LONGEST, 7)


def tokens_of(batches, text):
    return list(batches.tokenizer.encode_batch([text], max_length=LONGEST)[0][0])


def test_batches_hold_every_text_once_the_longest_first(batches):
    texts, seen, widths = random_sentences(23), [], []
    for rows, ids, mask in batches(texts, 5):
        seen += rows
        widths.append(ids.shape[1])
        assert len(rows) <= 5
        for row, padded, ones in zip(rows, ids, mask, strict=True):
            tokens = tokens_of(batches, texts[row])
            assert padded.tolist() == tokens + [7] * (len(padded) - len(tokens))
            assert ones.tolist() == [1] * len(tokens) + [0] * (len(padded) - len(tokens))
        assert mask.sum(1).max() == ids.shape[1]  # no wider than its longest text
    assert sorted(seen) == list(range(23))
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == LONGEST


def sums(pause):
    """Function from batches to a vector of two numbers for each text, in reverse, after a pause for each batch."""

    def run(batches):
        vectors = []
        for rows, ids, mask in batches:
            time.sleep(pause)
            vectors.append((rows, np.stack([(ids * mask).sum(1), mask.sum(1)], 1).astype(np.float32)))
        return reversed(vectors)

    return run


def test_a_side_chooses_its_fastest_way_and_keeps_the_order_of_the_texts(batches):
    texts = random_sentences(9)
    ways = batches.ways("slow", sums(0.05), 4, 1) | batches.ways("quick", sums(0), 4)
    before = ways["slow, batches of 4"](texts)
    encode, chosen = fastest_way(ways, texts)
    assert chosen["way"] == "quick, batches of 4"
    assert set(chosen["trials"]) == {"slow, batches of 4", "quick, batches of 4", "slow, one text a call"}
    assert chosen["trials"]["slow, one text a call"] < 20 < chosen["trials"]["quick, batches of 4"]
    np.testing.assert_array_equal(encode(texts), before)
    np.testing.assert_array_equal(one_by_one(encode, texts), before)
    assert before[:, 1].tolist() == [len(tokens_of(batches, text)) for text in texts]


def test_a_fast_way_with_other_vectors_is_left_out(batches):
    negative = lambda given: [(rows, -vectors) for rows, vectors in sums(0)(given)]
    ways = batches.ways("right", sums(0.02), 4) | batches.ways("wrong", negative, 4)
    _, chosen = fastest_way(ways, random_sentences(9))
    assert chosen["way"] == "right, batches of 4"
    assert list(chosen["wrong"]) == ["wrong, batches of 4"]
