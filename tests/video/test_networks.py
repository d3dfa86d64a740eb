"""Prompts: cleaned, then ids of one length."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from verax.checkpoint.resolve import read_tokenizer
from verax.errors import CheckpointError
from verax.video.networks import PROMPT_TOKENS, PromptTokenizer, clean

TEXTS = ["a red  circle\n", "", "caf\u00c3\u00a9 &amp;amp; bar", " ".join(["red"] * 30)]


@pytest.fixture
def folder(tmp_path):
    words = ["<pad>", "</s>", "<unk>", "a", "red", "circle", "&", "caf\u00e9", "bar"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_text_is_mended_unescaped_and_its_white_space_one_space():
    assert clean("  a \u00a0red\n\tcircle ") == "a red circle"
    assert clean("caf\u00c3\u00a9 &amp;lt; bar") == "caf\u00e9 < bar"
    assert clean(" &nbsp; ") == ""


def test_prompts_have_one_length_and_keep_their_end(folder):
    tokens, lengths = PromptTokenizer(read_tokenizer(folder), length=8)(TEXTS)
    assert tokens.dtype == lengths.dtype == np.int32
    np.testing.assert_array_equal(lengths, [4, 1, 4, 8])
    np.testing.assert_array_equal(
        tokens, [[3, 4, 5, 1, 0, 0, 0, 0], [1] + [0] * 7, [7, 6, 8, 1, 0, 0, 0, 0], [4] * 7 + [1]]
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
