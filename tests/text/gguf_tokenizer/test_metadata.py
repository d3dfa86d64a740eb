"""Missing and wrong metadata is refused in one sentence; optional metadata has llama.cpp's defaults."""

from types import SimpleNamespace

import pytest

from verax.errors import CheckpointError, UnsupportedModelError
from verax.text.tokens.gguf import read_gguf_tokenizer
from verax.text.tokens.tokenizer import Tokenizer

BYTE_LEVEL = {"model": "gpt2", "pre": "qwen2", "tokens": ["a", "b", "ab"], "merges": ["a b"], "token_type": [1, 1, 1]}
SENTENCEPIECE = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", "▁", "a", "▁a"],
    "scores": [0.0, 0.0, 0.0, -2.0, -3.0, -1.0],
    "token_type": [2, 3, 3, 1, 1, 1],
}


def read(sound, changes=None):
    given = {f"tokenizer.ggml.{key}": value for key, value in {**sound, **(changes or {})}.items() if value is not None}
    return read_gguf_tokenizer({"general.architecture": "qwen3", **given}, "a.gguf")


@pytest.mark.parametrize(
    ("sound", "changes", "error", "says"),
    [
        (BYTE_LEVEL, {"model": None}, CheckpointError, "has no tokenizer"),
        (BYTE_LEVEL, {"model": "no_vocab"}, CheckpointError, "has no tokenizer"),
        (BYTE_LEVEL, {"model": "t5"}, UnsupportedModelError, r"tokenizer\.ggml\.model 't5' is not supported"),
        (BYTE_LEVEL, {"pre": "bloom"}, UnsupportedModelError, r"tokenizer\.ggml\.pre 'bloom' is not supported in GGUF"),
        (BYTE_LEVEL, {"tokens": None}, CheckpointError, r"tokenizer\.ggml\.tokens is missing"),
        (BYTE_LEVEL, {"merges": None}, CheckpointError, r"tokenizer\.ggml\.merges is missing"),
        (BYTE_LEVEL, {"merges": ["a q"]}, CheckpointError, "its vocabulary is damaged"),
        (BYTE_LEVEL, {"token_type": [1]}, CheckpointError, "its vocabulary is damaged: 1 types for 3 tokens"),
        (BYTE_LEVEL, {"eos_token_id": 9}, CheckpointError, r"eos_token_id 9 is not a token"),
        (SENTENCEPIECE, {"tokens": []}, CheckpointError, "its vocabulary is damaged: it has no tokens"),
        (SENTENCEPIECE, {"scores": None}, CheckpointError, r"tokenizer\.ggml\.scores is missing"),
        (SENTENCEPIECE, {"scores": [0.0]}, CheckpointError, "its vocabulary is damaged: 1 scores for 6 tokens"),
        (SENTENCEPIECE, {"scores": ["a"] * 6}, CheckpointError, r"tokenizer\.ggml\.scores"),
        (SENTENCEPIECE, {"unknown_token_id": 6}, CheckpointError, r"unknown_token_id 6 is not a token"),
    ],
)
def test_other_kinds_and_damage_are_refused_with_the_reason(sound, changes, error, says):
    with pytest.raises(error, match=says):
        read(sound, changes)


def test_more_tokens_than_the_embeddings_have_rows_are_refused():
    metadata = {f"tokenizer.ggml.{key}": value for key, value in SENTENCEPIECE.items()}
    opened = SimpleNamespace(metadata=metadata, folder="a.gguf", config={"vocab_size": 5})
    with pytest.raises(CheckpointError, match=r"a\.gguf: its vocabulary has 6 tokens, its embeddings 5 rows"):
        Tokenizer.from_checkpoint(opened)


def test_sentencepiece_files_that_name_no_special_tokens_have_llama_s():
    parts = read(SENTENCEPIECE)
    assert parts.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert parts.eos_token_ids == {2}
    assert parts.backend.encode("a").ids == [1, 5]


@pytest.mark.parametrize(("begin", "end"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_beginning_and_the_end_token_can_be_switched(begin, end):
    backend = read(SENTENCEPIECE, {"add_bos_token": begin, "add_eos_token": end}).backend
    assert backend.encode("a").ids == [1] * begin + [5] + [2] * end
    assert backend.encode("a", add_special_tokens=False).ids == [5]


def test_a_control_token_that_ends_a_turn_ends_a_text():
    tokens = [*SENTENCEPIECE["tokens"], "<end_of_turn>", "<|end|>"]
    changes = {"tokens": tokens, "scores": [0.0] * 8, "token_type": [2, 3, 3, 1, 1, 1, 3, 1]}
    assert read(SENTENCEPIECE, changes).eos_token_ids == {2, 6}
