"""Prompts: cleaned, then ids of one length."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support.tiny_video import word_tokenizer
from verax.checkpoint.resolve import read_tokenizer
from verax.errors import CheckpointError
from verax.video.networks import PROMPT_TOKENS, PromptTokenizer, clean

TEXTS = ["a red  circle\n", "", "&amp;#97; red", " ".join(["red"] * 30)]


@pytest.fixture
def folder(tmp_path):
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_text_is_mended_unescaped_and_its_white_space_one_space():
    assert clean("  a \u00a0red\n\tcircle ") == "a red circle"
    assert clean("caf\u00c3\u00a9 &amp;lt; bar") == "caf\u00e9 < bar"
    assert clean(" &nbsp; ") == ""


def test_prompts_have_one_length_and_keep_their_end(folder):
    tokens, lengths = PromptTokenizer(read_tokenizer(folder), length=8)(TEXTS)
    assert tokens.dtype == lengths.dtype == np.int32
    np.testing.assert_array_equal(lengths, [4, 1, 3, 8])
    np.testing.assert_array_equal(
        tokens, [[3, 4, 7, 1, 0, 0, 0, 0], [1] + [0] * 7, [3, 4, 1, 0, 0, 0, 0, 0], [4] * 7 + [1]]
    )
    assert PromptTokenizer(read_tokenizer(folder))(["a"])[0].shape == (1, PROMPT_TOKENS) == (1, 512)


def test_a_tokenizer_that_is_missing_damaged_or_without_padding_is_said(folder, tmp_path_factory):
    with pytest.raises(CheckpointError, match=r"tokenizer.json: no such file"):
        read_tokenizer(tmp_path_factory.mktemp("empty"))
    with pytest.raises(CheckpointError, match="no token '<mask>'"):
        PromptTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")), pad_token="<mask>")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a valid tokenizer"):
        read_tokenizer(folder)
