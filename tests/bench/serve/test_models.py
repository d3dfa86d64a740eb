"""Models of load tests: the built-in one, random weights with a tokenizer, and both as GGUF files with a vocabulary."""

import pytest

from tests.support.tiny import tiny_checkpoint
from verax import builtin
from verax.bench.serve.models import served_model, write_tokenizer
from verax.checkpoint import Checkpoint
from verax.errors import InvalidParameterError
from verax.shapes import QWEN3_0_6B, SHAPES
from verax.text.tokens.tokenizer import Tokenizer

SMALL = {**QWEN3_0_6B, "num_hidden_layers": 1, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64}


def test_without_a_model_it_is_the_built_in_one():
    with served_model(None, None, "bfloat16") as served:
        assert (served.argument, served.path, served.vocab_size) == (None, builtin.text_model(), 1536)


def test_random_weights_have_a_tokenizer_and_are_gone_afterwards(monkeypatch):
    monkeypatch.setitem(SHAPES, "qwen3", ("small shapes", SMALL))
    with served_model(None, "qwen3", "bfloat16") as served:
        assert served.name == "random weights, small shapes"
        assert served.argument == str(served.path)
        assert Tokenizer.from_folder(served.path).vocab_size == served.vocab_size == 512
    assert not served.path.exists()


def test_every_id_of_a_made_up_tokenizer_is_a_text(tmp_path):
    write_tokenizer(tmp_path, 1000)
    (tmp_path / "config.json").write_text("{}")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode([300, 999, 256]) == " w300 w999 w"
    assert len({tokenizer.token(number) for number in range(1000)}) == 1000
    assert tokenizer.decode(tokenizer.encode("Grüße")) == "Grüße"


@pytest.mark.parametrize("shapes", ["llama", "qwen3"])
def test_shapes_stand_for_a_model_and_are_known(shapes, tmp_path):
    model = "somewhere" if shapes == "qwen3" else None
    with (
        pytest.raises(InvalidParameterError, match="shapes: expected one of qwen3, qwen3-8b, hybrid, moe and no model"),
        served_model(model, shapes, "bfloat16"),
    ):
        pass


def test_the_gguf_file_has_the_vocabulary_of_the_folder():
    with served_model(None, None, "bfloat16") as served:
        path = served.gguf("BF16")
        ours = Tokenizer.from_checkpoint(Checkpoint.open(path))
        theirs = Tokenizer.from_folder(builtin.text_model())
        for words in ("Once upon a time, there was a fox. 12 + 30 =", "Grüße\n\n  x"):
            assert ours.encode(words) == theirs.encode(words)
            assert ours.decode(ours.encode(words)) == words
        assert 2 in ours.eos_token_ids
        with served_model(str(path), None, "bfloat16") as again:
            assert again.gguf("BF16") == path


def test_a_gguf_file_is_not_made_of_another_kind_of_tokenizer(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    (folder / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {}}, "added_tokens": []}')
    with (
        served_model(str(folder), None, "float32") as served,
        pytest.raises(Exception, match="a tokenizer of type WordLevel cannot be written"),
    ):
        served.gguf("F32")
