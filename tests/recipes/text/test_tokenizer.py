"""The built-in model's tokenizer, its chat template, and the packing of documents into rows."""

import json
from functools import cache
from itertools import islice

import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from recipes.text.batches import batch, batches, pack
from recipes.text.data import CHAT_TEMPLATE, END_OF_TEXT, documents, render_chat
from recipes.text.tokenizer import save_tokenizer, train_tokenizer


@cache
def _tokenizer():
    return train_tokenizer(count=8000)


def _ids(text):
    return _tokenizer().encode(text, add_special_tokens=False).ids


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_exactly(text):
    assert _tokenizer().decode(_ids(text), skip_special_tokens=False) == text


def test_every_digit_is_a_token_of_its_own():
    assert [_tokenizer().id_to_token(i) for i in _ids("47")] == ["4", "7"]
    digits = [token for token in _tokenizer().get_vocab() if any(c in "0123456789" for c in token)]
    assert sorted(digits) == list("0123456789")


_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text()}), max_size=4
)
_TEMPLATE = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)


@settings(deadline=None)
@given(_MESSAGES, st.booleans())
def test_render_chat_is_what_the_template_renders(messages, prompt):
    rendered = _TEMPLATE.render(messages=messages, add_generation_prompt=prompt)
    assert render_chat(messages, add_generation_prompt=prompt) == rendered


def test_a_saved_tokenizer_loads_again_with_its_template_and_both_end_tokens(tmp_path):
    save_tokenizer(_tokenizer(), tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).to_str() == _tokenizer().to_str()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["pad_token"]) == ("<|im_end|>", END_OF_TEXT)
    assert config["chat_template"] == CHAT_TEMPLATE
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


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
