"""The built-in model's tokenizer, its chat template, and the packing of documents into rows."""

from functools import cache
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.text.batches import batch, batches, pack
from recipes.text.data import documents
from recipes.text.tokenizer import train_tokenizer


@cache
def _tokenizer():
    return train_tokenizer(count=1000)


def _ids(text):
    return _tokenizer().encode(text, add_special_tokens=False).ids


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_exactly(text):
    assert _tokenizer().decode(_ids(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("length", [1, 7, 64, 513])
def test_packing_loses_no_token(length):
    texts = list(islice(documents(9), 150))
    rows = list(pack(texts, _tokenizer(), length))
    expected = [token for document in texts for token in _ids(document.text)]
    assert [int(t) for row in rows for t in row.tokens[row.segments > 0]] == expected
    assert all((row.segments > 0).all() for row in rows[:-1])


def test_segments_and_positions_restart_at_each_document():
    texts = list(islice(documents(9), 50))
    for row in pack(texts, _tokenizer(), 128):
        begins = np.flatnonzero(row.positions[row.segments > 0] == 0)
        ends = np.flatnonzero(row.tokens[row.segments > 0] == 0)
        assert begins[0] == 0
        assert set(begins[1:] - 1) <= set(ends)
        assert np.array_equal(np.unique(row.segments[row.segments > 0]), np.arange(1, len(begins) + 1))


def test_a_batch_can_be_made_again_from_its_number():
    arguments = {"seed": 4, "batch_size": 3, "length": 65}
    stream = list(islice(batches(_tokenizer(), **arguments), 4))
    resumed = next(batches(_tokenizer(), **arguments, start=3))
    alone = batch(3, _tokenizer(), **arguments)
    for name in ("tokens", "segments", "positions"):
        assert stream[3][name].shape == (3, 65)
        assert np.array_equal(stream[3][name], resumed[name])
        assert np.array_equal(stream[3][name], alone[name])
    assert not np.array_equal(stream[2]["tokens"], stream[3]["tokens"])
