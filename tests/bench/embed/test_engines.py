"""Padded batches hold every text once, and vectors keep the order of their texts."""

import json

import numpy as np
import pytest
import tokenizers

from tests.support.tiny_encoder import random_sentences, tiny_encoder
from verax.bench.embed.engines import Work, batched_engine, make_batches
from verax.text.tokens.tokenizer import Tokenizer

LONGEST = 20
"""Tokens that are read of a text: some of the random sentences are longer."""


@pytest.fixture(scope="module", params=["right", "left"])
def tokenizer(request, tmp_path_factory):
    """Tokenizer that cuts texts on a side."""
    folder = tiny_encoder(tmp_path_factory.mktemp("encoder"))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"truncation_side": request.param}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


def tokens_of(tokenizer, text):
    return list(tokenizer.encode_batch([text], max_length=LONGEST)[0][0])


def test_batches_hold_every_text_once_the_longest_first(tokenizer):
    texts, seen, widths = random_sentences(23), [], []
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json(max_length=LONGEST))
    for rows, ids, mask in make_batches(backend, 7, texts, 5):
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


@pytest.mark.parametrize(
    ("options", "most"), [({"batch_size": 4}, 4), ({"batch_size": 1}, 1), ({"batch_size": 4, "latency": True}, 1)]
)
def test_vectors_keep_the_order_of_the_texts_whatever_the_order_of_the_batches(tmp_path, tokenizer, options, most):
    texts, sizes = random_sentences(9), []
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(max_length=LONGEST))
    fields = {"folder": "", "tokenizer": str(tmp_path / "tokenizer.json"), "padding": 7, "pooling": "mean"}
    fields |= {"texts": texts, "latency": False, "dtype": "float32", "quantization": None}

    def sums(batches):
        batches = list(batches)
        sizes.extend(len(batch.rows) for batch in batches)
        return reversed([(rows, np.stack([mask.sum(1), ids[:, 0]], 1)) for rows, ids, mask in batches])

    run, _ = batched_engine(Work(**fields | options), sums, {})
    run(str(tmp_path / "vectors.npy"))
    vectors = np.load(tmp_path / "vectors.npy")
    assert (max(sizes), vectors.dtype) == (most, np.float32)
    assert vectors[:, 0].tolist() == [len(tokens_of(tokenizer, text)) for text in texts]
